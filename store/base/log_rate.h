// Lines that strangers can cause: some of them are logged, and how many were not.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "store/base/mutex.h"

namespace ptc {

/// At most `lines` in each `period`. Threads: any.
class LogRate {
 public:
  LogRate(unsigned lines, std::chrono::seconds period) : lines_(lines), period_(period) {}

  /// What to put behind a line, which may be empty; nullopt: this one is not logged.
  std::optional<std::string> pass() {
    MutexLock lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now >= ends_) {
      ends_ = now + period_;
      passed_ = 0;
    }
    if (passed_ == lines_) {
      ++left_out_;
      return std::nullopt;
    }
    ++passed_;
    const uint64_t others = std::exchange(left_out_, 0);
    return others == 0 ? std::string() : fmt::format(" (and {} others before it)", others);
  }

 private:
  const unsigned lines_;
  const std::chrono::seconds period_;
  Mutex mutex_;
  std::chrono::steady_clock::time_point ends_ PTC_GUARDED_BY(mutex_){};
  unsigned passed_ PTC_GUARDED_BY(mutex_) = 0;
  uint64_t left_out_ PTC_GUARDED_BY(mutex_) = 0;
};

}  // namespace ptc
