// The search for a short schedule: simulated annealing over (configurations, order, nodes), each
// judged by the list scheduler, from many starts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

struct SolverOptions {
  uint64_t seed = 1;
  /// How many schedules are tried: the same seed and number, the same answer. 0: until `time`.
  uint64_t steps = 0;
  std::chrono::milliseconds time{2000};
  /// Ends the search with what is best so far. Outlives it.
  const std::atomic<bool>* stop = nullptr;
};

struct Solution {
  Schedule schedule;
  double lower_bound = 0;  // seconds
  std::string bound_by;    // what says so: "areas and the longest task", "the time-indexed model"
  uint64_t steps = 0;      // schedules that were tried
  double seconds = 0;      // that took
  double late = 0;         // seconds by which tasks are late, in sum
  /// Nobody is late, and none is shorter. Where somebody is, it is not known.
  bool optimal() const { return late == 0 && schedule.makespan <= lower_bound * (1 + 1e-9); }
};

/// Never worse than `known` (those of baselines, say) and the simple choices, which it begins with.
/// Ends early at the lower bound. With `time`, and where CBC is there, the time-indexed model is
/// solved beside it, in a process of its own (time_indexed.h). Threads: one a call.
Solution solve(const Instance& instance, const SolverOptions& options,
               const std::vector<const Schedule*>& known = {});

}  // namespace ptc::planner
