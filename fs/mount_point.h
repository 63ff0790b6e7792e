// The directory that is mounted on: what may be wrong with it, said in words.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// One line of /proc/self/mountinfo.
struct MountEntry {
  std::string mount_point, type, source;
};
Result<std::vector<MountEntry>> mounted_file_systems();
/// What is mounted exactly on `path` (absolute, no symbolic links), the topmost; nullopt: nothing.
std::optional<MountEntry> mounted_on(const std::string& path);

/// 0, or why stat(2) fails; ENOTCONN also where the kernel still answers out of its caches for a daemon
/// that is gone.
int stat_alive(const std::string& path, struct stat& stat);

/// Absolute and without symbolic links, also where the mount on it is dead (then only its parent is
/// resolved). kNotFound when it does not exist.
Result<std::string> resolve_mount_point(const std::string& path);

/// Makes sure that `path` (resolved) can be mounted on: a directory, empty, nothing mounted there.
/// A dead ptcfs mount, left by a killed daemon, is taken away; true if that was so.
Result<bool> prepare_mount_point(const std::string& path);

/// Whether this user may give allow_other: root may, others where /etc/fuse.conf has user_allow_other.
Result<> check_allow_other();

/// "/mnt/ptc" → "mnt-ptc", as `systemd-escape --path` does.
std::string escape_path(const std::string& path);

}  // namespace ptc
