#include "store/rpc/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "store/base/crc32c.h"
#include "store/rpc/address.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

constexpr size_t kMaxPieces = 1024;  // IOV_MAX
constexpr auto kLinger = std::chrono::milliseconds(500);
constexpr size_t kLingerBytes = 64 << 10;

std::span<const std::byte> bytes_of(const iovec& piece) {
  return {static_cast<const std::byte*>(piece.iov_base), piece.iov_len};
}

iovec piece_of(std::string_view text) {
  return {const_cast<char*>(text.data()), text.size()};
}

uint32_t checksum_of(std::span<const iovec> pieces) {
  uint32_t crc = 0;
  for (const iovec& piece : pieces) crc = crc32c(bytes_of(piece), crc);
  return crc;
}

}  // namespace

Connection::Connection(UniqueFd socket, std::string dialed)
    : socket_(std::move(socket)),
      peer_address_(name_of_peer(socket_.fd())),
      dialed_(std::move(dialed)),
      counters_(std::make_shared<PeerCounters>()) {
  int one = 1;  // a frame goes out when it is sent
  ::setsockopt(socket_.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

void Connection::count_in(std::shared_ptr<PeerCounters> counters) {
  counters->bytes_sent += counters_->bytes_sent;
  counters->bytes_received += counters_->bytes_received;
  counters->checksum_failures += counters_->checksum_failures;
  counters_ = std::move(counters);
}

Task<> Connection::start_tls(const TlsContext& context, TlsSession::Side side) {
  tls_ = std::make_unique<TlsSession>(context, socket_.fd(), side);
  for (;;) {
    const int done = tls_->handshake();
    if (done > 0) co_return ok();
    if (done == 0)
      co_return Error(Code::kUnavailable,
                      "the peer closed the connection in the TLS handshake; has it certificates, too?");
    if (tls_->events() == 0) co_return tls_error();
    PTC_CO_TRY(co_await wait(tls_->events()));
  }
}

Error Connection::tls_error() {
  Error error = tls_->error();
  if (error.code() == Code::kCorrupt) ++counters_->checksum_failures;
  return error;
}

Task<> Connection::wait(short events) {
  return socket_.wait(events == POLLOUT ? Socket::For::kWriting : Socket::For::kReading);
}

/// Moves what can be moved now of the pieces, which it uses up. False: the socket must be waited for.
Result<bool> Connection::move_some(std::span<iovec>& pieces, bool out, short& wait_for) {
  auto& counter = out ? counters_->bytes_sent : counters_->bytes_received;
  while (!pieces.empty()) {
    if (pieces.front().iov_len == 0) {
      pieces = pieces.subspan(1);
      continue;
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = std::min(pieces.size(), kMaxPieces);
    ssize_t moved = 0;
    if (tls_)
      moved = out ? tls_->send(pieces.front()) : tls_->receive(pieces.front());
    else
      moved = out ? ::sendmsg(socket_.fd(), &message, MSG_NOSIGNAL) : ::recvmsg(socket_.fd(), &message, 0);
    if (moved == 0) return Error(Code::kUnavailable, "the peer closed the connection");
    if (moved < 0 && tls_) {
      wait_for = tls_->events();
      if (wait_for == 0) return tls_error();
      return false;
    }
    if (moved < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN)
        return make_error(Code::kUnavailable, "{}: {}", out ? "sending" : "receiving", ::strerror(errno));
      wait_for = out ? POLLOUT : POLLIN;
      return false;
    }
    counter += static_cast<uint64_t>(moved);
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

Task<> Connection::transfer(std::span<iovec> pieces, bool out) {
  for (;;) {
    short events = 0;
    PTC_CO_TRY(const bool done, move_some(pieces, out, events));
    if (done) break;
    PTC_CO_TRY(co_await wait(events));
  }
  if (socket_.patience().stop.stop_requested()) co_return Error(Code::kCancelled, "cancelled");
  co_return ok();
}

Task<> Connection::send(FrameType type, uint64_t request, std::span<const iovec> body) {
  size_t bytes = 0;
  for (const iovec& piece : body) bytes += piece.iov_len;
  PTC_CHECK(bytes <= max_body_bytes(type));
  FrameHeaderBytes header = encode({type, request, static_cast<uint32_t>(bytes), checksum_of(body)});
  std::vector<iovec> pieces{{header.data(), header.size()}};
  pieces.insert(pieces.end(), body.begin(), body.end());
  co_return co_await transfer(pieces, true);
}

Task<> Connection::send(FrameType type, uint64_t request, std::string_view body) {
  const iovec piece = piece_of(body);
  co_return co_await send(type, request, std::span(&piece, 1));
}

Task<> Connection::send_data(uint64_t request, std::string_view text) {
  for (; !text.empty(); text.remove_prefix(std::min<size_t>(text.size(), kMaxDataBytes))) {
    PTC_CO_TRY(co_await send(FrameType::kData, request, text.substr(0, kMaxDataBytes)));
  }
  co_return ok();
}

Task<FrameHeader> Connection::receive_header() {
  for (;;) {
    FrameHeaderBytes bytes;
    iovec piece{bytes.data(), bytes.size()};
    PTC_CO_TRY(co_await transfer(std::span(&piece, 1), false));
    auto header = decode_frame_header(bytes);
    if (!header) ++counters_->checksum_failures;
    if (!header || header.value().type != FrameType::kPing) co_return header;
  }
}

Task<> Connection::receive_body(FrameHeader header, std::span<const iovec> body) {
  std::vector<iovec> pieces(body.begin(), body.end());
  PTC_CO_TRY(co_await transfer(pieces, false));
  if (checksum_of(body) == header.body_crc) co_return ok();
  ++counters_->checksum_failures;
  co_return make_error(Code::kCorrupt, "{} bytes were damaged on their way", header.body_bytes);
}

Task<std::string> Connection::receive_body(FrameHeader header) {
  std::string body(header.body_bytes, '\0');
  const iovec piece = piece_of(body);
  PTC_CO_TRY(co_await receive_body(header, std::span(&piece, 1)));
  co_return body;
}

Task<FrameHeader> Connection::expect_header(FrameType type, uint64_t request) {
  said_ = false;
  PTC_CO_TRY(auto header, co_await receive_header());
  if (header.request != request) co_return unexpected(header);
  if (header.type == type) co_return header;
  if (header.type != FrameType::kError) co_return unexpected(header);
  PTC_CO_TRY(auto body, co_await receive_body(header));
  auto error = decode_error(body);
  if (!error) co_return Error(Code::kCorrupt, "an error that cannot be read");
  said_ = true;
  co_return *std::move(error);
}

Task<std::string> Connection::expect(FrameType type, uint64_t request) {
  PTC_CO_TRY(auto header, co_await expect_header(type, request));
  co_return co_await receive_body(header);
}

Task<std::string> Connection::receive_data(uint64_t request, uint64_t bytes) {
  std::string text;
  while (text.size() < bytes) {
    PTC_CO_TRY(auto header, co_await receive_header());
    if (header.type != FrameType::kData || header.request != request || header.body_bytes == 0 ||
        header.body_bytes > bytes - text.size())
      co_return unexpected(header);
    const size_t before = text.size();
    text.resize(before + header.body_bytes);
    const iovec piece{text.data() + before, header.body_bytes};
    PTC_CO_TRY(co_await receive_body(header, std::span(&piece, 1)));
  }
  co_return text;
}

Task<bool> Connection::wait_for_request(std::chrono::milliseconds patience) {
  if (tls_ && tls_->has_pending()) co_return true;
  PTC_CO_TRY(co_await socket_.wait(Socket::For::kReading, patience));
  char first;
  co_return ::recv(socket_.fd(), &first, 1, MSG_PEEK) > 0;
}

bool Connection::looks_alive() const {
  pollfd idle{socket_.fd(), POLLIN, 0};
  return ::poll(&idle, 1, 0) == 0;
}

asio::awaitable<void> Connection::linger() {
  ::shutdown(socket_.fd(), SHUT_WR);
  const Deadline until = std::chrono::steady_clock::now() + kLinger;
  set_patience({kLinger, until, {}});
  char rest[4096];
  for (size_t taken = 0; taken < kLingerBytes;) {
    auto ready = co_await socket_.wait(Socket::For::kReading);
    if (!ready) co_return;
    const ssize_t got = ::recv(socket_.fd(), rest, sizeof rest, 0);
    if (got <= 0) co_return;
    taken += static_cast<size_t>(got);
  }
}

Error unexpected(const FrameHeader& header) {
  return make_error(Code::kCorrupt, "a frame of type {} for request {} was not expected",
                    static_cast<unsigned>(header.type), header.request);
}

void add_piece(std::vector<iovec>& pieces, const std::byte* at, size_t bytes) {
  if (!pieces.empty()) {
    iovec& last = pieces.back();
    if (static_cast<const std::byte*>(last.iov_base) + last.iov_len == at) {
      last.iov_len += bytes;
      return;
    }
  }
  pieces.push_back({const_cast<std::byte*>(at), bytes});
}

}  // namespace ptc
