#include "tools/planner/spase/instance.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "store/base/json.h"

namespace ptc::planner {
namespace {

/// How many nodes such a number of GPUs takes; 0: it cannot be had.
uint32_t nodes_for(const std::vector<NodeOfCluster>& nodes, uint32_t largest, uint32_t gpus) {
  if (gpus <= largest) return 1;
  if (gpus % largest != 0) return 0;
  const auto alike = std::count_if(nodes.begin(), nodes.end(),
                                   [&](const NodeOfCluster& node) { return node.gpus == largest; });
  const uint32_t needed = gpus / largest;
  return needed <= static_cast<uint64_t>(alike) ? needed : 0;
}

Error unknown_model(const JobToTrain& job, const std::vector<ProfileRow>& rows) {
  std::set<std::string> models;
  for (const ProfileRow& row : rows) models.insert(row.model);
  const std::vector<std::string> known(models.begin(), models.end());
  const auto like = nearest_name(job.model, known);
  return invalid_argument(
      "job {}: no profile has a model {}{}", ptc::quoted(job.name), ptc::quoted(job.model),
      like ? fmt::format(" (did you mean {}?)", ptc::quoted(*like)) : std::string());
}

Error no_technique(const JobToTrain& job, const std::vector<ProfileRow>& rows) {
  std::set<std::string> techniques;
  for (const ProfileRow& row : rows)
    if (row.model == job.model) techniques.insert(row.technique);
  const std::vector<std::string> known(techniques.begin(), techniques.end());
  if (techniques.contains(job.technique))
    return invalid_argument("job {}: its technique {} fits nowhere with {}", ptc::quoted(job.name),
                            ptc::quoted(job.technique), ptc::quoted(job.model));
  const auto like = nearest_name(job.technique, known);
  return invalid_argument(
      "job {}: no profile of {} has a technique {}{}", ptc::quoted(job.name),
      ptc::quoted(job.model), ptc::quoted(job.technique),
      like ? fmt::format(" (did you mean {}?)", ptc::quoted(*like)) : std::string());
}

/// Why none of what the profiles have can be taken.
Error fits_nowhere(const JobToTrain& job, const std::vector<ProfileRow>& rows, uint32_t largest,
                   uint32_t all) {
  bool has_batch = false, has_time = false;
  uint32_t least = UINT32_MAX;
  for (const ProfileRow& row : rows) {
    if (row.model != job.model) continue;
    if (row.batch < job.least_batch || row.batch > job.most_batch) continue;
    has_batch = true;
    if (!row.iteration_s) continue;
    has_time = true;
    least = std::min(least, row.gpus);
  }
  if (!has_batch)
    return invalid_argument("job {}: no profile of {} has a batch from {} to {}",
                            ptc::quoted(job.name), ptc::quoted(job.model), job.least_batch,
                            job.most_batch);
  if (!has_time)
    return invalid_argument("job {}: {} was out of memory in all that its profiles tried",
                            ptc::quoted(job.name), ptc::quoted(job.model));
  return invalid_argument(
      "job {}: it fits nowhere: {} needs {} GPUs at least, packed as they were measured, and the "
      "largest node has {} (of {} in all; beyond a node, whole nodes of that size)",
      ptc::quoted(job.name), ptc::quoted(job.model), least, largest, all);
}

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
  const uint32_t largest = instance.largest_node();
  std::set<std::string> models;
  for (const ProfileRow& row : from.rows) models.insert(row.model);
  for (const JobToTrain& job : from.file.jobs) {
    if (!models.contains(job.model)) return unknown_model(job, from.rows);
    Task task;
    task.name = job.name;
    const auto configurations = [&](const std::string& technique) {
      std::vector<Configuration> found;
      const FrontierOf of{job.model,
                          job.least_batch,
                          job.most_batch,
                          technique,
                          largest,
                          [&](uint32_t gpus) {
                            return nodes_for(instance.nodes, largest, gpus) != 0; }};
      for (const FrontierPoint& point : frontier(from.rows, of)) {
        const uint32_t nodes = nodes_for(instance.nodes, largest, point.gpus);
        found.push_back({point.gpus, nodes, job.samples / point.samples_per_s, point.row->batch,
                         point.row->way()});
      }
      return found;
    };
    task.configurations = configurations("");
    if (task.configurations.empty()) return fits_nowhere(job, from.rows, largest, instance.gpus());
    if (!job.technique.empty()) {
      task.usual = configurations(job.technique);
      if (task.usual.empty()) return no_technique(job, from.rows);
    }
    instance.tasks.push_back(std::move(task));
  }
  return instance;
}

}  // namespace ptc::planner
