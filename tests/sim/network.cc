#include "tests/sim/network.h"

namespace ptc::sim {

void Network::travel(unsigned from, unsigned to) {
  const uint64_t most = slow_[from] || slow_[to] ? 2'000'000 : 500;
  sleep(std::chrono::microseconds(20 + random_() % most));
}

void Network::set_frozen(unsigned place, bool frozen) {
  frozen_[place] = frozen;
  if (frozen) freeze(static_cast<int>(place) + 1);
  else thaw(static_cast<int>(place) + 1);
}

}  // namespace ptc::sim
