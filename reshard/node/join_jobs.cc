#include "reshard/node/join_jobs.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <filesystem>
#include <map>
#include <set>

#include "reshard/cluster/tombstones.h"
#include "reshard/job/file_pieces.h"
#include "reshard/move/plan_report.h"
#include "reshard/node/agreed_facts.h"
#include "store/base/file.h"
#include "store/base/json.h"

namespace ptc {
namespace {

using Jobs = std::map<std::string, MetaEntry>;  // by name

Result<Jobs> jobs_of(MetaClient& meta) {
  PTC_TRY(auto entries, meta.list("jobs/"));
  Jobs jobs;
  for (MetaEntry& entry : entries)
    if (std::string name = entry.key.substr(5); name.find('/') == std::string::npos)
      jobs.emplace(name, std::move(entry));
  return jobs;
}

/// The record of a checkpoint whose bytes all lie on `node`.
Result<std::string> record_on(const std::string& record, const std::string& job_dir,
                              const std::string& node) {
  PTC_TRY(auto value, parse_json(record));
  json::object* object = value.if_object();
  const json::value* id = object != nullptr ? object->if_contains("id") : nullptr;
  const json::value* stored = object != nullptr ? object->if_contains("stored") : nullptr;
  const json::value* generation = object != nullptr ? object->if_contains("generation") : nullptr;
  if (id == nullptr || !id->is_string() || stored == nullptr || !stored->is_string() ||
      generation == nullptr || !generation->is_int64())
    return make_error(Code::kCorrupt, "the record of a checkpoint is damaged: {}", record);
  const std::string directory =
      fmt::format("{}/checkpoints/{}/", job_dir, std::string_view(id->get_string()));
  const std::string before(stored->get_string());
  const int64_t next = generation->get_int64() + 1;
  const std::string plan = plan_file_of(before);
  const std::string after = fmt::format("stored-{}{}.json", next, plan.empty() ? "" : "-joined");
  PTC_TRY(auto text, read_text_file(AT_FDCWD, directory + before, kMaxStoredBytes));
  PTC_TRY(auto state, parse_json(text, {.max_bytes = kMaxStoredBytes}));
  boost::system::error_code bad;
  json::value* images = state.find_pointer("/images", bad);
  if (images == nullptr || !images->is_array())
    return make_error(Code::kCorrupt, "{}{} is damaged", directory, before);
  for (json::value& image : images->get_array())
    if (image.is_object()) image.get_object()["node"] = node;
  const std::string stored_text = json::serialize(state);
  PTC_TRY(write_file_atomically(AT_FDCWD, directory + after, stored_text));
  if (!plan.empty()) {
    if (auto kept = read_text_file(AT_FDCWD, directory + plan, kMaxStoredBytes); kept.has_value()) {
      PTC_TRY(write_file_atomically(AT_FDCWD, directory + plan_file_of(after), kept.value()));
    }
  }
  (*object)["generation"] = next;
  (*object)["stored"] = after;
  if (json::value* files = object->if_contains("files"); files != nullptr && files->is_object()) {
    files->get_object().erase(before);
    files->get_object()[after] = to_json(FileFacts::of(stored_text));
  }
  return json::serialize(*object);
}

Result<> commit_in_steps(MetaClient& meta,
                         const std::vector<std::pair<std::string, std::string>>& puts,
                         const MetaTransaction::Compare& identity) {
  for (size_t i = 0; i < puts.size();) {
    MetaTransaction transaction;
    transaction.compares = {identity};
    size_t bytes = 0;
    for (; i < puts.size() && transaction.puts.size() < kStepKeys; ++i) {
      bytes += puts[i].first.size() + puts[i].second.size();
      if (bytes > kStepBytes && !transaction.puts.empty()) break;
      transaction.puts.push_back(puts[i]);
    }
    PTC_TRY(meta.commit(transaction));
  }
  return ok();
}

}  // namespace

Result<ComparedJobs> compare_jobs(MetaClient& own, MetaClient& cluster) {
  PTC_TRY(auto here, jobs_of(own));
  PTC_TRY(auto there, jobs_of(cluster));
  ComparedJobs compared;
  for (const auto& [name, entry] : here) {
    const auto same = there.find(name);
    if (same == there.end()) compared.own.push_back(name);
    else if (job_id_of(same->second.value) != job_id_of(entry.value))
      compared.in_both.push_back(name);
  }
  for (const auto& [name, entry] : there)
    if (!here.contains(name)) compared.others.push_back(name);
  return compared;
}

Result<> join_jobs(MetaClient& own, MetaClient& cluster, const std::string& directory,
                   const std::string& node, const MetaTransaction::Compare& identity) {
  PTC_TRY(auto here, jobs_of(own));
  PTC_TRY(auto there, jobs_of(cluster));
  for (const auto& [name, entry] : here) {
    if (there.contains(name)) continue;  // compared before: it is the same
    const std::string prefix = entry.key + "/",
                      job_dir = fmt::format("{}/jobs/{}", directory, name);
    PTC_TRY(auto facts, own.list(prefix));
    std::vector<std::pair<std::string, std::string>> puts;
    std::set<std::string> keys;
    for (MetaEntry& fact : facts) {
      keys.insert(fact.key);
      if (fact.key.starts_with(prefix + "checkpoints/")) {
        Result<std::string> record = record_on(fact.value, job_dir, node);
        if (record.has_error())
          return std::move(record).error().with_context(
              fmt::format("job {}, {}", name, fact.key.substr(prefix.size())));
        fact.value = std::move(record).value();
      }
      puts.emplace_back(std::move(fact.key), std::move(fact.value));
    }
    // Of a job of this name that was removed, or whose making was cut off.
    PTC_TRY(auto left, cluster.list(prefix));
    for (const MetaEntry& other : left) {
      if (keys.contains(other.key)) continue;
      PTC_TRY(cluster.commit({.compares = {{entry.key, 0}, identity}, .deletes = {other.key}}));
    }
    PTC_TRY(commit_in_steps(cluster, puts, identity));
    MetaTransaction last;
    last.compares = {{entry.key, 0}, identity};
    last.puts = {{entry.key, entry.value}};
    PTC_TRY(cluster.commit(last));
  }
  return ok();
}

}  // namespace ptc
