#include "reshard/node/store_contents.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value_from.hpp>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <set>
#include <utility>

#include "reshard/node/store_identity.h"
#include "store/base/file.h"
#include "store/base/json.h"
#include "store/base/mutex.h"
#include "store/base/size_text.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr size_t kMaxIdBytes = 4096, kMostShownBytes = 1024;

bool holds_anything(const std::string& directory) {
  std::error_code error;
  return std::filesystem::exists(directory, error) && !std::filesystem::is_empty(directory, error);
}

std::string id_of_store(const std::string& directory) {
  const auto identity = read_store_identity(directory);
  return identity && identity.value() ? identity.value()->store : std::string();
}

/// Calls `on_file` with each, until that says false.
template <class OnFile>
Result<> visit_user_files(const std::string& job_dir, OnFile on_file) {
  const std::string files_dir = job_dir + "/files";
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::directory_iterator it(job_dir + "/committing", error);
      !error && it != fs::directory_iterator())
    if (!on_file("files that are being committed")) return ok();
  error.clear();
  for (fs::directory_iterator it(files_dir + "/incoming", error), end; !error && it != end;
       it.increment(error))
    if (!on_file("incoming/" + it->path().filename().string())) return ok();
  if (error && error != std::errc::no_such_file_or_directory)
    return errno_error(error.value(), "reading " + files_dir + "/incoming");
  error.clear();
  for (fs::directory_iterator it(files_dir, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename();
    if (name == "incoming") continue;
    if (name != "dataset") {
      if (!on_file(name)) return ok();
    } else if (!fs::is_empty(it->path(), error) && !on_file("dataset/")) {
      return ok();
    }
  }
  if (error) return errno_error(error.value(), "reading " + files_dir);
  return ok();
}

/// The directory of a job in which nobody has put anything: its making was cut off.
bool is_bare(const std::string& job_dir) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(job_dir, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename();
    if (name == "files" || name == "id") continue;
    if (holds_anything(it->path())) return false;
  }
  const Result<std::optional<std::string>> file = user_file_in(job_dir);
  return !error && (file.has_error() ? file.error().code() == Code::kNotFound : !file.value());
}

/// Empty: of an older ptcfs, or its making was cut off.
Result<std::string> id_in(const std::string& job_dir) {
  Result<std::string> id = read_text_file(AT_FDCWD, job_dir + "/id", kMaxIdBytes);
  if (id.has_error() && id.error().code() == Code::kNotFound) return std::string();
  return id;
}

}  // namespace

Result<std::optional<std::string>> user_file_in(const std::string& job_dir) {
  std::optional<std::string> found;
  PTC_TRY(visit_user_files(job_dir, [&](std::string name) {
    found = std::move(name);
    return false;
  }));
  return found;
}

Result<UserFiles> user_files_in(const std::string& job_dir, size_t most_names) {
  std::set<std::string> names;
  UserFiles files;
  PTC_TRY(visit_user_files(job_dir, [&](std::string name) {
    names.insert(std::move(name));
    if (names.size() > most_names) {
      names.erase(std::prev(names.end()));
      ++files.more;
    }
    return true;
  }));
  for (const std::string& name : names) files.names.push_back(printable(name, kMostShownBytes));
  return files;
}

std::string UserFiles::to_text() const {
  return json::serialize(json::object{{"files", json::value_from(names)}, {"more", more}});
}

UserFiles UserFiles::from_text(const std::string& text) {
  UserFiles files;
  const auto value = parse_json(text);
  if (value.has_error() || !value.value().is_object()) {
    if (!text.empty()) files.names.push_back(printable(text, kMostShownBytes));
    return files;
  }
  const json::object& object = value.value().get_object();
  if (const json::value* list = object.if_contains("files"); list && list->is_array())
    for (const json::value& name : list->get_array())
      if (name.is_string()) files.names.emplace_back(std::string_view(name.get_string()));
  if (const json::value* count = object.if_contains("more"))
    files.more = whole_number(*count).value_or(0);
  return files;
}

StoreContents::StoreContents(std::string directory, ImageStore& images)
    : directory_(std::move(directory)),
      store_id_(id_of_store(directory_)),
      images_(images),
      found_drafts_(images.drafts()) {}

std::vector<std::string> StoreContents::kept() const {
  std::set<std::string> all;
  std::error_code error;  // there is none
  for (std::filesystem::directory_iterator it(directory_ + "/kept", error), end;
       !error && it != end; it.increment(error))
    all.insert("kept/" + it->path().filename().string());
  MutexLock lock(mutex_);
  all.insert(kept_.begin(), kept_.end());
  return {all.begin(), all.end()};
}

void StoreContents::keep(const std::string& what, const std::string& why) {
  spdlog::warn("{}/{} is kept, though {}: look at it, and remove it if it is of no use", directory_,
               what, why);
  MutexLock lock(mutex_);
  if (!what.starts_with("kept/")) kept_.push_back(what);
}

Result<> StoreContents::settle_directories(const std::map<std::string, std::string>& names,
                                           const Tombstones& tombstones) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory_ + "/jobs", error))
    if (!names.contains(entry.path().filename())) found.push_back(entry.path().filename());
  for (const std::string& name : found) {
    PTC_TRY(auto id, id_in(job_dir(name)));
    const bool gone = tombstones.jobs.contains(id) || is_bare(job_dir(name));
    if (gone) {
      (void)carry_out(
          {name, id, tombstones.forced(id)});  // one that stays is no reason not to start
    } else {
      keep("jobs/" + name, "there is no such job any more, and nobody removed it");
    }
  }
  return ok();
}

Result<> StoreContents::settle_removed_meanwhile(const std::string& name, const std::string& id,
                                                 MetaClient& meta) {
  // Listed after the job was found to be gone, so its tombstone is among them, if there is one.
  PTC_TRY(const Tombstones tombstones, read_tombstones(meta));
  if (tombstones.jobs.contains(id)) (void)carry_out({name, id, tombstones.forced(id)});
  else keep("jobs/" + name, "there is no such job any more, and nobody removed it");
  return ok();
}

Result<> StoreContents::open_job_directory(const std::string& name, const std::string& id,
                                           const Tombstones& tombstones, bool is_new) {
  PTC_TRY(auto found, id_in(job_dir(name)));
  std::error_code error;
  if (is_new ? std::filesystem::exists(job_dir(name), error) : !found.empty() && found != id) {
    if (tombstones.jobs.contains(found) || is_bare(job_dir(name))) {
      // What cannot be removed keeps no other from its name.
      if (const Result<> removed = remove_job_directory(name, found, tombstones.forced(found));
          removed.has_error()) {
        PTC_TRY(put_aside(name, found, "its job was removed: " + removed.error().message()));
      }
    } else {
      PTC_TRY(
          put_aside(name, found, "there is another job of its name, and nobody removed this one"));
    }
  }
  return make_job_directory(name, id);
}

Result<> StoreContents::put_aside(const std::string& name, const std::string& id,
                                  const std::string& why) {
  constexpr size_t kMostBytes = 200;  // of the name: a whole one has no room beside an id
  size_t end = std::min(name.size(), kMostBytes);
  while (end < name.size() && end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80)
    --end;
  const std::string aside = fmt::format("kept/{}-{}", name.substr(0, end), id);
  PTC_TRY(make_directory(AT_FDCWD, directory_ + "/kept"));
  if (rename(job_dir(name).c_str(), fmt::format("{}/{}", directory_, aside).c_str()) != 0)
    return errno_error(errno, job_dir(name));
  keep(aside, why);
  return ok();
}

Result<> StoreContents::remove_job_directory(const std::string& name, const std::string& id,
                                             bool forced) {
  PTC_TRY(const bool gone, ptc::remove_job_directory(images_, job_dir(name), forced));
  if (gone) return ok();
  return put_aside(name, id, "its job was removed: somebody had just written files into it");
}

Result<> StoreContents::carry_out(Removal removal) {
  auto remove = [&]() -> Result<> {
    PTC_TRY(auto found, id_in(job_dir(removal.name)));
    if (found != removal.id) return ok();  // another job's by now
    return remove_job_directory(removal.name, removal.id, removal.forced);
  };
  Result<> removed = remove();
  if (removed.has_value()) return removed;
  if (const std::string why = removed.error().message(); why != removal.told) {
    spdlog::warn("job {} was removed, but its directory stays for now: {}", removal.name, why);
    removal.told = why;
  }
  left_.push_back(std::move(removal));
  return removed;
}

Result<> StoreContents::carry_out_left() {
  Result<> all = ok();
  for (Removal& one : std::exchange(left_, {}))
    if (Result<> removed = carry_out(std::move(one)); removed.has_error() && all.has_value())
      all = std::move(removed);
  return all;
}

Result<> StoreContents::make_job_directory(const std::string& name, const std::string& id) {
  const std::string dir = job_dir(name);
  PTC_TRY(make_directory(AT_FDCWD, dir));
  PTC_TRY(auto found, id_in(dir));
  if (found == id) return ok();
  // Nobody else's until it is known whose they are (JobAttributes).
  PTC_TRY(make_directory(AT_FDCWD, dir + "/files", 0700));
  PTC_TRY(make_directory(AT_FDCWD, dir + "/files/incoming", 0700));
  PTC_TRY(write_file_atomically(AT_FDCWD, dir + "/id", id));
  PTC_TRY(sync_directory(AT_FDCWD, dir));
  return sync_directory(AT_FDCWD, directory_ + "/jobs");
}

void StoreContents::settle_found_images(const std::vector<JobRef>& jobs, bool at_start) {
  if (images_looked_over_) return;
  std::set<std::string> used;
  for (const JobRef& job : jobs) {
    const std::optional<std::vector<ImageId>> known = job->images_in_use();
    if (!known) return;
    for (const ImageId& id : *known) used.insert(id.text);
  }
  images_looked_over_ = true;
  for (const ImageId& id : found_drafts_)
    if (!used.contains(id.text)) (void)images_.remove(id);
  found_drafts_.clear();
  if (!at_start) return;  // what was made since is nobody's yet
  const Result<std::vector<ImageId>> all = images_.list();
  if (all.has_error()) return;
  constexpr size_t kMostNames = 16;
  size_t count = 0;
  for (const ImageId& id : all.value()) {  // the others there are used, and more will be
    if (used.contains(id.text) || ++count > kMostNames) continue;
    std::error_code error;
    const uint64_t bytes = std::filesystem::file_size(images_.directory() + "/" + id.text, error);
    keep("images/" + id.text,
         fmt::format("it is named by no checkpoint ({})", format_size(error ? 0 : bytes)));
  }
  if (count > kMostNames)
    spdlog::warn("{}/images: {} more such files", directory_, count - kMostNames);
}

}  // namespace ptc
