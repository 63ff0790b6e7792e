#include "reshard/job/drain.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <map>

#include "reshard/job/job_parts.h"
#include "reshard/move/placement.h"
#include "reshard/move/space.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

/// A node that stays in service.
Result<std::string> check_there(const Cluster& cluster, const std::vector<JobRef>& jobs,
                                const std::vector<std::string>& drained, const std::string& node) {
  std::vector<std::string> alive = cluster.alive();
  if (!is_among(alive, node)) {
    const bool known = std::any_of(jobs.begin(), jobs.end(),
                                   [&](const JobRef& job) { return job->bytes_on(node) > 0; });
    if (known)
      return make_error(Code::kUnavailable,
                        "node {} is away, and nothing can be moved from it: start it "
                        "first",
                        node);
    return make_error(Code::kNotFound, "there is no node '{}' (nodes: {})", node,
                      fmt::join(alive, ", "));
  }
  std::erase_if(alive, [&](const std::string& other) { return is_among(drained, other); });
  std::erase(alive, node);
  if (alive.empty())
    return invalid_argument(
        "node {} is the last one in service: start another first, or take one into "
        "service again (ptc drain NODE --cancel)",
        node);
  return alive.front();
}

Result<> check_layouts(const std::vector<JobRef>& jobs, const std::string& node) {
  for (const JobRef& job : jobs)
    if (const std::optional<uint64_t> rank = job->rank_on(node))
      return invalid_argument(
          "layout.json of job {} wants rank {} on node {}: give it other \"devices\" "
          "first, or leave them out (ptc layout {} edit)",
          job->name(), *rank, node, job->name());
  return ok();
}

/// False: it is being drained already. That it is there, and is not drained yet, is said to who
/// asks, and no more: it may go a moment later, and who drains it twice drains it. But two must not
/// drain the last two.
Result<bool> put_drained(MetaClient& meta, Cluster& cluster, const std::vector<JobRef>& jobs,
                         ImageStore& images, const std::string& node) {
  PTC_TRY(auto drained, drained_nodes(meta));
  if (is_among(drained, node)) return false;
  PTC_TRY(const std::string stays, check_there(cluster, jobs, drained, node));
  PTC_TRY(check_layouts(jobs, node));
  BytesByPlace needed;
  for (const JobRef& job : jobs) {
    PTC_TRY(job->add_bytes_without(node, needed));
  }
  PTC_TRY(check_space(cluster, images, needed));
  MetaTransaction transaction;
  transaction.compares = {{drained_key(stays), 0}};
  transaction.puts = {
      {drained_key(node), json::serialize(json::object{{"since", time_text(now_ns())}})},
      {std::string(kMembership), node}};
  PTC_TRY(commit_fenced(meta, cluster, std::move(transaction)));
  return true;
}

}  // namespace

std::string drained_key(const std::string& node) { return std::string(kDrainedKeys) + node; }

Result<std::vector<std::string>> drained_nodes(MetaClient& meta) {
  PTC_TRY(auto entries, meta.list(kDrainedKeys));
  std::vector<std::string> nodes;
  for (const MetaEntry& entry : entries) nodes.push_back(entry.key.substr(kDrainedKeys.size()));
  return nodes;
}

Result<> begin_drain(MetaClient& meta, Cluster& cluster, const std::vector<JobRef>& jobs,
                     ImageStore& images, const std::string& node) {
  if (!cluster.shares_bytes())
    return invalid_argument(
        "this cluster has one node: there is none that could take over what it holds");
  Result<bool> put = put_drained(meta, cluster, jobs, images, node);
  constexpr int kTries = 10;  // another may be drained meanwhile
  for (int tries = 1; tries < kTries && put.has_error() && put.error().code() == Code::kConflict;
       ++tries)
    put = put_drained(meta, cluster, jobs, images, node);
  PTC_TRY(const bool is_new, std::move(put));
  if (!is_new) return ok();
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

Result<> cancel_drain(MetaClient& meta, Cluster& cluster, const std::string& node) {
  PTC_TRY(check_member(cluster));
  PTC_TRY(auto entry, meta.get(drained_key(node)));
  if (!entry) return make_error(Code::kNotFound, "node '{}' is not being drained", node);
  MetaTransaction
      transaction;  // whoever else ends it, or drains it again meanwhile, it is in service now
  transaction.deletes = {entry->key};
  PTC_TRY(commit_fenced(meta, cluster, std::move(transaction)));
  return ok();
}

}  // namespace ptc
