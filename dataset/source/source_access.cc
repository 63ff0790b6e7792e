#include "dataset/source/source_access.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/ranges.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "dataset/source/caught.h"
#include "store/base/json.h"

namespace ptc {
namespace {

/// A right that the caller has not, as a system call would say it.
Error refused(std::string what) { return Error(Code::kPermissionDenied, std::move(what), EACCES); }

/// openat2(2) with O_PATH: nothing but a name is looked up. `path` is for messages.
Result<UniqueFd> find_from(int at, const std::string& name, const std::string& path, int flags,
                           uint64_t resolve) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags | O_PATH | O_CLOEXEC);
  how.resolve = resolve | RESOLVE_NO_MAGICLINKS;
  while (true) {
    const long fd = ::syscall(SYS_openat2, at, name.c_str(), &how, sizeof how);
    if (fd >= 0) return UniqueFd(static_cast<int>(fd));
    if (errno == EAGAIN || errno == EINTR) continue;  // a rename came between
    if (errno == ENOSYS)
      return make_error(Code::kUnavailable,
                        "{}: shards are opened by openat2(2), which Linux has since 5.6",
                        ptc::quoted(path));
    if (errno != ELOOP) return errno_error(errno, "opening " + ptc::quoted(path));
    return Error(
        Code::kInvalidArgument,
        fmt::format(
            "{} leads through a circle of symbolic links, or through one of the kernel's own "
            "(/proc/self/fd/…), which no data set may",
            ptc::quoted(path)),
        ELOOP);
  }
}

bool is_no_data(decltype(statfs::f_type) type) {
  constexpr std::array<uint32_t, 18> kNoData = {
      PROC_SUPER_MAGIC,   SYSFS_MAGIC,         DEBUGFS_MAGIC,      TRACEFS_MAGIC, SECURITYFS_MAGIC,
      CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, BPF_FS_MAGIC,       NSFS_MAGIC,    PIPEFS_MAGIC,
      SOCKFS_MAGIC,       ANON_INODE_FS_MAGIC, DEVPTS_SUPER_MAGIC, SELINUX_MAGIC, SMACK_MAGIC,
      PSTOREFS_MAGIC,     EFIVARFS_MAGIC,      BINFMTFS_MAGIC};
  return std::find(kNoData.begin(), kNoData.end(), static_cast<uint32_t>(type)) != kNoData.end();
}

/// `facts`: of what is opened as `fd`.
Result<> refuse_no_data(int fd, const struct stat& facts, const std::string& path) {
  thread_local dev_t data =
      0;  // known to be good: on a network's file system fstatfs(2) asks the server
  if (facts.st_dev == data) return ok();
  struct statfs system = {};
  if (::fstatfs(fd, &system) != 0) return errno_error(errno, ptc::quoted(path));
  if (!is_no_data(system.f_type)) {
    data = facts.st_dev;
    return ok();
  }
  return refused(fmt::format(
      "{} is none of a disk's files, but something that the kernel shows as a file (procfs, sysfs "
      "and the like), and no data",
      ptc::quoted(path)));
}

}  // namespace

SourceAccess::SourceAccess(User user, std::vector<std::string> roots)
    : anybody_(false), user_(std::move(user)), roots_(std::move(roots)) {
  for (std::string& root : roots_)
    while (root.ends_with('/')) root.pop_back();
}

Result<ActingAs> SourceAccess::act() const {
  return anybody_ ? Result<ActingAs>(ActingAs::itself()) : ActingAs::user(user_);
}

Result<UniqueFd> SourceAccess::find_beneath(const std::string& path, int flags) const {
  for (const std::string& root : roots_) {
    if (!path.starts_with(root) || (path.size() > root.size() && path[root.size()] != '/'))
      continue;
    PTC_TRY(const UniqueFd at,
            open_file(AT_FDCWD, root.empty() ? "/" : root, O_PATH | O_DIRECTORY));
    const size_t name = path.find_first_not_of('/', root.size());
    const std::string below = name == path.npos ? "." : path.substr(name);
    auto found = find_from(at.get(), below, path, flags, RESOLVE_BENEATH);
    if (found || found.error().errno_value() != EXDEV) return found;
    return refused(fmt::format(
        "{} leads out of {}, below which data sets of this mount lie (--data-root); so do "
        "symbolic links that begin with '/'",
        ptc::quoted(path), ptc::quoted(root)));
  }
  return refused(
      fmt::format("{} does not lie below {}, as all data sets of this mount must (--data-root)",
                  ptc::quoted(path), fmt::join(roots_, ", ")));
}

Result<SourceAccess::Found> SourceAccess::find(const std::string& path, int flags) const {
  PTC_TRY(UniqueFd fd,
          roots_.empty() ? find_from(AT_FDCWD, path, path, flags, 0) : find_beneath(path, flags));
  Found found{std::move(fd), {}};
  if (::fstat(found.fd.get(), &found.facts) != 0) return errno_error(errno, ptc::quoted(path));
  PTC_TRY(refuse_no_data(found.fd.get(), found.facts, path));
  return found;
}

Result<UniqueFd> SourceAccess::open(const std::string& path, Wanted wanted) const {
  PTC_TRY(const ActingAs as, act());
  const int folder = wanted == Wanted::kFolder ? O_DIRECTORY : 0;
  PTC_TRY(const Found found, find(path, folder));
  const mode_t mode = found.facts.st_mode;
  const bool good =
      (S_ISREG(mode) && wanted != Wanted::kFolder) || (S_ISDIR(mode) && wanted != Wanted::kFile);
  if (!good) return invalid_argument("{}: not a regular file", ptc::quoted(path));
  // The same inode, whatever has the name now; its permissions are looked at as with any other
  // open.
  auto opened = open_file(AT_FDCWD, fmt::format("/proc/self/fd/{}", found.fd.get()),
                          O_RDONLY | O_NONBLOCK | O_NOCTTY | folder);
  if (!opened) return errno_error(opened.error().errno_value(), "opening " + ptc::quoted(path));
  return opened;
}

Result<struct stat> SourceAccess::stat(const std::string& path) const {
  PTC_TRY(const ActingAs as, act());
  PTC_TRY(const Found found, find(path, 0));
  return found.facts;
}

bool SourceAccess::exists(const std::string& path) const { return stat(path).has_value(); }

bool SourceAccess::is_folder(const std::string& path) const {
  const auto facts = stat(path);
  return facts && S_ISDIR(facts.value().st_mode);
}

Result<std::string> SourceAccess::read_text(const std::string& path, size_t limit) const {
  PTC_TRY(const UniqueFd fd, open(path, Wanted::kFile));
  struct stat facts = {};
  if (::fstat(fd.get(), &facts) != 0) return errno_error(errno, ptc::quoted(path));
  if (static_cast<uint64_t>(facts.st_size) > limit)
    return invalid_argument("{} is longer than {} bytes, the most that is read", ptc::quoted(path),
                            limit);
  std::string text(static_cast<size_t>(facts.st_size), '\0');
  auto read = read_exactly(fd.get(), std::as_writable_bytes(std::span(text)), 0);
  if (!read) return std::move(read).error().with_context(ptc::quoted(path));
  return text;
}

Result<std::vector<FolderEntry>> SourceAccess::entries(const std::string& path,
                                                       const std::stop_token& stop) const {
  PTC_TRY(UniqueFd fd, open(path, Wanted::kFolder));
  std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd.get()), &::closedir);
  if (!stream) return errno_error(errno, ptc::quoted(path));
  (void)fd.release();  // the stream's
  std::vector<FolderEntry> entries;
  errno = 0;
  while (const dirent* entry = ::readdir(stream.get())) {
    PTC_TRY(unless_stopped(stop));
    const std::string_view name = entry->d_name;
    unsigned char type = entry->d_type;
    if (type == DT_UNKNOWN) {
      struct stat facts = {};
      if (::fstatat(::dirfd(stream.get()), entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) == 0)
        type = IFTODT(facts.st_mode);
    }
    if (name != "." && name != "..") entries.push_back({std::string(name), type});
    errno = 0;
  }
  if (errno != 0) return errno_error(errno, ptc::quoted(path));
  return entries;
}

}  // namespace ptc
