#include "fs/whiteouts.h"

#include <utility>

namespace ptc {

void Whiteouts::expire() const {
  if (paths_.empty() || std::chrono::steady_clock::now() - last_hidden_ < kRestoreAfter) return;
  std::erase_if(paths_, [](const auto& path) { return path.second; });
}

void Whiteouts::hide(std::string path) {
  std::lock_guard lock(mutex_);
  expire();
  paths_[std::move(path)] = true;
  last_hidden_ = std::chrono::steady_clock::now();
}

void Whiteouts::hide_until_shown(std::string path) {
  std::lock_guard lock(mutex_);
  paths_[std::move(path)] = false;
}

void Whiteouts::show(const std::string& path) {
  std::lock_guard lock(mutex_);
  paths_.erase(path);
}

bool Whiteouts::hidden(const std::string& path) const {
  std::lock_guard lock(mutex_);
  expire();
  return paths_.contains(path);
}

bool Whiteouts::any() const {
  std::lock_guard lock(mutex_);
  expire();
  return !paths_.empty();
}

}  // namespace ptc
