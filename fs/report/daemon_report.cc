// .ptc/daemon.json: what only the daemon knows of itself, for whoever looks for what is wrong.
#include <dirent.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <fstream>
#include <iterator>
#include <memory>

#include "fs/report/reports.h"
#include "fs/report/version.h"
#include "reshard/node/job_store.h"
#include "store/base/control_group.h"
#include "store/base/json.h"

namespace ptc {
namespace {

uint64_t open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), &::closedir);
  uint64_t count = 0;
  if (directory)
    while (::readdir(directory.get()) != nullptr) ++count;
  return count < 3 ? 0 : count - 3;  // ".", ".." and the directory's own
}

uint64_t mappings() {
  std::ifstream file("/proc/self/maps");
  return static_cast<uint64_t>(std::count(std::istreambuf_iterator<char>(file), {}, '\n'));
}

bool is_in_memory(const std::string& directory) {
  struct statfs space = {};
  return ::statfs(directory.c_str(), &space) == 0 && space.f_type == TMPFS_MAGIC;
}

/// As /proc/self/status has it, in hexadecimal digits; "" where that cannot be read.
std::string effective_capabilities() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;)
    if (word == "CapEff:" && file >> word) return word;
  return "";
}

json::object limits_object() {
  json::object limits{{"open_files", open_descriptors()}, {"mappings", mappings()}};
  rlimit files = {};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) limits["open_files_limit"] = files.rlim_cur;
  const auto add = [&](const char* name, const std::optional<GroupLimit>& of_group) {
    if (of_group)
      limits[name] = json::object{
          {"limit", of_group->limit}, {"used", of_group->used}, {"group", of_group->group}};
  };
  const GroupLimits groups = group_limits();
  add("group_memory", groups.memory);
  add("group_threads", groups.threads);
  return limits;
}

}  // namespace

std::string daemon_text(Tree& tree) {
  const StoreSpace space = store_space(tree);
  return pretty_json(
      json::object{{"version", kVersion},
                   {"pid", ::getpid()},
                   {"user", ::geteuid()},
                   {"node", tree.store().node()},
                   {"store", tree.store().directory()},
                   {"store_in_memory", is_in_memory(tree.store().directory())},
                   {"store_total_bytes", space.total_bytes},
                   {"store_used_bytes", space.used_bytes},
                   {"uptime_seconds", static_cast<int64_t>(uptime_seconds(tree))},
                   {"kernel", json::object{{"passthrough", tree.passthrough().enabled()},
                                           {"expires_names", tree.can_expire_names()}}},
                   {"capabilities", effective_capabilities()},
                   {"limits", limits_object()},
                   {"options", tree.options()}});
}

}  // namespace ptc
