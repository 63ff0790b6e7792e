#include "reshard/node/join_jobs.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <filesystem>
#include <map>
#include <set>

#include "reshard/cluster/tombstones.h"
#include "reshard/job/file_pieces.h"
#include "reshard/job/names.h"
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

const std::string& name_in(const JobNames& as, const std::string& name) {
  const auto other = as.find(name);
  return other == as.end() ? name : other->second;
}

std::string job_dir_of(const std::string& directory, const std::string& name) {
  return fmt::format("{}/jobs/{}", directory, name);
}

/// Directories of jobs by what these are: a join that was cut off may have called one otherwise
/// than it is called, or will be.
std::map<std::string, std::string> directories_by_id(const std::string& directory) {
  constexpr size_t kMaxIdBytes = 4096;
  std::map<std::string, std::string> directories;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory + "/jobs", error))
    if (auto id = read_text_file(AT_FDCWD, entry.path().string() + "/id", kMaxIdBytes);
        id.has_value())
      directories.emplace(std::move(id).value(), entry.path().string());
  return directories;
}

Result<> rename_directories(const std::string& directory, const Jobs& here, const JobNames& as) {
  const auto directories = directories_by_id(directory);
  bool any = false;
  for (const auto& [own_name, entry] : here) {
    const auto known = directories.find(job_id_of(entry.value));
    // One that does not say what it is, is what it is called.
    const std::string before =
        known != directories.end() ? known->second : job_dir_of(directory, own_name);
    const std::string after = job_dir_of(directory, name_in(as, own_name));
    if (before == after) continue;
    if (::renameat2(AT_FDCWD, before.c_str(), AT_FDCWD, after.c_str(), RENAME_NOREPLACE) != 0)
      return errno_error(errno, fmt::format("renaming {} to {}", before, after));
    any = true;
  }
  return any ? sync_directory(AT_FDCWD, directory + "/jobs") : ok();
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
                         const MetaTransaction::Compare& no_job,
                         const MetaTransaction::Compare& identity) {
  for (size_t i = 0; i < puts.size();) {
    MetaTransaction transaction;
    transaction.compares = {no_job, identity};
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

Result<> take_job_name(std::string_view text, JobNames& as) {
  const size_t equals = text.rfind('=');  // which an old name may have
  if (equals == std::string_view::npos || equals == 0)
    return invalid_argument("'{}' is not OLD=NEW, the names of a job", text);
  const std::string from(text.substr(0, equals)), to(text.substr(equals + 1));
  PTC_TRY(check_name(to, "job", "status.json"));
  if (!as.emplace(from, to).second) return invalid_argument("job {} gets two names", from);
  return ok();
}

Result<> check_job_names(MetaClient& own, const std::string& directory, const JobNames& as) {
  PTC_TRY(auto here, jobs_of(own));
  std::set<std::string> taken;
  std::error_code error;
  const auto directories = directories_by_id(directory);
  for (const auto& [from, to] : as) {
    if (!here.contains(from))
      return invalid_argument("the store {} has no job {} that could become {}", directory, from,
                              to);
    const auto now = directories.find(job_id_of(here.at(from).value));
    const std::string wanted = job_dir_of(directory, to);
    const bool both = (now == directories.end() || now->second != wanted) &&
                      std::filesystem::exists(wanted, error);
    if (here.contains(to) || both || !taken.insert(to).second)
      return invalid_argument("job {} of the store {} cannot become {}: it has another of that",
                              from, directory, to);
  }
  return ok();
}

Result<ComparedJobs> compare_jobs(MetaClient& own, MetaClient& cluster, const JobNames& as) {
  PTC_TRY(auto here, jobs_of(own));
  PTC_TRY(auto there, jobs_of(cluster));
  ComparedJobs compared;
  std::set<std::string> names, ids;
  for (const auto& [name, entry] : there) ids.insert(job_id_of(entry.value));
  PTC_TRY(const auto removed, read_tombstones(cluster));
  for (const auto& [id, name] : removed.jobs) ids.insert(id);
  for (const auto& [own_name, entry] : here) {
    const std::string& name = name_in(as, own_name);
    names.insert(name);
    if (const std::string id = job_id_of(entry.value); !id.empty() && ids.contains(id))
      compared.there_already.push_back(own_name);
    const auto same = there.find(name);
    if (same == there.end()) compared.own.push_back(name);
    else if (job_id_of(same->second.value) != job_id_of(entry.value))
      compared.in_both.push_back(own_name);
  }
  for (const auto& [name, entry] : there)
    if (!names.contains(name)) compared.others.push_back(name);
  return compared;
}

Result<> join_jobs(MetaClient& own, MetaClient& cluster, const std::string& directory,
                   const std::string& node, const JobNames& as,
                   const MetaTransaction::Compare& identity) {
  PTC_TRY(auto here, jobs_of(own));
  PTC_TRY(rename_directories(directory, here, as));
  PTC_TRY(auto there, jobs_of(cluster));
  for (const auto& [own_name, entry] : here) {
    const std::string& name = name_in(as, own_name);
    if (there.contains(name)) continue;  // compared before: it is the same
    const std::string own_prefix = entry.key + "/", key = "jobs/" + name, prefix = key + "/",
                      job_dir = job_dir_of(directory, name);
    PTC_TRY(auto facts, own.list(own_prefix));
    std::vector<std::pair<std::string, std::string>> puts;
    std::set<std::string> keys;
    for (MetaEntry& fact : facts) {
      fact.key.replace(0, own_prefix.size(), prefix);
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
      PTC_TRY(cluster.commit({.compares = {{key, 0}, identity}, .deletes = {other.key}}));
    }
    PTC_TRY(commit_in_steps(cluster, puts, {key, 0}, identity));
    MetaTransaction last;
    last.compares = {{key, 0}, identity};
    last.puts = {{key, entry.value}};
    PTC_TRY(cluster.commit(last));
  }
  return ok();
}

}  // namespace ptc
