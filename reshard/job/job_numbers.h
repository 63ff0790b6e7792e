// What a job says about itself in numbers, for metrics.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "reshard/plan/planner.h"

namespace ptc {

enum class JobState { kIdle, kResharding, kFailed };
inline constexpr JobState kJobStates[] = {JobState::kIdle, JobState::kResharding,
                                          JobState::kFailed};
/// As status.json has it.
std::string_view state_name(JobState state);

/// Since the daemon started.
struct JobCounts {
  uint64_t reshards_done = 0, reshards_failed = 0, reshards_abandoned = 0;
  uint64_t commits_done = 0, commits_refused = 0;
  uint64_t hashed_bytes = 0;  // at the close of files and by commits
  uint64_t damaged_found =
      0;  // copies, each time that one is found: by verify, repairs and the scrub
  // What repairs made of them: mended where they lie, made anew elsewhere, or left, for no other
  // copy is right.
  uint64_t damaged_mended = 0, damaged_replaced = 0, damaged_left = 0;
  std::optional<double> last_commit_seconds;  // of those that were done
};

struct JobNumbers {
  JobState state = JobState::kIdle;
  int64_t revision = 0, in_force_revision = 0;
  uint64_t checkpoints = 0;
  int64_t newest_time_ns = 0;  // when the newest was committed, since the epoch; 0: there is none
  // Of the checkpoints: tensors of which no node that is there has some part; and those that cannot
  // be shown here.
  uint64_t lost_tensors = 0, unreadable = 0;
  uint64_t stored_bytes = 0;        // of its checkpoints, on this node
  uint64_t missing_copy_bytes = 0;  // that `replicas` asks for and this node cannot reach
  uint64_t progress_bytes = 0,
           progress_total_bytes = 0;  // of the reshard that runs, on all nodes; else 0
  // Agreed on: how often damaged bytes of the checkpoints were mended; and what was found, when
  // each was looked over last, of which no copy is right.
  uint64_t mendings = 0, damage_left = 0;
  JobCounts counts;
  struct LastReshard {
    TransferPlan::Totals totals;
    double seconds = 0;
  };
  std::optional<LastReshard> last_reshard;
};

}  // namespace ptc
