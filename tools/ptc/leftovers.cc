#include "tools/ptc/leftovers.h"

#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <utility>

#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::time_t kQuietSeconds = 300;
constexpr size_t kMostFiles = 20000;  // of one

void add(const std::string& path, Leftover& found) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return;
  if (S_ISREG(info.st_mode)) found.bytes += static_cast<uint64_t>(info.st_size);
  found.latest = std::max(found.latest, info.st_mtim.tv_sec);
}

Leftover look_at(const std::string& path) {
  Leftover found;
  add(path, found);
  size_t files = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    add(entry->path().string(), found);
    if (++files == kMostFiles) {
      found.all_seen = false;
      break;
    }
  }
  found.all_seen = found.all_seen && !error;
  return found;
}

}  // namespace

std::vector<Leftover> leftovers_of_job(const std::string& mount, const std::string& job) {
  std::vector<Leftover> all;
  const std::string incoming = mount + "/" + job + "/incoming";
  const auto names = list_directory(incoming);
  if (!names) return all;
  const std::time_t now = std::time(nullptr);
  for (const std::string& name : names.value()) {
    struct stat info {};
    const std::string path = incoming + "/" + name;
    if (::lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) continue;
    Leftover found = look_at(path);
    if (found.latest + kQuietSeconds > now) continue;
    found.job = job;
    found.name = name;
    all.push_back(std::move(found));
  }
  return all;
}

std::vector<Leftover> leftovers_of_mount(const std::string& mount) {
  std::vector<Leftover> all;
  const auto jobs = list_jobs(mount);
  if (!jobs) return all;
  for (const std::string& job : jobs.value())
    for (Leftover& found : leftovers_of_job(mount, job)) all.push_back(std::move(found));
  std::sort(all.begin(), all.end(),
            [](const Leftover& a, const Leftover& b) { return a.bytes > b.bytes; });
  return all;
}

}  // namespace ptc::cli
