// TLS of both sides of a connection.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

#include "store/base/error.h"
#include "store/tls/tls_context.h"

struct ssl_st;

namespace ptc {

/// One side of a connection, TLS 1.2 or later, over a non-blocking socket that it does not own.
/// Each step returns a number of bytes; 0: the peer has closed; −1: wait for events() of the
/// socket, or, where those are 0, error() says what is wrong.
/// Threads: one at a time.
class TlsSession {
 public:
  enum class Side { kClient, kServer };
  TlsSession(const TlsContext& context, int socket, Side side);

  /// Of a client, before the handshake: refuses whoever has no certificate for this name or address
  /// (wild cards count).
  Result<> expect_server(const std::string& host);
  int handshake();  // 1 when it is done
  ssize_t send(const iovec& piece);
  ssize_t receive(const iovec& piece);
  short events() const { return events_; }
  /// kPermissionDenied: a certificate is refused, by this side or the other; kCorrupt: damage or
  /// nonsense; kUnavailable: the connection broke.
  Error error() const { return Error(code_, message_); }

  /// Whether bytes came that receive() has not given yet.
  bool has_pending() const;
  /// Whether the peer's certificate is for a node of this name (SAN; wild cards do not count).
  bool peer_is(const std::string& node) const;

 private:
  ssize_t outcome(int result);
  std::shared_ptr<ssl_st> session_;
  short events_ = 0;
  Code code_ = Code::kUnavailable;
  std::string message_;
};

}  // namespace ptc
