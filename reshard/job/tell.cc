#include "reshard/job/tell.h"

#include <future>
#include <vector>

#include <spdlog/spdlog.h>

namespace ptc {
namespace {

void tell(Cluster* cluster, const std::string& job, const char* method) {
  static constexpr auto kDeadline = std::chrono::seconds(2);
  if (cluster == nullptr) return;
  std::vector<std::future<void>> told;
  for (const std::string& node : cluster->alive()) {
    if (node == cluster->self()) continue;
    told.push_back(std::async(std::launch::async, [cluster, &job, method, node] {
      Result<std::string> answer = cluster->call(node, method, job + "\n", kDeadline);
      if (answer.has_error())
        spdlog::info("job {}: node {} will see what changed a moment later: {}", job, node,
                     answer.error().message());
    }));
  }
}

}  // namespace

void tell_others(Cluster* cluster, const std::string& job) { tell(cluster, job, "job/changed"); }

void tell_others_of_data_set(Cluster* cluster, const std::string& job) { tell(cluster, job, kDataSetChangedMethod); }

}  // namespace ptc
