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
      peer_address_(name_of_peer(socket_.get())),
      dialed_(std::move(dialed)),
      counters_(std::make_shared<PeerCounters>()) {
  int one = 1;  // a frame goes out when it is sent
  ::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

void Connection::count_in(std::shared_ptr<PeerCounters> counters) {
  counters->bytes_sent += counters_->bytes_sent;
  counters->bytes_received += counters_->bytes_received;
  counters->checksum_failures += counters_->checksum_failures;
  counters_ = std::move(counters);
}

Result<> Connection::start_tls(const TlsContext& context, TlsSession::Side side) {
  tls_ = std::make_unique<TlsSession>(context, socket_.get(), side);
  for (;;) {
    const int done = tls_->handshake();
    if (done > 0) return ok();
    if (done == 0)
      return Error(Code::kUnavailable,
                   "the peer closed the connection in the TLS handshake; has it certificates, too?");
    if (tls_->events() == 0) return tls_error();
    PTC_TRY(wait(tls_->events()));
  }
}

Error Connection::tls_error() {
  Error error = tls_->error();
  if (error.code() == Code::kCorrupt) ++counters_->checksum_failures;
  return error;
}

Result<> Connection::wait(short events) {
  const Deadline silent = std::chrono::steady_clock::now() + patience_.silence;
  return wait_for(socket_.get(), events, std::min(silent, patience_.deadline), patience_.stop);
}

/// Moves all bytes of the pieces, which it uses up.
Result<> Connection::transfer(std::span<iovec> pieces, bool out) {
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
      moved = out ? ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL)
                  : ::recvmsg(socket_.get(), &message, 0);
    if (moved == 0) return Error(Code::kUnavailable, "the peer closed the connection");
    if (moved < 0 && tls_) {
      if (tls_->events() == 0) return tls_error();
      PTC_TRY(wait(tls_->events()));
      continue;
    }
    if (moved < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN)
        return make_error(Code::kUnavailable, "{}: {}", out ? "sending" : "receiving",
                          ::strerror(errno));
      PTC_TRY(wait(out ? POLLOUT : POLLIN));
      continue;
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
  return patience_.stop.stop_requested() ? Result<>(Error(Code::kCancelled, "cancelled")) : ok();
}

Result<> Connection::send(FrameType type, uint64_t request, std::span<const iovec> body) {
  size_t bytes = 0;
  for (const iovec& piece : body) bytes += piece.iov_len;
  PTC_CHECK(bytes <= max_body_bytes(type));
  FrameHeaderBytes header =
      encode({type, request, static_cast<uint32_t>(bytes), checksum_of(body)});
  std::vector<iovec> pieces{{header.data(), header.size()}};
  pieces.insert(pieces.end(), body.begin(), body.end());
  return transfer(pieces, true);
}

Result<> Connection::send(FrameType type, uint64_t request, std::string_view body) {
  const iovec piece = piece_of(body);
  return send(type, request, std::span(&piece, 1));
}

Result<> Connection::send_data(uint64_t request, std::string_view text) {
  for (; !text.empty(); text.remove_prefix(std::min<size_t>(text.size(), kMaxDataBytes))) {
    PTC_TRY(send(FrameType::kData, request, text.substr(0, kMaxDataBytes)));
  }
  return ok();
}

Result<FrameHeader> Connection::receive_header() {
  for (;;) {
    FrameHeaderBytes bytes;
    iovec piece{bytes.data(), bytes.size()};
    PTC_TRY(transfer(std::span(&piece, 1), false));
    auto header = decode_frame_header(bytes);
    if (!header) ++counters_->checksum_failures;
    if (!header || header.value().type != FrameType::kPing) return header;
  }
}

Result<> Connection::receive_body(const FrameHeader& header, std::span<const iovec> body) {
  std::vector<iovec> pieces(body.begin(), body.end());
  PTC_TRY(transfer(pieces, false));
  if (checksum_of(body) == header.body_crc) return ok();
  ++counters_->checksum_failures;
  return make_error(Code::kCorrupt, "{} bytes were damaged on their way", header.body_bytes);
}

Result<std::string> Connection::receive_body(const FrameHeader& header) {
  std::string body(header.body_bytes, '\0');
  const iovec piece = piece_of(body);
  PTC_TRY(receive_body(header, std::span(&piece, 1)));
  return body;
}

Result<FrameHeader> Connection::expect_header(FrameType type, uint64_t request) {
  said_ = false;
  PTC_TRY(auto header, receive_header());
  if (header.request != request) return unexpected(header);
  if (header.type == type) return header;
  if (header.type != FrameType::kError) return unexpected(header);
  PTC_TRY(auto body, receive_body(header));
  auto error = decode_error(body);
  if (!error) return Error(Code::kCorrupt, "an error that cannot be read");
  said_ = true;
  return *std::move(error);
}

Result<std::string> Connection::expect(FrameType type, uint64_t request) {
  PTC_TRY(auto header, expect_header(type, request));
  return receive_body(header);
}

Result<std::string> Connection::receive_data(uint64_t request, uint64_t bytes) {
  std::string text;
  while (text.size() < bytes) {
    PTC_TRY(auto header, receive_header());
    if (header.type != FrameType::kData || header.request != request || header.body_bytes == 0 ||
        header.body_bytes > bytes - text.size())
      return unexpected(header);
    const size_t before = text.size();
    text.resize(before + header.body_bytes);
    const iovec piece{text.data() + before, header.body_bytes};
    PTC_TRY(receive_body(header, std::span(&piece, 1)));
  }
  return text;
}

Result<bool> Connection::wait_for_request(std::chrono::milliseconds patience) {
  if (tls_ && tls_->has_pending()) return true;
  PTC_TRY(wait_for(socket_.get(), POLLIN, std::chrono::steady_clock::now() + patience,
                   patience_.stop));
  char first;
  return ::recv(socket_.get(), &first, 1, MSG_PEEK) > 0;
}

bool Connection::looks_alive() const {
  pollfd idle{socket_.get(), POLLIN, 0};
  return ::poll(&idle, 1, 0) == 0;
}

void Connection::linger() {
  ::shutdown(socket_.get(), SHUT_WR);
  const Deadline until = std::chrono::steady_clock::now() + kLinger;
  char rest[4096];
  for (size_t taken = 0; taken < kLingerBytes;) {
    if (!wait_for(socket_.get(), POLLIN, until, {})) return;
    const ssize_t got = ::recv(socket_.get(), rest, sizeof rest, 0);
    if (got <= 0) return;
    taken += static_cast<size_t>(got);
  }
}

void Connection::cut() { ::shutdown(socket_.get(), SHUT_RDWR); }

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
