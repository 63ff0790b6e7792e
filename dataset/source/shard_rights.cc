#include "dataset/source/shard_rights.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>

namespace ptc {
namespace {

constexpr const char* kAccessList = "system.posix_acl_access";
constexpr mode_t kForAll = 0044;

}  // namespace

ShardRights::ShardRights(gid_t group, mode_t mode, bool listed) {
  facts_.group = group;
  facts_.mode = mode & kForAll;
  if (listed && (mode & 0004) == 0) facts_.mode = 0;
  facts_.any = facts_.mode != kForAll;
}

void ShardRights::add(const ShardRights& other) {
  if (!other.facts_.any) return;
  if (!facts_.any) {
    facts_ = other.facts_;
    return;
  }
  facts_.mode &= other.facts_.mode;
  facts_.one_group =
      facts_.one_group && other.facts_.one_group && facts_.group == other.facts_.group;
}

mode_t ShardRights::mode() const {
  if (!facts_.any) return 0400 | kForAll;
  return facts_.one_group ? 0400 | facts_.mode : 0400;
}

std::optional<gid_t> ShardRights::group() const {
  if (!facts_.any || !facts_.one_group) return std::nullopt;
  return facts_.group;
}

Result<ShardRights> PathRights::of(int fd) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) return errno_error(errno, "fstat");
  ShardRights rights(facts.st_gid, facts.st_mode, ::fgetxattr(fd, kAccessList, nullptr, 0) > 0);
  // Where it lies, and not by which links it was named: behind a private link it is as public.
  std::array<char, PATH_MAX> buffer;
  const ssize_t bytes =
      ::readlink(fmt::format("/proc/self/fd/{}", fd).c_str(), buffer.data(), buffer.size());
  const std::string_view path(buffer.data(), bytes < 0 ? 0 : static_cast<size_t>(bytes));
  if (!path.starts_with('/') || path.size() == buffer.size()) {
    rights.add(ShardRights(0, 0, false));
    return rights;
  }
  MutexLock lock(mutex_);
  rights.add(of_directory(std::string(path.substr(0, path.rfind('/')))));
  return rights;
}

/// `path` without '/' at its end.
ShardRights PathRights::of_directory(const std::string& path) {
  if (const auto known = directories_.find(path); known != directories_.end()) return known->second;
  const std::string name = path.empty() ? "/" : path;
  ShardRights rights(0, 0, false);  // what cannot be seen lets nobody in
  struct stat facts;
  if (::stat(name.c_str(), &facts) == 0)
    rights = ShardRights(facts.st_gid, (facts.st_mode & 0011) << 2,
                         ::getxattr(name.c_str(), kAccessList, nullptr, 0) > 0);
  if (!path.empty()) rights.add(of_directory(path.substr(0, path.rfind('/'))));
  directories_.emplace(path, rights);
  return rights;
}

}  // namespace ptc
