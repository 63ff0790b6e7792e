// What a job does in the background: carries out next_step.h, a step at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "reshard/job/activity.h"
#include "reshard/job/checkpoint_files.h"
#include "reshard/job/decisions.h"
#include "reshard/job/doubts.h"
#include "reshard/job/job_peers.h"
#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/job/leadership.h"
#include "reshard/job/mender.h"
#include "reshard/job/next_step.h"
#include "reshard/job/part_maker.h"
#include "reshard/job/part_shelf.h"
#include "reshard/job/verifier.h"
#include "reshard/move/change.h"
#include "store/base/step_pool.h"

namespace ptc {

/// No state between its rounds but what is known of the job, and no lock. Threads: its steps are
/// taken one at a time, by whatever thread of the pool; start(), stop() and wake(): any.
class Resharder {
 public:
  /// All outlive it.
  struct Uses {
    const JobPlace& place;
    const JobPeers& peers;
    JobKnowledge& knowledge;
    const CheckpointFiles& files;
    Decisions& decisions;
    const PartMaker& maker;
    const Verifier& verifier;
    Mender& mender;
    PartShelf& shelf;
    Activities& activities;
    Doubts& doubts;
    std::function<Result<Followed>()> hear_others;  // what they decided is known when it returns
    /// kBusy: it is used. kNotFound: what has the name is another.
    std::function<Result<>(const std::string& name, const std::string& id)> remove_unused;
    std::function<void()> settle_doubts;  // soon
  };
  explicit Resharder(Uses uses) : uses_(std::move(uses)) {}

  void start(StepPool& pool);  // once
  void stop();
  void wake();  // something has changed

 private:
  /// To settle the job, from the moment when this node leads until it does no more.
  struct Attempt {
    CheckpointRef newest;
    Layout wanted;
    int64_t revision = 0;  // of that
    std::unique_ptr<Leadership> leadership;
    std::unique_ptr<Activity> activity;  // what it is at, once there is something to do
    Result<> result = ok();
    std::vector<std::shared_ptr<const ChangePlan>> plans;  // made in it, for who needs one again

    int64_t epoch() const { return leadership->epoch(); }
    /// What is lost of one checkpoint holds up no other; any other error ends it.
    bool goes_on() const { return result.has_value() || result.error().code() == Code::kCorrupt; }
    template <class Settle>
    void go_on(Settle&& settle) {
      Result<> next = ok();
      try {
        next = settle();
      } catch (const std::exception& error) {  // no memory
        next = make_error(Code::kNoSpace, "{}", error.what());
      }
      const bool again = next.has_error() && next.error().code() == Code::kCorrupt;
      if (next.has_error() && (result.has_value() || !again)) result = std::move(next);
    }
  };
  using StoredRef = std::shared_ptr<const StoredState>;

  /// Carries out next_step() until there is nothing to do now; returns when to look again.
  std::optional<StepPool::Time> carry_on(const std::stop_token& stop);
  /// False: another node leads, or has. `others_know_all`: which files of this node are missing.
  bool begin(Attempt& attempt, bool others_know_all);
  bool another_has_looked();
  bool lacks_room_of_older(const Attempt& attempt, const Result<>& settled,
                           const Round& round) const;
  void end(Attempt& attempt);
  Result<> settle_newest(Attempt& attempt);
  Result<> settle_older(const CheckpointRecord& record, Attempt& attempt);
  Result<> settle_one(CheckpointRecord record, Attempt& attempt);
  /// `fences`: of the nodes that made new images.
  Result<> check_devices_have_room(const ChangePlan& change, const StoredState& stored) const;
  Result<StoredRef> move(const CheckpointRecord& record, const WantedState& wanted,
                         Attempt& attempt, Fences& fences);
  /// kCancelled: something was damaged, and is taken out now: plan anew.
  Result<StoredRef> move_or_repair(const CheckpointRecord& record, const WantedState& wanted,
                                   Attempt& attempt, Fences& fences);
  /// False: a newer edit or checkpoint came.
  /// `planned`: what `moved` was made of. False: that, or what is wanted, is another one by now.
  /// `stored_file`: gets the name of what was written for the decision.
  Result<bool> flip(const Attempt& attempt, const CheckpointRecord& planned, StoredRef moved,
                    const Fences& fences, std::string& stored_file);
  /// After a decision that failed: at once, or when it is known that it was not made after all.
  void undo_unless_decided(const Error& error, const CheckpointRecord& record, StoredRef made,
                           int64_t epoch, const std::string& stored_file);
  /// Of those that are too many, by name and id, what nobody uses.
  void remove_superfluous(const std::vector<std::pair<std::string, std::string>>& surplus,
                          const std::stop_token& stop);
  bool is_used_elsewhere(const std::string& id,
                         const std::stop_token& stop);  // on another node a file of it is open, or
                                                        // that node says nothing
  void drop_undecided_parts();                          // whose leader is gone

  // trim.cc
  /// Copies beyond those that are wanted go, of all checkpoints. An error: some stay for now.
  Result<> trim_all(const Attempt& attempt);
  Result<> trim(const CheckpointRecord& record, const ChangePlan& change, const Attempt& attempt);
  void look_again_at_copies(const Error& error);

  const Uses uses_;
  const bool shares_bytes_ = uses_.place.services.cluster->shares_bytes();
  std::chrono::seconds copies_tried_again_{0};  // so long after the last time; by the loop alone
  int damaged_in_a_row_ = 0;  // moves that failed of damaged copies; of who reshards
  Loop loop_;                 // last: its steps use the rest
};

}  // namespace ptc
