// A cluster of simulated nodes: each is a real JobStore over a directory of its own, with the
// product's threads and its membership; simulated are the agreement store, and the calls and
// streams between nodes.
//
// A node that is killed leaves its directory as it is at that moment; its threads go on, in vain,
// over what was theirs, and nobody hears of them any more. Touched by the thread that runs, without
// a lock.
#pragma once

#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "reshard/node/job_store.h"
#include "tests/sim/meta_server.h"
#include "tests/sim/network.h"

namespace ptc::sim {

/// Of the scheduler: the threads of a node.
inline int group_of(unsigned node) { return static_cast<int>(node) + 1; }

/// What a node has cost so far, its earlier lives too. Bytes: of requests, answers and streams
/// between nodes that it sent; and of what it and the agreement store told each other.
struct NodeCosts {
  uint64_t writes = 0, conflicts = 0;  // transactions that were made, and that were refused
  std::array<uint64_t, kPeerTable.size()> calls{};           // that it made, by the table's row
  std::array<uint64_t, kPeerTable.size()> bytes_of_calls{};  // sent, of requests and answers
  uint64_t sent = 0, agreement = 0;

  void add_sent(const PeerRow& row, uint64_t bytes) {
    sent += bytes;
    bytes_of_calls[static_cast<size_t>(row.method)] += bytes;
  }
  uint64_t all_calls() const { return std::accumulate(calls.begin(), calls.end(), uint64_t{0}); }
  NodeCosts& operator+=(const NodeCosts& other);
  NodeCosts operator-(const NodeCosts& before) const;
  void raise_to(const NodeCosts& other);  // each by itself
};

class SimCluster {
 public:
  /// Directories of the nodes below `directory`. `failed` hears of what no fault excuses.
  SimCluster(unsigned nodes, uint64_t seed, std::filesystem::path directory,
             std::function<void(const std::string&)> failed);
  /// Kills what still runs.
  ~SimCluster();

  static std::string name(unsigned node) { return "w" + std::to_string(node); }
  unsigned size() const { return static_cast<unsigned>(nodes_.size()); }
  Network& network() { return network_; }
  MetaServer& agreement() { return agreement_; }
  const MetaServer& agreement() const { return agreement_; }
  /// In the background; `wait_up` waits for it.
  void start(unsigned node);
  /// As SIGTERM: it leaves, and ends. In the background; starting it again waits for that.
  void stop(unsigned node);
  /// As kill -9. Its directory stays, or is lost.
  void kill(unsigned node, bool keep_directory);
  /// `happens` before the `n`-th time from now on that the node writes to a file, syncs or renames
  /// one; 0: no more.
  void at_write(unsigned node, unsigned n, std::function<void()> happens);
  void set_pieces(const PieceSizes& pieces) { pieces_ = pieces; }  // of nodes that start later
  /// Writing files fails with ENOSPC.
  void set_full(unsigned node, bool full) { nodes_[node].full = full; }
  /// Writing to a file, syncing and renaming one takes up to a tenth of a second.
  void set_slow_disk(unsigned node, bool slow) { nodes_[node].slow_disk = slow; }
  bool is_wanted(unsigned node) const { return nodes_[node].wanted; }
  bool is_up(unsigned node) const;
  bool wait_up(unsigned node, Time limit);

  /// Runs `use` on the store of a node that is up, as a thread of that node; false: it is not up.
  /// The node may die meanwhile: then what `use` did counts for nothing.
  bool on(unsigned node, const std::function<void(JobStore&)>& use);
  /// As it sees the others; only while it is up.
  Cluster& member(unsigned node);
  bool died_since(unsigned node, uint64_t lives) const { return nodes_[node].lives != lives; }
  uint64_t lives(unsigned node) const { return nodes_[node].lives; }

  uint64_t bytes_moved() const { return bytes_moved_; }
  NodeCosts costs(unsigned node) const;
  std::filesystem::path directory(unsigned node) const;

 private:
  class Streams;
  class Calls;
  struct Instance;
  struct Node {
    std::shared_ptr<Instance> instance;
    bool wanted = false;
    uint64_t lives = 0;  // how many directories and processes there were
    uint64_t directory = 0;
    bool full = false, slow_disk = false;
    unsigned calls_left = 0;  // until that happens; 0: nothing does
    std::function<void()> happens;
    std::thread keeper;  // starts it, and ends it
    NodeCosts costs = {};
  };

  std::shared_ptr<Instance> serving(unsigned node) const;
  void open(unsigned node, const std::shared_ptr<Instance>& instance);
  void close(const std::shared_ptr<Instance>& instance);
  int before_file_call(unsigned node, FileCall call);
  Result<> meet(const Instance& from, unsigned to);
  Result<std::string> call(const Instance& from, unsigned to, const PeerRow& row,
                           const std::string& request, Time deadline, const std::stop_token& stop);

  std::filesystem::path directory_;
  std::function<void(const std::string&)> failed_;
  Network network_;
  MetaServer agreement_;
  std::vector<Node> nodes_;
  uint64_t bytes_moved_ = 0;
  PieceSizes pieces_;
  // What each node would compute, of equal inputs, is computed once.
  std::shared_ptr<SharedResults> results_;
  unsigned others_ = 0;  // detached threads
};

}  // namespace ptc::sim
