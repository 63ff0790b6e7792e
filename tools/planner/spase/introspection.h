// Introspection: a schedule that is carried out is looked at again, by what its tasks have done.
//
//   schedule, what tasks have done ──► forecast of what is left ─────────────┐
//   what is left, solved anew, each change of who runs with its price ───────┴─► the better of both
//
// Saturn (2309.01226) takes a new plan that ends so much earlier as a threshold says. Here the
// threshold is what the changes cost, and who keeps its configuration and its GPUs goes on.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tools/planner/spase/schedule.h"
#include "tools/planner/spase/solver.h"

namespace ptc::planner {

/// What a task has done.
struct TaskNow {
  double left = 1;      // the part of its samples that is still to be read; 0: it is over
  double slowness = 1;  // what a sample takes ÷ what its profile says
  struct Place {
    uint32_t configuration = 0;
    std::vector<OnNode> on;
    double trains_in_s = 0;  // it has just been started
  };
  std::optional<Place> runs = {};  // none: it waits
  /// Seconds, by configuration: of the change if it runs, else of its start; empty: none.
  std::vector<double> price_s = {};
  /// By configuration; empty: `slowness` with each.
  std::vector<double> slowness_of = {};
};

/// By node, those of its GPUs that tasks may have, ascending.
using UsableGpus = std::vector<std::vector<uint32_t>>;
UsableGpus all_gpus(const Instance& instance);

/// The rest of a schedule, from now on: who runs where it says goes on, and each other begins when
/// those before it on its GPUs have ended. Runs of tasks that are over are left out. With the times
/// of the profiles it ends when the schedule said. Makespan: infinite where a task is in no run, or
/// a GPU cannot be used.
Schedule forecast(const Instance& instance, const Schedule& schedule, std::span<const TaskNow> now,
                  const UsableGpus& usable);

struct IntrospectionRules {
  SolverOptions solver;  // for each of at most two searches
  /// How much earlier all must be done where somebody who runs is changed. None: than what the
  /// changes cost.
  std::optional<double> threshold_s = {};
};

struct Introspection {
  Schedule schedule;              // from now on; of those that are not over and have room
  std::vector<uint32_t> changed;  // tasks that run, and are to have something else
  std::vector<uint32_t> no_room;  // tasks that fit nowhere now
  double before = 0;       // seconds until all are done: as it was; infinite: it cannot go on
  double lower_bound = 0;  // seconds; of whoever keeps what it has, or changes
  bool is_new = false;     // another schedule than before
};

/// The schedule that is to hold from now on. Nobody who runs is changed unless all are done earlier
/// by more than what the changes cost, and no change is made that wins no more than it costs
/// itself. Never later than the forecast of `schedule`, but to be in time (Task::due_s, from now).
/// With SolverOptions::steps the same is the same answer. Cost: as solve(), twice.
Introspection introspect(const Instance& instance, const Schedule& schedule,
                         std::span<const TaskNow> now, const UsableGpus& usable,
                         const IntrospectionRules& rules);

}  // namespace ptc::planner
