// What the nodes of a cluster are and have, as one of them shows it: what is agreed on, and what
// each says of itself.
//
// What nodes say of themselves is asked of them, at most once a second and only while somebody
// looks: it is in no key that many nodes write, and costs nothing where nobody wants to know it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/cluster/reshard_progress.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// What a node says of itself, in numbers.
struct NodeNumbers {
  uint64_t memory_total_bytes = 0, memory_used_bytes = 0;  // of the file system of its store
  std::string memory_id;  // nodes with the same one have that file system together
  std::string version;    // of its ptcfs; empty: not said
  uint64_t time_ns = 0;   // of its clock when it said this, since 1970; 0: not said
  // With all other nodes, since its daemon was started.
  uint64_t sent_bytes = 0, received_bytes = 0;
  uint64_t broken_connections = 0, checksum_failures = 0, retries = 0;

  void add(const PeerNumbers& peer);
};

/// NodeNumbers::memory_id of the file system that a directory lies on: the machine since its last
/// boot, and the number that it has there.
std::string memory_id_of(const std::string& directory);

/// And what it does: what it answers to PeerMethod::kNumbers.
struct NodeAnswer {
  NodeNumbers numbers;
  std::map<std::string, ReshardProgress> reshards;  // by job

  std::string to_text() const;
  static Result<NodeAnswer> from_text(std::string_view text);
};

/// How another node's clock goes, as far as its answer tells: it read it at some moment between the
/// question and the answer.
struct ClockOffset {
  double ahead_seconds = 0;   // of this node's; negative: behind
  double within_seconds = 0;  // it may be so much more or less
  /// What this node's clock said when it asked, and when it had the answer. nullopt: nothing is
  /// known, as where this clock was set meanwhile.
  static std::optional<ClockOffset> of(uint64_t asked_ns, uint64_t said_ns, uint64_t answered_ns);
};

/// Remembers what the other nodes said last, and asks them again in the background when somebody
/// looks: a node that is slow or away holds up nobody, what it said is only older. Threads: any.
class NodeReports {
 public:
  explicit NodeReports(Cluster& cluster) : cluster_(cluster) {}
  ~NodeReports();

  struct Heard {
    NodeAnswer answer;
    std::chrono::steady_clock::time_point when;
    std::optional<ClockOffset> clock = std::nullopt;
  };
  /// By node, of those that are there. Who looks after a while waits for the answers, 0.3 s at
  /// most.
  std::map<std::string, Heard> heard();
  /// What other nodes do for the reshard of a job, as far as they said so since then.
  std::vector<ReshardProgress> reshard_of(const std::string& job, std::chrono::milliseconds since);
  /// Something was decided of that job: what nodes said of its reshard when they were asked before
  /// is over. Who looks next waits for what they say now, if any did something.
  void decided(const std::string& job);

 private:
  std::vector<std::string> others() const;
  void ask_all(const std::stop_token& stop);

  Cluster& cluster_;
  Mutex mutex_;
  ConditionVariable changed_;
  std::map<std::string, Heard> heard_ PTC_GUARDED_BY(mutex_);
  std::set<std::string> decided_ PTC_GUARDED_BY(mutex_);  // jobs, since nodes are being asked
  bool asking_ PTC_GUARDED_BY(mutex_) = false;
  std::optional<std::chrono::steady_clock::time_point> asked_
      PTC_GUARDED_BY(mutex_);  // the last time
  std::optional<std::chrono::steady_clock::time_point> answered_ PTC_GUARDED_BY(mutex_);
  std::jthread asker_ PTC_GUARDED_BY(mutex_);
};

/// All that is known of a node.
struct NodeReport {
  std::string name;
  const char* state = "away";  // up, away; fenced: this one, cut off from the others
  int64_t since_ns = 0;        // since the epoch; 0: not known
  uint64_t stored_bytes = 0;   // of checkpoints, that lie there, within reach or not
  bool draining = false;
  std::optional<NodeNumbers> numbers;               // nullopt: it has said nothing yet, or is away
  double age_seconds = 0;                           // since it said that
  std::optional<ClockOffset> clock = std::nullopt;  // of another node
};

}  // namespace ptc
