// The agreement store of a simulated cluster: what etcd is to a real one. One history of
// transactions, leases that end, watches that come later; and clients that reach it over the
// network, with all that then can happen.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "store/meta/meta_client.h"
#include "tests/sim/network.h"
#include "tests/sim/planted.h"

namespace ptc::sim {

/// What etcd takes for what it is asked, one after the other. All 0: nothing.
struct EtcdCosts {
  Time write{}, read{}, entry{}, event{};  // entry: of each that is listed; event: for each watch
  Time sync{};                             // until a write that is done is answered

  /// 10,000 writes or 50,000 reads a second, as its own benchmark has it on three machines with
  /// SSDs.
  static EtcdCosts measured() {
    using namespace std::chrono_literals;
    return {100us, 20us, 1us, 2us, 2ms};
  }
};
/// Of one node. Bytes: keys and values, of events too.
struct AgreementNumbers {
  uint64_t writes = 0, conflicts = 0, reads = 0, bytes = 0;
};

class MetaServer {
 public:
  explicit MetaServer(Network& network);
  ~MetaServer();

  /// The client of a node, for one life of it: fails as soon as that has ended. The server outlives
  /// it. A call waits for at most 10 s. A commit whose answer did not come by then may have been
  /// done, may yet be done, or not: kInDoubt.
  std::unique_ptr<MetaClient> connect(unsigned node, std::shared_ptr<const Life> life);

  // What is so, for who checks.
  const std::map<std::string, MetaEntry, std::less<>>& entries() const { return entries_; }
  int64_t revision() const { return revision_; }
  /// Called for each change that a transaction makes, when all of them are made, with what was
  /// there before. `by`: the node; nullopt: a lease has ended.
  using OnDecision = std::function<void(
      const MetaEvent& event, const std::optional<MetaEntry>& before, std::optional<unsigned> by)>;
  void on_decision(OnDecision hook) { on_decision_ = std::move(hook); }

  /// What the node watches is told so much later, and its decisions come up to so much later. 0: as
  /// the network brings them.
  void set_watch_lag(unsigned node, Time lag) { watch_lag_[node] = lag; }
  /// How much later a decision arrives than what it rests on was read. The node may die meanwhile.
  using HoldsBack = std::function<Time(unsigned node, Decision decision)>;
  void hold_back(HoldsBack how_long) { holds_back_ = std::move(how_long); }
  /// A node's lease ends at once, as that of a machine that was suspended: its clocks did not tell
  /// it.
  void end_lease_of(unsigned node);
  void set_costs(const EtcdCosts& costs) { costs_ = costs; }
  AgreementNumbers numbers(unsigned node) const {
    const auto known = numbers_.find(node);
    return known != numbers_.end() ? known->second : AgreementNumbers();
  }
  /// Compares that always hold. Outlives it; null: none.
  void plant(const Break* planted) { planted_ = planted; }

 private:
  class Client;
  class Lease;
  struct LeaseState {
    unsigned node;
    Time ttl, ends, renew_at;
    Lease* lease;  // of the client; null when that is gone
    std::shared_ptr<const Life> life;
  };
  /// A transaction that outlives the call: MetaTransaction names the lease by pointer.
  struct Request {
    MetaTransaction transaction;
    int64_t lease = 0;
    Decision decision = Decision::kNone;
    std::optional<unsigned> by = std::nullopt;
  };
  struct Doubt {
    bool done = false, forbidden = false;
  };
  struct Late {
    Time at;
    Request request;
    std::shared_ptr<Doubt> doubt;
  };

  Result<int64_t> commit(const Request& request);
  Decision decision_of(const MetaTransaction& transaction) const;
  void publish(const std::vector<MetaEvent>& events);
  int64_t grant(unsigned node, Time ttl, Lease* lease, std::shared_ptr<const Life> life);
  void end_lease(int64_t id);
  void keep_house();
  void finish_turn();

  Network& network_;
  std::map<std::string, MetaEntry, std::less<>> entries_;
  std::map<std::string, int64_t, std::less<>> lease_of_;
  int64_t revision_ = 1;
  int64_t last_lease_ = 0;
  std::map<int64_t, LeaseState> leases_;
  std::vector<Late> late_;
  std::vector<Client*> clients_;  // in the order of their coming
  std::map<std::pair<std::string, int64_t>, std::string>
      records_;  // of checkpoints: key, revision → value
  OnDecision on_decision_;
  HoldsBack holds_back_;
  const Break* planted_ = nullptr;
  std::map<unsigned, Time> watch_lag_;
  EtcdCosts costs_;
  Time turn_{}, busy_until_{};  // what the request that is looked at takes; and all before it
  Time answered_later_{};
  std::map<unsigned, AgreementNumbers> numbers_;
  bool stopping_ = false;
  std::thread house_;
};

}  // namespace ptc::sim
