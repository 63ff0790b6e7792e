// Counts the memory that a piece of code takes: what is allocated, at its highest.
#pragma once

#include <cstddef>

namespace ptc::fuzz {

/// From here to peak_bytes(), of all threads; what was allocated before does not count. One at a
/// time.
class MemoryMeter {
 public:
  MemoryMeter();
  ~MemoryMeter();
  size_t peak_bytes() const;
};

}  // namespace ptc::fuzz
