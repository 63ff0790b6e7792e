// Which numbers of GPUs nodes can give at once, and why a job can have none of what was measured.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

/// Of one node, or whole ones of the largest size.
class RoomOnNodes {
 public:
  explicit RoomOnNodes(const std::vector<NodeOfCluster>& nodes);

  uint32_t largest() const { return largest_; }  // node's GPUs
  uint32_t gpus() const { return gpus_; }        // of all nodes
  /// How many nodes so many GPUs take; 0: they cannot be had.
  uint32_t nodes_for(uint32_t gpus) const;

 private:
  uint32_t largest_ = 0, gpus_ = 0, alike_ = 0;  // nodes that are as large
};

/// What is wrong with a job, and where that stands in its file.
struct Misfit {
  std::string key;  // of the job: "batch"
  std::string why;  // names the limit, or what there is instead
};

/// Why nothing in `rows`, of its model, can be taken, where that is so. `technique`: only rows with
/// it are looked at; empty: all.
Misfit why_none_fits(const JobToTrain& job, const std::string& technique,
                     std::span<const ProfileRow* const> rows, const RoomOnNodes& room);

}  // namespace ptc::planner
