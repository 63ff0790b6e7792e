// A lock for each key, there while somebody holds it or waits for it.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace ptc {

/// Threads: any.
class KeyedLock {
 public:
  class Held {
   public:
    ~Held() {
      std::lock_guard lock(all_.mutex_);
      all_.held_.erase(key_);
      all_.released_.notify_all();
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    friend class KeyedLock;
    Held(KeyedLock& all, std::string key) : all_(all), key_(std::move(key)) {
      std::unique_lock lock(all_.mutex_);
      all_.released_.wait(lock, [&] { return all_.held_.insert(key_).second; });
    }
    KeyedLock& all_;
    const std::string key_;
  };

  /// Waits until nobody else holds the lock of this key.
  [[nodiscard]] Held hold(std::string key) { return Held(*this, std::move(key)); }

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  std::set<std::string> held_;  // guarded
};

}  // namespace ptc
