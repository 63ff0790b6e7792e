#include "fs/tree/queue_patience.h"

#include <algorithm>

namespace ptc {

QueuePatience::milliseconds QueuePatience::left(uid_t user) {
  const Clock::time_point now = now_();
  MutexLock lock(mutex_);
  if (now - ended_ > kAtOnce) {
    in_vain_ = {};
    users_.clear();
  }
  const milliseconds least = users_.contains(user) ? kLeastAgain : kLeast;
  return std::max(least, std::chrono::ceil<milliseconds>(kMost - in_vain_));
}

void QueuePatience::waited_in_vain(uid_t user, Clock::duration time) {
  if (time < kAtOnce) return;  // a refusal that needed no waiting
  const Clock::time_point now = now_();
  MutexLock lock(mutex_);
  in_vain_ = std::min<Clock::duration>(in_vain_ + time, kMost);
  users_.insert(user);
  ended_ = now;
}

}  // namespace ptc
