// The GPUs of a cluster, a simulated or a real one, and who has which.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "tools/planner/elastic/curve.h"
#include "tools/planner/profile/jobs_file.h"

namespace ptc::planner {

/// What a job has been given by the decision.
struct Wish {
  uint32_t job = 0;
  const Curve* curve = nullptr;
  std::optional<uint32_t> point, now;  // of its curve; none: no GPUs
};

/// A job has GPUs of one node, or whole nodes of the largest size, or as many of each of several.
/// Threads: one.
class Placement {
 public:
  explicit Placement(const std::vector<NodeOfCluster>& nodes);

  /// Of the nodes that work.
  uint32_t gpus() const;
  const std::vector<OnNode>& of(uint32_t job) const;
  bool has(uint32_t job) const { return taken_.contains(job); }

  void release(uint32_t job);
  /// On `near`'s node if that has room, else on the one with the least room that is enough. False:
  /// there is none, and nothing has changed. Cost: O(nodes).
  /// `each`: on so many GPUs of each of its nodes, beyond one node; 0: on whole nodes.
  bool place(uint32_t job, uint32_t gpus, const std::vector<OnNode>* near = nullptr,
             uint32_t each = 0);
  /// Those very GPUs. False: some are taken, or do not work, and nothing has changed.
  bool take(uint32_t job, std::vector<OnNode> places);

  /// Those whose point is another than now give up their GPUs, and then get others, the largest
  /// first. Where GPUs that are free lie scattered, all of `wishes` are placed anew, and who then
  /// has no room gets a lower point of his curve, or none. Jobs that `wishes` do not name stay.
  void carry_out(std::span<Wish> wishes);

  /// Of a node that works.
  uint32_t free_on(uint32_t node) const { return nodes_[node].is_down ? 0 : nodes_[node].free; }
  uint32_t largest_node() const { return largest_; }
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
  using Places = std::map<uint32_t, std::vector<OnNode>>;  // by job

  OnNode take(uint32_t node, uint32_t gpus);
  bool place_all(std::vector<Wish*> wishes, const Places& before);
  void place_what_has_room(std::vector<Wish*> wishes, const Places& before);
  void keep_numbers(const Places& before);

  std::vector<Node> nodes_;
  uint32_t largest_ = 0;
  Places taken_;
};

/// As many GPUs of the same nodes: GPUs of a node are alike.
bool same_nodes(const std::vector<OnNode>& a, const std::vector<OnNode>& b);

}  // namespace ptc::planner
