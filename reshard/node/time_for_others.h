// How long somebody still waits for other nodes.
#pragma once

#include <algorithm>
#include <chrono>

namespace ptc {

/// What is left of somebody's patience with other nodes; 0, of one who has no end of it.
class TimeForOthers {
 public:
  explicit TimeForOthers(std::chrono::milliseconds all) : all_(all), until_(Clock::now() + all) {}
  std::chrono::milliseconds left() const {
    using std::chrono::milliseconds;
    if (all_ == all_.zero()) return all_;
    return std::max(std::chrono::ceil<milliseconds>(until_ - Clock::now()), milliseconds(1));
  }
  /// Of it, for what need not be answered.
  std::chrono::milliseconds a_moment() const {
    return std::min(all_, std::chrono::milliseconds(200));
  }

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::milliseconds all_;
  const Clock::time_point until_;
};

}  // namespace ptc
