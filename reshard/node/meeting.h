// A node is one of a cluster once every other one has let it in, and it those: else it would be
// there for all, and what needs all nodes would fail on each.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "store/rpc/peer_server.h"
#include "store/rpc/peers.h"

namespace ptc {

/// Answers PeerMethod::kMeet of nodes that want to join, by connecting to where they say that they
/// listen. `peers` outlives it.
PeerServer::Handler answer_meetings(Peers& peers);

/// The others as this node has met them: when this was so, by the revision of their keys. Threads:
/// one at a time.
class Meetings {
 public:
  struct Other {
    std::string name, address;
    int64_t revision = 0;
  };
  explicit Meetings(Peers& peers) : peers_(peers) {}

  /// Meets those that it has not met yet, many at a time: this node connects to the other, the
  /// other to `own_address`, and both prove who they are each time. `peers` knows their addresses.
  /// Errors name the first node, and say what is wrong: kPermissionDenied (secret, certificate,
  /// cluster), kUnavailable.
  Result<> meet(const std::vector<Other>& others, const std::string& own_address);

 private:
  Result<> meet(const Other& other, const std::string& own_address);

  Peers& peers_;
  std::map<std::string, int64_t> met_;
};

}  // namespace ptc
