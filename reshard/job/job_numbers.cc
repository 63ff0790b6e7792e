#include "reshard/job/job_numbers.h"

#include "reshard/job/job_impl.h"

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
  for (const WrittenFile& file : checkpoint.manifest().files)
    if (!file.has_tensors) bytes += file.bytes;
  return bytes;
}

JobState Job::Impl::state() const {
  const CheckpointRecord* newest = latest();
  if (failed && failed->revision == revision &&
      failed->checkpoint == (newest != nullptr ? newest->checkpoint->name() : ""))
    return JobState::kFailed;
  return running || !settled() ? JobState::kResharding : JobState::kIdle;
}

JobNumbers Job::numbers() const {
  std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  JobNumbers numbers;
  numbers.state = impl.state();
  numbers.revision = impl.revision;
  numbers.in_force_revision = impl.in_force.revision;
  numbers.checkpoints = impl.checkpoints.size();
  for (const auto& [name, record] : impl.checkpoints)
    numbers.stored_bytes += stored_bytes(*record.checkpoint);
  if (impl.running) {
    numbers.progress_bytes = impl.running->bytes_done->load();
    numbers.progress_total_bytes = impl.running->bytes_total;
  }
  numbers.counts = impl.counts;
  numbers.counts.hashed_bytes = impl.hashes.bytes();
  if (impl.last_reshard)
    numbers.last_reshard = {impl.last_reshard->totals, impl.last_reshard->seconds};
  return numbers;
}

}  // namespace ptc
