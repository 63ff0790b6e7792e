// A node as a member of its cluster, by what is agreed on and by calls to the others; of a daemon,
// of a cluster of the tests, and of a simulated one.
//
// nodes/<name> is put under a lease: {"address": "10.0.0.1:7070", "store": "<16 hex>", "boot": "<16
// hex>"}. A node is alive while its key is there; one that starts again is known by its store. One
// whose own lease may have ended decides nothing (fence()), and joins anew when the agreement store
// can be reached again.
//
// A node joins when it and each of the others have let each other in (meeting.h), in two
// transactions however many come at once: joining/<name> says that it wants to; then it meets all
// members, and those that said so before it; then that key goes, and nodes/<name> comes, under the
// same lease. Of any two the one that said so later has seen the other, so they have met; and who
// came first waits for nobody. `membership` is put with it.
//
// Who is there is listed once, and then follows from the watch. Many that come or go within a
// moment are one change: the larger the cluster, the longer that is.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/cluster/peer_calls.h"
#include "reshard/node/meeting.h"
#include "reshard/node/seen_nodes.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
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

  /// Whether a member lets this node in, as far as one answers, and, of a store that `is_new` to
  /// the cluster, whether the name is free. To be asked before anything of it is agreed on, its
  /// jobs among that: join() asks all, when it is known where this node listens. kPermissionDenied;
  /// kAlreadyExists.
  Result<> check_let_in(bool is_new) const;
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
  std::optional<MetaTransaction::Compare> fence() const override;
  MetaTransaction::Compare fence_of(const std::string& node) const override;
  std::shared_ptr<const MetaLease> lease() const override;
  uint64_t lease_losses() const override { return lease_losses_; }
  std::vector<Seen> seen() const override;
  std::vector<PeerNumbers> traffic() const override { return calls_.numbers(); }

 private:
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds time, std::stop_token stop) override {
    return calls_.call(node, row, request, time, std::move(stop));
  }
  std::vector<Result<std::string>> call_all(const std::vector<Question>& questions,
                                            const PeerRow& row, AskManner manner,
                                            std::stop_token stop) override {
    return calls_.call_all(questions, row, std::move(manner), std::move(stop));
  }

  struct Known {
    std::string address, boot;
    int64_t revision = 0;
    friend bool operator==(const Known&, const Known&) = default;
  };
  static Known known_of(const std::string& value, int64_t revision);
  /// To join, which may take several rounds. Its key goes with it, unless it succeeds.
  struct Attempt {
    explicit Attempt(PeerCalls& calls) : meetings(calls) {}
    Meetings meetings;
    std::unique_ptr<MetaLease> lease;
    std::string value;          // of the keys under it
    int64_t revision = 0;       // of joining/<name>
    std::set<std::string> met;  // that were no members yet
  };

  std::string key() const;
  std::string joining_key() const;
  bool is_member() const PTC_REQUIRES(mutex_);
  bool key_is_there() const PTC_REQUIRES(mutex_);
  void forget_attempt() PTC_REQUIRES(mutex_);
  Result<> while_it_passes(const std::function<Result<>()>& step) const;
  Result<> check_not_running(const MetaEntry& entry) const;
  Result<> check_not_replaced() const;
  Result<> check_name_is_free(const std::optional<MetaEntry>& entry);
  Result<> forget_former_self();
  Result<> say_that_it_joins();
  Result<> meet_the_others();
  Result<> join_once();
  void join_again(std::string why);
  void believe_again();
  Result<> read_members();
  void take_over(std::map<std::string, Known> now);
  Error not_let_in(const Error& error) const;
  Result<> note_who_is_gone();
  Result<> take_events(std::vector<MetaEvent> events);
  std::chrono::steady_clock::duration pause() const;
  void tell();
  void follow(std::stop_token stop);

  const MemberOptions options_;
  MetaClient& meta_;
  PeerCalls& calls_;
  std::string store_, address_;    // since begin() and join()
  std::function<void()> changed_;  // since join()
  std::optional<Attempt> attempt_;
  bool was_member_ = false;  // since join()
  std::string replaced_by_;  // where another has this store since then; of the follower
  std::string told_;         // why it does not belong any more; of the follower
  std::atomic<uint64_t> lease_losses_ = 0;
  std::unique_ptr<SeenNodes> seen_nodes_;
  std::shared_ptr<void> watch_;

  mutable Mutex mutex_;
  StoppableConditionVariable wanted_;
  std::map<std::string, Known> members_ PTC_GUARDED_BY(mutex_);
  std::vector<MetaEvent> events_ PTC_GUARDED_BY(mutex_);  // of nodes/
  bool gap_ PTC_GUARDED_BY(mutex_) = false;               // not all of them were told
  std::shared_ptr<MetaLease> lease_ PTC_GUARDED_BY(mutex_);
  int64_t revision_ PTC_GUARDED_BY(mutex_) = 0;  // of the own key
  std::jthread follower_;                        // last
};

}  // namespace ptc
