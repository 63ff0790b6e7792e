// Memory that images have left, kept for those that come.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "store/base/mutex.h"

namespace ptc {

/// Whether the machine's host takes memory back that nobody uses (free page reporting): what has
/// been free for two seconds then costs ten times as much to use again.
bool host_takes_free_memory();

/// Bytes that may be taken without anybody else having to give some: what is free beyond an eighth
/// of the machine's memory, and beyond an eighth of what each control group of this process may
/// have.
uint64_t memory_to_spare();

struct MemoryReserveOptions {
  /// So much is taken at the start, as far as there is memory to spare, and again whenever images
  /// have left some.
  uint64_t for_good = 0;
  /// Beyond that, as much as images have left, but never more than the store holds; and 96 MiB
  /// beside what is more than 256 MiB, for some of it is given in vain.
  bool follows = false;
  /// That is given back when none of it was used for so long.
  std::chrono::milliseconds idle = std::chrono::minutes(10);
  std::function<uint64_t()> to_spare = memory_to_spare;

  bool is_off() const { return for_good == 0 && !follows; }
};

/// Pages of nobody's, which are given back to the kernel just before it is asked for as many: it
/// hands out those that came last, which are still behind the machine's memory, and in the
/// processor's cache perhaps. So a page of this never was part of a file, nor will be: whoever
/// still has a file of an image, or pages of it in a pipe, keeps them.
///
/// What is not for good is marked so that the kernel may take it (MADV_FREE): it counts as
/// available, and nobody is killed for it.
///
/// One thread takes the pages, and is there while there is something to do, or something to give
/// back. Threads: any.
class MemoryReserve {
 public:
  /// `used`: bytes that the store holds, at the moment.
  MemoryReserve(MemoryReserveOptions options, std::function<uint64_t()> used);
  ~MemoryReserve();
  MemoryReserve(const MemoryReserve&) = delete;
  MemoryReserve& operator=(const MemoryReserve&) = delete;

  /// The memory of so many bytes of files has gone back to the kernel, a moment ago.
  void gone(uint64_t bytes);
  /// So many bytes are about to be taken for files, by this thread: the kernel keeps some of what
  /// is given for the processor that gave it.
  void give(uint64_t bytes);
  /// Somebody begins to write files of the store, without a word on how much: gives in step with
  /// what the store holds, until that has not grown for a second.
  void writing();

  uint64_t held() const { return held_.load(std::memory_order_relaxed); }
  /// Waits until there is nothing to do. For tests.
  void settle();

 private:
  using Clock = std::chrono::steady_clock;
  void begin_to_work() PTC_REQUIRES(mutex_);
  void work(const std::stop_token& stop);
  uint64_t spare_beside(uint64_t bytes) const;
  uint64_t target() const PTC_REQUIRES(mutex_);
  void take() PTC_REQUIRES(mutex_);  // one block
  void give_with(uint64_t bytes) PTC_REQUIRES(mutex_);
  void give_blocks(size_t count) PTC_REQUIRES(mutex_);
  void follow_writers(const std::stop_token& stop) PTC_REQUIRES(mutex_);

  const MemoryReserveOptions options_;
  const std::function<uint64_t()> used_;
  std::atomic<uint64_t> held_{0};  // written with the mutex held
  mutable Mutex mutex_;
  StoppableConditionVariable changed_, settled_;
  std::vector<void*> blocks_ PTC_GUARDED_BY(mutex_);
  uint64_t wanted_ PTC_GUARDED_BY(mutex_) = 0;          // bytes that were left and not used since
  uint64_t given_too_much_ PTC_GUARDED_BY(mutex_) = 0;  // of the block that was given last
  uint64_t given_apart_ PTC_GUARDED_BY(mutex_) = 0;  // not to writers, since these were looked at
  Clock::time_point last_use_ PTC_GUARDED_BY(mutex_);
  bool working_ PTC_GUARDED_BY(mutex_) = false;
  bool writing_ PTC_GUARDED_BY(mutex_) = false;  // asked for
  bool has_thread_ PTC_GUARDED_BY(mutex_) = false;
  std::jthread thread_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
