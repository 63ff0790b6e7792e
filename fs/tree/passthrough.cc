#include "fs/tree/passthrough.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "store/base/file.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

// <linux/fuse.h> of the oldest system built on knows neither; the numbers are the kernel's ABI.
struct BackingMap {
  int32_t fd;
  uint32_t flags;
  uint64_t padding;
};
constexpr unsigned long kBackingOpen = _IOW(229, 1, BackingMap);
constexpr unsigned long kBackingClose = _IOW(229, 2, uint32_t);

}  // namespace

int Passthrough::start(int session_fd) {
  session_fd_ = session_fd;
  int probe = ::memfd_create("ptcfs-probe", MFD_CLOEXEC);
  if (probe < 0) return errno;
  BackingMap map{probe, 0, 0};
  int id = ::ioctl(session_fd_, kBackingOpen, &map);
  int error = id > 0 ? 0 : errno;
  ::close(probe);
  if (error != 0) return error;
  first_id_ = id;
  files_.fetch_add(1, std::memory_order_relaxed);
  close_backing(id);
  enabled_.store(true, std::memory_order_release);
  return 0;
}

int32_t Passthrough::open_backing(int fd) {
  if (!enabled() || fd < 0) return 0;
  // For each open the kernel opens it once more, with the flags of that. This one stays for all of
  // them until the last close: if it could write, a reader that opened the file beside its writer
  // would keep it open for writing.
  UniqueFd readable;
  if ((::fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY)
    readable = UniqueFd(::open(fmt::format("/proc/self/fd/{}", fd).c_str(), O_RDONLY | O_CLOEXEC));
  BackingMap map{readable.get() >= 0 ? readable.get() : fd, 0, 0};
  int id = ::ioctl(session_fd_, kBackingOpen, &map);
  if (id <= 0) return 0;
  files_.fetch_add(1, std::memory_order_relaxed);
  return id;
}

void Passthrough::close_backing(int32_t id) {
  uint32_t value = static_cast<uint32_t>(id);
  ::ioctl(session_fd_, kBackingClose, &value);
  files_.fetch_sub(1, std::memory_order_relaxed);
}

int32_t InodeMode::enter(Passthrough& passthrough, int fd) {
  MutexLock lock(mutex_);
  if (open_files_ == 0) backing_id_ = passthrough.open_backing(fd);
  ++open_files_;
  if (backing_id_ != 0) passthrough.count_open();
  return backing_id_;
}

void InodeMode::restore(Passthrough& passthrough, uint64_t open_files, int32_t backing_id) {
  MutexLock lock(mutex_);
  open_files_ += open_files;
  if (backing_id == 0 || backing_id_ != 0) return;
  backing_id_ = backing_id;
  passthrough.take_over();
}

void Passthrough::close_others(const std::unordered_set<int32_t>& ids) {
  constexpr int32_t kMost = 1 << 20;  // numbers go round; so far nobody gets
  for (int32_t id = 1; id < std::min(first_id_, kMost); ++id) {
    uint32_t value = static_cast<uint32_t>(id);
    if (!ids.contains(id)) ::ioctl(session_fd_, kBackingClose, &value);
  }
}

bool InodeMode::is_read_through() const {
  MutexLock lock(mutex_);
  return open_files_ > 0 && backing_id_ == 0;
}

void InodeMode::leave(Passthrough& passthrough) {
  MutexLock lock(mutex_);
  if (--open_files_ == 0 && backing_id_ != 0) {
    passthrough.close_backing(backing_id_);
    backing_id_ = 0;
  }
}

}  // namespace ptc
