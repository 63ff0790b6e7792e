// A node as a member of its cluster, by what is agreed on and by calls to the others; of a daemon,
// of a cluster of the tests, and of a simulated one.
//
// nodes/<name> is put under a lease: {"address": "10.0.0.1:7070", "store": "<16 hex>", "boot": "<16
// hex>"}. A node is alive while its key is there; one that starts again is known by its store. It
// puts it when it has met all the others (meeting.h); `membership` is put by each that does, so
// that of two that come at the same time the later one meets the earlier one. One whose own lease
// may have ended decides nothing (fence()), and joins anew when the agreement store can be reached
// again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/cluster/peer_calls.h"
#include "reshard/node/meeting.h"
#include "reshard/node/seen_nodes.h"
#include "store/base/error.h"
#include "store/meta/meta_client.h"

namespace ptc {

struct MemberOptions {
  std::string node;               // its name
  std::chrono::seconds lease{5};  // a node that is not heard of for so long is gone
};

/// Threads: any.
class Membership : public Cluster {
 public:
  /// Both outlive it. Nothing is asked or written yet.
  Membership(MemberOptions options, MetaClient& meta, PeerCalls& calls);
  ~Membership() override;

  /// Once, when the store is known to belong to the cluster, and before anything of it is looked at
  /// (ClusterServices::begin): nobody decides with what a former life of this node had promised.
  /// kAlreadyExists: that one still runs, or another of this name.
  Result<> begin(const std::string& store);
  /// From here on the others see this node, at `address`, where it answers by now. `changed` is
  /// called when nodes came or went, or this one did for itself; until leave() returns. Errors say
  /// which of the others does not let it in, and why; one that does not answer is waited for until
  /// its lease must have ended. kBusy when another node has the name, and keeps it for a while.
  Result<> join(const std::string& address, std::function<void()> changed);
  /// The others see that this node is gone.
  void leave();

  struct Member {
    std::string name, address;
  };
  std::vector<Member> members() const;

  const std::string& self() const override { return options_.node; }
  std::vector<std::string> alive() const override;
  MetaTransaction::Compare fence() const override;
  MetaTransaction::Compare fence_of(const std::string& node) const override;
  std::shared_ptr<const MetaLease> lease() const override;
  std::vector<Seen> seen() const override;
  std::vector<PeerNumbers> traffic() const override { return calls_.numbers(); }

 private:
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override {
    return calls_.call(node, row, request, time, std::move(stop));
  }
  std::vector<Result<std::string>> call_all(const std::vector<Question>& questions,
                                            const PeerRow& row, std::chrono::milliseconds time,
                                            std::stop_token stop) override {
    return calls_.call_all(questions, row, time, std::move(stop));
  }

  std::string key() const;
  bool is_member() const;  // mutex_ is held
  Result<> check_not_running(const MetaEntry& entry);
  Result<> forget_former_self();
  Result<> meet_the_others();
  Result<> join_once();
  Result<> join_again();
  Result<> read_members();
  void look_at_identity();
  void tell();
  void follow(std::stop_token stop);

  struct Known {
    std::string address;
    int64_t revision = 0;
    friend bool operator==(const Known&, const Known&) = default;
  };

  const MemberOptions options_;
  MetaClient& meta_;
  PeerCalls& calls_;
  std::string store_, address_;       // since begin() and join()
  std::function<void()> changed_;     // since join()
  std::optional<Meetings> meetings_;  // of one attempt to join, which may take several rounds
  std::string told_;                  // why it does not belong any more; of the follower
  std::unique_ptr<SeenNodes> seen_nodes_;
  std::shared_ptr<void> watch_;

  mutable std::mutex mutex_;
  std::condition_variable_any wanted_;
  std::map<std::string, Known> members_;  // guarded
  bool refresh_ = true;                   // read nodes/ again; guarded
  std::shared_ptr<MetaLease> lease_;      // guarded
  int64_t revision_ = 0;                  // of the own key; guarded
  std::jthread follower_;                 // last
};

}  // namespace ptc
