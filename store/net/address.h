// "host:port" and the sockets that come of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/net/socket.h"

namespace ptc {

struct PeerAddress {
  std::string host, port;
  /// "w1:7070", "10.0.0.1:7070", "[::1]:7070". kInvalidArgument.
  static Result<PeerAddress> parse(std::string_view text);
};

/// Whether it stands for every address of this machine: "0.0.0.0", "[::]". Nobody can connect to
/// that.
bool is_wildcard(const PeerAddress& address);

/// A DNS label, as a certificate or an address can have it: 1 to 63 of a-z, 0-9 and '-', which
/// neither begins nor ends it. kInvalidArgument, with a name that would do where there is one.
Result<> check_node_name(std::string_view name);

/// A connected socket, non-blocking. All addresses of a name are tried, one after the other. A name
/// server that does not answer is left when the patience ends.
Task<UniqueFd> connect_to(PeerAddress address, Patience patience);

struct Listener {
  UniqueFd fd;          // non-blocking
  std::string address;  // numeric, with the true port
  uint16_t port = 0;
  bool loopback = false;
};
Result<Listener> listen_on(const PeerAddress& address);

/// "10.0.0.1:43210" of the other end.
std::string name_of_peer(int socket);

}  // namespace ptc
