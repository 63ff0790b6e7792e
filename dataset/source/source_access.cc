#include "dataset/source/source_access.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/ranges.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "store/base/json.h"

namespace ptc {
namespace {

/// A right that the caller has not, as a system call would say it.
Error refused(std::string what) { return Error(Code::kPermissionDenied, std::move(what), EACCES); }

}  // namespace

SourceAccess::SourceAccess(User user, std::vector<std::string> roots)
    : anybody_(false), user_(std::move(user)), roots_(std::move(roots)) {
  for (std::string& root : roots_)
    while (root.ends_with('/')) root.pop_back();
}

Result<ActingAs> SourceAccess::act() const {
  return anybody_ ? Result<ActingAs>(ActingAs::itself()) : ActingAs::user(user_);
}

Result<UniqueFd> SourceAccess::open_beneath(const std::string& path, int flags) const {
  for (const std::string& root : roots_) {
    if (!path.starts_with(root) || (path.size() > root.size() && path[root.size()] != '/')) continue;
    PTC_TRY(const UniqueFd at, open_file(AT_FDCWD, root.empty() ? "/" : root, O_PATH | O_DIRECTORY));
    const size_t name = path.find_first_not_of('/', root.size());
    const std::string below = name == path.npos ? "." : path.substr(name);
    open_how how{};
    how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
    while (true) {
      const long fd = ::syscall(SYS_openat2, at.get(), below.c_str(), &how, sizeof how);
      if (fd >= 0) return UniqueFd(static_cast<int>(fd));
      if (errno == EAGAIN || errno == EINTR) continue;  // a rename came between
      if (errno != EXDEV) return errno_error(errno, "opening " + path);
      return refused(fmt::format("{} leads out of {}, below which data sets of this mount lie (--data-root); so do "
                                 "symbolic links that begin with '/'", ptc::quoted(path), ptc::quoted(root)));
    }
  }
  return refused(fmt::format("{} does not lie below {}, as all data sets of this mount must (--data-root)",
                             ptc::quoted(path), fmt::join(roots_, ", ")));
}

Result<UniqueFd> SourceAccess::open(const std::string& path, int flags) const {
  PTC_TRY(const ActingAs as, act());
  return roots_.empty() ? open_file(AT_FDCWD, path, flags) : open_beneath(path, flags);
}

Result<struct stat> SourceAccess::stat(const std::string& path) const {
  PTC_TRY(const ActingAs as, act());
  struct stat facts = {};
  if (roots_.empty()) {
    if (::stat(path.c_str(), &facts) != 0) return errno_error(errno, ptc::quoted(path));
    return facts;
  }
  PTC_TRY(const UniqueFd fd, open_beneath(path, O_PATH));
  if (::fstat(fd.get(), &facts) != 0) return errno_error(errno, ptc::quoted(path));
  return facts;
}

bool SourceAccess::exists(const std::string& path) const { return stat(path).has_value(); }

bool SourceAccess::is_folder(const std::string& path) const {
  const auto facts = stat(path);
  return facts && S_ISDIR(facts.value().st_mode);
}

Result<std::string> SourceAccess::read_text(const std::string& path, size_t limit) const {
  PTC_TRY(const UniqueFd fd, open(path, O_RDONLY | O_NONBLOCK));
  struct stat facts = {};
  if (::fstat(fd.get(), &facts) != 0) return errno_error(errno, ptc::quoted(path));
  if (!S_ISREG(facts.st_mode)) return invalid_argument("{} is no ordinary file", ptc::quoted(path));
  if (static_cast<uint64_t>(facts.st_size) > limit)
    return invalid_argument("{} is longer than {} bytes, the most that is read", ptc::quoted(path), limit);
  std::string text(static_cast<size_t>(facts.st_size), '\0');
  auto read = read_exactly(fd.get(), std::as_writable_bytes(std::span(text)), 0);
  if (!read) return std::move(read).error().with_context(ptc::quoted(path));
  return text;
}

Result<std::vector<FolderEntry>> SourceAccess::entries(const std::string& path) const {
  PTC_TRY(UniqueFd fd, open(path, O_RDONLY | O_DIRECTORY | O_NONBLOCK));
  std::unique_ptr<DIR, int (*)(DIR*)> stream(::fdopendir(fd.get()), &::closedir);
  if (!stream) return errno_error(errno, ptc::quoted(path));
  (void)fd.release();  // the stream's
  std::vector<FolderEntry> entries;
  errno = 0;
  while (const dirent* entry = ::readdir(stream.get())) {
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
