#include "store/rpc/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "store/base/crc32c.h"
#include "store/net/address.h"
#include "store/rpc/messages.h"

namespace ptc {
namespace {

constexpr auto kLinger = std::chrono::milliseconds(500);
constexpr size_t kLingerBytes = 64 << 10;

std::span<const std::byte> bytes_of(const iovec& piece) {
  return {static_cast<const std::byte*>(piece.iov_base), piece.iov_len};
}

uint32_t checksum_of(std::span<const iovec> pieces) {
  uint32_t crc = 0;
  for (const iovec& piece : pieces) crc = crc32c(bytes_of(piece), crc);
  return crc;
}

}  // namespace

Connection::Connection(UniqueFd socket, std::string dialed)
    : stream_(std::move(socket)),
      peer_address_(name_of_peer(stream_.fd())),
      dialed_(std::move(dialed)),
      counters_(std::make_shared<PeerCounters>()) {
  stream_.count_in(counters_->bytes_sent, counters_->bytes_received, counters_->checksum_failures);
}

void Connection::count_in(std::shared_ptr<PeerCounters> counters) {
  counters->bytes_sent += counters_->bytes_sent;
  counters->bytes_received += counters_->bytes_received;
  counters->checksum_failures += counters_->checksum_failures;
  counters_ = std::move(counters);
  stream_.count_in(counters_->bytes_sent, counters_->bytes_received, counters_->checksum_failures);
}

Task<> Connection::send(FrameType type, uint64_t request, std::span<const iovec> body) {
  size_t bytes = 0;
  for (const iovec& piece : body) bytes += piece.iov_len;
  PTC_CHECK(bytes <= max_body_bytes(type));
  FrameHeaderBytes header =
      encode({type, request, static_cast<uint32_t>(bytes), checksum_of(body)});
  std::vector<iovec> pieces{{header.data(), header.size()}};
  pieces.insert(pieces.end(), body.begin(), body.end());
  co_return co_await stream_.send(pieces);
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
    PTC_CO_TRY(co_await stream_.receive(std::span(&piece, 1)));
    auto header = decode_frame_header(bytes);
    if (!header) ++counters_->checksum_failures;
    if (!header || header.value().type != FrameType::kPing) co_return header;
  }
}

Task<> Connection::receive_body(FrameHeader header, std::span<const iovec> body) {
  std::vector<iovec> pieces(body.begin(), body.end());
  PTC_CO_TRY(co_await stream_.receive(pieces));
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
  PTC_CO_TRY(const bool came, co_await stream_.wait_to_receive(patience));
  if (!came) co_return Error(Code::kUnavailable, "no answer in time");
  char first;
  // Under TLS what comes next may have been taken from the socket already.
  co_return ::recv(stream_.fd(), &first, 1, MSG_PEEK) > 0 || (stream_.has_tls() && errno == EAGAIN);
}

asio::awaitable<void> Connection::linger() {
  ::shutdown(stream_.fd(), SHUT_WR);
  const Deadline until = std::chrono::steady_clock::now() + kLinger;
  set_patience({kLinger, until, {}});
  char rest[4096];
  for (size_t taken = 0; taken < kLingerBytes;) {
    auto ready = co_await stream_.wait_to_receive(kLinger);
    if (!ready || !ready.value()) co_return;
    const ssize_t got = ::recv(stream_.fd(), rest, sizeof rest, 0);
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
