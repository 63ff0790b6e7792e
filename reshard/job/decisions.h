// What is decided here about a job: one decision at a time, each a transaction that names what it
// was based on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reshard/job/checkpoint_files.h"
#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"
#include "reshard/job/job_update.h"
#include "reshard/job/known_job.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// Threads: any. `mutex` is held while a decision is made and written to the metadata, and while
/// what others decided is taken over, and only for that moment: hashing and moving bytes happen
/// outside of it, on snapshots, and the decision then checks (in memory and, by the transaction's
/// compares, in the metadata) that what it was based on still holds. It is taken before any lock of
/// a part. All that this is given outlives it.
class Decisions {
 public:
  Decisions(const JobPlace& place, const CheckpointFiles& files, JobKnowledge& knowledge)
      : place_(place), files_(files), knowledge_(knowledge) {}

  Mutex& mutex() PTC_RETURN_CAPABILITY(mutex_) { return mutex_; }

  /// A file that says where the bytes of a checkpoint shall lie.
  struct NewStored {
    std::string file;
    int64_t generation = 0;
    std::shared_ptr<const StoredState> stored;
    FileFacts facts = {};  // of the file
  };
  /// Of `record`, before the decision and without the mutex: all nodes have it, and the plan beside
  /// it, when this returns. Nothing names it yet. On an error neither is here.
  Result<NewStored> write_stored(const CheckpointRecord& record,
                                 std::shared_ptr<const StoredState> moved,
                                 const PlanTexts& plan) const;

  /// Lets `decide` read what is known at this moment and say what changes, and makes it one
  /// transaction, which rests on all that was read. Returns its revision; 0: there was nothing to
  /// decide. kConflict: something of that is not what it was, and nothing was written. It is not
  /// tried again: what is known would be the same.
  Result<int64_t> update(const JobUpdate::Decide& decide) const { return update(nullptr, decide); }
  /// The same; it rests on that `leader` leads still.
  Result<int64_t> update_as(const Leadership& leader, const JobUpdate::Decide& decide) const {
    return update(&leader, decide);
  }

  // Steps of a decision, with the mutex held.

  /// The same record still, in the decision, with where its bytes lie from then on.
  static void put_stored(CheckpointRecord& record, NewStored next, JobUpdate& update);
  /// The decision has come: `record` is what is known from now on. Returns what was before.
  static std::shared_ptr<const StoredState> take_over(KnownJob& known,
                                                      const CheckpointRecord& record,
                                                      KnownJob::PlanRef plan);

  // Whole decisions, which take the mutex.

  /// The bytes of `seen` lie in `images` from now on, where all holds that `besides` reads; it
  /// writes nothing. False: something has changed meanwhile. `leader`: as JobUpdate's.
  /// `were_damaged`: what was read of the others may be wrong.
  Result<bool> replace_images(const CheckpointRecord& seen, std::vector<StoredImage> images,
                              const Leadership* leader, const JobUpdate::Decide& besides,
                              bool were_damaged = false);
  /// Files of this node that are missing, as after a start on an empty store, or that are back. As
  /// long as other nodes count on them, their plans are other ones than this node's. False: some of
  /// it could not be said now, and the others take it for there.
  bool report_missing_images();
  /// Damaged bytes were mended where they lie. False: it was removed. kConflict: something else was
  /// decided about it.
  Result<bool> count_mending(const std::string& name, const std::string& id);

  /// After one: the images that it replaced go, and the new ones stay.
  void remove_replaced(const CheckpointRecord& record, const StoredState& before) const;

 private:
  Result<int64_t> update(const Leadership* leader, const JobUpdate::Decide& decide) const;

  const JobPlace& place_;
  const CheckpointFiles& files_;
  JobKnowledge& knowledge_;
  Mutex mutex_;
};

}  // namespace ptc
