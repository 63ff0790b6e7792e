// A node is one of a cluster once every other one has let it in, and it those: else it would be
// there for all, and what needs all nodes would fail on each.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/peer_calls.h"

namespace ptc {

/// Answers PeerMethod::kMeet of a node that wants to join, by connecting to where it says that it
/// listens.
Result<std::string> answer_meeting(PeerCalls& calls, const std::string& from,
                                   std::string_view address);

/// The others as this node has met them, each life of a node by itself. Threads: one at a time.
class Meetings {
 public:
  struct Other {
    std::string name, address, boot;
    bool joins = false;  // it is no member yet: that it refuses this node need not last
  };
  explicit Meetings(PeerCalls& calls) : calls_(calls) {}

  /// Meets those that it has not met yet, many at a time, in this order: this node connects to the
  /// other, the other to `own_address`, and both prove who they are each time. `calls` knows their
  /// addresses.
  /// Errors name the first node, and say what is wrong: kPermissionDenied (secret, certificate,
  /// cluster), by a member; kUnavailable.
  Result<> meet(const std::vector<Other>& others, const std::string& own_address);

 private:
  PeerCalls& calls_;
  std::map<std::string, std::string> met_;  // name → boot
};

}  // namespace ptc
