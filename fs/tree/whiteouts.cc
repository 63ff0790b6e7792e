#include "fs/tree/whiteouts.h"

#include <algorithm>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

void Whiteouts::expire() const {
  if (paths_.empty() || std::chrono::steady_clock::now() - last_hidden_ < kRestoreAfter) return;
  if (std::erase_if(paths_, [](const auto& path) { return path.second; }) != 0) {
    ::clock_gettime(CLOCK_REALTIME, &restored_);
    some_ = !paths_.empty();
  }
}

void Whiteouts::hide(std::string path) {
  MutexLock lock(mutex_);
  expire();
  paths_[std::move(path)] = true;
  some_ = true;
  last_hidden_ = std::chrono::steady_clock::now();
}

void Whiteouts::hide_until_shown(std::string path) {
  MutexLock lock(mutex_);
  paths_[std::move(path)] = false;
  some_ = true;
}

void Whiteouts::show(const std::string& path) {
  MutexLock lock(mutex_);
  paths_.erase(path);
  some_ = !paths_.empty();
}

bool Whiteouts::hidden(const std::string& path) const {
  if (!some_) return false;
  MutexLock lock(mutex_);
  expire();
  return paths_.contains(path);
}

timespec Whiteouts::restored() const {
  MutexLock lock(mutex_);
  expire();
  return restored_;
}

std::chrono::duration<double> Whiteouts::none_comes_back_for() const {
  if (!some_) return kForever;
  MutexLock lock(mutex_);
  expire();
  const bool can =
      std::any_of(paths_.begin(), paths_.end(), [](const auto& path) { return path.second; });
  if (!can) return kForever;
  return kRestoreAfter - (std::chrono::steady_clock::now() - last_hidden_);
}

bool Whiteouts::any() const {
  if (!some_) return false;
  MutexLock lock(mutex_);
  expire();
  return !paths_.empty();
}

}  // namespace ptc
