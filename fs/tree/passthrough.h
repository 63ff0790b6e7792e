// Handing a file to the kernel, which then reads and writes it without asking (Linux ≥ 6.9).
#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_set>

#include "store/base/mutex.h"

namespace ptc {

/// The ioctls of one mount's connection. Off until start() found that they work: they need
/// CAP_SYS_ADMIN, and a kernel that agreed to passthrough in its INIT request.
/// Threads: any.
class Passthrough {
 public:
  /// `session_fd` is the open /dev/fuse. Returns 0, or the errno that says why it cannot be had.
  int start(int session_fd);
  bool enabled() const { return enabled_.load(std::memory_order_acquire); }
  void stop() { enabled_.store(false, std::memory_order_release); }

  /// How many opens the kernel answers by itself, and how many files it holds for that now.
  uint64_t opens() const { return opens_.load(std::memory_order_relaxed); }
  uint64_t files() const { return files_.load(std::memory_order_relaxed); }
  void count_open() { opens_.fetch_add(1, std::memory_order_relaxed); }

  /// A backing id (> 0) for an open regular file, or 0. The id holds the file by itself.
  int32_t open_backing(int fd);
  void close_backing(int32_t id);
  /// Of an earlier process, which left it with the connection: it is counted here from now on.
  void take_over() { files_.fetch_add(1, std::memory_order_relaxed); }
  /// Closes all that the connection has, but for these: what an earlier process left behind.
  void close_others(const std::unordered_set<int32_t>& ids);

 private:
  int session_fd_ = -1;
  int32_t first_id_ = 0;  // that this process was given
  std::atomic<bool> enabled_{false};
  std::atomic<uint64_t> opens_{0}, files_{0};
};

/// How one inode is read while it is open. The kernel refuses (EIO) to mix passthrough with other
/// opens of an inode, or two backing ids, so the first open decides for all until the last close.
/// Threads: any.
class InodeMode {
 public:
  /// Counts one open file of `fd`. The backing id, or 0: reads come to the handle.
  int32_t enter(Passthrough& passthrough, int fd);
  void leave(Passthrough& passthrough);
  /// It is open already, so often and by this backing id or none: by opens that an earlier process
  /// answered. Before any of this one's.
  void restore(Passthrough& passthrough, uint64_t open_files, int32_t backing_id);
  /// Whether it is open, and every read comes to a handle.
  bool is_read_through() const;

 private:
  mutable Mutex mutex_;
  uint64_t open_files_ PTC_GUARDED_BY(mutex_) = 0;
  int32_t backing_id_ PTC_GUARDED_BY(mutex_) = 0;
};

/// One count in an InodeMode, given back when destroyed.
class InodeModeHold {
 public:
  InodeModeHold(Passthrough& passthrough, InodeMode& mode, int fd)
      : passthrough_(passthrough), mode_(mode), backing_id_(mode.enter(passthrough, fd)) {}
  ~InodeModeHold() { mode_.leave(passthrough_); }
  InodeModeHold(const InodeModeHold&) = delete;
  InodeModeHold& operator=(const InodeModeHold&) = delete;
  int32_t backing_id() const { return backing_id_; }

 private:
  Passthrough& passthrough_;
  InodeMode& mode_;
  int32_t backing_id_;
};

}  // namespace ptc
