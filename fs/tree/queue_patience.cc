#include "fs/tree/queue_patience.h"

#include <algorithm>
#include <utility>

namespace ptc {

void QueuePatience::give_back(Clock::time_point now) {
  in_vain_ -= std::min(in_vain_, now - std::exchange(then_, now));
  if (in_vain_ == Clock::duration::zero()) users_.clear();
}

QueuePatience::milliseconds QueuePatience::left(uid_t user) {
  const Clock::time_point now = now_();
  MutexLock lock(mutex_);
  give_back(now);
  const bool new_here = !users_.contains(user) && users_.size() < kNewOnes;
  const milliseconds least = new_here ? kLeast : kLeastAgain;
  return std::max(least, std::chrono::ceil<milliseconds>(kMost - in_vain_));
}

void QueuePatience::waited_in_vain(uid_t user, Clock::duration time) {
  if (time < kAtOnce) return;  // a refusal that needed no waiting
  const Clock::time_point now = now_();
  MutexLock lock(mutex_);
  give_back(std::max(then_, now - time));
  in_vain_ = std::min<Clock::duration>(in_vain_ + time, kMost);
  users_.insert(user);
  then_ = std::max(then_, now);
}

}  // namespace ptc
