#include "store/net/byte_stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ptc {
namespace {

constexpr size_t kMaxPieces = 1024;  // IOV_MAX

}  // namespace

ByteStream::ByteStream(UniqueFd socket) : socket_(std::move(socket)) {
  int one = 1;  // what is sent goes out
  ::setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

void ByteStream::count_in(std::atomic<uint64_t>& sent, std::atomic<uint64_t>& received,
                          std::atomic<uint64_t>& damaged) {
  sent_ = &sent;
  received_ = &received;
  damaged_ = &damaged;
}

Error ByteStream::tls_error() const {
  Error error = tls_->error();
  if (damaged_ != nullptr && error.code() == Code::kCorrupt) ++*damaged_;
  return error;
}

Task<> ByteStream::start_tls(const TlsContext& context, TlsSession::Side side, std::string server) {
  tls_ = std::make_unique<TlsSession>(context, socket_.fd(), side);
  if (!server.empty()) {
    PTC_CO_TRY(tls_->expect_server(server));
  }
  for (;;) {
    const int done = tls_->handshake();
    if (done > 0) co_return ok();
    if (done == 0)
      co_return Error(
          Code::kUnavailable,
          "the peer closed the connection in the TLS handshake; has it certificates, too?");
    if (tls_->events() == 0) co_return tls_error();
    PTC_CO_TRY(co_await wait(tls_->events()));
  }
}

Task<> ByteStream::wait(short events) {
  return socket_.wait(events == POLLOUT ? Socket::For::kWriting : Socket::For::kReading);
}

/// Moves what can be moved now of the pieces, which it uses up. False: the socket must be waited
/// for.
Result<bool> ByteStream::move_some(std::span<iovec>& pieces, bool out, short& wait_for) {
  while (!pieces.empty()) {
    if (pieces.front().iov_len == 0) {
      pieces = pieces.subspan(1);
      continue;
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = std::min(pieces.size(), kMaxPieces);
    ssize_t moved = 0;
    if (tls_) moved = out ? tls_->send(pieces.front()) : tls_->receive(pieces.front());
    else
      moved = out ? ::sendmsg(socket_.fd(), &message, MSG_NOSIGNAL)
                  : ::recvmsg(socket_.fd(), &message, 0);
    if (moved == 0) return Error(Code::kUnavailable, "the peer closed the connection");
    if (moved < 0 && tls_) {
      wait_for = tls_->events();
      if (wait_for == 0) return tls_error();
      return false;
    }
    if (moved < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN)
        return make_error(Code::kUnavailable, "{}: {}", out ? "sending" : "receiving",
                          ::strerror(errno));
      wait_for = out ? POLLOUT : POLLIN;
      return false;
    }
    if (auto* counter = out ? sent_ : received_) *counter += static_cast<uint64_t>(moved);
    if (!out) last_received_ = std::chrono::steady_clock::now();
    for (size_t left = static_cast<size_t>(moved); left > 0;) {
      iovec& piece = pieces.front();
      const size_t part = std::min(left, piece.iov_len);
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + part;
      piece.iov_len -= part;
      left -= part;
      if (piece.iov_len == 0) pieces = pieces.subspan(1);
    }
  }
  return true;
}

Task<> ByteStream::transfer(std::span<iovec> pieces, bool out) {
  for (;;) {
    short events = 0;
    PTC_CO_TRY(const bool done, move_some(pieces, out, events));
    if (done) break;
    PTC_CO_TRY(co_await wait(events));
  }
  if (patience().stop.stop_requested()) co_return Error(Code::kCancelled, "cancelled");
  co_return ok();
}

Task<size_t> ByteStream::receive_some(std::span<char> space) {
  const iovec piece{space.data(), space.size()};
  for (;;) {
    const ssize_t got =
        tls_ ? tls_->receive(piece) : ::recv(socket_.fd(), space.data(), space.size(), 0);
    if (got >= 0) {
      if (received_ != nullptr) *received_ += static_cast<uint64_t>(got);
      if (got > 0) last_received_ = std::chrono::steady_clock::now();
      co_return static_cast<size_t>(got);
    }
    short events = POLLIN;
    if (tls_) {
      events = tls_->events();
      if (events == 0) co_return tls_error();
    } else if (errno == EINTR) {
      continue;
    } else if (errno != EAGAIN) {
      co_return make_error(Code::kUnavailable, "receiving: {}", ::strerror(errno));
    }
    PTC_CO_TRY(co_await wait(events));
  }
}

Task<bool> ByteStream::wait_to_receive(std::chrono::milliseconds time) {
  if (tls_ && tls_->has_pending()) co_return true;
  auto ready = co_await socket_.wait(Socket::For::kReading, time);
  if (ready) co_return true;
  if (socket_.waited_too_long()) co_return false;
  co_return std::move(ready).error();
}

bool ByteStream::is_idle() const {
  pollfd idle{socket_.fd(), POLLIN, 0};
  return ::poll(&idle, 1, 0) == 0;
}

iovec piece_of(std::string_view text) { return {const_cast<char*>(text.data()), text.size()}; }

}  // namespace ptc
