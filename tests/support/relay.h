// A bad network in user space: passes TCP connections on, and cuts, stalls, delays or damages them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "tests/support/relay_base.h"

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
  /// Of connection number 0, 1 …; on a thread of its own.
  using Plans = std::function<Plan(int connection)>;

  Relay(const std::string& target, Plans plans);

  const std::string& address() const { return base_.address(); }
  int connections() const { return base_.connections(); }

 private:
  RelayBase base_;
};

}  // namespace ptc
