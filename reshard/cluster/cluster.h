// What a job needs to know of the other nodes, and how it talks to them. A node that is alone has
// one, too (lone_node.h): nobody asks whether there is a cluster, but what it does differently.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/peer_table.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/meta/meta_client.h"
#include "store/rpc/peer_numbers.h"

namespace ptc {

/// Keys of members, each under its lease; of nodes that want to be (node/membership.h), the same;
/// of nodes that are drained (drain.h); and the one key that is put with each of these, and by each
/// node before it opens its store: while it stays as it is, no node came, came back or was drained.
inline constexpr std::string_view kMemberKeys = "nodes/", kJoiningKeys = "joining/",
                                  kDrainedKeys = "drained/", kMembership = "membership";

/// Threads: any.
class Cluster {
 public:
  virtual ~Cluster() = default;

  virtual const std::string& self() const = 0;
  /// Nodes whose lease has not ended, this one among them while that holds for it, by name.
  virtual std::vector<std::string> alive() const = 0;
  /// Asks another node, as the method's row says (ask_by()).
  Result<std::string> ask(const std::string& node, PeerMethod method, const std::string& request,
                          std::stop_token stop = {}, std::chrono::milliseconds at_most = {});
  /// Several nodes at the same time (PeerRow::at_once()), and waits for all answers, which are in
  /// their order. `then`: what each is asked next, by the same method.
  struct Question {
    std::string node;
    std::string_view request;  // outlives the call
  };
  std::vector<Result<std::string>> ask_all(PeerMethod method,
                                           const std::vector<Question>& questions,
                                           std::stop_token stop = {},
                                           std::chrono::milliseconds at_most = {},
                                           AfterAnswer then = {});
  /// Every decision of this node names it: it fails once the node's lease has ended. Null: it needs
  /// none.
  virtual std::optional<MetaTransaction::Compare> fence() const = 0;
  /// The same of another node, as it is now: a decision that rests on what that node has made names
  /// what this said before the node was asked, for one that was started anew has thrown that away.
  virtual MetaTransaction::Compare fence_of(const std::string& node) const = 0;
  /// The lease that what a node does, and only while it lives, is put under; null: it is no member.
  virtual std::shared_ptr<const MetaLease> lease() const = 0;
  /// How often it had ended, or may have, and this node had to join again.
  virtual uint64_t lease_losses() const { return 0; }
  /// Whether this node decides anything now: its lease lives.
  virtual bool may_decide() const;

  /// Whether bytes of a checkpoint may lie on other nodes, within reach or not. Then what is stored
  /// says on which, what is not found here may be there, and copies are made, moved and trimmed.
  virtual bool shares_bytes() const { return true; }
  /// Whether others decide, too. Then what is known here may be behind, and who leads is agreed on.
  virtual bool shares_decisions() const { return true; }
  /// Whether what was removed is remembered (tombstones.h), for stores that are away. Else it is
  /// forgotten once that is carried out here.
  virtual bool remembers_removals() const { return true; }

  /// A node that is or was a member, and since when. That is agreed on, but may be heard of a
  /// moment later.
  struct Seen {
    std::string node;
    bool there = false;
    int64_t since_ns = 0;  // since the epoch; of one that went while nobody was there to see it:
                           // since somebody was
  };
  virtual std::vector<Seen> seen() const { return {}; }  // by name
  /// Of all connections between this node and others, by node.
  virtual std::vector<PeerNumbers> traffic() const { return {}; }

  /// The key of the cluster's identity, and its revision, when this node's store had found that
  /// they belong together. Every decision names it.
  void belongs_to(MetaTransaction::Compare identity);
  std::optional<MetaTransaction::Compare> identity() const;
  /// The agreement store is not what it was (its data were lost, or are of a backup): nothing that
  /// it says is taken over, nothing is decided, and who was there before counts as there. Says so
  /// in the log, once.
  void distrust(const std::string& why);
  void trust();
  std::optional<std::string> distrusted() const;

 private:
  /// Asks once. The node's own errors come back as they are; kUnavailable when it cannot be
  /// reached, broken_off() when the connection broke.
  virtual Result<std::string> call(const std::string& node, const PeerRow& row,
                                   const std::string& request, std::chrono::milliseconds time,
                                   std::stop_token stop) = 0;
  /// Several at the same time: as many at a time as the row says, and each once more, at once,
  /// where the connection broke and the row allows it. Without an own way, by threads.
  virtual std::vector<Result<std::string>> call_all(const std::vector<Question>& questions,
                                                    const PeerRow& row, AskManner manner,
                                                    std::stop_token stop);

  mutable Mutex identity_mutex_;
  std::optional<MetaTransaction::Compare> identity_ PTC_GUARDED_BY(identity_mutex_);
  std::optional<std::string> distrusted_ PTC_GUARDED_BY(identity_mutex_);
};

/// kUnavailable while what the agreement store says is not believed.
Result<> check_trusted(const Cluster& cluster);
/// The same after a look at the identity there; from then on it is distrusted if that is gone, or
/// another.
Result<> check_identity(MetaClient& meta, Cluster& cluster);
/// kUnavailable where this node is cut off from its cluster, before anything is asked of that.
Result<> check_member(const Cluster& cluster);
/// A decision: fails once this node's lease has ended, at once where that is known. Compares of
/// other nodes' keys, which may be as many as there are nodes, are looked at before, and
/// kMembership stands for them in the transaction.
Result<int64_t> commit_fenced(MetaClient& meta, const Cluster& cluster,
                              MetaTransaction transaction);

}  // namespace ptc
