// When and where each task runs, and how good that is.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tools/planner/spase/instance.h"

namespace ptc::planner {

struct Run {
  uint32_t task = 0, configuration = 0;  // into Instance::tasks, Task::configurations
  double start = 0, end = 0;             // seconds
  std::vector<OnNode> on;
};

struct Schedule {
  std::vector<Run> runs;  // one of each task, in the order of starts
  double makespan = 0;
};

/// How much later than it is due each of its tasks ends; 0: it does not. Seconds, by run.
std::vector<double> lateness_of(const Instance& instance, const Schedule& schedule);
/// What is made least: first the time in sum by which tasks are late, and then the makespan.
double cost_of(const Instance& instance, const Schedule& schedule);

/// What a list scheduler turns into a schedule: the tasks in some order, and of each its
/// configuration, and where it must run.
struct Choice {
  static constexpr uint32_t kAnyNode = UINT32_MAX;
  std::vector<uint32_t> order;          // tasks
  std::vector<uint32_t> configuration;  // by task
  std::vector<uint32_t> node;           // by task: or kAnyNode; of one that takes a single node
};

/// What a schedule comes of, or one that is no longer.
Choice choice_of(const Schedule& schedule, size_t tasks);

/// Each task in turn starts as early as it can behind those before it, on the node that lets it
/// start first. Every schedule in which nothing could start earlier comes of some choice. Before
/// all others are those whose configuration is pinned. Reused for many choices of one instance.
/// Cost: O(tasks × (nodes + GPUs of a node)), a few ns each. Threads: one.
class ListScheduler {
 public:
  explicit ListScheduler(const Instance& instance);
  /// Seconds until the last one ends. `last`: the task that does.
  double makespan(const Choice& choice, uint32_t* last = nullptr);
  /// As cost_of(); without deadlines it is the makespan.
  double cost(const Choice& choice, uint32_t* last = nullptr);
  /// Of the last choice, whose makespan that was: until when the GPUs are taken, by a mean (of 32nd
  /// powers) that is near the makespan, and becomes less with each of them. Seconds.
  double smooth_end(double makespan, int doublings) const;
  Schedule schedule(const Choice& choice);

 private:
  /// Until when the k-th GPU of a node is taken, those that are free first first. Of one k they lie
  /// side by side, so that all nodes are looked at in one pass.
  double& free(uint32_t node, uint32_t k) { return free_[k * nodes_ + node]; }
  void begin(const Choice& choice);
  void begin_with_pinned(const Choice& choice);
  double place(const Choice& choice, uint32_t task, Run* run);
  double place_whole(const Configuration& what, Run* run);

  const Instance& instance_;
  const size_t nodes_;
  const uint32_t most_;                         // GPUs of a node
  std::vector<uint32_t> by_size_, place_of_;    // nodes, the smaller ones first; and where each is
  std::vector<uint32_t> sizes_;                 // by place, as all that follows
  std::vector<uint32_t> whole_;                 // places of those of the largest size
  std::vector<double> free_;                    // infinity where there is none
  std::vector<std::vector<uint32_t>> numbers_;  // of the same GPUs, in schedule()
  const bool has_pinned_, has_deadlines_;
  const double of_lateness_;
  double late_ = 0;                                               // of the last choice, in sum
  std::vector<std::vector<std::pair<double, uint32_t>>> pinned_;  // by place: until when, which GPU
};

/// No schedule is shorter in which a task keeps its configuration: the least time in which each
/// task has a configuration that ends by then, and the cheapest such ones have room. Seconds.
double lower_bound_of(const Instance& instance);

}  // namespace ptc::planner
