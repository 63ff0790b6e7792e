#include "tools/planner/profile/room.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "store/base/json.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

/// Batches that somebody has tried.
std::string batches_of(std::span<const ProfileRow* const> rows) {
  std::set<uint64_t> batches;
  for (const ProfileRow* row : rows)
    if (row->origin != "interpolated") batches.insert(row->batch);
  constexpr size_t kMost = 16;
  std::string known = batches.size() == 1 ? "there is " : "there are ";
  size_t said = 0;
  for (const uint64_t batch : batches) {
    if (said == kMost) {
      known += fmt::format(" and {} more, up to {}", batches.size() - said, *batches.rbegin());
      break;
    }
    known += fmt::format("{}{}", said++ == 0 ? "" : ", ", batch);
  }
  return known;
}

std::string wanted_batch(const JobToTrain& job) {
  return job.least_batch == job.most_batch
             ? fmt::format("of {}", job.least_batch)
             : fmt::format("from {} to {}", job.least_batch, job.most_batch);
}

}  // namespace

RoomOnNodes::RoomOnNodes(const std::vector<NodeOfCluster>& nodes) {
  for (const NodeOfCluster& node : nodes) {
    gpus_ += node.gpus;
    alike_ = node.gpus > largest_ ? 1 : alike_ + (node.gpus == largest_);
    largest_ = std::max(largest_, node.gpus);
  }
}

uint32_t RoomOnNodes::nodes_for(uint32_t gpus) const {
  if (gpus <= largest_) return 1;
  const uint32_t needed = gpus / largest_;
  return gpus % largest_ == 0 && needed <= alike_ ? needed : 0;
}

Misfit why_none_fits(const JobToTrain& job, const std::string& technique,
                     std::span<const ProfileRow* const> rows, const RoomOnNodes& room) {
  std::set<std::string> techniques;
  std::vector<const ProfileRow*> of_technique, of_batch;
  const ProfileRow *least = nullptr, *spread = nullptr;  // of the fewest GPUs
  for (const ProfileRow* row : rows) {
    if (!row->technique.empty()) techniques.insert(row->technique);
    if (!technique.empty() && row->technique != technique) continue;
    of_technique.push_back(row);
    if (row->batch < job.least_batch || row->batch > job.most_batch) continue;
    of_batch.push_back(row);
    if (!row->iteration_s) continue;
    if (least == nullptr || row->gpus < least->gpus) least = row;
    const bool can_be_had = room.nodes_for(row->gpus) != 0;
    if (can_be_had && (spread == nullptr || row->gpus < spread->gpus)) spread = row;
  }
  std::string model = ptc::quoted(job.model);
  if (of_technique.empty())
    return {"technique", fmt::format("no profile of {} has a technique {}{}", model,
                                     ptc::quoted(technique), what_there_is(technique, techniques))};
  if (!technique.empty()) model += " with " + ptc::quoted(technique);
  if (of_batch.empty())
    return {"batch", fmt::format("no profile of {} has a batch {}; {}", model, wanted_batch(job),
                                 batches_of(of_technique))};
  if (least == nullptr) {
    const std::string why = why_no_time(of_batch);
    return {"model", why == "out of memory"
                         ? model + " was out of memory in all that its profiles tried"
                         : fmt::format("{} had no time in any trial: {}", model, why)};
  }
  if (spread != nullptr) {
    const uint32_t nodes = room.nodes_for(spread->gpus);
    return {"model",
            fmt::format(
                "it fits nowhere: {} was measured with {} of which at most {} were on one node, "
                "and that is not taken for {}: how fast it is there is not known",
                model, counted(spread->gpus, "GPU"), spread->gpus_per_node,
                nodes == 1 ? fmt::format("one node (the largest has {})", room.largest())
                           : fmt::format("{} nodes with {} each", nodes, room.largest()))};
  }
  return {"model",
          fmt::format("it fits nowhere: {} needs {} at least, and the largest node has {} (of {} "
                      "in all; beyond a node, whole nodes of that size)",
                      model, counted(least->gpus, "GPU"), room.largest(), room.gpus())};
}

}  // namespace ptc::planner
