// The GPUs of a cluster that is simulated, and who has them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

/// A job has GPUs of one node, or whole nodes of the largest size. Threads: one.
class SimulatedCluster {
 public:
  explicit SimulatedCluster(const std::vector<NodeOfCluster>& nodes);

  /// Of the nodes that work.
  uint32_t gpus() const;
  const std::vector<OnNode>& of(uint32_t job) const;
  bool has(uint32_t job) const { return taken_.contains(job); }

  void release(uint32_t job);
  /// On `near`'s node if that has room, else on the one with the least room that is enough. False:
  /// there is none, and nothing has changed. Cost: O(nodes).
  bool place(uint32_t job, uint32_t gpus, const std::vector<OnNode>* near = nullptr);

  /// GPUs of a node are alike: who has as many there as `before` (by job) keeps the same ones, and
  /// the others of that node get the rest. After all were placed anew.
  void keep_numbers(const std::vector<std::vector<OnNode>>& before);

  bool works(uint32_t node) const { return !nodes_[node].is_down; }
  size_t nodes() const { return nodes_.size(); }
  /// Who had GPUs there: they have none any more.
  std::vector<uint32_t> fail(uint32_t node);
  void repair(uint32_t node) { nodes_[node].is_down = false; }

 private:
  struct Node {
    std::vector<bool> is_taken;  // by GPU
    uint32_t free = 0;
    bool is_down = false;
  };
  OnNode take(uint32_t node, uint32_t gpus);

  std::vector<Node> nodes_;
  uint32_t largest_ = 0;
  std::map<uint32_t, std::vector<OnNode>> taken_;
};

}  // namespace ptc::planner
