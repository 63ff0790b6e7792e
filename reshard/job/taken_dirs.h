// A node's part in commits that other nodes lead (commit_attempt.h), step by step, as it is asked
// to:
//
//   take    {"id", "incoming", "from", "fence"} → list_files(), or nothing if there is no such
//           directory here
//   read    {"id"} '\n' request → read_parts()
//   hash    {"id"} '\n' request → hash_files()
//   adopt   {"id", "files"} → the images that the files became
//   hide    {"id"}: right before the decision
//   untake  {"id"}: there will be none; all of it goes back, copies that were made here too
//   rights  {"id", "incoming"} → rights_of_tree() of it, before untake: who may be told of it
//
// The decision is seen in the metadata: then the directory goes. Who leads may fail in the middle,
// and untake may be lost. So this node asks how a commit goes of which it has not heard for a
// while; and where the lease of the node that leads has ended and it has not decided, it never
// will, for its decision names its key under that lease. Until it is hidden, the directory can be
// written again here, too: then the commit finds nothing more on this node, and fails.
//
// From then on its name is shown here as on the node that leads (ShownName): the same mv, on this
// node, waits for the decision and is told of it, also where that came too late for the mv that
// asked for it. The name goes when that one was told, which this node asks, or after a minute.
#pragma once

#include <boost/json/object.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <string_view>

#include "reshard/cluster/keyed_lock.h"
#include "reshard/intake/commit_share.h"
#include "reshard/job/hash_queue.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "store/base/error.h"
#include "store/base/mutex.h"
#include "store/meta/meta_client.h"

namespace ptc {

/// What this node holds of such commits, by their ids: its part of incoming/, files that describe
/// them, copies. Threads: any; its lock is held while nothing else is called, but to look at a
/// share.
class TakenDirs {
 public:
  /// All are called without a lock of this.
  struct Rest {
    /// What others have decided by now is known here when it returns, and settle() was called.
    std::function<Result<>()> follow;
    /// Copies that were made here for the commit go.
    std::function<void(const std::string& id)> drop;
    /// look_after() is to be called soon.
    std::function<void()> wake;
    /// StagedParts::was_lost().
    std::function<Result<bool>(const std::string& incoming)> was_lost =
        [](const std::string&) -> Result<bool> { return false; };
    /// What of this directory was here has become part of a checkpoint.
    std::function<void(const std::string& incoming)> gave = [](const std::string&) {};
  };
  /// The answer of a node that has no such directory, and had one in a former store.
  static constexpr std::string_view kLost = "lost";
  /// All outlive this.
  TakenDirs(const JobPlace& place, const JobPeers& peers, HashQueue& hashing, Rest rest)
      : place_(place), peers_(peers), hashing_(hashing), rest_(std::move(rest)) {}

  /// One of the methods above. kConflict: nothing of this commit is here any more.
  Result<std::string> answer(PeerMethod method, const boost::json::object& request,
                             const std::string& id, std::string_view rest);
  /// From here on this node holds something of it, and has heard of who leads it ("from", "fence").
  Result<> note(const boost::json::object& request, const std::string& id);
  bool holds(const std::string& id) const;
  bool any() const;
  /// It will never be decided.
  void untake(const std::string& id);

  using Clock = std::chrono::steady_clock;
  /// As the node that leads it answers a mv of incoming/<incoming> to checkpoints/<name>: ok() once
  /// it was decided, and nobody was told so; waits for that while it is being decided. kUnavailable
  /// with EAGAIN: it still is. nullopt: the name stands for nothing that was taken.
  /// `checkpoint_of`: the name of the checkpoint that has this id, if there is one; called without
  /// a lock of this.
  std::optional<Result<>> hear(
      const std::string& incoming, const std::string& name, Clock::time_point deadline,
      const std::function<std::string(const std::string& id)>& checkpoint_of);

  /// Commits that can never be decided any more. To be asked before the metadata are read that
  /// would say that one has been decided.
  Result<std::set<std::string>> given_up() const;
  /// `decided`: ids in the metadata.
  void settle(const std::set<std::string>& given_up, const std::set<std::string>& decided);
  /// Asks those that lead, and have not been heard of for a while; or whose mv may have been told.
  void look_after(const std::stop_token& stop);
  Clock::time_point next_look() const;  // is due then, at the latest; max(): whenever
  /// The job ends here: whether they were decided the next start knows.
  void stop();

 private:
  struct Taken {
    std::string from;                    // the node that leads
    MetaTransaction::Compare fence;      // of it, which its decision names
    std::shared_ptr<CommitShare> share;  // null: nothing of incoming/
    Clock::time_point heard;             // of it
  };
  /// One that was decided, by its name in incoming/, which is shown until its mv was answered.
  struct Shown {
    std::string id, from;  // and the node that led it
    std::shared_ptr<ShownName> name;
    Clock::time_point since, ask_at;
  };
  Result<std::string> take(const boost::json::object& request, const std::string& id);
  Result<std::string> rights(const boost::json::object& request, const CommitShare* share) const;
  Result<> wait_until_back(const std::string& incoming);
  void committed(const std::string& id, const Taken& own);
  void forget_shown(const std::string& incoming, const std::string& id = "");  // "": any
  void look_after_shown(const std::stop_token& stop);
  /// What became of it, by its leader and then by what is agreed: it is completed here or undone.
  /// kBusy: it is not decided.
  Result<> find_out(const std::string& id, const std::string& leader, const std::stop_token& stop);

  const JobPlace& place_;
  const JobPeers& peers_;
  HashQueue& hashing_;
  const Rest rest_;
  KeyedLock takes_;  // by the name in incoming/
  std::stop_source stop_;
  mutable Mutex mutex_;
  ConditionVariable changed_;  // what hear() waits for
  std::map<std::string, Taken> taken_ PTC_GUARDED_BY(mutex_);
  std::map<std::string, Shown> shown_ PTC_GUARDED_BY(mutex_);
  std::multiset<std::string> going_back_
      PTC_GUARDED_BY(mutex_);  // names in incoming/, taken no more and not there yet
  bool stopped_ PTC_GUARDED_BY(mutex_) = false;
};

}  // namespace ptc
