#include "reshard/job/job_numbers.h"

#include "reshard/job/job_impl.h"
#include "reshard/job/last_reshard.h"

namespace ptc {

std::string_view state_name(JobState state) {
  switch (state) {
    case JobState::kIdle: return "idle";
    case JobState::kResharding: return "resharding";
    case JobState::kFailed: return "failed";
  }
  return "";
}

uint64_t stored_bytes(const Checkpoint& checkpoint) {
  uint64_t bytes = 0;
  const std::shared_ptr<const StoredState> stored = checkpoint.stored();
  for (const ImageLayout& layout : stored->layouts()) bytes += layout.bytes;
  return bytes;
}

JobState Job::Impl::state() const {
  const CheckpointRecord* newest = latest();
  if (failed && failed->revision == revision &&
      failed->checkpoint == (newest != nullptr ? newest->checkpoint->name() : ""))
    return JobState::kFailed;
  return activities.any_reshard() || !settled() ? JobState::kResharding : JobState::kIdle;
}

JobNumbers Job::numbers() const {
  std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  JobNumbers numbers;
  numbers.state = impl.state();
  numbers.revision = impl.revision;
  numbers.in_force_revision = impl.in_force.revision;
  numbers.checkpoints = impl.checkpoints.size();
  numbers.stored_bytes = impl.bytes_on(node_key(impl.services));
  if (const std::optional<Activity::Progress> shown = impl.activities.reshard()) {
    numbers.progress_bytes = shown->bytes_done;
    numbers.progress_total_bytes = shown->bytes_total;
  }
  numbers.counts = impl.counts;
  numbers.counts.hashed_bytes = impl.hashes.bytes();
  if (const std::optional<LastReshard> last = LastReshard::of(impl.last_plan))
    numbers.last_reshard = {last->totals, last->seconds};
  return numbers;
}

}  // namespace ptc
