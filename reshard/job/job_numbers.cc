#include "reshard/job/job_numbers.h"

#include "reshard/job/job_parts.h"
#include "reshard/job/job_status.h"

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

uint64_t Job::missing_copy_bytes() const { return impl_->knowledge.now()->missing_copies(); }

JobNumbers Job::numbers() const {
  const std::optional<ReshardProgress> shown = progress();
  const JobKnowledge::Snapshot known = impl_->knowledge.now();
  JobNumbers numbers = numbers_of(*known, impl_->place.node_key(),
                                  impl_->activities.any_reshard() || shown.has_value());
  if (shown) {
    numbers.progress_bytes = shown->bytes_done;
    numbers.progress_total_bytes = shown->bytes_total;
  }
  numbers.counts.hashed_bytes = impl_->hashing.hashes().bytes();
  return numbers;
}

JobNumbers numbers_of(const KnownJob& known, std::string_view node, bool reshards) {
  JobNumbers numbers;
  numbers.state = known.state(reshards);
  numbers.revision = known.saved.revision;
  numbers.in_force_revision = known.in_force.revision;
  numbers.checkpoints = known.checkpoints.size();
  if (const CheckpointRecord* newest = known.latest())
    numbers.newest_time_ns = newest->checkpoint->manifest().time_ns;
  numbers.unreadable = known.damaged.size();
  numbers.stored_bytes = known.bytes_on(node);
  numbers.missing_copy_bytes = known.missing_copies();
  for (const auto& [name, record] : known.checkpoints) {
    numbers.mendings += static_cast<uint64_t>(record.mended);
    numbers.lost_tensors += record.checkpoint->lost_tensors().size();
    if (const auto looked = known.looked_over.find(record.id); looked != known.looked_over.end())
      numbers.damage_left +=
          looked->second.found.size() + static_cast<uint64_t>(looked->second.more);
  }
  numbers.counts = known.counts;
  if (known.last_reshard)
    numbers.last_reshard = {known.last_reshard->totals, known.last_reshard->seconds};
  return numbers;
}

}  // namespace ptc
