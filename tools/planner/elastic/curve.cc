#include "tools/planner/elastic/curve.h"

#include <algorithm>

namespace ptc::planner {

Curve make_curve(const std::vector<const ProfileRow*>& rows, const std::string& model,
                 uint64_t least_batch, uint64_t most_batch, const std::vector<NodeOfCluster>& nodes,
                 const std::function<double(uint64_t batch)>& worth) {
  uint32_t largest = 0;
  for (const NodeOfCluster& node : nodes) largest = std::max(largest, node.gpus);
  const auto alike = std::count_if(nodes.begin(), nodes.end(),
                                   [&](const NodeOfCluster& node) { return node.gpus == largest; });
  FrontierOf of{model, least_batch, most_batch};
  of.gpus_per_node = largest;
  of.worth = worth;
  of.keeps_all = static_cast<bool>(worth);
  of.can_be_had = [&](uint32_t gpus) {
    return gpus <= largest ||
           (gpus % largest == 0 && gpus / largest <= static_cast<uint64_t>(alike));
  };
  Curve curve;
  for (const FrontierPoint& point : frontier(rows, of))
    curve.points.push_back({point.gpus, point.samples_per_s, point.row->batch, point.row->way(), 0,
                            point.row->tp, point.row->pp, point.row->dp, point.row->technique});
  for (const CurvePoint& point : curve.points) {
    curve.of_one_gpu = std::max(curve.of_one_gpu, point.samples_per_s / point.gpus);
    if (point.gpus == 1) break;  // it is measured, and need not be inferred
  }
  for (CurvePoint& point : curve.points) point.speed_up = point.samples_per_s / curve.of_one_gpu;
  return curve;
}

}  // namespace ptc::planner
