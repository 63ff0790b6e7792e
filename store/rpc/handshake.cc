#include "store/rpc/handshake.h"

#include <sys/random.h>

#include "store/base/bytes.h"
#include "store/net/address.h"
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
  for (std::string_view text :
       {role, std::string_view(client.cluster), std::string_view(client.node),
        std::string_view(client.nonce), std::string_view(server.cluster),
        std::string_view(server.node), std::string_view(server.nonce)})
    out.text(text);
  return out.take();
}

Task<> start_tls(Connection& connection, const Identity& self, TlsSession::Side side) {
  auto context = self.credentials->tls();
  if (!context) co_return ok();
  co_return co_await connection.start_tls(*context, side);
}

Task<std::string> refuse(Connection& connection, std::string why) {
  Error error(Code::kPermissionDenied, std::move(why));
  (void)co_await connection.send(FrameType::kError, 0, encode(error));
  co_return error;
}

}  // namespace

Task<> greet(Connection& connection, const Identity& self, const std::string& other) {
  PTC_CO_TRY(co_await start_tls(connection, self, TlsSession::Side::kClient));
  Hello mine{self.cluster, self.node, {}, {}};
  PTC_CO_TRY(mine.nonce, new_nonce());
  PTC_CO_TRY(co_await connection.send(FrameType::kHello, 0, encode(mine)));
  PTC_CO_TRY(auto body, co_await connection.expect(FrameType::kWelcome, 0));
  PTC_CO_TRY(auto theirs, decode_hello(body));
  if (theirs.cluster != self.cluster)
    co_return make_error(Code::kPermissionDenied, "it is of cluster {}, this node of {}",
                         theirs.cluster, self.cluster);
  if (theirs.node != other)
    co_return make_error(Code::kUnavailable, "there is node {} now, not {}", theirs.node, other);
  if (!connection.may_be(other))
    co_return make_error(Code::kPermissionDenied, "its certificate is not for {} (SAN)", other);
  const std::string_view wrong =
      self.credentials->fault(theirs.proof, proven("server", mine, theirs));
  if (!wrong.empty()) co_return make_error(Code::kPermissionDenied, "{}", wrong);
  PTC_CO_TRY(co_await connection.send(FrameType::kProof, 0,
                                      self.credentials->proof(proven("client", mine, theirs))));
  PTC_CO_TRY(co_await connection.expect(FrameType::kReady, 0));
  co_return ok();
}

Task<std::string> admit(Connection& connection, const Identity& self) {
  PTC_CO_TRY(co_await start_tls(connection, self, TlsSession::Side::kServer));
  PTC_CO_TRY(auto body, co_await connection.expect(FrameType::kHello, 0));
  PTC_CO_TRY(auto theirs, decode_hello(body));
  Hello mine{self.cluster, self.node, {}, {}};
  PTC_CO_TRY(mine.nonce, new_nonce());
  if (theirs.cluster != self.cluster)
    co_return co_await refuse(connection,
                              fmt::format("node {} is of cluster {}, node {} of {}", theirs.node,
                                          theirs.cluster, self.node, self.cluster));
  if (auto label = check_node_name(theirs.node); !label)
    co_return co_await refuse(connection, label.error().message());
  if (!connection.may_be(theirs.node))
    co_return co_await refuse(connection,
                              fmt::format("the certificate is not for node {} (SAN)", theirs.node));
  mine.proof = self.credentials->proof(proven("server", theirs, mine));
  PTC_CO_TRY(co_await connection.send(FrameType::kWelcome, 0, encode(mine)));
  PTC_CO_TRY(auto proof, co_await connection.expect(FrameType::kProof, 0));
  const std::string_view wrong = self.credentials->fault(proof, proven("client", theirs, mine));
  if (!wrong.empty())
    co_return co_await refuse(connection,
                              fmt::format("node {} is refused: {}", theirs.node, wrong));
  PTC_CO_TRY(co_await connection.send(FrameType::kReady, 0));
  co_return theirs.node;
}

}  // namespace ptc
