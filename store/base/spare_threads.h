// Threads for work that may wait long: as many as there is such work at the same time, kept for a
// while.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

namespace ptc {

/// Work that waits for other work of the same threads, perhaps over another node, never waits for a
/// thread: so there is no limit but what makes them. Threads: any.
class SpareThreads {
 public:
  /// `name`: of each, as `top` shows it.
  explicit SpareThreads(std::string name) : name_(std::move(name)) {}
  /// Waits for all work.
  ~SpareThreads();

  /// On some thread, soon. std::system_error: there is none left, nor can one be made.
  void run(std::function<void()> work);

 private:
  void serve();

  const std::string name_;
  std::mutex mutex_;
  std::condition_variable more_, less_;
  std::deque<std::function<void()>> waiting_;  // guarded by mutex_, and below
  size_t threads_ = 0, idle_ = 0;
  bool ending_ = false;
};

}  // namespace ptc
