// Threads for work that may wait long: as many as there is such work at the same time, kept for a
// while.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include "store/base/mutex.h"

namespace ptc {

/// Without a limit, work that waits for other work of the same threads, perhaps over another node,
/// never waits for a thread. Threads: any.
class SpareThreads {
 public:
  /// `name`: of each, as `top` shows it. `most`: work beyond that waits for one of these.
  explicit SpareThreads(std::string name, size_t most = SIZE_MAX)
      : name_(std::move(name)), most_(most) {}
  /// As end().
  ~SpareThreads();

  /// On some thread, soon. Throws where there is no memory, or no thread left, nor can one be made.
  void run(std::function<void()> work);
  /// Whether work waits for a thread; as it was a moment ago.
  bool any_waits() const { return any_waits_.load(std::memory_order_relaxed); }
  /// Waits for all work, and for the threads; those that later work begins end with it.
  void end();

 private:
  void begin_thread() PTC_REQUIRES(mutex_);
  void serve();

  const std::string name_;
  const size_t most_;
  Mutex mutex_;
  ConditionVariable more_, less_;
  std::deque<std::function<void()>> waiting_ PTC_GUARDED_BY(mutex_);
  std::atomic<bool> any_waits_ = false;
  size_t threads_ PTC_GUARDED_BY(mutex_) = 0, idle_ PTC_GUARDED_BY(mutex_) = 0;
  bool ending_ PTC_GUARDED_BY(mutex_) = false;
};

}  // namespace ptc
