#include "reshard/job/drain.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>

#include "reshard/job/job_impl.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

constexpr std::string_view kDrained = "drained/";

bool is_one_of(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

Result<> check_there(const Cluster& cluster, const std::vector<JobRef>& jobs,
                     const std::vector<std::string>& drained, const std::string& node) {
  std::vector<std::string> alive = cluster.alive();
  if (!is_one_of(alive, node)) {
    const bool known = std::any_of(jobs.begin(), jobs.end(),
                                   [&](const JobRef& job) { return job->bytes_on(node) > 0; });
    if (known)
      return make_error(Code::kUnavailable, "node {} is away, and nothing can be moved from it: start it "
                        "first", node);
    return make_error(Code::kNotFound, "there is no node '{}' (nodes: {})", node, fmt::join(alive, ", "));
  }
  std::erase_if(alive, [&](const std::string& other) { return is_one_of(drained, other); });
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

Result<uint64_t> free_on(const std::string& node, Cluster& cluster, ImageStore& images) {
  constexpr auto kDeadline = std::chrono::seconds(10);
  if (node == cluster.self()) {
    PTC_TRY(auto space, images.space());
    return space.free_bytes;
  }
  PTC_TRY(auto answer, cluster.call(node, kSpaceMethod, "", kDeadline));
  PTC_TRY(auto space, parse_json(answer));
  if (!space.is_object()) return make_error(Code::kCorrupt, "node {} does not say what is free", node);
  PTC_TRY(auto free, json_uint(space.as_object(), "free", INT64_MAX));
  return free.value_or(0);
}

Result<> check_space(Cluster& cluster, const std::vector<JobRef>& jobs, ImageStore& images,
                     const std::string& node) {
  std::map<std::string, uint64_t> needed;
  for (const JobRef& job : jobs) {
    PTC_TRY(auto bytes, job->bytes_without(node));
    for (const auto& [other, more] : bytes) needed[other] += more;
  }
  for (const auto& [other, bytes] : needed) {
    PTC_TRY(uint64_t free, free_on(other, cluster, images));
    if (bytes > free)
      return make_error(Code::kNoSpace, "not enough memory on node {}: {} would come there, {} are free; "
                        "remove checkpoints (ptc rm), or give its store more (ptcfs --memory)",
                        other, format_size(bytes), format_size(free));
  }
  return ok();
}

}  // namespace

std::string drained_key(const std::string& node) { return std::string(kDrained) + node; }

Result<std::vector<std::string>> drained_nodes(MetaClient& meta) {
  PTC_TRY(auto entries, meta.list(kDrained));
  std::vector<std::string> nodes;
  for (const MetaEntry& entry : entries) nodes.push_back(entry.key.substr(kDrained.size()));
  return nodes;
}

Result<> begin_drain(MetaClient& meta, Cluster* cluster, const std::vector<JobRef>& jobs,
                     ImageStore& images, const std::string& node) {
  if (cluster == nullptr)
    return invalid_argument("this cluster has one node: there is none that could take over what it holds");
  PTC_TRY(auto drained, drained_nodes(meta));
  if (is_one_of(drained, node)) return ok();
  PTC_TRY(check_there(*cluster, jobs, drained, node));
  PTC_TRY(check_layouts(jobs, node));
  PTC_TRY(check_space(*cluster, jobs, images, node));
  MetaTransaction transaction;
  transaction.compares = {{drained_key(node), 0}, cluster->fence_of(node)};
  transaction.puts = {{drained_key(node), json::serialize(json::object{{"since", time_text(now_ns())}})}};
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
