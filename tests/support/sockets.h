// Sockets for tests that wait on a thread of their own.
#pragma once

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <stop_token>

#include "store/net/address.h"

namespace ptc {

/// Whether `fd` can be read or written (POLLIN, POLLOUT) before the deadline, or the stop.
inline bool comes(int fd, short events, Deadline deadline, const std::stop_token& stop = {}) {
  constexpr std::chrono::milliseconds kSlice(50);
  while (!stop.stop_requested() && std::chrono::steady_clock::now() < deadline) {
    pollfd waiting{fd, events, 0};
    if (::poll(&waiting, 1, kSlice.count()) > 0) return true;
  }
  return false;
}

inline Result<UniqueFd> connect_here(PeerAddress address, std::stop_token stop = {}) {
  const Deadline deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  return run_here(
      [&](IoExecutor) { return connect_to(address, {.deadline = deadline, .stop = stop}); });
}

}  // namespace ptc
