#include "store/rpc/handshake.h"

#include <sys/random.h>

#include "store/base/bytes.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

Result<std::string> new_nonce() {
  std::string nonce(kNonceBytes, '\0');
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size()))
    return errno_error(errno, "getrandom");
  return nonce;
}

/// What a proof is of: all that both sides said, and which side proves.
std::string proven(std::string_view role, const Hello& client, const Hello& server) {
  ByteWriter out;
  out.text("ptcfs node connection");
  out.number(kProtocolVersion);
  for (std::string_view text : {role, std::string_view(client.cluster), std::string_view(client.node),
                                std::string_view(client.nonce), std::string_view(server.cluster),
                                std::string_view(server.node), std::string_view(server.nonce)})
    out.text(text);
  return out.take();
}

Result<> start_tls(Connection& connection, const Identity& self, TlsSession::Side side) {
  auto context = self.credentials->tls();
  return context ? connection.start_tls(*context, side) : ok();
}

}  // namespace

Result<> greet(Connection& connection, const Identity& self, const std::string& other) {
  PTC_TRY(start_tls(connection, self, TlsSession::Side::kClient));
  Hello mine{self.cluster, self.node, {}, {}};
  PTC_TRY(mine.nonce, new_nonce());
  PTC_TRY(connection.send(FrameType::kHello, 0, encode(mine)));
  PTC_TRY(auto body, connection.expect(FrameType::kWelcome, 0));
  PTC_TRY(auto theirs, decode_hello(body));
  if (theirs.cluster != self.cluster)
    return make_error(Code::kPermissionDenied, "it is of cluster {}, this node of {}",
                      theirs.cluster, self.cluster);
  if (theirs.node != other)
    return make_error(Code::kUnavailable, "there is node {} now, not {}", theirs.node, other);
  if (!connection.may_be(other))
    return make_error(Code::kPermissionDenied, "its certificate is not for {} (SAN)", other);
  const std::string_view wrong = self.credentials->fault(theirs.proof, proven("server", mine, theirs));
  if (!wrong.empty()) return make_error(Code::kPermissionDenied, "{}", wrong);
  PTC_TRY(connection.send(FrameType::kProof, 0,
                          self.credentials->proof(proven("client", mine, theirs))));
  PTC_TRY(connection.expect(FrameType::kReady, 0));
  return ok();
}

Result<std::string> admit(Connection& connection, const Identity& self) {
  auto refuse = [&](std::string_view why) {
    Error error(Code::kPermissionDenied, std::string(why));
    (void)connection.send(FrameType::kError, 0, encode(error));
    return error;
  };
  PTC_TRY(start_tls(connection, self, TlsSession::Side::kServer));
  PTC_TRY(auto body, connection.expect(FrameType::kHello, 0));
  PTC_TRY(auto theirs, decode_hello(body));
  Hello mine{self.cluster, self.node, {}, {}};
  PTC_TRY(mine.nonce, new_nonce());
  if (theirs.cluster != self.cluster)
    return refuse(fmt::format("node {} is of cluster {}, node {} of {}", theirs.node,
                              theirs.cluster, self.node, self.cluster));
  if (auto label = check_node_name(theirs.node); !label) return refuse(label.error().message());
  if (!connection.may_be(theirs.node))
    return refuse(fmt::format("the certificate is not for node {} (SAN)", theirs.node));
  mine.proof = self.credentials->proof(proven("server", theirs, mine));
  PTC_TRY(connection.send(FrameType::kWelcome, 0, encode(mine)));
  PTC_TRY(auto proof, connection.expect(FrameType::kProof, 0));
  const std::string_view wrong = self.credentials->fault(proof, proven("client", theirs, mine));
  if (!wrong.empty()) return refuse(fmt::format("node {} is refused: {}", theirs.node, wrong));
  PTC_TRY(connection.send(FrameType::kReady, 0));
  return theirs.node;
}

}  // namespace ptc
