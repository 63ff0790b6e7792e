// The mount: connects libfuse to the tree, and the kernel's passthrough to both.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fs/kernel/kept_mount.h"
#include "fs/kernel/request_rings.h"
#include "fs/kernel/server_threads.h"
#include "fs/kernel/stuck_check.h"
#include "fs/kernel/waits.h"
#include "fs/tree/open_files.h"
#include "fs/tree/tree.h"
#include "store/base/mutex.h"

struct fuse_session;
struct iovec;

namespace ptc {

enum class IoUring { kOff, kAuto, kOn };  // auto: where the kernel has it

struct MountOptions {
  std::string mount_point;       // an existing directory, absolute
  std::string source = "ptcfs";  // shown by mount(8), which knows its fstab line by it
  bool allow_other = false;
  bool debug = false;     // every request on stderr
  unsigned threads = 24;  // that answer requests, at most; beside those that wait for others
  IoUring io_uring = IoUring::kOff;  // whether requests come that way
  std::chrono::milliseconds patience{
      60000};  // a request waits so long for another node or a foreign file
  std::vector<std::string> kernel_options;  // noexec, noatime …
  /// Called by any thread, and does not wait: the mount is going, or it is used again
  /// (FuseSession::tell_next_use).
  std::function<void()> stirred = [] {};
  /// Where a keeper has the mount: it goes on when this process ends without unmount(). Null: not
  /// so. It outlives the session.
  KeptMount* kept = nullptr;
};

/// Order: mount(), then unmount() (or somebody else's umount), then wait() and destruction.
/// Threads: any.
class FuseSession : public KernelCache {
 public:
  /// Mounts, and returns when the kernel has greeted. `tree` outlives the session.
  static Result<std::unique_ptr<FuseSession>> mount(Tree& tree, const MountOptions& options);
  ~FuseSession() override;

  Tree& tree() const { return tree_; }
  Waits& waits() { return waits_; }
  OpenFiles& open_files() { return open_files_; }
  LiveState* live_state() { return options_.kept != nullptr ? &options_.kept->state() : nullptr; }
  bool uses_io_uring() const { return rings_ != nullptr && !no_rings_.has_error(); }

  /// True once the mount is gone and all threads have ended.
  bool wait(std::chrono::milliseconds patience);
  /// Unmounts; where something is still open, lazily, so that the name is free and what is open is
  /// served for as long as this process lives. True if that was not needed.
  bool unmount();
  /// The mount is gone; some thread may still be at work.
  bool is_gone() const { return servers_.is_gone(); }
  /// Why no request is answered; empty: they are. It is stuck where every thread that takes
  /// requests has been at work for MountOptions::patience, and none has begun another: those that
  /// wait for others are no such threads. Waits for nothing.
  std::string trouble();
  /// After this no request is answered any more.
  void stop();
  /// No request is read any more; returns when those that were are answered, but for those that
  /// wait for others, or after `most`. For the end of a process whose mount goes on.
  void stop_receiving(std::chrono::milliseconds most);

  /// Threads end that answered requests when there were more of them. Now and then.
  void end_spare_threads() { servers_.end_spare(); }
  /// Calls MountOptions::stirred for the next request.
  void tell_next_use() { servers_.tell_next(); }

  /// The kernel forgets names that nobody uses now (Linux 6.18; before, it does so when it needs
  /// the memory): kAll; kWhereMany, if it knows very many; kWhereIdle, if it knows many, but not
  /// those with whose names it would lose bytes that it has cached. Now and then.
  enum class Prune { kAll, kWhereMany, kWhereIdle };
  void prune_names(Prune what);

  void drop_attributes(const Node& node) override;
  void drop_content(const Node& node) override;
  void expire_names() override;
  bool can_expire_names() const override { return kernel_minor_ >= kMinorWithEpochs; }

 private:
  FuseSession(Tree& tree, const MountOptions& options);
  Result<> start();
  Result<> go_on();
  bool refuse_poison(uint64_t unique);
  void serve_requests(ServerThreads::Place& place);
  bool note_waiting(int change);
  void set_read_ahead() const;
  static ssize_t on_read(int fd, void* buffer, size_t size, void* userdata);
  static ssize_t on_write(int fd, struct iovec* iov, int count, void* userdata);
  void answer_init(struct iovec* iov, int count);
  bool prepare_rings(uint64_t offered);
  void start_rings();
  void process_forgets();

  Tree& tree_;
  const MountOptions options_;
  fuse_session* session_ = nullptr;
  bool serves_ = false;  // it has begun to
  bool wait_for_suspects();
  void end_suspect();
  Mutex suspects_mutex_;
  ConditionVariable suspect_ended_;
  bool serves_suspect_ PTC_GUARDED_BY(suspects_mutex_) = false;
  Mutex mutex_;
  ConditionVariable changed_;
  bool greeted_ PTC_GUARDED_BY(mutex_) = false;
  bool unmounted_ PTC_GUARDED_BY(mutex_) = false;
  bool clean_ PTC_GUARDED_BY(mutex_) = false;  // unmounted, and nothing was open
  static constexpr uint32_t kMinorWithEpochs = 44,
                            kMinorWithPrune = 45;  // of the protocol; Linux 6.16, 6.18
  std::atomic<uint64_t> init_request_{0}, kernel_flags_{0};
  std::atomic<uint32_t> kernel_minor_{0};
  OpenFiles open_files_;
  Result<> no_rings_ = ok();  // why there are none
  std::unique_ptr<RequestRings> rings_;
  Mutex forgets_mutex_;
  std::vector<std::byte> forgets_ PTC_GUARDED_BY(forgets_mutex_);  // as they are read
  int forgets_fd_ = -1;                                            // reads, and does not wait
  ServerThreads servers_;
  Waits waits_;
  StuckCheck stuck_;
};

}  // namespace ptc
