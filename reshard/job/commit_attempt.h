// mv incoming/<name> checkpoints/: from directories of files, on whatever nodes, to a checkpoint,
// all or nothing.
//
// 1. Every node that has incoming/<name> seals it: it can be read, and nobody writes it any more.
// 2. draft_commit() makes sense of the files; what of them was not hashed when it was closed is
//    hashed now.
// 3. They are linked as images, what says where these lie goes to all nodes, and the copies that
//    `replicas` asks for are made.
// 4. Every node hides its directory in committing/<id>/, having looked that nothing was written
//    after all.
// 5. One metadata transaction makes it a checkpoint: the point of no return.
// 6. The directories go.
//
// 1 to 3 may take long, and a rename holds locks of the kernel: so they go on after `mv` got
// EAGAIN, and the same mv again finds the attempt and goes on with it. 4 and 5 are short, and begin
// only while a mv waits: a checkpoint never comes when nobody asks for it, and incoming/<name> is
// there until it does. In between the files are where they were; whoever writes one or removes it
// ends the attempt. So does a minute without a mv.
//
// Where 5 comes to its end after that mv got EAGAIN, the same mv again says that it was done. For
// that the name must be found: from 4 on an empty directory is in its place (ShownName) on each
// node that gave something, until a mv was answered, or a minute long (on others: taken_dirs.h). It
// answers for this very commit, by its id, and only as long as the checkpoint is there and nobody
// has put anything else in that place.
//
// A failure before 5 takes all back, on every node. A crash before 5 is taken back at the next
// start (a hidden directory is renamed back, images that were drafts go), and by the other nodes,
// since the node that leads is gone; a crash after it is finished (the directory goes). Where
// nobody knows whether 5 was done, all stays until the metadata can be asked (Doubts), and only
// this commit waits for it.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "reshard/intake/commit.h"
#include "reshard/intake/commit_share.h"
#include "reshard/job/commits_led.h"
#include "store/base/mutex.h"

namespace ptc {

/// Threads: any; it has one of its own, which its destructor waits for.
class CommitAttempt : public std::enable_shared_from_this<CommitAttempt> {
 public:
  using Clock = std::chrono::steady_clock;

  CommitAttempt(CommitsLed& all, std::string id, std::string incoming, std::string name);
  ~CommitAttempt();
  void start();

  const std::string& id() const { return id_; }
  const std::string& incoming() const { return incoming_; }
  const std::string& name() const { return name_; }

  /// The outcome; nothing: it is not known by then. Who has less than a third of a second waits
  /// for no preparations: others may stand in a queue behind him.
  std::optional<Result<>> wait(Clock::time_point deadline);
  /// It ends, unless somebody waits for it or it is being decided (then false).
  bool withdraw();
  /// It ends, whoever waits: kCancelled.
  void stop();
  bool stopped() const;  // by one of the two
  /// Nobody has asked for it for too long.
  bool forgotten() const;
  /// Its thread has nothing more to do, and all of it was taken back or done.
  bool ended() const;
  /// "open", "committed", "unheard" (the same, and no mv was told so yet) or "given up": for nodes
  /// that hold something of it.
  std::string_view outcome() const;
  /// Of one that failed while nobody waited.
  struct Failure {
    Code code;
    int64_t time_ns;
  };
  std::optional<Failure> unheard_failure() const;
  /// It was decided when nobody waited any more, and its name is still shown.
  bool unheard_success() const;
  /// Its files are hidden by now, and in their place is what somebody has put there since: that is
  /// no part of it.
  bool written_anew() const;
  /// Its name goes.
  void answered();

 private:
  enum class Step { kPreparing, kReady, kDeciding, kInDoubt, kCommitted, kFailed };
  struct Elsewhere {
    FilesElsewhere files;
    MetaTransaction::Compare fence;  // as it was before the node was asked
  };

  void run();
  Result<> prepare();
  Result<> take_elsewhere();
  /// kUnavailable: a node that is away has something of it, and nobody has said that it goes
  /// without.
  Result<> check_all_answered(const std::set<std::string>& answered) const;
  /// kConflict: it has lost what it had, and nobody has said that it goes without.
  Result<> check_goes_without_lost(const std::string& node) const;
  Result<> draft();
  Result<> adopt();
  Result<> write_down();
  Result<> make_copies();
  bool wait_until_asked();
  Result<> hide();
  Result<> decide();
  Result<> decide_once();
  void end(Result<> result);
  /// Of what other nodes have of it, before they put that back; nullopt: everybody.
  std::optional<ReadRights> rights_elsewhere();
  void finish();
  void take_back();
  void let_go();
  void settle_doubt();
  bool is_unheard() const PTC_REQUIRES(mutex_);
  bool shows_its_name() const PTC_REQUIRES(mutex_);
  /// Asks these nodes at the same time, and hands each answer on.
  Result<> ask_all(
      const std::vector<std::string>& nodes, PeerMethod method,
      const std::function<std::string(const std::string& node)>& request,
      const std::function<Result<>(const std::string& node, const std::string& answer)>& take);

  CommitsLed& all_;  // which outlives it
  const CommitsLed::Uses& job_ = all_.uses_;
  const std::string id_, incoming_, name_, label_, source_dir_;
  const Clock::time_point started_ = Clock::now();
  std::unique_ptr<Activity> activity_;

  // Of the thread alone.
  std::optional<MetaTransaction::Compare> fence_;  // of this node, when it began
  Fences fences_;                                  // that, and of the others
  std::shared_ptr<CommitShare> share_;             // null: this node has no such directory
  std::vector<Elsewhere> elsewhere_;
  CommitDraft draft_;
  std::vector<ImageRef> images_;  // by file of the manifest
  CheckpointRecord record_;
  std::shared_ptr<const StoredState> with_copies_;
  std::vector<std::string> asked_;  // nodes that may hold something of it
  std::set<std::string> without_;   // of these, that have told nothing of it

  mutable Mutex mutex_;
  StoppableConditionVariable changed_;
  Step step_ PTC_GUARDED_BY(mutex_) = Step::kPreparing;
  std::optional<Error> error_ PTC_GUARDED_BY(mutex_);
  int64_t failed_at_ns_ PTC_GUARDED_BY(mutex_) = 0;
  bool heard_ PTC_GUARDED_BY(mutex_) = false;  // somebody got the outcome
  std::shared_ptr<ShownName> shown_ PTC_GUARDED_BY(mutex_);
  bool hidden_ PTC_GUARDED_BY(mutex_) = false;  // what this node gave, if it gave anything
  unsigned waiting_ PTC_GUARDED_BY(mutex_) = 0;
  Clock::time_point latest_deadline_ PTC_GUARDED_BY(mutex_){};
  Clock::time_point last_asked_ PTC_GUARDED_BY(mutex_) = Clock::now();
  bool ended_ PTC_GUARDED_BY(mutex_) = false;
  std::stop_source stop_;

  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace ptc
