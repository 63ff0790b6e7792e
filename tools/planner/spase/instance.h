// What SPASE decides (Select a Parallelism, Allocate resources, SchedulE): a configuration for each
// task, a node, and when. Nagrecha and Kumar, "Saturn: An Optimized Data System for Large Model
// Deep Learning Workloads" (2309.01226).
//
// GPUs of a node are alike. A task runs on one node from its start to its end; one that needs more
// than any node has takes whole nodes of one size (beyond the paper).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "tools/planner/profile/jobs_file.h"

namespace ptc::planner {

struct Configuration {
  uint32_t gpus = 0;   // of all its nodes
  uint32_t nodes = 1;  // > 1: whole ones, alike
  double seconds = 0;  // of the whole task
  uint64_t batch = 0;
  std::string way;  // "fsdp tp1-pp1-dp8"
  /// Where it runs already, from the very beginning; empty: it can run anywhere.
  std::vector<OnNode> pinned = {};
  double area() const { return gpus * seconds; }
};

struct Task {
  std::string name;
  std::vector<Configuration> configurations;  // more GPUs, less time; at least one
  std::vector<Configuration> usual;           // the same by what its user would take; may be none
  std::optional<double> due_s = {};           // seconds from the start of all, by its deadline
};

struct Instance {
  std::vector<NodeOfCluster> nodes;
  std::vector<Task> tasks;

  uint32_t gpus() const;  // of all nodes
  uint32_t largest_node() const;
};

/// kInvalidArgument: a job whose model is in no profile, profiles of several kinds of GPU, or a job
/// that fits nowhere (and which limit). Cost: O(rows · log + configurations of all tasks).
Result<Instance> make_instance(const JobsAndProfiles& from);

}  // namespace ptc::planner
