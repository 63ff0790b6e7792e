// Several nodes of a cluster in one process: with the product's membership, their agreement is a
// memory_meta, their network is calls of functions, and can be cut. For the logic; real processes
// and sockets are in tests/cluster.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reshard/node/job_store.h"
#include "reshard/node/membership.h"
#include "store/meta/meta_client.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {

/// What a test asks to be done; may be exchanged while it is called, which then ends as it began.
template <class Signature>
class Hook;
template <class Answer, class... Arguments>
class Hook<Answer(Arguments...)> {
 public:
  using Function = std::function<Answer(Arguments...)>;
  Hook& operator=(Function function) {
    auto shared = std::make_shared<const Function>(std::move(function));
    std::lock_guard lock(mutex_);
    function_.swap(shared);
    return *this;
  }
  /// Nothing is set: as if it had said no.
  template <class... Given>
  Answer operator()(Given&&... given) const {
    std::shared_ptr<const Function> function;
    {
      std::lock_guard lock(mutex_);
      function = function_;
    }
    return function != nullptr && *function ? (*function)(std::forward<Given>(given)...) : Answer();
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Function> function_;  // guarded
};

class LocalCluster {
 public:
  explicit LocalCluster(unsigned nodes, PieceSizes pieces = {});
  ~LocalCluster();

  /// "w0", "w1", …
  static std::string name(unsigned node) { return "w" + std::to_string(node); }
  JobStore& store(unsigned node) { return *nodes_[node]->store; }
  Cluster& as_seen_by(unsigned node);
  JobRef job(unsigned node, const std::string& job);

  /// The node ends, as by kill -9 for all others: its lease is gone at once, and they have seen it.
  void stop(unsigned node);
  /// … and comes back with its old directory, and all see it.
  void start(unsigned node);

  /// The node knows that its lease may have ended, and gets no other; all others still see it.
  void fence(unsigned node, bool fenced);

  /// From now on the node's decisions that commit a checkpoint are in doubt, done or not, and
  /// nobody can settle that. nullopt: no longer, and it can be settled.
  void doubt(unsigned node, std::optional<bool> done);

  std::string directory(unsigned node) const {
    return nodes_[node]->dir.path();
  }  // of its store, also while it is stopped

  /// Until every node that runs has taken over all decisions, and no job has anything to do.
  void wait_settled();

  /// Bytes that went from node to node so far, and out of one node.
  uint64_t bytes_moved() const;
  uint64_t bytes_sent(unsigned node) const;

  /// Asked before each call and each item of a fetch ("fetch") to another node: true, and it is
  /// lost.
  Hook<bool(const std::string& node, std::string_view method)> loses;

  /// Asked after each call to another node: true, and the connection breaks before the answer
  /// comes.
  Hook<bool(const std::string& asking, const std::string& node, std::string_view method,
            const std::string& request)>
      breaks;

  /// Asked before each transaction of a node: with an error, it is not made.
  Hook<std::optional<Error>(const std::string& node, const MetaTransaction& transaction)> refuses;
  /// Called before each call to another node: how long who asks will wait.
  Hook<void(std::string_view method, std::chrono::milliseconds time)> waits;
  /// Called before a node lists what is agreed on below a prefix, or ("<prefix> since") what has
  /// changed there.
  Hook<void(const std::string& node, std::string_view prefix)> lists;
  /// What is agreed on, past all nodes.
  MetaClient& meta() { return *meta_; }

 private:
  class NodeCalls;
  class NodeTransport;
  class NodeMeta;
  struct Node {
    TempDir dir;
    std::unique_ptr<NodeMeta> meta;
    std::unique_ptr<NodeCalls> calls;
    std::unique_ptr<Membership> membership;
    std::shared_ptr<JobStore> store;  // one of several while it is asked; guarded
  };
  /// Until all nodes that run know which do.
  void wait_seen() const;
  /// nullptr: it does not answer that node.
  std::shared_ptr<JobStore> serving(const std::string& node, const std::string& asking);

  const PieceSizes pieces_;
  std::unique_ptr<MetaClient> meta_;
  mutable std::mutex mutex_;  // who runs, and what was sent
  std::vector<std::unique_ptr<Node>> nodes_;
  std::set<std::string> running_;
  std::map<std::string, uint64_t> sent_;
};

}  // namespace ptc::testing
