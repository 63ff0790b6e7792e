#include "fs/tree/errands.h"

#include <pthread.h>

#include <utility>

#include "store/base/mutex.h"

namespace ptc {

void Errands::start(std::function<void()> errand) {
  List ended, next(1);  // those are joined without the lock
  MutexLock lock(mutex_);
  for (auto one = under_way_.begin(); one != under_way_.end();) {
    const auto it = one++;
    if (it->ended) ended.splice(ended.end(), under_way_, it);
  }
  One& one = next.front();
  one.thread = std::jthread([this, &one, errand = std::move(errand)]() mutable {
    ::pthread_setname_np(::pthread_self(), "ptcfs-errand");
    std::exchange(errand, nullptr)();
    MutexLock ended_lock(mutex_);
    one.ended = true;
  });
  under_way_.splice(under_way_.end(), next);
}

void Errands::wait() {
  for (;;) {
    List ending;  // joined without the lock
    MutexLock lock(mutex_);
    if (under_way_.empty()) return;
    ending.swap(under_way_);
  }
}

}  // namespace ptc
