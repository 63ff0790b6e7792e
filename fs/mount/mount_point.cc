#include "fs/mount/mount_point.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>

#include "store/base/file.h"
#include "store/base/shell_word.h"

namespace ptc {
namespace {

bool unmount_by_force(const std::string& path) {
  // By force: requests that the dead daemon never answered must end, or their callers wait for
  // ever.
  if (::umount2(path.c_str(), MNT_FORCE | UMOUNT_NOFOLLOW) == 0) return true;
  if (::umount2(path.c_str(), MNT_DETACH | UMOUNT_NOFOLLOW) == 0) return true;
  pid_t child = ::fork();
  if (child == 0) {
    ::execlp("fusermount3", "fusermount3", "-uzq", "--", path.c_str(), nullptr);
    ::_exit(127);
  }
  int status = 0;
  while (child > 0 && ::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

std::string unescaped_path(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size()) {
      out += static_cast<char>(std::strtol(std::string(text.substr(i + 1, 3)).c_str(), nullptr, 8));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

Result<std::vector<MountEntry>> mounted_file_systems() {
  PTC_TRY(auto text, read_text_file(AT_FDCWD, "/proc/self/mountinfo", 64 << 20));
  std::vector<MountEntry> entries;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    size_t separator = line.find(" - ");
    if (separator == std::string::npos) continue;
    MountEntry entry;
    std::istringstream left(line.substr(0, separator)), right(line.substr(separator + 3));
    std::string field;
    for (int i = 0; i < 5; ++i) left >> field;
    entry.mount_point = unescaped_path(field);
    right >> entry.type >> field;
    entry.source = unescaped_path(field);
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::optional<MountEntry> mounted_on(const std::string& path) {
  auto all = mounted_file_systems();
  if (!all) return std::nullopt;
  std::optional<MountEntry> found;
  for (MountEntry& entry : all.value()) {
    if (entry.mount_point == path) found = std::move(entry);
  }
  return found;
}

std::optional<MountEntry> mounted_around(const std::string& path) {
  auto all = mounted_file_systems();
  std::error_code error;
  const std::string resolved = std::filesystem::weakly_canonical(path, error).string();
  if (!all || error) return std::nullopt;
  std::optional<MountEntry> found;
  for (MountEntry& entry : all.value()) {
    const std::string& top = entry.mount_point;
    const bool around =
        resolved.starts_with(top) &&
        (resolved.size() == top.size() || top.ends_with('/') || resolved[top.size()] == '/');
    if (around && (!found || top.size() >= found->mount_point.size())) found = std::move(entry);
  }
  return found;
}

Result<std::string> resolve_mount_point(const std::string& path) {
  if (char* whole = ::realpath(path.c_str(), nullptr)) {
    std::string result = whole;
    std::free(whole);
    return result;
  }
  if (errno != ENOTCONN && errno != EACCES) {
    return errno_error(errno, fmt::format("mount point {}", path));
  }
  std::error_code error;
  auto absolute = std::filesystem::absolute(path, error).lexically_normal();
  if (!absolute.has_filename()) absolute = absolute.parent_path();
  auto parent = std::filesystem::canonical(absolute.parent_path(), error);
  if (error) return errno_error(error.value(), fmt::format("mount point {}", path));
  return (parent / absolute.filename()).string();
}

int stat_alive(const std::string& path, struct stat& stat) {
  struct statfs space = {};  // which is never cached
  bool alive = ::stat(path.c_str(), &stat) == 0 && ::statfs(path.c_str(), &space) == 0;
  return alive ? 0 : errno;
}

Result<bool> check_mount_point(const std::string& path) {
  struct stat stat = {};
  const int failed = stat_alive(path, stat);
  const auto mounted = mounted_on(path);
  if (failed == ENOTCONN) {
    if (!mounted || mounted->type != "fuse.ptcfs") {
      return make_error(Code::kBusy,
                        "{} is a dead mount, but not of ptcfs ({}); unmount it first: "
                        "umount -l {}",
                        path, mounted ? mounted->type : "unknown type", shell_word(path));
    }
    return true;
  }
  if (failed != 0) return errno_error(failed, fmt::format("mount point {}", path));
  if (!S_ISDIR(stat.st_mode)) return invalid_argument("mount point {} is not a directory", path);
  if (mounted && mounted->type == "fuse.ptcfs") {
    return make_error(Code::kBusy, "ptcfs is already mounted on {}; unmount it first: umount {}",
                      path, shell_word(path));
  }
  return false;
}

Result<> take_away_dead_mount(const std::string& path) {
  if (unmount_by_force(path)) return ok();
  return make_error(Code::kPermissionDenied,
                    "{} is a dead ptcfs mount of another user; "
                    "unmount it first: umount -l {}",
                    path, shell_word(path));
}

Result<> check_allow_other() {
  if (::geteuid() == 0) return ok();
  auto text = read_text_file(AT_FDCWD, "/etc/fuse.conf", 1 << 20);
  std::istringstream lines(text ? text.value() : "");
  for (std::string line, word; std::getline(lines, line);) {
    if (std::istringstream(line) >> word && word == "user_allow_other") return ok();
  }
  return make_error(
      Code::kPermissionDenied,
      "allow_other: only root may let other users in, unless /etc/fuse.conf has the line "
      "user_allow_other; let root add it, or leave the option out");
}

std::string escape_path(const std::string& path) {
  std::string out;
  for (const auto& part : std::filesystem::path(path).lexically_normal()) {
    if (part == "/" || part.empty() || part == ".") continue;
    if (!out.empty()) out += '-';
    for (unsigned char c : part.string()) {
      bool plain = std::isalnum(c) || c == ':' || c == '_' || (c == '.' && !out.empty());
      if (plain) {
        out += static_cast<char>(c);
      } else {
        out += fmt::format("\\x{:02x}", c);
      }
    }
  }
  return out.empty() ? "-" : out;
}

}  // namespace ptc
