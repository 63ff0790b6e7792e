#include "tools/planner/spase/instance.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "tools/planner/profile/room.h"

namespace ptc::planner {
namespace {

using Rows = std::vector<const ProfileRow*>;

/// The rows by model, and of those that could be taken the best of each kind: rows that agree in
/// technique, batch and GPUs differ only in how fast they are.
class RowsByModel {
 public:
  RowsByModel(const Rows& rows, const RoomOnNodes& room) {
    std::map<std::tuple<std::string, std::string, uint64_t, uint32_t>, size_t> places;
    for (const ProfileRow* row : rows) {
      OfModel& of = by_model_[row->model];
      of.all.push_back(row);
      if (!row->iteration_s || !is_packed(*row, room.largest()) || room.nodes_for(row->gpus) == 0)
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
  const RoomOnNodes room(instance.nodes);
  RowsByModel rows(taken, room);
  for (const JobToTrain& job : from.file.jobs) {
    Task task;
    task.name = job.name;
    if (job.deadline) task.due_s = seconds_until(*job.deadline);
    const auto configurations = [&](const std::string& technique) {
      std::vector<Configuration> found;
      for (const FrontierPoint& point : rows.points(job, technique))
        found.push_back({point.gpus, room.nodes_for(point.gpus), job.samples / point.samples_per_s,
                         point.row->batch, point.row->way()});
      return found;
    };
    const auto misfit = [&](const std::string& technique) {
      const Misfit why = why_none_fits(job, technique, rows.all(job.model), room);
      return from.file.error(job, why.key, why.why);
    };
    task.configurations = configurations("");
    if (task.configurations.empty()) return misfit("");
    if (!job.technique.empty()) {
      task.usual = configurations(job.technique);
      if (task.usual.empty()) return misfit(job.technique);
    }
    instance.tasks.push_back(std::move(task));
  }
  return instance;
}

}  // namespace ptc::planner
