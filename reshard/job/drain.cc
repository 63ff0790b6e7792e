#include "reshard/job/drain.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>

#include "reshard/job/job_impl.h"
#include "reshard/job/space.h"

namespace ptc {
namespace {


Result<> check_there(const Cluster& cluster, const std::vector<JobRef>& jobs,
                     const std::vector<std::string>& drained, const std::string& node) {
  std::vector<std::string> alive = cluster.alive();
  if (!is_among(alive, node)) {
    const bool known = std::any_of(jobs.begin(), jobs.end(),
                                   [&](const JobRef& job) { return job->bytes_on(node) > 0; });
    if (known)
      return make_error(Code::kUnavailable, "node {} is away, and nothing can be moved from it: start it "
                        "first", node);
    return make_error(Code::kNotFound, "there is no node '{}' (nodes: {})", node, fmt::join(alive, ", "));
  }
  std::erase_if(alive, [&](const std::string& other) { return is_among(drained, other); });
  if (std::erase(alive, node) > 0 && alive.empty())
    return invalid_argument("node {} is the last one in service: start another first, or take one into "
                            "service again (ptc drain NODE --cancel)", node);
  return ok();
}

Result<> check_layouts(const std::vector<JobRef>& jobs, const std::string& node) {
  for (const JobRef& job : jobs)
    if (const std::optional<uint64_t> rank = job->rank_on(node))
      return invalid_argument("layout.json of job {} wants rank {} on node {}: give it other \"devices\" "
                              "first, or leave them out (ptc layout {} edit)",
                              job->name(), *rank, node, job->name());
  return ok();
}

}  // namespace

std::string drained_key(const std::string& node) { return std::string(kDrainedKeys) + node; }

Result<std::vector<std::string>> drained_nodes(MetaClient& meta) {
  PTC_TRY(auto entries, meta.list(kDrainedKeys));
  std::vector<std::string> nodes;
  for (const MetaEntry& entry : entries) nodes.push_back(entry.key.substr(kDrainedKeys.size()));
  return nodes;
}

Result<> begin_drain(MetaClient& meta, Cluster* cluster, const std::vector<JobRef>& jobs,
                     ImageStore& images, const std::string& node) {
  if (cluster == nullptr)
    return invalid_argument("this cluster has one node: there is none that could take over what it holds");
  PTC_TRY(auto drained, drained_nodes(meta));
  if (is_among(drained, node)) return ok();
  PTC_TRY(check_there(*cluster, jobs, drained, node));
  PTC_TRY(check_layouts(jobs, node));
  std::map<std::string, uint64_t> needed;
  for (const JobRef& job : jobs) {
    PTC_TRY(job->add_bytes_without(node, needed));
  }
  PTC_TRY(check_space(*cluster, images, needed));
  MetaTransaction transaction;
  transaction.compares = {{drained_key(node), 0}, cluster->fence_of(node)};
  transaction.puts = {{drained_key(node), json::serialize(json::object{{"since", time_text(now_ns())}})},
                      {std::string(kMembership), node}};
  PTC_TRY(commit_fenced(meta, cluster, std::move(transaction)));
  // From here on no layout.json can name it; one that was saved a moment ago may.
  for (const JobRef& job : jobs) {
    PTC_TRY(job->sync());
  }
  Result<> free = check_layouts(jobs, node);
  if (free.has_error()) {
    PTC_TRY(cancel_drain(meta, cluster, node));
  }
  return free;
}

Result<> cancel_drain(MetaClient& meta, Cluster* cluster, const std::string& node) {
  PTC_TRY(check_member(cluster));
  PTC_TRY(auto entry, meta.get(drained_key(node)));
  if (!entry) return make_error(Code::kNotFound, "node '{}' is not being drained", node);
  MetaTransaction transaction;
  transaction.compares = {{entry->key, entry->revision}};
  transaction.deletes = {entry->key};
  PTC_TRY(commit_fenced(meta, cluster, std::move(transaction)));
  return ok();
}

}  // namespace ptc
