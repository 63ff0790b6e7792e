#include "reshard/cluster/tell.h"

#include <spdlog/spdlog.h>

#include <vector>

namespace ptc {
namespace {

void tell(Cluster& cluster, const std::string& job, PeerMethod method, const std::string& request,
          std::chrono::milliseconds at_most) {
  std::vector<Cluster::Question> questions;
  for (const std::string& node : cluster.alive())
    if (node != cluster.self()) questions.push_back({node, request});
  const std::vector<Result<std::string>> answers = cluster.ask_all(method, questions, {}, at_most);
  for (size_t i = 0; i < questions.size(); ++i)
    if (answers[i].has_error())
      spdlog::info("job {}: node {} will see what changed a moment later: {}", job,
                   questions[i].node, answers[i].error().message());
}

}  // namespace

void tell_others(Cluster& cluster, const std::string& job, std::chrono::milliseconds at_most) {
  tell(cluster, job, PeerMethod::kChanged, "", at_most);  // what changed is read, of all jobs
}

void tell_others_of_data_set(Cluster& cluster, const WhichJob& job) {
  tell(cluster, job.name, PeerMethod::kDataSetChanged, request_about(job, ""), {});
}

}  // namespace ptc
