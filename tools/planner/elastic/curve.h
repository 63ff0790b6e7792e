// What is known of a job's speed by number of GPUs: all that deciding looks at.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/profile/profile.h"

namespace ptc::planner {

struct CurvePoint {
  uint32_t gpus = 0;
  double samples_per_s = 0;
  uint64_t batch = 0;
  std::string way;      // "ddp tp1-pp1-dp4"
  double speed_up = 0;  // by the reference, below
  uint32_t tp = 1, pp = 1, dp = 1;
  std::string technique = {};  // as its profile says; may be empty
  uint32_t each = 0;           // GPUs on each of its nodes; 0: on as few nodes as can be

  /// The same number of GPUs, used in the same way.
  bool is_as(const CurvePoint& other) const {
    return gpus == other.gpus && batch == other.batch && way == other.way;
  }
};

/// By GPUs, ascending, each faster than those before it.
struct Curve {
  std::vector<CurvePoint> points;
  /// Samples a second of one GPU: of the best batch there; where one GPU is too few, of each of
  /// those of the point that makes the most of a GPU.
  double of_one_gpu = 0;

  bool empty() const { return points.empty(); }
  uint32_t least() const { return points.front().gpus; }
};

/// Those whose GPUs have room on `nodes`, as they were measured; as make_curve() takes them.
std::vector<const ProfileRow*> can_be_had(const std::vector<const ProfileRow*>& rows,
                                          const std::vector<NodeOfCluster>& nodes, bool spreads);

/// T of the paper: the throughput by GPUs, each with the batch within [least, most] that is fastest
/// there, over that of one GPU. Empty: nothing that was measured has room on `nodes`. Only what was
/// measured packed onto as few of the largest nodes as it needs is taken; beyond one node, whole
/// ones. `worth`: of a sample, by batch; then throughput counts that, and all numbers of GPUs stay.
/// `spreads`: also what was measured evenly over more nodes than it needs, beyond one node.
Curve make_curve(const std::vector<const ProfileRow*>& rows, const std::string& model,
                 uint64_t least_batch, uint64_t most_batch, const std::vector<NodeOfCluster>& nodes,
                 const std::function<double(uint64_t batch)>& worth = {}, bool spreads = false);

}  // namespace ptc::planner
