#include "store/image/lazy_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "store/base/mutex.h"

namespace ptc {
namespace {

/// So many files the clock looks at when another one is opened: what that takes does not grow with
/// how many are in use.
constexpr size_t kLookedAt = 32;

constexpr unsigned kIdentity = STATX_TYPE | STATX_INO | STATX_SIZE | STATX_BTIME;

/// A file system that knows no time of birth may be one that gives a file new inode numbers (FUSE):
/// then any is taken for it.
std::tuple<uint64_t, int64_t, uint32_t> identity_of(const struct statx& info) {
  if ((info.stx_mask & STATX_BTIME) == 0) return {};
  return {info.stx_ino, info.stx_btime.tv_sec, info.stx_btime.tv_nsec};
}

bool is_no_descriptor_left(int reason) { return reason == EMFILE || reason == ENFILE; }

}  // namespace

size_t LazyFiles::open_files() const {
  MutexLock lock(mutex_);
  return open_.size() + kept_;
}

void LazyFiles::add(LazyFile& file, UniqueFd fd) {
  UniqueFd closed[2];  // after the mutex is free: a close may take a while
  MutexLock lock(mutex_);
  file.fd_ = fd.release();
  file.position_ = open_.size();
  open_.push_back(&file);
  file.users_.fetch_add(LazyFile::kOpen + 1, std::memory_order_release);
  for (UniqueFd& one : closed)
    if (open_.size() > most_open_) one = close_next(kLookedAt);
  over_.store(open_.size() > most_open_, std::memory_order_relaxed);
}

void LazyFiles::close_unused(LazyFile& file) {
  UniqueFd closed;
  MutexLock lock(mutex_);
  if (open_.size() > most_open_) closed = try_close(file);
  over_.store(open_.size() > most_open_, std::memory_order_relaxed);
}

bool LazyFiles::close_any() {
  UniqueFd closed;
  MutexLock lock(mutex_);
  closed = close_next(2 * open_.size());  // the second time none has a second chance
  over_.store(open_.size() > most_open_, std::memory_order_relaxed);
  return closed.valid();
}

UniqueFd LazyFiles::close_next(size_t looked_at) {
  for (; looked_at > 0 && !open_.empty(); --looked_at) {
    if (hand_ >= open_.size()) hand_ = 0;
    LazyFile& file = *open_[hand_];
    if (!file.used_again_.exchange(false, std::memory_order_relaxed))
      if (UniqueFd closed = try_close(file); closed.valid())
        return closed;  // the last one is in its place now
    ++hand_;
  }
  return {};
}

UniqueFd LazyFiles::try_close(LazyFile& file) {
  uint32_t unused = LazyFile::kOpen;
  if (file.position_ == LazyFile::kNowhere ||
      !file.users_.compare_exchange_strong(unused, 0, std::memory_order_acq_rel))
    return {};
  take_out(file);
  return UniqueFd(std::exchange(file.fd_, -1));
}

void LazyFiles::take_out(LazyFile& file) {
  open_[file.position_] = open_.back();
  open_[file.position_]->position_ = file.position_;
  open_.pop_back();
  file.position_ = LazyFile::kNowhere;
}

bool LazyFiles::keep_open(LazyFile& file) {
  MutexLock lock(mutex_);
  if (file.kept_) return true;
  if (kept_ >= most_open_ / 2) return false;
  take_out(file);
  file.kept_ = true;
  ++kept_;
  over_.store(open_.size() > most_open_, std::memory_order_relaxed);
  return true;
}

void LazyFiles::forget(LazyFile& file) {
  UniqueFd closed;
  MutexLock lock(mutex_);
  if (file.position_ != LazyFile::kNowhere) take_out(file);
  if (file.kept_) --kept_;
  closed = UniqueFd(std::exchange(file.fd_, -1));
  over_.store(open_.size() > most_open_, std::memory_order_relaxed);
}

FileInUse::~FileInUse() {
  if (file_ != nullptr) file_->release();
}

LazyFile::LazyFile(LazyFilesRef files, std::string name, Access access, const struct statx& found)
    : files_(std::move(files)),
      access_(access),
      bytes_(found.stx_size),
      identity_(identity_of(found)),
      name_(std::move(name)) {}

LazyFile::~LazyFile() {
  files_->forget(*this);
  if (removed_) ::unlinkat(files_->directory(), name_.c_str(), 0);  // else a start sees to it
  if ((removed_ || name_.empty()) && files_->gone_) files_->gone_(bytes_);
}

Result<std::unique_ptr<LazyFile>> LazyFile::find(LazyFilesRef files, std::string name,
                                                 Access access) {
  struct statx info {};
  if (::statx(files->directory(), name.c_str(), AT_SYMLINK_NOFOLLOW, kIdentity, &info) != 0)
    return errno_error(errno, fmt::format("{} in {}", name, files->path()));
  if (!S_ISREG(info.stx_mode))
    return make_error(Code::kCorrupt, "{} in {} is not a regular file", name, files->path());
  return std::unique_ptr<LazyFile>(new LazyFile(std::move(files), std::move(name), access, info));
}

Result<FileInUse> LazyFile::use() {
  if ((users_.fetch_add(1, std::memory_order_acquire) & kOpen) != 0) {
    if (!used_again_.load(std::memory_order_relaxed))
      used_again_.store(true, std::memory_order_relaxed);
    return FileInUse(this, fd_);
  }
  users_.fetch_sub(1, std::memory_order_relaxed);
  MutexLock lock(mutex_);
  return open_and_use();
}

Result<FileInUse> LazyFile::open_and_use() {
  if ((users_.fetch_add(1, std::memory_order_acquire) & kOpen) != 0) return FileInUse(this, fd_);
  users_.fetch_sub(1, std::memory_order_relaxed);
  PTC_TRY(UniqueFd fd, open());
  const int lent = fd.get();
  files_->add(*this, std::move(fd));
  return FileInUse(this, lent);
}

Result<UniqueFd> LazyFile::open() const {
  const auto what = [&]() PTC_REQUIRES(mutex_) {
    return fmt::format("{} in {}", name_, files_->path());
  };
  const int how = access_ == Access::kWrite ? O_RDWR : O_RDONLY;
  for (;;) {
    UniqueFd fd(
        ::openat(files_->directory(), name_.c_str(), how | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!fd.valid()) {
      const int reason = errno;
      if (reason == EINTR || (is_no_descriptor_left(reason) && files_->close_any())) continue;
      if (reason == ENOENT || reason == ELOOP || reason == ENXIO)
        return make_error(Code::kCorrupt,
                          "{} was taken away or replaced from outside; take it from another copy",
                          what());
      return errno_error(reason, "opening " + what());
    }
    struct statx info {};
    if (::statx(fd.get(), "", AT_EMPTY_PATH, kIdentity, &info) != 0)
      return errno_error(errno, what());
    if (!S_ISREG(info.stx_mode) || identity_of(info) != identity_)
      return make_error(Code::kCorrupt,
                        "{} was replaced from outside by another file; take it from another copy",
                        what());
    return fd;
  }
}

void LazyFile::release() {
  if (users_.fetch_sub(1, std::memory_order_release) == (kOpen | 1) &&
      files_->over_.load(std::memory_order_relaxed))
    files_->close_unused(*this);
}

void LazyFile::open_as(UniqueFd fd) {
  MutexLock lock(mutex_);
  files_->add(*this, std::move(fd));
  release();
}

Result<> LazyFile::rename(const std::string& to) {
  MutexLock lock(mutex_);
  // The name that a removed one may have is to go with it.
  if (name_.empty() || removed_)
    return make_error(Code::kNotFound, "what shall be {} in {} was removed", to, files_->path());
  if (::renameat(files_->directory(), name_.c_str(), files_->directory(), to.c_str()) != 0)
    return errno_error(errno, fmt::format("renaming {} to {} in {}", name_, to, files_->path()));
  name_ = to;
  return ok();
}

Result<> LazyFile::remove() {
  MutexLock lock(mutex_);
  if (name_.empty() || removed_) return ok();
  auto use = open_and_use();
  const bool in_reach = use.has_value() || is_no_descriptor_left(use.error().errno_value());
  if (in_reach && (use.has_error() || !files_->keep_open(*this))) {
    const std::string to = name_ + std::string(kRemovedSuffix);
    if (::renameat(files_->directory(), name_.c_str(), files_->directory(), to.c_str()) == 0) {
      name_ = to;
      removed_ = true;
      return ok();
    }
    if (errno != ENOENT)
      return errno_error(errno, fmt::format("removing {} from {}", name_, files_->path()));
  } else if (::unlinkat(files_->directory(), name_.c_str(), 0) != 0 && errno != ENOENT) {
    return errno_error(errno, fmt::format("removing {} from {}", name_, files_->path()));
  }
  name_.clear();
  return ok();
}

}  // namespace ptc
