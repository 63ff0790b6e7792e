// What the control groups of this process let it have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ptc {

/// One limit, and what is used of it by all of the group that sets it. `group`: its directory.
struct GroupLimit {
  uint64_t limit = 0, used = 0;
  std::string group;
};

/// The least of the group that the process is in and of those around it, of version 2 or 1;
/// nullopt: none is set, or none can be seen (in a container the groups outside are not).
struct GroupLimits {
  std::optional<GroupLimit> memory;   // bytes, with the pages of tmpfs that the group touched first
  std::optional<GroupLimit> threads;  // systemd's TasksMax
};
GroupLimits group_limits();

/// The same with other roots than /proc/self/cgroup and /sys/fs/cgroup.
GroupLimits group_limits(const std::string& membership, const std::string& groups);

}  // namespace ptc
