#include "store/net/tls_session.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

#include "store/base/json.h"

namespace ptc {
namespace {

void forget_errors() {
  ::ERR_clear_error();
  errno = 0;
}

/// OpenSSL's own socket BIO calls write(2), which raises SIGPIPE.
int socket_write(BIO* bio, const char* bytes, int count) {
  BIO_clear_retry_flags(bio);
  const int socket = static_cast<int>(reinterpret_cast<intptr_t>(::BIO_get_data(bio)));
  const ssize_t sent = ::send(socket, bytes, static_cast<size_t>(count), MSG_NOSIGNAL);
  if (sent < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_write(bio);
  return static_cast<int>(sent);
}
int socket_read(BIO* bio, char* bytes, int count) {
  BIO_clear_retry_flags(bio);
  const int socket = static_cast<int>(reinterpret_cast<intptr_t>(::BIO_get_data(bio)));
  const ssize_t got = ::recv(socket, bytes, static_cast<size_t>(count), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
  return static_cast<int>(got);
}
long socket_control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO* new_socket_bio(int socket) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = ::BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "ptcfs socket");
    ::BIO_meth_set_write(made, socket_write);
    ::BIO_meth_set_read(made, socket_read);
    ::BIO_meth_set_ctrl(made, socket_control);
    return made;
  }();
  BIO* bio = ::BIO_new(method);
  PTC_CHECK(bio != nullptr);
  ::BIO_set_data(bio, reinterpret_cast<void*>(static_cast<intptr_t>(socket)));
  ::BIO_set_init(bio, 1);
  return bio;
}

/// Alerts by which the peer refuses this side's certificate (RFC 8446, 6.2).
bool is_refusal(int alert) { return (alert >= 42 && alert <= 49) || alert == 116; }

}  // namespace

TlsSession::TlsSession(const TlsContext& context, int socket, Side side)
    : session_(::SSL_new(context.get()), &::SSL_free) {
  PTC_CHECK(session_ != nullptr);
  BIO* bio = new_socket_bio(socket);
  ::SSL_set_bio(session_.get(), bio, bio);
  if (side == Side::kClient) ::SSL_set_connect_state(session_.get());
  else ::SSL_set_accept_state(session_.get());
}

Result<> TlsSession::expect_server(const std::string& host) {
  forget_errors();
  SSL* session = session_.get();
  if (::X509_VERIFY_PARAM_set1_ip_asc(::SSL_get0_param(session), host.c_str()) == 1) return ok();
  forget_errors();
  ::SSL_set_hostflags(session, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
  if (::SSL_set_tlsext_host_name(session, host.c_str()) == 1 &&
      ::SSL_set1_host(session, host.c_str()) == 1)
    return ok();
  return make_error(Code::kInvalidArgument, "TLS: {} is no name of a server: {}", quoted(host),
                    last_tls_error());
}

int TlsSession::handshake() {
  forget_errors();
  return static_cast<int>(outcome(::SSL_do_handshake(session_.get())));
}

ssize_t TlsSession::send(const iovec& piece) {
  forget_errors();
  return outcome(::SSL_write(session_.get(), piece.iov_base,
                             static_cast<int>(std::min<size_t>(piece.iov_len, INT_MAX))));
}

ssize_t TlsSession::receive(const iovec& piece) {
  forget_errors();
  return outcome(::SSL_read(session_.get(), piece.iov_base,
                            static_cast<int>(std::min<size_t>(piece.iov_len, INT_MAX))));
}

ssize_t TlsSession::outcome(int result) {
  if (result > 0) return result;
  const int reason = errno;
  events_ = 0;
  switch (::SSL_get_error(session_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      events_ = POLLIN;
      return -1;
    case SSL_ERROR_WANT_WRITE:
      events_ = POLLOUT;
      return -1;
    case SSL_ERROR_ZERO_RETURN:
      return 0;
    case SSL_ERROR_SYSCALL:
      if (reason == 0) return 0;  // closed without a word
      code_ = Code::kUnavailable;
      message_ = fmt::format("TLS: {}", ::strerror(reason));
      return -1;
    default:
      break;
  }
  const unsigned long error = ::ERR_peek_error();
  const int detail = ERR_GET_REASON(error);
  const long verified = ::SSL_get_verify_result(session_.get());
  const bool refused = detail == SSL_R_CERTIFICATE_VERIFY_FAILED ||
                       detail == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE ||
                       is_refusal(detail - SSL_AD_REASON_OFFSET);
  code_ = refused ? Code::kPermissionDenied : Code::kCorrupt;
  message_ = fmt::format("TLS: {}", last_tls_error());
  if (verified != X509_V_OK)
    message_ += fmt::format(" ({})", ::X509_verify_cert_error_string(verified));
  return -1;
}

bool TlsSession::has_pending() const { return ::SSL_pending(session_.get()) > 0; }

bool TlsSession::peer_is(const std::string& node) const {
  std::unique_ptr<X509, void (*)(X509*)> peer(::SSL_get1_peer_certificate(session_.get()),
                                              &::X509_free);
  return peer != nullptr &&
         ::X509_check_host(peer.get(), node.data(), node.size(),
                           X509_CHECK_FLAG_NO_WILDCARDS | X509_CHECK_FLAG_NEVER_CHECK_SUBJECT,
                           nullptr) == 1;
}

}  // namespace ptc
