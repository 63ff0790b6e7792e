// The first frames of a connection: who is there, of which cluster, and the proof of it. See
// PROTOCOL.md.
#pragma once

#include <memory>
#include <string>

#include "store/base/error.h"
#include "store/rpc/connection.h"
#include "store/rpc/credentials.h"

namespace ptc {

struct Identity {
  std::string node, cluster;
  std::shared_ptr<const Credentials> credentials;
};

/// The side that connected, to node `other`. kPermissionDenied: another cluster, secret or
/// authority; kUnavailable: another node listens there now.
Task<> greet(Connection& connection, const Identity& self, const std::string& other);

/// The side that listens; the peer's name. The peer is told why it is refused.
Task<std::string> admit(Connection& connection, const Identity& self);

}  // namespace ptc
