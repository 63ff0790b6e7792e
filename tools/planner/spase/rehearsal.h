// What becomes of a schedule when tasks take other times than their profiles say: in simulated
// time, with introspection or without.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tools/planner/spase/introspection.h"

namespace ptc::planner {

struct RehearsalRules {
  bool introspects = true;
  double interval_s = 1000;  // between introspections; there is one whenever a task ends, too
  double price_s = 0;        // of a change, and of a start after one; the first start costs nothing
  IntrospectionRules introspection;
};

struct Rehearsal {
  double makespan = 0;
  uint64_t introspections = 0, taken = 0;  // how many, and after how many another schedule held
  uint64_t changes = 0;                    // of tasks that ran
  /// What ran, piece by piece; a task that was changed has several.
  std::vector<Run> pieces;
};

/// `slowness`: of each task what a sample takes ÷ what its profile says. It is known as soon as the
/// task has trained a while. Solving takes no time here: jobs run meanwhile.
Rehearsal rehearse(const Instance& instance, const Schedule& schedule,
                   const std::vector<double>& slowness, const RehearsalRules& rules);

/// Of each task a factor between 1 ÷ (1 + deviation) and 1 + deviation; their logarithms are drawn
/// evenly. The same on each machine.
std::vector<double> drawn_slowness(size_t tasks, double deviation, uint64_t seed);

}  // namespace ptc::planner
