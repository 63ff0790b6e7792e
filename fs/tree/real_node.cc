#include "fs/tree/real_node.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <shared_mutex>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr std::string_view kUserXattr = "user.";

/// The owner's files are his from the start. A daemon that is not root can make only its own.
FsResult<> give_to(int dir_fd, const char* name, uid_t uid, gid_t gid) {
  if (::geteuid() != 0) return ok();
  if (::fchownat(dir_fd, name, uid, gid, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) != 0) {
    return last_errno();
  }
  return ok();
}

constexpr uint64_t kMostAtOnce = uint64_t{1} << 60;  // no file system has so much
constexpr uint64_t kPage = 4096;
constexpr uint64_t page_begin(uint64_t offset) { return offset / kPage * kPage; }
constexpr uint64_t page_end(uint64_t offset) { return page_begin(offset + kPage - 1); }

/// How much of [begin, end) has no page yet, at most: all from the first hole on.
uint64_t without_page(int fd, uint64_t begin, uint64_t end) {
  const off_t hole = ::lseek(fd, static_cast<off_t>(page_begin(begin)), SEEK_HOLE);
  const uint64_t first =
      hole < 0 ? page_begin(begin) : page_end(static_cast<uint64_t>(hole));  // the end has its page
  return first < page_end(end) ? page_end(end) - first : 0;
}

// Names and values, of one file: they lie in the kernel's memory.
constexpr int64_t kMostXattrBytes = 128 << 10;  // a value may have half of it

int64_t bytes_of(int fd) {
  struct stat stat = {};
  return ::fstat(fd, &stat) == 0 ? stat.st_blocks * 512 : 0;
}

QuotaAmount space_of(const HeldFd& fd) { return {bytes_of(fd.get()) + xattr_bytes(fd), 1}; }

}  // namespace

namespace {

using ListXattrs = ssize_t (*)(const char* path, char* names, size_t size);
using GetXattr = ssize_t (*)(const char* path, const char* name, void* value, size_t size);

int64_t bytes_of_xattrs(const char* path, ListXattrs list, GetXattr get) {
  const ssize_t size = list(path, nullptr, 0);
  if (size <= 0) return 0;
  std::string names(static_cast<size_t>(size) + 1024, '\0');
  const ssize_t got = list(path, names.data(), names.size());
  int64_t bytes = 0;
  for (ssize_t at = 0; at < got;) {
    const std::string_view name = names.c_str() + at;
    at += static_cast<ssize_t>(name.size()) + 1;
    if (!name.starts_with(kUserXattr)) continue;
    bytes += static_cast<int64_t>(name.size()) +
             std::max<ssize_t>(0, get(path, name.data(), nullptr, 0));
  }
  return bytes;
}

}  // namespace

int64_t xattr_bytes(const HeldFd& file) {
  return bytes_of_xattrs(file.proc_path().c_str(), ::listxattr, ::getxattr);
}
int64_t xattr_bytes(const std::string& path) {
  return bytes_of_xattrs(path.c_str(), ::llistxattr, ::lgetxattr);
}

template <class Change>
auto RealNode::counted(uint64_t most, const std::function<uint64_t()>& needed, Change change,
                       const std::function<void()>& done) -> decltype(change()) {
  if (!job_->limited()) {
    uncounted_.store(true, std::memory_order_relaxed);
    return change();
  }
  if (most > kMostAtOnce) return Errno{EDQUOT};
  Quotas& quotas = job_->tree().quotas();
  const Quotas::Account& job = job_->account();
  SharedLock gate(job_->space_gate());
  MutexLock own(space_mutex_);
  if (uncounted_.exchange(false)) note_freed(0);
  PTC_TRY(const HeldFd fd, held());
  struct stat before = {};
  if (::fstat(fd.get(), &before) != 0) return last_errno();
  auto reserved = static_cast<int64_t>(most);
  if (!quotas.reserve(job, before.st_uid, {reserved, 0})) {
    reserved = static_cast<int64_t>(needed());
    PTC_TRY(quotas.reserve_in_a_moment(job, before.st_uid, {reserved, 0}));
  }
  auto result = change();
  const int64_t grown =
      by_kernel_.load() ? 0 : bytes_of(fd.get()) - before.st_blocks * 512;  // else it is looked at
  quotas.add(job, before.st_uid, {grown - reserved, 0});
  if (result && done) done();
  return result;
}

void RealNode::note_taken(uint64_t begin, uint64_t end) {
  begin = page_begin(begin);
  end = page_end(end);
  const bool meets = begin <= taken_end_ && taken_begin_ <= end;
  taken_begin_ = meets ? std::min(taken_begin_, begin) : begin;
  taken_end_ = meets ? std::max(taken_end_, end) : end;
}

void RealNode::note_freed(uint64_t begin) { taken_end_ = std::min(taken_end_, page_end(begin)); }

uint64_t RealNode::lacking(int fd, uint64_t begin, uint64_t end) const {
  if (taken_begin_ <= begin && begin < taken_end_) begin = taken_end_;
  return begin < end ? without_page(fd, begin, end) : 0;
}

FsResult<> RealNode::counted_new(const Caller& caller, const std::function<FsResult<>()>& make) {
  if (!job_->limited()) return make();
  Quotas& quotas = job_->tree().quotas();
  SharedLock gate(job_->space_gate());
  const uid_t user = ::geteuid() == 0 ? caller.uid : ::geteuid();
  PTC_TRY(quotas.reserve_in_a_moment(job_->account(), user, {0, 1}));
  const FsResult<> made = make();
  if (!made) quotas.add(job_->account(), user, {0, -1});
  return made;
}

void RealNode::limit_space(struct statvfs& space) const {
  const auto of_job = job_->tree().quotas().space_of(job_->account());
  if (!of_job || space.f_frsize == 0) return;
  const auto limit = [](uint64_t most, int64_t used, fsblkcnt_t& all, fsblkcnt_t& free,
                        fsblkcnt_t& available) {
    const auto taken = static_cast<uint64_t>(std::max<int64_t>(0, used));
    all = std::min<fsblkcnt_t>(all, most);
    free = std::min<fsblkcnt_t>(free, most - std::min(most, taken));
    available = std::min(available, free);
  };
  if (of_job->limit.bytes != UINT64_MAX)
    limit(of_job->limit.bytes / space.f_frsize,
          of_job->used.bytes / static_cast<int64_t>(space.f_frsize), space.f_blocks, space.f_bfree,
          space.f_bavail);
  if (of_job->limit.files != UINT64_MAX)
    limit(of_job->limit.files, of_job->used.files, space.f_files, space.f_ffree, space.f_favail);
}

void RealNode::note_unlinked() {
  const HeldFd fd = file_.hold();
  struct stat stat = {};
  if (!fd.valid() || ::fstat(fd.get(), &stat) != 0 || stat.st_nlink > 0 || nameless_.exchange(true))
    return;
  MutexLock known(known_mutex_);
  job_->tree().quotas().know_file(
      job_->account(), this, [this] { return look(); }, false);
  job_->tree().quotas().note_nameless(job_->account(), this, stat.st_uid);
}

Quotas::Seen RealNode::look() const {
  MutexLock lock(open_mutex_);
  const HeldFd held =
      open_.empty() ? file_.hold() : HeldFd(UniqueFd(::fcntl(open_.back(), F_DUPFD_CLOEXEC, 0)));
  struct stat stat = {};
  if (held.valid() && ::fstat(held.get(), &stat) == 0)
    seen_ = {.user = stat.st_uid, .amount = space_of(held), .named = stat.st_nlink > 0};
  return seen_;
}

void RealNode::note_open(int fd, bool by_kernel) {
  MutexLock known(known_mutex_);
  {
    MutexLock lock(open_mutex_);
    open_.push_back(fd);
  }
  if (by_kernel) by_kernel_ = true;
  job_->tree().quotas().know_file(
      job_->account(), this, [this] { return look(); }, by_kernel);
}

void RealNode::note_closing(int fd) {
  MutexLock known(known_mutex_);
  const auto is_last = [&] {
    MutexLock lock(open_mutex_);
    return open_.size() == 1;
  };
  // Without a name it may live on: in it, for example, is somebody's working directory.
  const bool last = is_last();
  if (last && !nameless_.load()) job_->tree().quotas().forget_file(job_->account(), this);
  if (last) by_kernel_ = false;
  MutexLock lock(open_mutex_);
  open_.erase(std::find(open_.begin(), open_.end(), fd));
}

FsResult<> RealNode::take_away(const HeldFd& directory, const std::string& name,
                               const std::function<FsResult<>()>& call) {
  if (!job_->tree().handles().enabled() && !job_->limited()) return call();
  const UniqueFd child(::openat(directory.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  struct stat stat = {};
  if (!child.valid() || ::fstat(child.get(), &stat) != 0) return call();
  const auto known = std::dynamic_pointer_cast<RealNode>(job_->tree().table().find(key_of(stat)));
  if (known != nullptr) known->file_.pin(child.get());
  FsResult<> done = call();
  // On an error, too, it may have lost its last name: what follows a rename may fail.
  const bool named = ::fstat(child.get(), &stat) == 0 && stat.st_nlink > 0;
  if (!named && S_ISREG(stat.st_mode)) job_->job().note_gone(stat.st_ino);
  if (known == nullptr) return done;
  if (named) known->file_.unpin();
  if ((done || !named) && job_->limited()) known->note_unlinked();
  return done;
}

RealNode::~RealNode() {
  if (!nameless_.load()) return;
  SharedLock gate(job_->space_gate());
  job_->tree().quotas().forget_file(job_->account(), this);
}

/// An open real file. With passthrough the kernel reads and writes by itself, and only the rest
/// (truncate, fallocate, fsync, seek) comes here.
class RealHandle : public Handle {
 public:
  RealHandle(std::shared_ptr<RealNode> node, UniqueFd fd, DescriptorShareRef share, bool writable)
      : node_(std::move(node)), share_(std::move(share)), fd_(std::move(fd)), writable_(writable) {
    // What the kernel writes by itself nobody counts.
    const int backing = node_->job().limited() ? -1 : fd_.get();
    hold_.emplace(node_->job().tree().passthrough(), node_->mode_, backing);
    if (writable_) node_->writers_.fetch_add(1);
    node_->note_open(fd_.get(), writable_ && backing_id() != 0);
  }
  ~RealHandle() override {
    hold_.reset();
    node_->note_closing(fd_.get());
    try {
      UniqueFd name;
      if (writable_)
        name = UniqueFd(
            ::open(fmt::format("/proc/self/fd/{}", fd_.get()).c_str(), O_PATH | O_CLOEXEC));
      if (writable_) node_->job().job().note_writer(node_->inode_);
      fd_.reset();
      if (writable_ && node_->writers_.fetch_sub(1) == 1) node_->note_written(name.get());
    } catch (const std::exception&) {  // no memory: then it is hashed at the commit
    }
  }

  int32_t backing_id() const { return hold_->backing_id(); }

  FsResult<size_t> read(std::span<std::byte> out, uint64_t offset, const Interrupted&) override {
    size_t done = 0;
    while (done < out.size()) {
      ssize_t got = ::pread(fd_.get(), out.data() + done, out.size() - done,
                            static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return last_errno();
      if (got == 0) break;
      done += static_cast<size_t>(got);
    }
    return done;
  }
  FsResult<size_t> write(std::span<const std::byte> data, uint64_t offset) override {
    const uint64_t end = offset + data.size();
    return node_->counted(
        page_end(end) - page_begin(offset), [&] { return node_->lacking(fd_.get(), offset, end); },
        [&] { return write_now(data, offset); });
  }
  FsResult<> sync(bool data_only) override {
    if ((data_only ? ::fdatasync(fd_.get()) : ::fsync(fd_.get())) != 0) return last_errno();
    return ok();
  }
  FsResult<> truncate(uint64_t size) override {
    return node_->counted(
        0, [] { return uint64_t{0}; },
        [&]() -> FsResult<> {
          if (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) return last_errno();
          return ok();
        },
        [&] { node_->note_freed(size); });
  }
  FsResult<> allocate(int mode, off_t offset, off_t length) override {
    const bool frees = (mode & FALLOC_FL_PUNCH_HOLE) != 0;
    const auto begin = static_cast<uint64_t>(offset), end = begin + static_cast<uint64_t>(length);
    const bool takes = (mode & ~FALLOC_FL_KEEP_SIZE) == 0;
    const uint64_t most = frees ? 0 : page_end(end) - page_begin(begin);
    return node_->counted(
        most, [&] { return frees ? 0 : node_->lacking(fd_.get(), begin, end); },
        [&]() -> FsResult<> {
          ImageStore& files = node_->job().tree().store().images();
          if (takes) {
            if (int error = files.take_space(fd_.get(), mode, begin, end); error != 0)
              return Errno{error};
          } else if (::fallocate(fd_.get(), mode, offset, length) != 0) {
            return last_errno();
          }
          return ok();
        },
        [&] {
          if (takes) node_->note_taken(begin, end);
          else node_->note_freed(begin);
        });
  }
  FsResult<off_t> seek(off_t offset, int whence, uint64_t) override {
    off_t result = ::lseek(fd_.get(), offset, whence);
    if (result < 0) return last_errno();
    return result;
  }
  FsResult<Pages> pages(const Caller& caller) override {
    if (backing_id() != 0) return Errno{lies_in_memory(fd_.get()) ? EALREADY : EOPNOTSUPP};
    const int flags = ::fcntl(fd_.get(), F_GETFL) & O_ACCMODE;
    // What is written so, or kept after it was removed, nobody counts; and nothing is mapped that
    // cannot be read.
    if (flags == O_WRONLY || node_->job().limited()) return Errno{EOPNOTSUPP};
    PTC_TRY(check_descriptors(fd_.get()));
    return node_->job().tree().page_files().of(fd_.get(), flags, caller);
  }

 private:
  FsResult<size_t> write_now(std::span<const std::byte> data, uint64_t offset) {
    size_t done = 0;
    while (done < data.size()) {
      ssize_t put = ::pwrite(fd_.get(), data.data() + done, data.size() - done,
                             static_cast<off_t>(offset + done));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0 && done == 0) return last_errno();
      if (put <= 0) break;
      done += static_cast<size_t>(put);
    }
    return done;
  }

  const std::shared_ptr<RealNode> node_;
  const DescriptorShareRef share_;
  UniqueFd fd_;
  const bool writable_;
  std::optional<InodeModeHold> hold_;
};

RealNode::RealNode(JobViewRef job, HostFile file, const struct stat& stat)
    : Node(key_of(stat)), job_(std::move(job)), file_(std::move(file)), inode_(stat.st_ino) {}
RealNode::RealNode(JobViewRef job, HostFile file, std::string key)
    : Node(std::move(key)), job_(std::move(job)), file_(std::move(file)), inode_(0) {}

FsResult<HeldFd> RealNode::held() const {
  HeldFd fd = file_.hold();
  if (!fd.valid()) return last_errno();
  return fd;
}

std::string RealNode::key_of(const struct stat& stat) {
  return fmt::format("r{:x}:{:x}", stat.st_dev, stat.st_ino);
}

void RealNode::note_written(int fd) const {
  auto path_of = [](int of) {
    char path[PATH_MAX];
    ssize_t size = ::readlink(fmt::format("/proc/self/fd/{}", of).c_str(), path, sizeof(path));
    return std::string(path, size > 0 ? static_cast<size_t>(size) : 0);
  };
  struct stat stat = {};
  if (::fstat(fd, &stat) != 0 || stat.st_nlink == 0) return;
  std::string path = path_of(fd);
  std::string incoming = path_of(job_->incoming_fd().get()) + "/";
  if (!path.starts_with(incoming)) return;
  if (S_ISREG(stat.st_mode)) job_->job().note_closed(path.substr(incoming.size()));
  else if (S_ISDIR(stat.st_mode)) job_->job().note_moved_in(path.substr(incoming.size()));
}

UniqueFd RealNode::note_moved(const HeldFd& directory, const std::string& name) const {
  UniqueFd moved(::openat(directory.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  struct stat stat = {};
  if (!moved.valid() || ::fstat(moved.get(), &stat) != 0) return moved;
  NodeTable& table = job_->tree().table();
  if (const NodeRef node = table.find(key_of(stat))) table.moved(*node, *this, name);
  return moved;
}

bool RealNode::let_go_if_removed() {
  struct stat stat = {};
  struct statfs system = {};
  const HeldFd fd = file_.hold();
  if (!fd.valid()) return errno == ESTALE;
  if (::fstat(fd.get(), &stat) != 0 || stat.st_nlink > 0) return false;
  if (::fstatfs(fd.get(), &system) == 0 && system.f_type == TMPFS_MAGIC) file_.let_go();
  return true;
}

FsResult<struct stat> RealNode::attributes() {
  PTC_TRY(const HeldFd fd, held());
  struct stat stat = {};
  if (::fstat(fd.get(), &stat) != 0) return last_errno();
  return stat;
}

FsResult<> RealNode::drop_suid(const HeldFd& fd, const Caller& caller) {
  // To change the owner into who he is does nearly all that: mode bits and time of the change.
  if (::fchownat(fd.get(), "", -1, -1, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0)
    return last_errno();
  // What it leaves, because root may keep it: S_ISGID of a file that its group cannot execute.
  struct stat stat = {};
  if (caller.uid == 0 || ::fstat(fd.get(), &stat) != 0 || !S_ISREG(stat.st_mode)) return ok();
  if ((stat.st_mode & S_ISGID) == 0 || caller.is_in(stat.st_gid)) return ok();
  if (::chmod(fd.proc_path().c_str(), stat.st_mode & 07777 & ~S_ISGID) != 0) return last_errno();
  return ok();
}

FsResult<> RealNode::set_attributes(const AttributeChange& change, Handle* handle) {
  if (read_only_.load()) return Errno{EROFS};
  PTC_TRY(const HeldFd fd, held());
  if (change.drops_suid) {
    PTC_TRY(drop_suid(fd, *change.drops_suid));
  }
  if (change.uid || change.gid) {
    struct stat before = {};
    const bool counts = change.uid && job_->limited() && ::fstat(fd.get(), &before) == 0;
    std::optional<SharedLock> gate;
    if (counts) gate.emplace(job_->space_gate());
    if (::fchownat(fd.get(), "", change.uid.value_or(-1), change.gid.value_or(-1),
                   AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW) != 0) {
      return last_errno();
    }
    if (counts) {
      const QuotaAmount space = space_of(fd);
      job_->tree().quotas().add(job_->account(), before.st_uid, {-space.bytes, -space.files});
      job_->tree().quotas().add(job_->account(), *change.uid, space);
    }
  }
  if (change.mode && ::chmod(fd.proc_path().c_str(), *change.mode & 07777) != 0)
    return last_errno();
  if (change.size) {
    if (handle != nullptr) {
      PTC_TRY(handle->truncate(*change.size));
    } else {
      PTC_TRY(job_->gate().unless_sealed({key()}, [&]() -> FsResult<> {
        if (read_only_.load()) return Errno{EROFS};  // since this waits
        return counted(
            0, [] { return uint64_t{0}; },
            [&]() -> FsResult<> {
              job_->job().note_writer(inode_);
              if (::truncate(fd.proc_path().c_str(), static_cast<off_t>(*change.size)) != 0)
                return last_errno();
              job_->job().note_writer(inode_);
              return ok();
            },
            [&] { note_freed(*change.size); });
      }));
    }
  }
  if (change.access_time || change.modify_time) {
    const timespec omit{0, UTIME_OMIT};
    timespec times[2] = {change.access_time.value_or(omit), change.modify_time.value_or(omit)};
    if (::utimensat(fd.get(), "", times, AT_EMPTY_PATH) != 0) return last_errno();
  }
  return ok();
}

FsResult<Opened> RealNode::opened(UniqueFd fd, DescriptorShareRef share, int flags) {
  if ((flags & O_ACCMODE) != O_RDONLY) {
    job_->tree().store().images().expect_writing();
    job_->job().note_writer(inode_);
  } else if ((flags & O_TRUNC) != 0) {
    job_->job().note_writer(inode_);
  }
  auto self = std::static_pointer_cast<RealNode>(shared_from_this());
  auto handle = std::make_unique<RealHandle>(std::move(self), std::move(fd), std::move(share),
                                             (flags & O_ACCMODE) != O_RDONLY);
  int32_t backing_id = handle->backing_id();
  return Opened{std::move(handle), IoMode::kCached, backing_id};
}

FsResult<Opened> RealNode::open(const Caller& caller, int flags) {
  int host_flags = (flags & (O_ACCMODE | O_TRUNC | O_SYNC | O_DSYNC)) | O_NONBLOCK | O_CLOEXEC;
  const bool reads = (flags & O_ACCMODE) == O_RDONLY && (flags & O_TRUNC) == 0;
  auto open_now = [&]() -> FsResult<Opened> {
    if (!reads && read_only_.load()) return Errno{EROFS};  // perhaps since this waits
    PTC_TRY(const HeldFd path, held());
    PTC_TRY(auto share, job_->tree().take_descriptor(caller.uid));
    UniqueFd fd;
    const auto open_it = [&]() -> FsResult<> {
      fd = UniqueFd(::open(path.proc_path().c_str(), host_flags));
      struct stat stat = {};
      // Just now a lease shows whether somebody writes the file (HashQueue): that is waited for.
      if (!fd.valid() && errno == EWOULDBLOCK && ::fstat(path.get(), &stat) == 0 &&
          S_ISREG(stat.st_mode))
        fd = UniqueFd(::open(path.proc_path().c_str(), host_flags & ~O_NONBLOCK));
      return ok();
    };
    if ((flags & O_TRUNC) != 0) {
      job_->job().note_writer(inode_);
      PTC_TRY(counted(
          0, [] { return uint64_t{0}; }, open_it, [&] { note_freed(0); }));
    } else {
      PTC_TRY(open_it());
    }
    if (!fd.valid()) return last_errno();
    if ((flags & O_TRUNC) != 0 && caller.uid != 0) {
      PTC_TRY(drop_suid(path, caller));
    }
    return opened(std::move(fd), std::move(share), flags);
  };
  if (reads) return open_now();
  if (read_only_.load()) return Errno{EROFS};
  return job_->gate().unless_sealed({key()}, open_now);
}

FsResult<std::string> RealNode::read_link() {
  PTC_TRY(const HeldFd fd, held());
  char target[PATH_MAX];
  ssize_t size = ::readlinkat(fd.get(), "", target, sizeof(target));
  if (size < 0) return last_errno();
  return std::string(target, static_cast<size_t>(size));
}

FsResult<NodeRef> RealNode::lookup(const std::string& name) {
  PTC_TRY(const HeldFd directory, held());
  return find(directory, name);
}

FsResult<NodeRef> RealNode::find(const HeldFd& directory, const std::string& name) {
  UniqueFd child(::openat(directory.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (!child.valid()) return last_errno();
  struct stat stat = {};
  if (::fstat(child.get(), &stat) != 0) return last_errno();
  NodeTable& table = job_->tree().table();
  const NodeRef known = table.find(key_of(stat));
  auto* real = dynamic_cast<RealNode*>(known.get());
  if (known != nullptr && (real == nullptr || !job_->tree().handles().enabled())) return known;
  if (!job_->tree().handles().enabled()) {
    PTC_TRY(check_descriptors(child.get()));
  }
  HostFile file(job_->tree().handles(), std::move(child));
  if (real != nullptr && real->file_.same_file(file)) return known;
  if (real != nullptr) table.displace(*real);  // its file is gone, and this one has got its number
  return table.intern(std::make_shared<RealNode>(job_, std::move(file), stat));
}

FsResult<std::vector<DirEntry>> RealNode::list() {
  PTC_TRY(const HeldFd directory, held());
  int fd = ::openat(directory.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return last_errno();
  DIR* stream = ::fdopendir(fd);
  if (stream == nullptr) {
    ::close(fd);
    return Errno{ENOMEM};
  }
  std::unique_ptr<DIR, int (*)(DIR*)> owner(stream, &::closedir);
  std::vector<DirEntry> entries;
  errno = 0;
  while (dirent* entry = ::readdir(stream)) {
    std::string_view name = entry->d_name;
    if (name != "." && name != "..") {
      entries.push_back(
          {std::string(name), static_cast<mode_t>(DTTOIF(entry->d_type)), entry->d_ino});
    }
    errno = 0;
  }
  if (errno != 0) return last_errno();
  return entries;
}

FsResult<> RealNode::change(const std::function<bool()>& call) {
  return job_->gate().unless_sealed({key()}, [&]() -> FsResult<> {
    if (!call()) return last_errno();
    return ok();
  });
}

gid_t RealNode::group_for(const HeldFd& directory, const Caller& caller) {
  struct stat stat = {};
  bool inherits = ::fstat(directory.get(), &stat) == 0 && (stat.st_mode & S_ISGID) != 0;
  return inherits ? stat.st_gid : caller.gid;
}

FsResult<Created> RealNode::create(const Caller& caller, const std::string& name, mode_t mode,
                                   int flags) {
  int host_flags = (flags & (O_ACCMODE | O_SYNC | O_DSYNC)) | O_CREAT | O_EXCL | O_CLOEXEC;
  PTC_TRY(const HeldFd directory, held());
  PTC_TRY(auto share, job_->tree().take_descriptor(caller.uid));
  UniqueFd fd;
  PTC_TRY(counted_new(caller, [&] {
    return change([&] {
      fd = UniqueFd(::openat(directory.get(), name.c_str(), host_flags, mode & 07777));
      // Somebody else was quicker: ESTALE makes the kernel look again and check permissions.
      if (!fd.valid() && errno == EEXIST && (flags & O_EXCL) == 0) errno = ESTALE;
      return fd.valid();
    });
  }));
  PTC_TRY(give_to(fd.get(), "", caller.uid, group_for(directory, caller)));
  if ((mode & (S_ISUID | S_ISGID)) != 0) ::fchmod(fd.get(), mode & 07777);  // chown drops them
  PTC_TRY(auto node, find(directory, name));
  auto real = std::dynamic_pointer_cast<RealNode>(node);
  PTC_TRY(auto opened, real->opened(std::move(fd), std::move(share), flags));
  return Created{std::move(node), std::move(opened)};
}

FsResult<NodeRef> RealNode::adopt_new(const HeldFd& directory, const Caller& caller,
                                      const std::string& name, mode_t mode) {
  PTC_TRY(give_to(directory.get(), name.c_str(), caller.uid, group_for(directory, caller)));
  PTC_TRY(auto node, find(directory, name));
  if (!S_ISDIR(mode) && !S_ISLNK(mode) && (mode & (S_ISUID | S_ISGID)) != 0) {
    PTC_TRY(const HeldFd made, static_cast<RealNode&>(*node).held());
    ::chmod(made.proc_path().c_str(), mode & 07777);
  }
  return node;
}

FsResult<NodeRef> RealNode::make_directory(const Caller& caller, const std::string& name,
                                           mode_t mode) {
  PTC_TRY(const HeldFd directory, held());
  PTC_TRY(counted_new(caller, [&] {
    return change([&] { return ::mkdirat(directory.get(), name.c_str(), mode & 07777) == 0; });
  }));
  return adopt_new(directory, caller, name, S_IFDIR | mode);
}

FsResult<NodeRef> RealNode::make_node(const Caller& caller, const std::string& name, mode_t mode) {
  if (!S_ISREG(mode) && !S_ISFIFO(mode) && !S_ISSOCK(mode)) return Errno{EPERM};  // mounted nodev
  PTC_TRY(const HeldFd directory, held());
  PTC_TRY(counted_new(caller, [&] {
    return change([&] { return ::mknodat(directory.get(), name.c_str(), mode, 0) == 0; });
  }));
  return adopt_new(directory, caller, name, mode);
}

FsResult<NodeRef> RealNode::make_symlink(const Caller& caller, const std::string& name,
                                         const std::string& target) {
  PTC_TRY(const HeldFd directory, held());
  PTC_TRY(counted_new(caller, [&] {
    return change([&] { return ::symlinkat(target.c_str(), directory.get(), name.c_str()) == 0; });
  }));
  return adopt_new(directory, caller, name, S_IFLNK);
}

FsResult<NodeRef> RealNode::make_link(Node& node, const std::string& name) {
  auto* real = dynamic_cast<RealNode*>(&node);
  if (real == nullptr || real->read_only_.load()) return Errno{EPERM};
  if (real->job_ != job_) return Errno{EXDEV};
  PTC_TRY(const HeldFd directory, held());
  PTC_TRY(const HeldFd file, real->held());
  // A file that is being committed must not get a second name that it could be written through.
  return job_->gate().unless_sealed({key(), real->key()}, [&]() -> FsResult<NodeRef> {
    if (real->read_only_.load()) return Errno{EPERM};  // since this waits
    if (::linkat(AT_FDCWD, file.proc_path().c_str(), directory.get(), name.c_str(),
                 AT_SYMLINK_FOLLOW) != 0) {
      return last_errno();
    }
    const UniqueFd linked(::openat(directory.get(), name.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
    if (linked.valid()) note_written(linked.get());
    return node.shared_from_this();
  });
}

FsResult<> RealNode::unlink(const std::string& name) { return remove(name, 0); }
FsResult<> RealNode::remove_directory(const std::string& name) {
  return remove(name, AT_REMOVEDIR);
}

FsResult<> RealNode::remove(const std::string& name, int flags) {
  PTC_TRY(const HeldFd directory, held());
  return take_away(directory, name, [&] {
    return change([&] { return ::unlinkat(directory.get(), name.c_str(), flags) == 0; });
  });
}

FsResult<> RealNode::sync_directory() {
  PTC_TRY(const HeldFd directory, held());
  UniqueFd fd(::openat(directory.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || ::fsync(fd.get()) != 0) return last_errno();
  return ok();
}

FsResult<std::string> RealNode::get_xattr(const std::string& name) {
  if (!name.starts_with(kUserXattr)) return Errno{EOPNOTSUPP};
  PTC_TRY(const HeldFd fd, held());
  std::string value(XATTR_SIZE_MAX, '\0');
  ssize_t size = ::getxattr(fd.proc_path().c_str(), name.c_str(), value.data(), value.size());
  if (size < 0) return last_errno();
  value.resize(static_cast<size_t>(size));
  return value;
}

FsResult<std::vector<std::string>> RealNode::list_xattrs() {
  PTC_TRY(const HeldFd fd, held());
  std::string names(XATTR_LIST_MAX, '\0');
  ssize_t size = ::listxattr(fd.proc_path().c_str(), names.data(), names.size());
  if (size < 0) return last_errno();
  std::vector<std::string> result;
  for (size_t at = 0; at < static_cast<size_t>(size);) {
    std::string name = names.c_str() + at;
    at += name.size() + 1;
    if (name.starts_with(kUserXattr)) result.push_back(std::move(name));
  }
  return result;
}

FsResult<> RealNode::set_xattr(const std::string& name, std::string_view value, int flags) {
  if (!name.starts_with(kUserXattr)) return Errno{EOPNOTSUPP};
  if (read_only_.load()) return Errno{EROFS};
  PTC_TRY(const HeldFd fd, held());
  const std::string path = fd.proc_path();
  return change_xattrs(fd, static_cast<int64_t>(name.size() + value.size()), [&]() -> FsResult<> {
    const ssize_t old = ::getxattr(path.c_str(), name.c_str(), nullptr, 0);
    const int64_t others =
        xattr_bytes(fd) - (old < 0 ? 0 : static_cast<int64_t>(name.size()) + old);
    if (others + static_cast<int64_t>(name.size() + value.size()) > kMostXattrBytes)
      return Errno{ENOSPC};
    if (::setxattr(path.c_str(), name.c_str(), value.data(), value.size(), flags) != 0)
      return last_errno();
    return ok();
  });
}

FsResult<> RealNode::change_xattrs(const HeldFd& fd, int64_t most,
                                   const std::function<FsResult<>()>& change) {
  std::optional<SharedLock> gate;
  if (job_->limited()) gate.emplace(job_->space_gate());
  MutexLock own(space_mutex_);
  struct stat stat = {};
  if (!gate || ::fstat(fd.get(), &stat) != 0) return change();
  Quotas& quotas = job_->tree().quotas();
  const int64_t before = xattr_bytes(fd);
  PTC_TRY(quotas.reserve(job_->account(), stat.st_uid, {most, 0}));
  const FsResult<> changed = change();
  quotas.add(job_->account(), stat.st_uid, {xattr_bytes(fd) - before - most, 0});
  return changed;
}

FsResult<> RealNode::remove_xattr(const std::string& name) {
  if (!name.starts_with(kUserXattr)) return Errno{EOPNOTSUPP};
  if (read_only_.load()) return Errno{EROFS};
  PTC_TRY(const HeldFd fd, held());
  return change_xattrs(fd, 0, [&]() -> FsResult<> {
    if (::removexattr(fd.proc_path().c_str(), name.c_str()) != 0) return last_errno();
    return ok();
  });
}

}  // namespace ptc
