// Threads for work that may wait long: as many as there is such work at the same time, kept for a
// while.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

namespace ptc {

/// Without a limit, work that waits for other work of the same threads, perhaps over another node,
/// never waits for a thread. Threads: any.
class SpareThreads {
 public:
  /// `name`: of each, as `top` shows it. `most`: work beyond that waits for one of these.
  explicit SpareThreads(std::string name, size_t most = SIZE_MAX)
      : name_(std::move(name)), most_(most) {}
  /// Waits for all work.
  ~SpareThreads();

  /// On some thread, soon. Throws where there is no memory, or no thread left, nor can one be made.
  void run(std::function<void()> work);

 private:
  void begin_thread();  // mutex_ held
  void serve();

  const std::string name_;
  const size_t most_;
  std::mutex mutex_;
  std::condition_variable more_, less_;
  std::deque<std::function<void()>> waiting_;  // guarded by mutex_, and below
  size_t threads_ = 0, idle_ = 0;
  bool ending_ = false;
};

}  // namespace ptc
