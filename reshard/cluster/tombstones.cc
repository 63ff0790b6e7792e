#include "reshard/cluster/tombstones.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cerrno>
#include <filesystem>

#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

bool says_unforced(std::string_view tombstone) {
  const Result<json::value> value = parse_json(tombstone);
  if (value.has_error() || !value.value().is_object()) return false;
  const json::value* forced = value.value().as_object().if_contains("forced");
  return forced != nullptr && forced->is_bool() && !forced->get_bool();
}

/// What users may write into. A directory in which something is stays, and what is above it: false.
Result<bool> take_user_directories(const std::string& job_dir) {
  for (const char* name : {"committing", "files/incoming", "files/dataset", "files"}) {
    const std::string path = fmt::format("{}/{}", job_dir, name);
    if (::rmdir(path.c_str()) == 0 || errno == ENOENT) continue;
    if (errno == ENOTEMPTY || errno == EEXIST) return false;
    return errno_error(errno, "removing directory " + path);
  }
  return true;
}

constexpr std::string_view kJobs = "removed/jobs/", kCheckpoints = "removed/checkpoints/";

}  // namespace

std::string removed_job_key(std::string_view id) { return fmt::format("{}{}", kJobs, id); }
bool is_removed_job_key(std::string_view key) { return key.starts_with(kJobs); }
std::string removed_checkpoint_key(std::string_view id) {
  return fmt::format("{}{}", kCheckpoints, id);
}

std::string removed_job_text(std::string_view name, bool forced) {
  return json::serialize(
      json::object{{"name", name}, {"forced", forced}, {"time", time_text(now_ns())}});
}

std::string removed_checkpoint_text(std::string_view job, std::string_view name) {
  return json::serialize(json::object{{"job", job}, {"name", name}, {"time", time_text(now_ns())}});
}

Result<Tombstones> read_tombstones(MetaClient& meta) {
  Tombstones found;
  PTC_TRY(found.entries, meta.list(kTombstones));
  for (const MetaEntry& entry : found.entries) {
    found.revision = std::max(found.revision, entry.revision);
    if (entry.key.starts_with(kJobs)) {
      const std::string id = entry.key.substr(kJobs.size());
      found.jobs.emplace(id, json_text(entry.value, "name"));
      if (says_unforced(entry.value)) found.unforced.insert(id);
    }
    if (entry.key.starts_with(kCheckpoints))
      found.checkpoints.emplace(entry.key.substr(kCheckpoints.size()),
                                json_text(entry.value, "job"));
  }
  return found;
}

Result<bool> is_removed(MetaClient& meta, const std::string& key) {
  PTC_TRY(auto entry, meta.get(key));
  return entry.has_value();
}

void note_carried_out(MetaClient& meta, const Cluster& cluster, const std::string& tombstone) {
  if (!cluster.remembers_removals()) (void)meta.commit({.deletes = {tombstone}});
}

std::string job_id_of(std::string_view value) {
  std::string id = json_text(value, "id");
  return id.empty() ? json_text(value, "created") : id;  // of an older ptcfs
}

std::vector<ImageId> images_named_in(const std::string& stored_file) {
  std::vector<ImageId> ids;
  Result<std::string> text = read_text_file(AT_FDCWD, stored_file, kMaxStoredBytes);
  if (text.has_error()) return ids;
  auto value = parse_json(text.value(), {.max_bytes = kMaxStoredBytes});
  boost::system::error_code bad;
  const json::value* images =
      value.has_value() ? value.value().find_pointer("/images", bad) : nullptr;
  if (images == nullptr || !images->is_array()) return ids;
  for (const json::value& image : images->get_array())
    if (const json::value* id = image.find_pointer("/id", bad); id != nullptr && id->is_string())
      ids.push_back({std::string(id->get_string())});
  return ids;
}

Result<> remove_checkpoint_directory(ImageStore& images, const std::string& directory) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error))
    if (it->path().filename().string().starts_with("stored-"))
      for (const ImageId& id : images_named_in(it->path())) (void)images.remove(id);
  return remove_tree(AT_FDCWD, directory);
}

Result<bool> remove_job_directory(ImageStore& images, const std::string& directory, bool forced) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory + "/checkpoints", error), end;
       !error && it != end; it.increment(error)) {
    PTC_TRY(remove_checkpoint_directory(images, it->path()));
  }
  if (!forced) {
    // Once more: who looked at the job just now may have made one of the empty ones anew.
    bool empty = false;
    for (int tries = 0; tries < 2 && !empty; ++tries) {
      PTC_TRY(empty, take_user_directories(directory));
    }
    if (!empty) return false;
  }
  // The id last: by it the next start knows a removal that was cut off.
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error))
    if (it->path().filename() != "id") {
      PTC_TRY(remove_tree(AT_FDCWD, it->path()));
    }
  PTC_TRY(remove_tree(AT_FDCWD, directory));
  return true;
}

}  // namespace ptc
