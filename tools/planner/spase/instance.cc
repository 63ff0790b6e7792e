#include "tools/planner/spase/instance.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "store/base/json.h"
#include "tools/planner/profile/input.h"

namespace ptc::planner {
namespace {

/// How many nodes a number of GPUs takes.
class Counts {
 public:
  explicit Counts(const Instance& instance)
      : largest_(instance.largest_node()),
        alike_(std::count_if(instance.nodes.begin(), instance.nodes.end(),
                             [&](const NodeOfCluster& node) { return node.gpus == largest_; })) {}

  uint32_t largest() const { return largest_; }
  /// 0: it cannot be had.
  uint32_t nodes_for(uint32_t gpus) const {
    if (gpus <= largest_) return 1;
    const uint32_t needed = gpus / largest_;
    return gpus % largest_ == 0 && needed <= static_cast<uint64_t>(alike_) ? needed : 0;
  }

 private:
  const uint32_t largest_;
  const ptrdiff_t alike_;  // nodes that are as large
};

using Rows = std::vector<const ProfileRow*>;

Error no_technique(const JobToTrain& job, const Rows& rows) {
  std::set<std::string> techniques;
  for (const ProfileRow* row : rows)
    if (!row->technique.empty()) techniques.insert(row->technique);
  if (techniques.contains(job.technique))
    return invalid_argument("job {}: its technique {} fits nowhere with {}", ptc::quoted(job.name),
                            ptc::quoted(job.technique), ptc::quoted(job.model));
  return invalid_argument("job {}: no profile of {} has a technique {}{}", ptc::quoted(job.name),
                          ptc::quoted(job.model), ptc::quoted(job.technique),
                          what_there_is(job.technique, techniques));
}

Error no_batch(const JobToTrain& job, const Rows& rows) {
  std::set<uint64_t> batches;
  for (const ProfileRow* row : rows) batches.insert(row->batch);
  constexpr size_t kMost = 16;
  std::string known;
  size_t said = 0;
  for (const uint64_t batch : batches) {
    if (said == kMost) {
      known += fmt::format(" and {} more, up to {}", batches.size() - said, *batches.rbegin());
      break;
    }
    known += fmt::format("{}{}", said++ == 0 ? "" : ", ", batch);
  }
  const std::string wanted = job.least_batch == job.most_batch
                                 ? fmt::format("of {}", job.least_batch)
                                 : fmt::format("from {} to {}", job.least_batch, job.most_batch);
  return invalid_argument("job {}: no profile of {} has a batch {}; there {} {}",
                          ptc::quoted(job.name), ptc::quoted(job.model), wanted,
                          batches.size() == 1 ? "is" : "are", known);
}

/// Why none of what the profiles have of its model can be taken.
Error fits_nowhere(const JobToTrain& job, const Rows& rows, const Instance& instance,
                   const Counts& counts) {
  const uint32_t largest = counts.largest();
  Rows of_batch;
  const ProfileRow *least = nullptr, *spread = nullptr;  // of the fewest GPUs
  for (const ProfileRow* row : rows) {
    if (row->batch < job.least_batch || row->batch > job.most_batch) continue;
    of_batch.push_back(row);
    if (!row->iteration_s) continue;
    if (least == nullptr || row->gpus < least->gpus) least = row;
    const bool can_be_had = counts.nodes_for(row->gpus) != 0;
    if (can_be_had && (spread == nullptr || row->gpus < spread->gpus)) spread = row;
  }
  const std::string job_name = ptc::quoted(job.name), model = ptc::quoted(job.model);
  if (of_batch.empty()) return no_batch(job, rows);
  if (least == nullptr) {
    const std::string why = why_no_time(of_batch);
    if (why == "out of memory")
      return invalid_argument("job {}: {} was out of memory in all that its profiles tried",
                              job_name, model);
    return invalid_argument("job {}: {} had no time in any trial: {}", job_name, model, why);
  }
  if (spread != nullptr) {
    const uint32_t nodes = counts.nodes_for(spread->gpus);
    return invalid_argument(
        "job {}: it fits nowhere: {} was measured with {} of which at most {} were on one node, "
        "and that is not taken for {}: how fast it is there is not known",
        job_name, model, counted(spread->gpus, "GPU"), spread->gpus_per_node,
        nodes == 1 ? fmt::format("one node (the largest has {})", largest)
                   : fmt::format("{} nodes with {} each", nodes, largest));
  }
  return invalid_argument(
      "job {}: it fits nowhere: {} needs {} at least, and the largest node has {} (of {} in all; "
      "beyond a node, whole nodes of that size)",
      job_name, model, counted(least->gpus, "GPU"), largest, instance.gpus());
}

/// The rows by model, and of those that could be taken the best of each kind: rows that agree in
/// technique, batch and GPUs differ only in how fast they are.
class RowsByModel {
 public:
  RowsByModel(const Rows& rows, const Counts& counts) {
    std::map<std::tuple<std::string, std::string, uint64_t, uint32_t>, size_t> places;
    for (const ProfileRow* row : rows) {
      OfModel& of = by_model_[row->model];
      of.all.push_back(row);
      if (!row->iteration_s || !is_packed(*row, counts.largest()) ||
          counts.nodes_for(row->gpus) == 0)
        continue;
      const auto [place, is_new] =
          places.try_emplace({row->model, row->technique, row->batch, row->gpus}, of.best.size());
      if (is_new) of.best.push_back(row);
      else if (*row->iteration_s < *of.best[place->second]->iteration_s)
        of.best[place->second] = row;
    }
  }

  const Rows& all(const std::string& model) const { return by_model_.at(model).all; }
  const std::vector<FrontierPoint>& points(const JobToTrain& job, const std::string& technique) {
    const auto [place, is_new] =
        points_.try_emplace({job.model, technique, job.least_batch, job.most_batch});
    if (is_new)
      place->second = frontier(by_model_.at(job.model).best,
                               {job.model, job.least_batch, job.most_batch, technique});
    return place->second;
  }

 private:
  struct OfModel {
    Rows all, best;
  };
  std::map<std::string, OfModel> by_model_;
  // By model, technique and batches, which many jobs share.
  std::map<std::tuple<std::string, std::string, uint64_t, uint64_t>, std::vector<FrontierPoint>>
      points_;
};

}  // namespace

uint32_t Instance::gpus() const {
  return std::accumulate(nodes.begin(), nodes.end(), 0u,
                         [](uint32_t sum, const NodeOfCluster& node) { return sum + node.gpus; });
}

uint32_t Instance::largest_node() const {
  uint32_t most = 0;
  for (const NodeOfCluster& node : nodes) most = std::max(most, node.gpus);
  return most;
}

Result<Instance> make_instance(const JobsAndProfiles& from) {
  Instance instance;
  instance.nodes = from.file.nodes;
  PTC_TRY(const Rows taken, rows_of_jobs(from));
  const Counts counts(instance);
  RowsByModel rows(taken, counts);
  for (const JobToTrain& job : from.file.jobs) {
    Task task;
    task.name = job.name;
    if (job.deadline) task.due_s = seconds_until(*job.deadline);
    const auto configurations = [&](const std::string& technique) {
      std::vector<Configuration> found;
      for (const FrontierPoint& point : rows.points(job, technique))
        found.push_back({point.gpus, counts.nodes_for(point.gpus),
                         job.samples / point.samples_per_s, point.row->batch, point.row->way()});
      return found;
    };
    task.configurations = configurations("");
    if (task.configurations.empty())
      return fits_nowhere(job, rows.all(job.model), instance, counts);
    if (!job.technique.empty()) {
      task.usual = configurations(job.technique);
      if (task.usual.empty()) return no_technique(job, rows.all(job.model));
    }
    instance.tasks.push_back(std::move(task));
  }
  return instance;
}

}  // namespace ptc::planner
