#include "fs/kernel/fuse_session.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "fs/kernel/fuse_request.h"
#include "fs/nodes/root_dir.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr auto kPauseWithoutMemory = std::chrono::milliseconds(50);

// The kernel's wire format, as far as this libfuse does not know it yet.
struct InHeader {
  uint32_t length, opcode;
  uint64_t unique, nodeid;
  uint32_t uid, gid, pid, padding;
};
struct InitIn {
  uint32_t major, minor, max_readahead, flags, flags2;
};
struct OutHeader {
  uint32_t length;
  int32_t error;
  uint64_t unique;
};
struct PruneOut {
  uint32_t count, padding;
  uint64_t spare;
};
struct InitOut {
  uint32_t major, minor, max_readahead, flags;
  uint16_t max_background, congestion_threshold;
  uint32_t max_write, time_gran;
  uint16_t max_pages, map_alignment;
  uint32_t flags2, max_stack_depth;
};
struct OpenOut {
  uint64_t fh;
  uint32_t open_flags;
  int32_t backing_id;
};
constexpr uint32_t kOpcodeInit = 26;
constexpr int32_t kNotifyIncEpoch = 8, kNotifyPrune = 9;
constexpr uint64_t kParallelDirops = uint64_t{1} << 18;
constexpr uint64_t kInitExt = uint64_t{1} << 30;
constexpr uint64_t kPassthrough = uint64_t{1} << 37;
constexpr uint64_t kOverIoUring = uint64_t{1} << 41;
constexpr uint64_t kKillprivV2 = uint64_t{1} << 28;
constexpr uint32_t kOpenPassthrough = 1 << 7;
constexpr uint32_t kOpenCached = (1 << 0) | (1 << 1);  // direct_io, keep_cache: not with it

constexpr unsigned long kCloneDevice = _IOR(229, 0, uint32_t);

constexpr size_t kMaxRequest = 1 << 20;
constexpr int kWakeSignal = SIGUSR2;  // interrupts a thread that waits for a request

/// What libfuse has to say goes where all else goes; the last complaint also into our own error.
std::string& last_complaint() {
  thread_local std::string text;  // read by the thread that mounts
  return text;
}
void log_for_libfuse(enum fuse_log_level level, const char* format, va_list arguments) {
  char text[1024];
  ::vsnprintf(text, sizeof(text), format, arguments);
  std::string_view line = text;
  while (line.ends_with('\n')) line.remove_suffix(1);
  if (line.empty()) return;
  if (level <= FUSE_LOG_ERR) last_complaint() = line;
  spdlog::log(level <= FUSE_LOG_ERR ? spdlog::level::warn : spdlog::level::debug, "{}", line);
}

Result<> mount_kept(KeptMount& kept, const MountOptions& options) {
  std::string data = fmt::format("default_permissions,max_read={}", kMaxRequest);
  unsigned long flags = 0;
  for (const std::string& option : options.kernel_options) {
    if (option == "noexec") flags |= MS_NOEXEC;
    else if (option == "noatime") flags |= MS_NOATIME;
    else if (option == "nodiratime") flags |= MS_NODIRATIME;
    else if (option == "sync") flags |= MS_SYNCHRONOUS;
    else if (option == "dirsync") flags |= MS_DIRSYNC;
  }
  return kept.mount(options.mount_point, options.source, data, options.allow_other, flags);
}

/// A request that is copied to a page that is not there yet when the daemon is killed ends with
/// EIO, and is not given out again. So all pages are there before.
void keep_resident(void* buffer, size_t size) {
  static thread_local std::pair<const void*, size_t> last = {};
  if (last == std::pair<const void*, size_t>(buffer, size)) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(buffer) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(buffer) + size + page - 1) / page * page;
#ifndef MADV_POPULATE_WRITE
  constexpr int MADV_POPULATE_WRITE = 23;
#endif
  // Before Linux 5.14: as it was.
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
  last = {buffer, size};
}

FuseSession* session_of(void* userdata) { return static_cast<FuseSession*>(userdata); }

/// fusermount3 -u[z], for those who may not umount(2).
bool unmount_by_helper(const std::string& mount_point, bool lazy) {
  pid_t child = ::fork();
  if (child == 0) {
    ::execlp("fusermount3", "fusermount3", lazy ? "-uzq" : "-uq", "--", mount_point.c_str(),
             nullptr);
    ::_exit(127);
  }
  int status = 0;
  while (child > 0 && ::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool is_in_path(const char* program) {
  const char* path = std::getenv("PATH");
  // libfuse looks in /usr/bin first.
  std::istringstream directories(fmt::format("/usr/bin:{}", path != nullptr ? path : "/bin"));
  for (std::string directory; std::getline(directories, directory, ':');)
    if (::access((directory + "/" + program).c_str(), X_OK) == 0) return true;
  return false;
}

/// With what to do about it, where that is known. What fusermount3 says, which mounts for users,
/// goes to standard error and not to libfuse.
std::string why_not_mounted(const std::string& mount_point, std::string said) {
  if (::access("/dev/fuse", R_OK | W_OK) != 0) {
    if (said.empty()) said = fmt::format("/dev/fuse: {}", std::strerror(errno));
    return said + (errno == EACCES
                       ? "; whoever mounts must be able to open it: root lets all users with "
                         "chmod 666 /dev/fuse, or mounts with -o allow_other for them"
                       : "; modprobe fuse, or give the container the device");
  }
  if (!said.empty()) return said;
  if (!is_in_path("fusermount3"))
    return "users but root need fusermount3, which is not installed (Debian: fuse3)";
  if (::access(mount_point.c_str(), W_OK) != 0)
    return "users but root mount on directories alone that they may write";
  return "fusermount3 refused it, and says why above";
}

}  // namespace

FuseSession::FuseSession(Tree& tree, const MountOptions& options)
    : tree_(tree),
      options_(options),
      servers_({.most = options.threads,
                .wake_signal = kWakeSignal,
                .serve = [this](ServerThreads::Place& place) { serve_requests(place); },
                .stirred =
                    [this] {
                      changed_.notify_all();
                      options_.stirred();
                    },
                .fewest = 4}),
      waits_({.patience = options.patience,
              .counted = [this](int change) { return note_waiting(change); },
              .goes_on =
                  [this] {
                    if (rings_ != nullptr) rings_->send_reply();
                  }}),
      stuck_(options.patience) {}

Result<std::unique_ptr<FuseSession>> FuseSession::mount(Tree& tree, const MountOptions& options) {
  std::unique_ptr<FuseSession> session(new FuseSession(tree, options));
  PTC_TRY(session->start());
  return session;
}

Result<> FuseSession::start() {
  std::string source;
  for (char c : options_.source) {
    if (c == ',' || c == '\\') source += '\\';
    source += c;
  }
  std::string mount_options = fmt::format(
      "default_permissions,nosuid,nodev,fsname={},subtype=ptcfs,max_read={}", source, kMaxRequest);
  KeptMount* const kept = options_.kept;
  if (kept != nullptr) {
    tree_.table().keep_in(kept->state(),
                          [this](uint64_t id, Node& node) { open_files_.found(id, node); });
    open_files_.keep_in(kept->state(), tree_.table(), tree_.passthrough());
  }
  if (options_.allow_other) mount_options += ",allow_other";
  for (const std::string& option : options_.kernel_options) mount_options += "," + option;
  fuse_set_log_func(&log_for_libfuse);
  fuse_args args = FUSE_ARGS_INIT(0, nullptr);
  fuse_opt_add_arg(&args, "ptcfs");
  fuse_opt_add_arg(&args, "-o");
  fuse_opt_add_arg(&args, mount_options.c_str());
  if (options_.debug) fuse_opt_add_arg(&args, "-d");
  session_ = fuse_session_new(&args, &fuse_operations(), sizeof(fuse_lowlevel_ops), this);
  fuse_opt_free_args(&args);
  if (session_ == nullptr) {
    return invalid_argument("libfuse does not accept the mount options '{}': {}", mount_options,
                            last_complaint());
  }

  tree_.set_root(tree_.table().intern(std::make_shared<RootDir>(tree_)));
  tree_.table().remember_root(tree_.root().shared_from_this());
  if (kept == nullptr && fuse_session_mount(session_, options_.mount_point.c_str()) != 0) {
    return make_error(Code::kUnavailable, "mounting {} failed: {}", options_.mount_point,
                      why_not_mounted(options_.mount_point, last_complaint()));
  }
  if (kept != nullptr && !kept->goes_on()) {
    PTC_TRY(mount_kept(*kept, options_));
  }
  fuse_custom_io io = {};
  io.writev = &FuseSession::on_write;
  io.read = &FuseSession::on_read;
  // The session closes its own.
  int fd =
      kept != nullptr ? ::fcntl(kept->device(), F_DUPFD_CLOEXEC, 0) : fuse_session_fd(session_);
  if (fd < 0) return errno_error(errno, "/dev/fuse");
  if (int error = fuse_session_custom_io(session_, &io, fd); error != 0) {
    return errno_error(-error, "connecting libfuse to the kernel");
  }

  struct sigaction wake = {};
  wake.sa_handler = [](int) {};
  ::sigaction(kWakeSignal, &wake, nullptr);  // no SA_RESTART: read() returns
  if (kept != nullptr && kept->goes_on()) {
    PTC_TRY(go_on());
  }
  PTC_TRY(servers_.start());
  serves_ = true;
  // Not before: who is in a directory whose name has expired does not know where he is until it is
  // looked up.
  if (kept != nullptr && kept->goes_on()) expire_names();
  UniqueLock lock(mutex_);
  const auto any = [&]() PTC_REQUIRES(mutex_) { return greeted_ || servers_.threads() == 0; };
  if (!changed_.wait_for(mutex_, std::chrono::seconds(10), any) || !greeted_) {
    return make_error(Code::kUnavailable, "the kernel did not answer the mount of {}",
                      options_.mount_point);
  }
  lock.unlock();
  if (options_.io_uring == IoUring::kOn && no_rings_.has_error()) return no_rings_.error();
  if (kept == nullptr || !kept->goes_on()) set_read_ahead();
  return ok();
}

/// All that must be so before the kernel's first request is read.
Result<> FuseSession::go_on() {
  KeptMount& kept = *options_.kept;
  fuse_buf greeting = {};
  const int got = fuse_session_receive_buf(session_, &greeting);
  if (got > 0) fuse_session_process_buf(session_, &greeting);
  std::free(greeting.mem);
  PTC_TRY(kept.agreed());
  {
    MutexLock lock(mutex_);
    if (!greeted_) return make_error(Code::kInternal, "the kernel's greeting was not kept");
  }
  if (tree_.passthrough().enabled()) tree_.passthrough().close_others(open_files_.backing_ids());
  // What changed since the last one has ended nobody has told the kernel; and what it does not ask
  // for is not looked for, so that later changes would not be told either.
  for (const uint64_t id : tree_.table().cached_and_not_found_yet())
    (void)fuse_lowlevel_notify_inval_inode(session_, id, -1, 0);
  open_files_.reopen_writers();
  kept.begin();
  return kept.resend();
}

FuseSession::~FuseSession() {
  if (session_ == nullptr) return;
  tree_.set_kernel_cache(nullptr);
  // What this process cannot go on with is for its keeper, and perhaps for another.
  const bool leaves = options_.kept != nullptr && options_.kept->goes_on() && !serves_;
  bool clean = !leaves && unmount();
  stop();
  tree_.passthrough().stop();
  // Frees what libfuse remembers of the mount; it sees that there is nothing left to unmount. After
  // a lazy unmount it would not, and take away whatever is mounted there by now.
  if (clean) fuse_session_unmount(session_);
  fuse_session_destroy(session_);
  rings_.reset();
  if (forgets_fd_ >= 0) ::close(forgets_fd_);
  tree_.table().forget_all();
}

bool FuseSession::note_waiting(int change) {
  if (rings_ != nullptr && rings_->note_waiting(change)) return true;
  return servers_.note_waiting(change);
}

void FuseSession::serve_requests(ServerThreads::Place& place) {
  fuse_buf buffer = {};
  LiveState::Serving serving(live_state());
  while (!fuse_session_exited(session_) && !place.is_spare()) {
    place.receives();
    const int got = fuse_session_receive_buf(session_, &buffer);
    place.received(got > 0);
    if (got == -EINTR || got == -EAGAIN) continue;
    if (got == -ENOMEM) {  // for this thread's buffer; it is mounted still
      std::this_thread::sleep_for(kPauseWithoutMemory);
      continue;
    }
    if (got <= 0) break;  // unmounted
    InHeader header;
    std::memcpy(&header, buffer.mem, sizeof header);
    served_request() = header.unique;
    const bool suspect = live_state() != nullptr && live_state()->is_suspect(header.unique);
    const bool alone = suspect && wait_for_suspects();
    serving.begin(header.unique);
    if (live_state() == nullptr || !refuse_poison(header.unique))
      fuse_session_process_buf(session_, &buffer);
    serving.end();
    if (alone) end_suspect();
    place.served();
  }
  std::free(buffer.mem);
}

/// False: the one before takes long, and is perhaps innocent.
bool FuseSession::wait_for_suspects() {
  MutexLock lock(suspects_mutex_);
  const auto free = [this]() PTC_REQUIRES(suspects_mutex_) { return !serves_suspect_; };
  if (!suspect_ended_.wait_for(suspects_mutex_, std::chrono::seconds(1), free)) return false;
  return serves_suspect_ = true;
}

void FuseSession::end_suspect() {
  MutexLock lock(suspects_mutex_);
  serves_suspect_ = false;
  suspect_ended_.notify_one();
}

/// Daemons have died of it: whoever asks for it is told so, and not the next one.
bool FuseSession::refuse_poison(uint64_t unique) {
  if (!live_state()->is_poison(unique)) return false;
  spdlog::error("a request is refused: while it was served, more than one daemon has ended");
  const OutHeader refusal = {sizeof refusal, -EIO, unique};
  (void)!::write(options_.kept->device(), &refusal, sizeof refusal);
  return true;
}

std::string FuseSession::trouble() {
  if (servers_.is_gone()) return "unmounted";
  if (uses_io_uring()) return {};  // the keeper starts another thread for each request
  const auto stuck = stuck_.look(servers_.none_is_free(), tree_.stats().requests(),
                                 std::chrono::steady_clock::now());
  if (!stuck) return {};
  return fmt::format("all {} threads are stuck, and no request was begun for {} s",
                     servers_.threads(),
                     std::chrono::duration_cast<std::chrono::seconds>(*stuck).count());
}

/// Those that wait for others may do so for ever, and nobody waits for them any more.
bool FuseSession::wait(std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  if (!servers_.wait(patience)) return false;
  MutexLock lock(mutex_);
  return changed_.wait_until(
      mutex_, end, [&]() PTC_REQUIRES(mutex_) { return rings_ == nullptr || rings_->is_over(); });
}

void FuseSession::stop() {
  fuse_session_exit(session_);
  if (rings_ != nullptr) rings_->stop();
  servers_.stop();
}

void FuseSession::stop_receiving(std::chrono::milliseconds most) {
  fuse_session_exit(session_);
  servers_.stop(most);
}

bool FuseSession::unmount() {
  {
    MutexLock lock(mutex_);
    // Nothing serves any more: somebody else has unmounted it.
    if (std::exchange(unmounted_, true)) return clean_;
    if (servers_.wait(std::chrono::milliseconds(0))) return clean_ = true;
  }
  const char* path = options_.mount_point.c_str();
  bool root = ::geteuid() == 0;
  if (root ? ::umount2(path, UMOUNT_NOFOLLOW) == 0
           : unmount_by_helper(options_.mount_point, false)) {
    MutexLock lock(mutex_);
    return clean_ = true;
  }
  if (root) {
    ::umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW);
  } else {
    unmount_by_helper(options_.mount_point, true);
  }
  return false;
}

void FuseSession::drop_attributes(const Node& node) {
  // Errors: the kernel has let go of it, or the mount is gone. Both are what was wanted.
  (void)fuse_lowlevel_notify_inval_inode(session_, node.id(), -1, 0);
}

void FuseSession::drop_content(const Node& node) {
  (void)fuse_lowlevel_notify_inval_inode(session_, node.id(), 0, 0);
}

void FuseSession::expire_names() {
  if (!can_expire_names()) return;
  OutHeader notification = {sizeof(OutHeader), kNotifyIncEpoch, 0};
  // Fails only where there is no mount any more.
  (void)!::write(fuse_session_fd(session_), &notification, sizeof(notification));
}

void FuseSession::prune_names(Prune what) {
  constexpr size_t kVeryMany = 100'000, kMany = 10'000;  // each takes a KiB
  constexpr size_t kAtOnce = 4096;
  const size_t beyond = what == Prune::kAll ? 0 : what == Prune::kWhereMany ? kVeryMany : kMany;
  if (kernel_minor_ < kMinorWithPrune || tree_.table().size() < beyond) return;
  for (size_t part = 0; part < NodeTable::kParts; ++part) {
    std::vector<uint64_t> ids;
    tree_.table().each_known(part, [&](const KnownNode& known) {
      if (known.id == NodeTable::kRootId) return;
      if (what == Prune::kWhereIdle && known.node.keeps_content() && known.node.was_opened())
        return;
      ids.push_back(known.id);
    });
    for (size_t begin = 0; begin < ids.size(); begin += kAtOnce) {
      const size_t count = std::min(kAtOnce, ids.size() - begin);
      PruneOut prune = {static_cast<uint32_t>(count), 0, 0};
      OutHeader header = {
          static_cast<uint32_t>(sizeof header + sizeof prune + count * sizeof(uint64_t)),
          kNotifyPrune, 0};
      iovec parts[] = {{&header, sizeof header},
                       {&prune, sizeof prune},
                       {&ids[begin], count * sizeof(uint64_t)}};
      if (::writev(fuse_session_fd(session_), parts, 3) < 0) return;  // there is no mount any more
    }
  }
}

void FuseSession::set_read_ahead() const {
  // 128 KiB whatever INIT asks for; files that are read through the daemon want more.
  struct stat stat = {};
  if (::stat(options_.mount_point.c_str(), &stat) != 0) return;
  std::ofstream(
      fmt::format("/sys/class/bdi/{}:{}/read_ahead_kb", major(stat.st_dev), minor(stat.st_dev)))
      << kMaxRequest / 1024;
}

ssize_t FuseSession::on_read(int fd, void* buffer, size_t size, void* userdata) {
  KeptMount* const kept = session_of(userdata)->options_.kept;
  if (kept != nullptr) keep_resident(buffer, size);
  const bool heard_before = kept != nullptr && kept->has_greeting();
  ssize_t got = heard_before ? kept->read_greeting(buffer, size) : ::read(fd, buffer, size);
  if (got >= static_cast<ssize_t>(sizeof(InHeader) + sizeof(InitIn))) {
    InHeader header;
    std::memcpy(&header, buffer, sizeof(header));
    if (header.opcode == kOpcodeInit) {
      InitIn init;
      std::memcpy(&init, static_cast<char*>(buffer) + sizeof(header), sizeof(init));
      FuseSession* self = session_of(userdata);
      self->kernel_minor_ = init.minor;
      self->kernel_flags_ = init.flags | (uint64_t{init.flags2} << 32);
      self->init_request_ = header.unique;
      if (kept != nullptr)
        kept->save_greeting({static_cast<std::byte*>(buffer), static_cast<size_t>(got)});
    }
  }
  return got;
}

/// INIT: asks for what this libfuse cannot ask for.
void FuseSession::answer_init(struct iovec* iov, int count) {
  InitOut out = {};
  if (count < 2 || iov[1].iov_len < sizeof(out)) return;
  std::memcpy(&out, iov[1].iov_base, sizeof(out));
  uint64_t offered = kernel_flags_;
  if ((offered & kPassthrough) != 0) {
    out.flags |= kInitExt;
    out.flags2 |= kPassthrough >> 32;
    out.max_stack_depth = 1;
  }
  if (prepare_rings(offered)) {
    out.flags |= kInitExt;
    out.flags2 |= kOverIoUring >> 32;
  }
  // Otherwise one lookup that waits holds up all others in its directory, and nobody can kill
  // these.
  if ((offered & kParallelDirops) != 0) out.flags |= kParallelDirops;
  // Otherwise every write asks for security.capability first.
  if ((offered & kKillprivV2) != 0) out.flags |= kKillprivV2;
  std::memcpy(iov[1].iov_base, &out, sizeof(out));
}

/// True: the kernel is to be told that there will be rings.
bool FuseSession::prepare_rings(uint64_t offered) {
  if (options_.io_uring == IoUring::kOff) return false;
  if ((offered & kOverIoUring) == 0) {
    no_rings_ = make_error(Code::kUnavailable,
                           "the kernel does not offer its requests by io_uring: that needs Linux "
                           "6.14 and `echo Y > /sys/module/fuse/parameters/enable_uring`");
    return false;
  }
  auto rings = std::make_unique<RequestRings>(
      RequestRings::Options{.device = fuse_session_fd(session_),
                            .payload_bytes = kMaxRequest,
                            .wake_signal = kWakeSignal,
                            .process =
                                [this, session = session_](void* memory, size_t size) {
                                  servers_.note_use();
                                  fuse_buf request = {};
                                  request.mem = memory;
                                  request.size = size;
                                  fuse_session_process_buf(session, &request);
                                },
                            .process_forgets = [this] { process_forgets(); },
                            .ended =
                                [this] {
                                  { MutexLock lock(mutex_); }
                                  changed_.notify_all();
                                  options_.stirred();
                                }});
  no_rings_ = rings->prepare();
  if (no_rings_.has_error()) return false;
  rings_ = std::move(rings);
  return true;
}

void FuseSession::process_forgets() {
  MutexLock lock(forgets_mutex_);
  for (;;) {
    const ssize_t got = ::read(forgets_fd_, forgets_.data(), forgets_.size());
    if (got <= 0) return;
    fuse_buf request = {};
    request.mem = forgets_.data();
    request.size = static_cast<size_t>(got);
    fuse_session_process_buf(session_, &request);
  }
}

void FuseSession::start_rings() {
  if (rings_ == nullptr) return;
  uint32_t device = static_cast<uint32_t>(fuse_session_fd(session_));
  forgets_fd_ = ::open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK);
  ::ioctl(forgets_fd_, kCloneDevice, &device);  // where it fails, others read them
  {
    MutexLock lock(forgets_mutex_);
    forgets_.resize(kMaxRequest + 4096);
  }
  no_rings_ = rings_->start();
  if (!no_rings_.has_error()) return;
  spdlog::warn("requests come by /dev/fuse: {}", no_rings_.error().message());
}

ssize_t FuseSession::on_write(int fd, struct iovec* iov, int count, void* userdata) {
  FuseSession* self = session_of(userdata);
  OutHeader header = {};
  if (iov[0].iov_len >= sizeof(header)) std::memcpy(&header, iov[0].iov_base, sizeof(header));
  uint64_t init = self->init_request_;
  if (init != 0 && header.unique == init && header.error == 0) {
    self->init_request_ = 0;
    self->answer_init(iov, count);
    self->tree_.set_kernel_cache(self);  // before the kernel asks, and so remembers, anything
    KeptMount* const kept = self->options_.kept;
    ssize_t written = header.length;
    if (kept == nullptr || kept->answers_greeting(iov, count)) {
      if (kept != nullptr) kept->begin();
      written = ::writev(fd, iov, count);
    }
    int error = (self->kernel_flags_ & kPassthrough) != 0 ? self->tree_.passthrough().start(fd)
                                                          : EOPNOTSUPP;
    if (error != 0) {
      spdlog::warn(
          "the kernel will not read images by itself ({}); everything goes through this "
          "process, at a fraction of the speed",
          error == EPERM ? "that needs root, or CAP_SYS_ADMIN" : std::strerror(error));
    }
    self->start_rings();
    {
      MutexLock lock(self->mutex_);
      self->greeted_ = true;
    }
    self->changed_.notify_all();
    return written;
  }
  if (int32_t id = reply_backing_id();
      id != 0 && header.error == 0 && count == 2 && iov[1].iov_len >= sizeof(OpenOut)) {
    char* at = static_cast<char*>(iov[1].iov_base) + iov[1].iov_len - sizeof(OpenOut);
    OpenOut open;
    std::memcpy(&open, at, sizeof(open));
    open.open_flags = (open.open_flags & ~kOpenCached) | kOpenPassthrough;
    open.backing_id = id;
    std::memcpy(at, &open, sizeof(open));
  }
  if (self->rings_ != nullptr && self->rings_->reply(iov, count)) return header.length;
  return ::writev(fd, iov, count);
}

}  // namespace ptc
