// Tells threads that are busy from threads that are stuck: by what they have begun between two
// looks, so that no request costs anything more.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "store/base/mutex.h"

namespace ptc {

/// Threads: any.
class StuckCheck {
 public:
  using Clock = std::chrono::steady_clock;
  /// `patience`: all may be at work for so long without beginning anything new.
  explicit StuckCheck(Clock::duration patience) : patience_(patience) {}

  /// A look: whether nobody is free for the next request, and how many were begun so far. For how
  /// long none was, once that is longer than the patience. As long as nobody looks, nothing is
  /// noticed: it takes two looks.
  std::optional<Clock::duration> look(bool none_is_free, uint64_t begun, Clock::time_point now) {
    MutexLock lock(mutex_);
    if (!none_is_free) {
      since_.reset();
      return std::nullopt;
    }
    if (!since_ || begun != begun_) {
      since_ = now;
      begun_ = begun;
    }
    if (now - *since_ < patience_) return std::nullopt;
    return now - *since_;
  }

 private:
  const Clock::duration patience_;
  Mutex mutex_;
  std::optional<Clock::time_point> since_ PTC_GUARDED_BY(mutex_);  // the first look that was so
  uint64_t begun_ PTC_GUARDED_BY(mutex_) = 0;                      // by then
};

}  // namespace ptc
