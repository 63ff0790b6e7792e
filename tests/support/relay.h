// A bad network in user space: passes TCP connections on, and cuts, stalls, delays or damages them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <stop_token>
#include <string>
#include <thread>

#include "store/net/address.h"

namespace ptc {

class Relay {
 public:
  /// What happens to the bytes that one connection brings from the target.
  struct Plan {
    uint64_t cut_after = UINT64_MAX;    // so many bytes: both ends get a reset
    uint64_t stall_after = UINT64_MAX;  // … nothing comes any more, and nobody closes
    uint64_t swap_at = UINT64_MAX;  // the 16-bit words there and behind it change places, as TCP's
                                    // checksum does not see
    std::chrono::milliseconds delay{0};  // before each piece
    size_t piece_bytes = 64 << 10;
  };
  /// Of connection number 0, 1 …
  using Plans = std::function<Plan(int connection)>;

  Relay(std::string target, Plans plans);
  ~Relay();

  const std::string& address() const { return listener_.address; }
  int connections() const { return count_; }

 private:
  struct Pair {
    UniqueFd client, target;
    std::thread out, back;
  };
  void accept_all();
  void pump(int from, int to, Plan plan);

  const PeerAddress target_;
  const Plans plans_;
  Listener listener_;
  std::stop_source stop_;
  std::atomic<int> count_{0};
  std::list<Pair> pairs_;  // the acceptor's
  std::thread acceptor_;
};

}  // namespace ptc
