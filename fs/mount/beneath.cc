#include "fs/mount/beneath.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <mntent.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <sstream>

namespace ptc {
namespace {

/// Root's own cannot be made by users, to have root open what is theirs.
const char* attribute() {
  return ::geteuid() == 0 ? "trusted.ptcfs.beneath" : "user.ptcfs.beneath";
}

bool set_immutable(int fd, bool on) {
  int flags = 0;
  if (::ioctl(fd, FS_IOC_GETFLAGS, &flags) != 0) return false;
  const int wanted = on ? flags | FS_IMMUTABLE_FL : flags & ~FS_IMMUTABLE_FL;
  return wanted == flags || ::ioctl(fd, FS_IOC_SETFLAGS, &wanted) == 0;
}

const pid_t first_pid = ::getpid();  // before it goes into the background

bool is_service() {
  auto groups = read_text_file(AT_FDCWD, "/proc/self/cgroup", 1 << 16);
  const char* executed = ::secure_getenv("SYSTEMD_EXEC_PID");
  return groups &&
         is_lasting_service(groups.value(), executed != nullptr ? executed : "", first_pid);
}

bool is_immutable(int fd) {
  int flags = 0;
  return ::ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0 && (flags & FS_IMMUTABLE_FL) != 0;
}

}  // namespace

Result<Beneath> Beneath::open(const std::string& path) {
  PTC_TRY(auto fd, open_file(AT_FDCWD, path, O_RDONLY | O_DIRECTORY));
  return Beneath(std::move(fd));
}

std::vector<std::string> Beneath::names(size_t most) const {
  std::vector<std::string> found;
  const int fd = ::openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  std::unique_ptr<DIR, int (*)(DIR*)> stream(fd < 0 ? nullptr : ::fdopendir(fd), &::closedir);
  if (stream == nullptr) return found;
  while (const dirent* entry = ::readdir(stream.get())) {
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    if (found.size() == most) break;
    found.emplace_back(name);
  }
  return found;
}

Beneath::Closed Beneath::close() {
  if (is_immutable(fd_.get())) return Closed::kForAll;
  struct stat stat = {};
  if (::fstat(fd_.get(), &stat) != 0) return Closed::kNot;
  const std::string mode = fmt::format("{:o}", stat.st_mode & 07777);
  if (::fsetxattr(fd_.get(), attribute(), mode.data(), mode.size(), XATTR_CREATE) != 0 &&
      errno != EEXIST)
    return Closed::kNot;
  const bool all = set_immutable(fd_.get(), true);
  if (all) return Closed::kForAll;
  return ::fchmod(fd_.get(), stat.st_mode & 07777 & ~0222u) == 0 ? Closed::kForMost : Closed::kNot;
}

Result<> Beneath::give_back() {
  char text[16] = {};
  const ssize_t size = ::fgetxattr(fd_.get(), attribute(), text, sizeof text - 1);
  if (size <= 0) return ok();
  const auto mode = static_cast<mode_t>(std::strtoul(text, nullptr, 8) & 07777);
  if ((is_immutable(fd_.get()) && !set_immutable(fd_.get(), false)) ||
      ::fchmod(fd_.get(), mode) != 0 || ::fremovexattr(fd_.get(), attribute()) != 0) {
    return errno_error(errno, "making the directory beneath the mount writable again");
  }
  return ok();
}

bool is_lasting_service(std::string_view cgroups, std::string_view executed_pid, pid_t pid) {
  std::istringstream lines{std::string(cgroups)};
  for (std::string line; std::getline(lines, line);) {
    const std::string_view unit = std::string_view(line).substr(line.rfind('/') + 1);
    if (!unit.ends_with(".service") || unit.starts_with("run-"))
      continue;  // systemd-run's are of once
    if (unit.starts_with("ptcfs@") || executed_pid == std::to_string(pid)) return true;
  }
  return false;
}

bool is_lasting_mount_point(const std::string& path) {
  if (is_service()) return true;
  const std::unique_ptr<FILE, int (*)(FILE*)> table(::setmntent("/etc/fstab", "re"), &::endmntent);
  if (table == nullptr) return false;
  mntent entry = {};
  char buffer[4096];
  while (::getmntent_r(table.get(), &entry, buffer, sizeof buffer) != nullptr) {
    if (std::string_view(entry.mnt_type) == "fuse.ptcfs" &&
        std::filesystem::path(entry.mnt_dir).lexically_normal() == std::filesystem::path(path)) {
      return true;
    }
  }
  return false;
}

}  // namespace ptc
