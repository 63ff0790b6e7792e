// What goes on when the request that began it has been answered: each in a thread of its own.
#pragma once

#include <functional>
#include <list>
#include <thread>

#include "store/base/mutex.h"

namespace ptc {

/// Threads: any.
class Errands {
 public:
  Errands() = default;
  ~Errands() { wait(); }
  Errands(const Errands&) = delete;
  Errands& operator=(const Errands&) = delete;

  /// `errand` throws nothing; its thread lets go of what it holds, and may be the last that had it.
  /// Throws where there is no memory, or no thread, for it.
  void start(std::function<void()> errand);
  /// Until all have ended, those too that are started meanwhile. Not from within one.
  void wait();

 private:
  struct One {
    bool ended = false;  // guarded by mutex_
    std::jthread thread;
  };
  using List = std::list<One>;

  Mutex mutex_;
  List under_way_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
