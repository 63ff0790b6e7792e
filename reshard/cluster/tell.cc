#include "reshard/cluster/tell.h"

#include <spdlog/spdlog.h>

#include <vector>

#include "store/base/fan_out.h"

namespace ptc {
namespace {

void tell(Cluster* cluster, const std::string& job, const char* method,
          std::chrono::milliseconds time) {
  if (cluster == nullptr) return;
  std::vector<std::string> nodes = cluster->alive();
  std::erase(nodes, cluster->self());
  Answers<std::string> told(
      nodes.size(), [&](size_t i) { return cluster->call(nodes[i], method, job + "\n", time); });
  const std::vector<Result<std::string>> answers = told.wait();
  for (size_t i = 0; i < nodes.size(); ++i)
    if (answers[i].has_error())
      spdlog::info("job {}: node {} will see what changed a moment later: {}", job, nodes[i],
                   answers[i].error().message());
}

}  // namespace

void tell_others(Cluster* cluster, const std::string& job, std::chrono::milliseconds time) {
  tell(cluster, job, "job/changed", time);
}

void tell_others_of_data_set(Cluster* cluster, const std::string& job) {
  tell(cluster, job, kDataSetChangedMethod, std::chrono::seconds(2));
}

}  // namespace ptc
