#include "tools/planner/elastic/curve.h"

#include <algorithm>
#include <optional>

namespace ptc::planner {

namespace {

uint32_t largest_of(const std::vector<NodeOfCluster>& nodes) {
  uint32_t largest = 0;
  for (const NodeOfCluster& node : nodes) largest = std::max(largest, node.gpus);
  return largest;
}

/// GPUs on each node, where such a row can be had: 0 where it was packed.
std::optional<uint32_t> each_of(const ProfileRow& row, const std::vector<NodeOfCluster>& nodes,
                                uint32_t largest, bool spreads) {
  const bool packed = is_packed(row, largest);
  if (row.gpus <= largest) return packed ? std::optional(0u) : std::nullopt;
  const uint32_t each = packed ? largest : row.gpus_per_node;
  const auto roomy = std::count_if(nodes.begin(), nodes.end(), [&](const NodeOfCluster& node) {
    return packed ? node.gpus == largest : node.gpus >= each;
  });
  if (row.gpus % each != 0 || row.gpus / each > static_cast<uint64_t>(roomy)) return std::nullopt;
  if (packed) return 0;
  return spreads ? std::optional(each) : std::nullopt;
}

}  // namespace

std::vector<const ProfileRow*> can_be_had(const std::vector<const ProfileRow*>& rows,
                                          const std::vector<NodeOfCluster>& nodes, bool spreads) {
  const uint32_t largest = largest_of(nodes);
  std::vector<const ProfileRow*> found;
  for (const ProfileRow* row : rows)
    if (each_of(*row, nodes, largest, spreads)) found.push_back(row);
  return found;
}

Curve make_curve(const std::vector<const ProfileRow*>& rows, const std::string& model,
                 uint64_t least_batch, uint64_t most_batch, const std::vector<NodeOfCluster>& nodes,
                 const std::function<double(uint64_t batch)>& worth, bool spreads) {
  std::vector<const ProfileRow*> possible;
  for (const ProfileRow* row : can_be_had(rows, nodes, spreads))
    if (row->model == model) possible.push_back(row);
  const uint32_t largest = largest_of(nodes);
  FrontierOf of{model, least_batch, most_batch};
  of.worth = worth;
  of.keeps_all = static_cast<bool>(worth);
  Curve curve;
  for (const FrontierPoint& point : frontier(possible, of))
    curve.points.push_back({point.gpus, point.samples_per_s, point.row->batch, point.row->way(), 0,
                            point.row->tp, point.row->pp, point.row->dp, point.row->technique,
                            *each_of(*point.row, nodes, largest, spreads)});
  for (const CurvePoint& point : curve.points) {
    curve.of_one_gpu = std::max(curve.of_one_gpu, point.samples_per_s / point.gpus);
    if (point.gpus == 1) break;  // it is measured, and need not be inferred
  }
  for (CurvePoint& point : curve.points) point.speed_up = point.samples_per_s / curve.of_one_gpu;
  return curve;
}

}  // namespace ptc::planner
