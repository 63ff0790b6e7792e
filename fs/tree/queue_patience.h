// How long operations wait that hold locks of the whole mount.
#pragma once

#include <sys/types.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <set>

#include "fs/tree/errno.h"
#include "store/base/mutex.h"

namespace ptc {

/// The kernel lets one rename between directories be under way in a mount at a time, and one mkdir
/// or rmdir in its root; so each waits for others 1.7 s at most, and is EAGAIN then. Those that
/// queue up behind it would still wait for as many times that. So one that comes at once when
/// another has waited in vain, as who stands in a queue does, has what that has left, but half a
/// second always; a quarter, of a user who has waited in vain in this queue before.
/// Threads: any.
class QueuePatience {
 public:
  using Clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;
  static constexpr milliseconds kMost{1700}, kLeast{500}, kLeastAgain{250};
  static constexpr milliseconds kAtOnce{100};

  explicit QueuePatience(std::function<Clock::time_point()> now = Clock::now)
      : now_(std::move(now)) {}

  /// What `wait` is given is what it waits at most; EAGAIN says that this was in vain.
  template <class Wait>
  auto spent(uid_t user, const Wait& wait) {
    const Clock::time_point begun = now_();
    auto outcome = wait(left(user));
    if (!outcome && outcome.error().value == EAGAIN) waited_in_vain(user, now_() - begun);
    return outcome;
  }

 private:
  milliseconds left(uid_t user);
  void waited_in_vain(uid_t user, Clock::duration time);

  const std::function<Clock::time_point()> now_;
  Mutex mutex_;
  // Of this queue.
  Clock::duration in_vain_ PTC_GUARDED_BY(mutex_){};
  std::set<uid_t> users_ PTC_GUARDED_BY(mutex_);
  Clock::time_point ended_ PTC_GUARDED_BY(mutex_){};  // the last of them
};

}  // namespace ptc
