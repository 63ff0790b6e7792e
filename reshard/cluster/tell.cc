#include "reshard/cluster/tell.h"

#include <spdlog/spdlog.h>

#include <vector>

#include "store/base/fan_out.h"

namespace ptc {
namespace {

void tell(Cluster* cluster, const std::string& job, PeerMethod method, const std::string& request,
          std::chrono::milliseconds at_most) {
  if (cluster == nullptr) return;
  std::vector<std::string> nodes = cluster->alive();
  std::erase(nodes, cluster->self());
  Answers<std::string> told(nodes.size(), [&](size_t i) {
    return cluster->ask(nodes[i], method, request, {}, at_most);
  });
  const std::vector<Result<std::string>> answers = told.wait();
  for (size_t i = 0; i < nodes.size(); ++i)
    if (answers[i].has_error())
      spdlog::info("job {}: node {} will see what changed a moment later: {}", job, nodes[i],
                   answers[i].error().message());
}

}  // namespace

void tell_others(Cluster* cluster, const std::string& job, std::chrono::milliseconds at_most) {
  tell(cluster, job, PeerMethod::kChanged, "", at_most);  // what changed is read, of all jobs
}

void tell_others_of_data_set(Cluster* cluster, const WhichJob& job) {
  tell(cluster, job.name, PeerMethod::kDataSetChanged, request_about(job, ""), {});
}

}  // namespace ptc
