// Numbers that are drawn: the same ones from the same seed, whatever the library.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>

namespace ptc::planner {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t bits() { return engine_(); }
  /// In [0, 1).
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double between(double least, double most) { return least + (most - least) * unit(); }
  /// In [0, count); count > 0.
  size_t below(size_t count) { return static_cast<size_t>(unit() * static_cast<double>(count)); }
  /// Until the next of those that come `per_s` a second in the mean.
  double wait(double per_s) { return -std::log(1 - unit()) / per_s; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace ptc::planner
