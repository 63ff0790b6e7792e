#include "tests/sim/network.h"

namespace ptc::sim {

Time Network::one_way(unsigned from, unsigned to) {
  const uint64_t most = slow_[from] || slow_[to] ? 2'000'000 : 500;
  return std::chrono::microseconds(20 + random_() % most);
}

void Network::travel(unsigned from, unsigned to) { sleep(one_way(from, to)); }

bool Network::travel_both_ways(unsigned from, unsigned to) {
  if (!cuts_.empty() || slow_[from] || slow_[to] || frozen_[to] || breaks_ > 0) return false;
  sleep(one_way(from, to) + one_way(to, from));
  return true;
}

void Network::set_frozen(unsigned place, bool frozen) {
  frozen_[place] = frozen;
  if (frozen) freeze(static_cast<int>(place) + 1);
  else thaw(static_cast<int>(place) + 1);
}

}  // namespace ptc::sim
