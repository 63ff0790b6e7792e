// What others do with the same tasks: the baselines of Saturn's evaluation, by the same scheduler.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

struct Baseline {
  std::string name, what;
  double makespan = 0;  // seconds
  /// One that takes no longer; none where tasks change their configurations.
  std::optional<Schedule> schedule = {};
};

/// * current practice: all GPUs of a node to one task after the other, by its user's technique.
/// * max: the same, by the best technique.
/// * min: each task the fewest GPUs that it fits on; where that leaves some, they are spread.
/// * random: configurations and order drawn, the mean of three (`seed`).
/// * optimus: in waves. As many tasks as fit get the least, then a GPU more goes to whom it gains
///   most, until none is left; the next wave begins when the last of one has ended.
/// * optimus, dynamic: the same of all that are unfinished whenever one ends; changes cost nothing.
/// The last two are left out where there are very many tasks and nodes: they take too long; and
/// where `stop` becomes true, which ends them.
std::vector<Baseline> baselines(const Instance& instance, uint64_t seed,
                                const std::atomic<bool>* stop = nullptr);

/// Where a task has what its user would take, it has nothing else.
Instance as_usual(const Instance& instance);

/// Those of them that are choices for ListScheduler, to begin a search with.
std::vector<Choice> simple_choices(const Instance& instance);

}  // namespace ptc::planner
