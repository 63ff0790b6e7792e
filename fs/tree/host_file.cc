#include "fs/tree/host_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>

#include "store/base/descriptors.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

union HandleSpace {
  file_handle handle;
  char bytes[sizeof(file_handle) + MAX_HANDLE_SZ];
};

/// Type and bytes of the handle, and the mount that it is of.
std::optional<std::pair<std::string, int>> handle_of(int fd) {
  HandleSpace space = {};
  space.handle.handle_bytes = MAX_HANDLE_SZ;
  int mount_id = 0;
  if (::name_to_handle_at(fd, "", &space.handle, &mount_id, AT_EMPTY_PATH) != 0)
    return std::nullopt;
  const char* begin = reinterpret_cast<const char*>(&space.handle.handle_type);
  return std::pair(std::string(begin, sizeof space.handle.handle_type + space.handle.handle_bytes),
                   mount_id);
}

UniqueFd open_handle(int mount, const std::string& handle) {
  HandleSpace space = {};
  space.handle.handle_bytes =
      static_cast<unsigned>(handle.size() - sizeof space.handle.handle_type);
  std::memcpy(&space.handle.handle_type, handle.data(), handle.size());
  return UniqueFd(::open_by_handle_at(mount, &space.handle, O_PATH | O_NOFOLLOW | O_CLOEXEC));
}

std::atomic<bool> descriptors_short{false};

}  // namespace

std::string HeldFd::proc_path() const { return fmt::format("/proc/self/fd/{}", fd_); }

void FileHandles::start(const std::string& directory) {
  UniqueFd mount(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!mount.valid()) return;
  const auto own = handle_of(mount.get());
  if (!own || !open_handle(mount.get(), own->first).valid()) return;
  mount_ = std::move(mount);
  mount_id_ = own->second;
}

HostFile::HostFile(const FileHandles& handles, UniqueFd fd) : handles_(&handles) {
  if (handles.enabled()) {
    auto handle = handle_of(fd.get());
    if (handle && handle->second == handles.mount_id_) {
      handle_ = std::move(handle->first);
      return;
    }
  }
  kept_ = std::make_shared<const UniqueFd>(std::move(fd));
}

HostFile::HostFile(HostFile&& other) noexcept { *this = std::move(other); }

HostFile& HostFile::operator=(HostFile&& other) noexcept {
  handles_ = other.handles_;
  handle_ = std::move(other.handle_);
  kept_ = std::move(other.kept_);
  pins_ = other.pins_;
  return *this;
}

HeldFd HostFile::hold() const {
  {
    MutexLock lock(mutex_);
    if (kept_ != nullptr) return HeldFd(kept_);
  }
  if (handle_.empty()) {
    errno = ESTALE;
    return HeldFd(UniqueFd());
  }
  return HeldFd(open_handle(handles_->mount_.get(), handle_));
}

bool HostFile::same_file(const HostFile& other) const { return handle_ == other.handle_; }

uint64_t HostFile::stamp() const {
  if (!handle_.empty()) return std::hash<std::string>()(handle_);
  const HeldFd fd = hold();
  struct statx facts = {};
  if (!fd.valid() || ::statx(fd.get(), "", AT_EMPTY_PATH, STATX_BTIME, &facts) != 0) return 0;
  return static_cast<uint64_t>(facts.stx_btime.tv_sec) * 1'000'000'000 + facts.stx_btime.tv_nsec;
}

void HostFile::pin(int fd) {
  MutexLock lock(mutex_);
  if (handle_.empty()) return;  // it keeps one anyway
  ++pins_;
  if (kept_ != nullptr) return;
  if (!check_descriptors(fd)) return;
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.valid()) kept_ = std::make_shared<const UniqueFd>(std::move(copy));
}

void HostFile::unpin() {
  MutexLock lock(mutex_);
  if (!handle_.empty() && --pins_ == 0) kept_.reset();
}

void HostFile::let_go() {
  std::shared_ptr<const UniqueFd> last;  // closed without the lock
  MutexLock lock(mutex_);
  last = std::move(kept_);
}

bool lies_in_memory(int fd) {
  struct statfs system = {};
  return ::fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
}

FsResult<int> descriptors_left(int any) {
  // The lowest number that is free is given: a high one says how many are in use. A few below it
  // may be free again, which something had that was open for a moment.
  constexpr int kFreeBelow = 3;
  static const int most = static_cast<int>(descriptor_limit() - reserved_descriptors());
  UniqueFd below[kFreeBelow];
  for (UniqueFd& one : below) one = UniqueFd(::fcntl(any, F_DUPFD_CLOEXEC, 0));
  const UniqueFd next(::fcntl(any, F_DUPFD_CLOEXEC, 0));
  const Errno error = next.valid() ? Errno{EMFILE} : last_errno();
  if (!next.valid() || next.get() >= most / 4 * 3) descriptors_short = true;
  if (!next.valid() || next.get() >= most) return error;
  return most - next.get();
}

FsResult<> check_descriptors(int any) {
  PTC_TRY(descriptors_left(any));
  return ok();
}

namespace {

struct Shares {
  Mutex mutex;
  std::unordered_map<uid_t, int> by_user PTC_GUARDED_BY(mutex);
};
Shares& shares() {
  static Shares all;
  return all;
}

}  // namespace

FsResult<DescriptorShareRef> DescriptorShare::take(uid_t user, int any) {
  PTC_TRY(const int left, descriptors_left(any));
  DescriptorShareRef share(new DescriptorShare(user));
  const auto taken = [&] {  // with this one
    MutexLock lock(shares().mutex);
    return shares().by_user[user];
  };
  const bool is_own = user == 0 || user == ::geteuid();  // whose mount it is
  if (!is_own && taken() > left) return Errno{EMFILE};
  return share;
}

DescriptorShare::DescriptorShare(uid_t user) : user_(user) {
  MutexLock lock(shares().mutex);
  ++shares().by_user[user];
}

DescriptorShare::~DescriptorShare() {
  MutexLock lock(shares().mutex);
  const auto found = shares().by_user.find(user_);
  if (--found->second == 0) shares().by_user.erase(found);
}

bool were_descriptors_short() { return descriptors_short.exchange(false); }

}  // namespace ptc
