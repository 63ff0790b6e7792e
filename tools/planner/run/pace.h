// How slow a job trains, by how its count of consumed samples gets on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

namespace ptc::planner {

/// Threads: one.
class Pace {
 public:
  static constexpr double kMostSlowness = 100;  // and at least the inverse

  /// It is told of each progress. What a sample takes ÷ what its curve says, once that is known.
  /// From one progress to another: what it takes until the first one is its start. Where the count
  /// falls, ranks went on from a checkpoint, and it is measured anew.
  std::optional<double> note(double now, uint64_t consumed, double samples_per_s) {
    if (!from_ || consumed < last_) from_ = From{now, consumed, 0};
    else ++from_->seen;
    last_ = consumed;
    const double seconds = now - from_->at;
    if (from_->seen < kLeastSeen || seconds < kLeastSeconds || samples_per_s <= 0 ||
        consumed <= from_->consumed)
      return std::nullopt;
    const double slowness =
        seconds * samples_per_s / static_cast<double>(consumed - from_->consumed);
    if (from_->seen >= kMostSeen) from_ = From{now, consumed, 0};
    return std::clamp(slowness, 1 / kMostSlowness, kMostSlowness);
  }

 private:
  static constexpr int kLeastSeen = 4, kMostSeen = 64;  // how often it was seen to get on
  static constexpr double kLeastSeconds = 1;

  struct From {
    double at = 0;
    uint64_t consumed = 0;
    int seen = 0;
  };
  std::optional<From> from_;  // none: nothing was seen yet
  uint64_t last_ = 0;
};

}  // namespace ptc::planner
