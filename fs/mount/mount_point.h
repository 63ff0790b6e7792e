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
/// A path as mountinfo has it, with \040 for a space, as it is.
std::string unescaped_path(std::string_view text);
/// What is mounted exactly on `path` (absolute, no symbolic links), the topmost; nullopt: nothing.
std::optional<MountEntry> mounted_on(const std::string& path);
/// What `path` lies in, or would if it were made; nullopt: it cannot be told.
std::optional<MountEntry> mounted_around(const std::string& path);

/// 0, or why stat(2) fails; ENOTCONN also where the kernel still answers out of its caches for a
/// daemon that is gone.
int stat_alive(const std::string& path, struct stat& stat);

/// Absolute and without symbolic links, also where the mount on it is dead (then only its parent is
/// resolved). kNotFound when it does not exist.
Result<std::string> resolve_mount_point(const std::string& path);

/// Whether `path` (resolved) can be mounted on: a directory on which no ptcfs serves. True: there
/// is a dead mount, left by a killed daemon, and it can be taken away.
Result<bool> check_mount_point(const std::string& path);
/// Takes it away. Not before the next mount is about to follow: until then nobody writes beneath.
Result<> take_away_dead_mount(const std::string& path);

/// Whether this user may give allow_other: root may, others where /etc/fuse.conf has
/// user_allow_other.
Result<> check_allow_other();

/// "/mnt/ptc" → "mnt-ptc", as `systemd-escape --path` does.
std::string escape_path(const std::string& path);

}  // namespace ptc
