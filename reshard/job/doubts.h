// Decisions of which it is not known whether they were made (Code::kInDoubt), until it is.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// What a decision was for stays as it is while it is in doubt: who made it leaves here what is to
/// be done once the metadata can be asked. Threads: any.
class Doubts {
 public:
  void add(std::function<void()> when_known) {
    MutexLock lock(mutex_);
    waiting_.push_back(std::move(when_known));
  }
  bool any() const {
    MutexLock lock(mutex_);
    return !waiting_.empty();
  }
  /// `find_out`: after it nothing that was in doubt before is so any more, and what was decided is
  /// known here. On its error all wait on.
  void settle(const std::function<Result<>()>& find_out) {
    std::vector<std::function<void()>> now;
    {
      MutexLock lock(mutex_);
      now.swap(waiting_);
    }
    if (now.empty()) return;
    if (find_out().has_value()) {
      for (const auto& when_known : now) when_known();
      return;
    }
    MutexLock lock(mutex_);
    waiting_.insert(waiting_.begin(), std::make_move_iterator(now.begin()),
                    std::make_move_iterator(now.end()));
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::function<void()>> waiting_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
