// The commits that this node leads: who asks for one finds what is under way (commit_attempt.h).
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "reshard/job/activity.h"
#include "reshard/job/checkpoint_files.h"
#include "reshard/job/decisions.h"
#include "reshard/job/doubts.h"
#include "reshard/job/hash_queue.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/job/part_maker.h"
#include "reshard/job/staged_parts.h"
#include "reshard/job/taken_dirs.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

class CommitAttempt;

/// Names nodes whose part of incoming/<incoming> nobody waits for, when they are away; the user's.
std::string without_file_of(const std::string& incoming);

/// By their names in incoming/. Threads: any; its lock is held for no longer than it takes to find
/// or note one, and an attempt is destroyed without it.
class CommitsLed {
 public:
  using Clock = std::chrono::steady_clock;
  /// All outlive it.
  struct Uses {
    const JobPlace& place;
    const JobPeers& peers;
    JobKnowledge& knowledge;
    const CheckpointFiles& files;
    Decisions& decisions;
    const PartMaker& maker;
    HashQueue& hashing;
    StagedParts& staged;
    TakenDirs& taken;
    Activities& activities;
    Doubts& doubts;
    std::function<Result<>()> follow;  // what others decided by now is known when it returns
    std::function<void()> wake;        // look_after() and the doubts are to be seen to soon
  };
  explicit CommitsLed(Uses uses) : uses_(std::move(uses)) {}

  /// Job::commit().
  Result<> commit(const std::string& incoming, const std::string& name, Clock::time_point deadline);
  /// "open", "committed", "unheard" (the same, and no mv was told so yet) or "given up": for nodes
  /// that hold something of it.
  std::string outcome_of(const std::string& id) const;

  /// Nothing can be committed from now on; false: one is waited for, or being decided, and all is
  /// as it was.
  bool close();
  void reopen();
  /// Gives up what nobody asks for any more. False: nothing is left to look after.
  bool look_after();
  /// The job ends. Those that are under way: they end when they are stopped and let go.
  std::vector<std::shared_ptr<CommitAttempt>> stop();

 private:
  friend class CommitAttempt;  // which tells how it ended
  /// The one under way, or a new one; an error: of one that has failed since the last mv, or what
  /// forbids to begin.
  Result<std::shared_ptr<CommitAttempt>> find(const std::string& incoming, const std::string& name,
                                              Clock::time_point deadline);
  void note_committed(const std::string& id);
  /// `elsewhere`: who may know what it names of other nodes' incoming/<incoming>; nullopt:
  /// everybody. What not everybody may know is in incoming/<incoming>.error, for who may.
  void note_refused(const std::string& incoming, const Error& error,
                    const std::optional<ReadRights>& elsewhere = std::nullopt);
  void write_error_file(const std::string& incoming, const std::string& text,
                        const std::optional<ReadRights>& rights);
  /// Beside incoming/<incoming>: why it was refused, and which nodes it goes without.
  void remove_files_about(const std::string& incoming);

  const Uses uses_;
  std::stop_source stop_;  // who has given up a commit tells no other once the job ends
  mutable Mutex mutex_;
  std::map<std::string, std::shared_ptr<CommitAttempt>> attempts_ PTC_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<CommitAttempt>> ended_
      PTC_GUARDED_BY(mutex_);  // of which only the thread is left, at most
  std::deque<std::string> committed_ids_ PTC_GUARDED_BY(mutex_);  // of late
  bool stopping_ PTC_GUARDED_BY(mutex_) = false;
  bool closed_ PTC_GUARDED_BY(mutex_) = false;  // being removed: nothing may be committed any more
  bool space_changed_ PTC_GUARDED_BY(mutex_) =
      false;  // in incoming/: what the job takes is to be counted anew
};

}  // namespace ptc
