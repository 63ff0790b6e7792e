// Another lower bound, and a start of the search: the time-indexed model, where CBC was there when
// this was built.
//
// Time is a grid. x_t,s,n,τ is 1 where task t starts with configuration s on node n between τ and
// τ + 1. Durations are rounded down to the grid, so that every schedule that is no longer than the
// one that is known gives a solution: what runs at once on the grid does so at the end of its slot.
//
//   min C    C ≥ Σ (τ·δ + R_ts) x of each task, C·ΣG ≥ Σ g_ts·R_ts x,  Σ x = 1 of each task,
//            Σ g_ts x of what runs on n at τ ≤ G_n
//
// So the least C, or what CBC can say of it, is no longer than the shortest schedule.
#pragma once

#include <chrono>
#include <memory>
#include <optional>

#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

struct TimeIndexed {
  double lower_bound = 0;  // seconds
  Choice choice;           // in the order of starts; its order is empty where none was found
};

/// CBC in a process of its own, beside the search: it ends by itself, or with this.
class TimeIndexedSearch {
 public:
  /// Whether it was built with CBC.
  static bool is_there();
  /// `makespan` of a schedule that is known. It does nothing where the model would be too large.
  TimeIndexedSearch(const Instance& instance, double makespan, std::chrono::milliseconds time);
  ~TimeIndexedSearch();
  TimeIndexedSearch(const TimeIndexedSearch&) = delete;
  TimeIndexedSearch& operator=(const TimeIndexedSearch&) = delete;

  bool goes_on() const;
  /// What it has found, once; it does not wait.
  std::optional<TimeIndexed> found();

 private:
  class Process;
  std::shared_ptr<Process> process_;  // whose type is known where CBC is
};

}  // namespace ptc::planner
