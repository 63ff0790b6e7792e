// Several nodes of a cluster in one process: with the product's membership, their agreement is a
// memory_meta, their network is calls of functions, and can be cut. For the logic; real processes
// and sockets are in tests/cluster.
#pragma once

#include <chrono>
#include <condition_variable>
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
/// Nodes call it for as long as the cluster lives, which is longer than a test's body: what refers
/// to something there is set by during().
template <class Signature>
class Hook;
template <class Answer, class... Arguments>
class Hook<Answer(Arguments...)> {
 public:
  using Function = std::function<Answer(Arguments...)>;

 private:
  struct Set {
    Function function;
    unsigned calls = 0;  // guarded: those that have not ended
  };

 public:
  /// At its end what was set is no longer, and nobody is in it.
  class Meanwhile {
   public:
    Meanwhile() = default;
    Meanwhile(Hook* hook, std::shared_ptr<Set> set) : hook_(hook), set_(std::move(set)) {}
    Meanwhile(Meanwhile&&) = default;
    Meanwhile& operator=(Meanwhile&& other) {
      end();
      hook_ = other.hook_;
      set_ = std::move(other.set_);
      return *this;
    }
    ~Meanwhile() { end(); }

   private:
    void end() {
      if (set_ == nullptr) return;
      std::unique_lock lock(hook_->mutex_);
      if (hook_->set_ == set_) hook_->set_ = nullptr;
      hook_->ended_.wait(lock, [&] { return set_->calls == 0; });
      set_ = nullptr;
    }
    Hook* hook_ = nullptr;
    std::shared_ptr<Set> set_;  // nullptr: moved away
  };

  Hook& operator=(Function function) {
    (void)set(std::move(function));
    return *this;
  }
  /// Until what is returned ends, or another is set.
  [[nodiscard]] Meanwhile during(Function function) { return {this, set(std::move(function))}; }

  /// Nothing is set: as if it had said no.
  template <class... Given>
  Answer operator()(Given&&... given) const {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<Set> set = set_;
    if (set == nullptr || !set->function) return Answer();
    ++set->calls;
    lock.unlock();
    const Ending ending(*this, *set);
    return set->function(std::forward<Given>(given)...);
  }

 private:
  struct Ending {
    Ending(const Hook& of, Set& called) : hook(of), set(called) {}
    ~Ending() {
      std::lock_guard lock(hook.mutex_);
      if (--set.calls == 0) hook.ended_.notify_all();
    }
    const Hook& hook;
    Set& set;
  };
  std::shared_ptr<Set> set(Function function) {
    auto set = std::make_shared<Set>(Set{.function = std::move(function)});
    std::lock_guard lock(mutex_);
    set_ = set;
    return set;
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::shared_ptr<Set> set_;  // guarded
};

class LocalCluster {
 public:
  /// `devices`: those of each node, as Devices::open() has them.
  explicit LocalCluster(unsigned nodes, PieceSizes pieces = {},
                        const std::vector<std::string>& devices = {});
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
  const std::vector<std::string> devices_;
  std::unique_ptr<MetaClient> meta_;
  mutable std::mutex mutex_;  // who runs, and what was sent
  std::vector<std::unique_ptr<Node>> nodes_;
  std::set<std::string> running_;
  std::map<std::string, uint64_t> sent_;
};

}  // namespace ptc::testing
