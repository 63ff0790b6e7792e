#include "fs/tree/errands.h"

#include <pthread.h>

#include <chrono>
#include <exception>
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

FsResult<> Errands::ask(const std::string& what, const std::string& how,
                        const std::function<FsResult<>()>& errand) {
  constexpr auto kWaits = std::chrono::milliseconds(1700);
  const auto until = std::chrono::steady_clock::now() + kWaits;
  MutexLock lock(asked_mutex_);
  for (;;) {
    const auto known = asked_.find(what);
    const auto one = known != asked_.end() ? known->second : std::make_shared<Asked>(Asked{how});
    if (known == asked_.end()) {
      asked_.emplace(what, one);
      if (!begin(what, one, errand)) {
        asked_.erase(what);
        return Errno{EAGAIN};
      }
    }
    if (!ended_.wait_until(asked_mutex_, until, [&] { return one->outcome.has_value(); }))
      return Errno{EAGAIN};
    if (one->how == how) return *one->outcome;
  }
}

/// False: there is no thread, or no memory, for it.
bool Errands::begin(const std::string& what, const std::shared_ptr<Asked>& one,
                    const std::function<FsResult<>()>& errand) {
  try {
    start([this, what, one, errand] {
      FsResult<> outcome = Errno{ENOMEM};
      try {
        outcome = errand();
      } catch (const std::exception&) {
      }
      MutexLock lock(asked_mutex_);
      one->outcome = outcome;
      asked_.erase(what);
      ended_.notify_all();
    });
    return true;
  } catch (const std::exception&) {
    return false;
  }
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
