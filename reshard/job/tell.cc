#include "reshard/job/tell.h"

#include <future>
#include <vector>

#include <spdlog/spdlog.h>

namespace ptc {
namespace {

void tell(Cluster* cluster, const std::string& job, const char* method, std::chrono::milliseconds time) {
  if (cluster == nullptr) return;
  std::vector<std::future<void>> told;
  for (const std::string& node : cluster->alive()) {
    if (node == cluster->self()) continue;
    told.push_back(std::async(std::launch::async, [cluster, &job, method, node, time] {
      Result<std::string> answer = cluster->call(node, method, job + "\n", time);
      if (answer.has_error())
        spdlog::info("job {}: node {} will see what changed a moment later: {}", job, node,
                     answer.error().message());
    }));
  }
}

}  // namespace

void tell_others(Cluster* cluster, const std::string& job, std::chrono::milliseconds time) {
  tell(cluster, job, "job/changed", time);
}

void tell_others_of_data_set(Cluster* cluster, const std::string& job) {
  tell(cluster, job, kDataSetChangedMethod, std::chrono::seconds(2));
}

}  // namespace ptc
