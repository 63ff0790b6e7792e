#include "store/base/control_group.h"

#include <algorithm>
#include <fstream>
#include <vector>

namespace ptc {
namespace {

constexpr uint64_t kNoLimit = uint64_t{1} << 62;  // version 1 has a number for it, near 2^63

/// nullopt: the file is not there, or says "max".
std::optional<uint64_t> count_in(const std::string& path) {
  uint64_t number = 0;
  if (!(std::ifstream(path) >> number)) return std::nullopt;
  return number;
}

struct LimitFiles {
  const char* limit;
  const char* used;
};

/// Of the group and of those around it the one that leaves least.
void look_upwards(const std::string& top, std::string group, const LimitFiles& files,
                  std::optional<GroupLimit>* least) {
  for (;;) {
    const std::string path = group == "/" ? top : top + group;
    const auto limit = count_in(path + "/" + files.limit);
    const auto used = count_in(path + "/" + files.used);
    if (limit && *limit < kNoLimit && (!*least || *limit < (*least)->limit))
      *least = GroupLimit{*limit, used.value_or(0), path};
    if (group == "/") return;
    group = group.substr(0, std::max<size_t>(group.rfind('/'), 1));
  }
}

bool has_controller(const std::string& list, const std::string& name) {
  return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

}  // namespace

GroupLimits group_limits(const std::string& membership, const std::string& groups) {
  GroupLimits found;
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {  // 4:memory:/a/b, or of version 2 0::/a/b
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || second + 1 >= line.size() || line[second + 1] != '/')
      continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      for (const std::string& top : {groups, groups + "/unified"}) {
        look_upwards(top, group, {"memory.max", "memory.current"}, &found.memory);
        look_upwards(top, group, {"pids.max", "pids.current"}, &found.threads);
      }
    } else if (has_controller(controllers, "memory")) {
      look_upwards(groups + "/" + controllers, group,
                   {"memory.limit_in_bytes", "memory.usage_in_bytes"}, &found.memory);
    } else if (has_controller(controllers, "pids")) {
      look_upwards(groups + "/" + controllers, group, {"pids.max", "pids.current"}, &found.threads);
    }
  }
  return found;
}

GroupLimits group_limits() { return group_limits("/proc/self/cgroup", "/sys/fs/cgroup"); }

}  // namespace ptc
