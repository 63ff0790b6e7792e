// A lock for each key, there while somebody holds it or waits for it.
#pragma once

#include <set>
#include <string>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

/// Threads: any.
class KeyedLock {
 public:
  class Held {
   public:
    ~Held() {
      MutexLock lock(all_.mutex_);
      all_.held_.erase(key_);
      all_.released_.notify_all();
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    friend class KeyedLock;
    Held(KeyedLock& all, std::string key) : all_(all), key_(std::move(key)) {
      MutexLock lock(all_.mutex_);
      all_.released_.wait(
          all_.mutex_, [&]() PTC_REQUIRES(all_.mutex_) { return all_.held_.insert(key_).second; });
    }
    KeyedLock& all_;
    const std::string key_;
  };

  /// Waits until nobody else holds the lock of this key.
  [[nodiscard]] Held hold(std::string key) { return Held(*this, std::move(key)); }

 private:
  Mutex mutex_;
  ConditionVariable released_;
  std::set<std::string> held_ PTC_GUARDED_BY(mutex_);
};

}  // namespace ptc
