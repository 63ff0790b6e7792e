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
/// queue up behind it would still wait for as many times that. So what one waits in vain is taken
/// from what the next may wait, and comes back with time; a quarter of a second is always left,
/// half a second to the first few users who have not waited in vain since it was all there. So a
/// queue takes twice as long at most as it would where nobody waits, and 1.7 s. Threads: any.
class QueuePatience {
 public:
  using Clock = std::chrono::steady_clock;
  using milliseconds = std::chrono::milliseconds;
  static constexpr milliseconds kMost{1700}, kLeast{500}, kLeastAgain{250};
  static constexpr milliseconds kAtOnce{100};  // what needs no more was no waiting
  static constexpr size_t kNewOnes = 3;

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

  void give_back(Clock::time_point now) PTC_REQUIRES(mutex_);

  const std::function<Clock::time_point()> now_;
  Mutex mutex_;
  Clock::duration in_vain_ PTC_GUARDED_BY(mutex_){};  // as it was then
  Clock::time_point then_ PTC_GUARDED_BY(mutex_){};
  std::set<uid_t> users_ PTC_GUARDED_BY(mutex_);  // who did
};

}  // namespace ptc
