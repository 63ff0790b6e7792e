#include "reshard/job/job_numbers.h"

#include "reshard/job/job_impl.h"

namespace ptc {

std::string_view state_name(JobState state) {
  switch (state) {
    case JobState::kIdle:
      return "idle";
    case JobState::kResharding:
      return "resharding";
    case JobState::kFailed:
      return "failed";
  }
  return "";
}

uint64_t stored_bytes(const Checkpoint& checkpoint) {
  uint64_t bytes = 0;
  const std::shared_ptr<const StoredState> stored = checkpoint.stored();
  for (const ImageLayout& layout : stored->layouts()) bytes += layout.bytes;
  return bytes;
}

uint64_t bytes_of_missing_copies(const Checkpoint& checkpoint, uint32_t replicas) {
  uint64_t missing = 0;
  const std::shared_ptr<const StoredState> stored = checkpoint.stored();
  const std::vector<StoredImage>& images = stored->images;
  auto same = [&](size_t a, size_t b) {  // they stand beside each other
    return images[a].state == images[b].state && images[a].path == images[b].path &&
           images[a].written == images[b].written;
  };
  for (size_t begin = 0, end; begin < images.size(); begin = end) {
    uint64_t there = 0;
    for (end = begin; end < images.size() && same(begin, end); ++end)
      there += images[end].image != nullptr;
    if (there <= replicas)
      missing += (replicas + uint64_t{1} - there) * stored->layouts()[begin].bytes;
  }
  return missing;
}

uint64_t Job::Impl::missing_copies() const {
  uint64_t missing = 0;
  for (const auto& [name, record] : checkpoints)
    missing += bytes_of_missing_copies(*record.checkpoint, saved.layout.replicas);
  return missing;
}

uint64_t Job::missing_copy_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->missing_copies();
}

JobState Job::Impl::state() const {
  const CheckpointRecord* newest = latest();
  if (failed && failed->revision == saved.revision &&
      failed->checkpoint == (newest != nullptr ? newest->checkpoint->name() : ""))
    return JobState::kFailed;
  if (lost() != nullptr && !settled()) return JobState::kFailed;
  return activities.any_reshard() || !settled() ? JobState::kResharding : JobState::kIdle;
}

JobNumbers Job::numbers() const {
  const std::optional<ReshardProgress> shown = progress();
  std::lock_guard lock(impl_->mutex);
  const Impl& impl = *impl_;
  JobNumbers numbers;
  numbers.state = impl.state();
  numbers.revision = impl.saved.revision;
  numbers.in_force_revision = impl.in_force.revision;
  numbers.checkpoints = impl.checkpoints.size();
  numbers.stored_bytes = impl.bytes_on(node_key(impl.services));
  numbers.missing_copy_bytes = impl.missing_copies();
  for (const auto& [name, record] : impl.checkpoints) {
    numbers.mendings += static_cast<uint64_t>(record.mended);
    if (const auto looked = impl.looked_over.find(record.id); looked != impl.looked_over.end())
      numbers.damage_left += looked->second.found.size();
  }
  if (shown) {
    numbers.progress_bytes = shown->bytes_done;
    numbers.progress_total_bytes = shown->bytes_total;
  }
  numbers.counts = impl.counts;
  numbers.counts.hashed_bytes = impl.hashing.hashes().bytes();
  if (impl.last_reshard)
    numbers.last_reshard = {impl.last_reshard->totals, impl.last_reshard->seconds};
  return numbers;
}

}  // namespace ptc
