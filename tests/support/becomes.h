// Waits for what other threads bring about.
#pragma once

#include <chrono>
#include <thread>

namespace ptc::testing {

/// Whether it is so within ten seconds; asked every 10 ms.
template <class True>
bool becomes(True is_true) {
  for (int i = 0; i < 1000 && !is_true(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return is_true();
}

}  // namespace ptc::testing
