// One connection between two nodes: frames out, frames in, checked, and every wait with an end.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/net/byte_stream.h"
#include "store/rpc/frame.h"
#include "store/rpc/peer_numbers.h"

namespace ptc {

/// It speaks and listens on the executor it is attached to; attached to none, it rests.
/// Threads: as of a Socket; looks_alive(): any.
/// Errors, after each of which the connection is good for nothing more: kUnavailable (broken,
/// silent, deadline), kCorrupt (damage or nonsense), kCancelled.
class Connection {
 public:
  /// `dialed`: the address it was made to, where it was made from here.
  explicit Connection(UniqueFd socket, std::string dialed = {});

  void attach(const IoExecutor& executor) { stream_.attach(executor); }
  void detach() { stream_.detach(); }

  /// Before anything else is sent. kPermissionDenied: a certificate is not of the authority.
  Task<> start_tls(const TlsContext& context, TlsSession::Side side) {
    return stream_.start_tls(context, side);
  }
  /// Whether the peer may say that it is this node: by its certificate, or because there is no TLS.
  bool may_be(const std::string& node) const { return !stream_.has_tls() || stream_.peer_is(node); }

  void set_patience(Patience patience) { stream_.set_patience(std::move(patience)); }
  /// Where bytes and checksum failures are counted from now on; what was before, too.
  void count_in(std::shared_ptr<PeerCounters> counters);

  /// A frame whose body is the pieces, one behind the other.
  Task<> send(FrameType type, uint64_t request, std::span<const iovec> body);
  Task<> send(FrameType type, uint64_t request, std::string_view body = {});
  /// `text` in data frames.
  Task<> send_data(uint64_t request, std::string_view text);

  /// The next frame but pings; its body must be received next.
  Task<FrameHeader> receive_header();
  /// Fills the pieces, which are as long as the body; kCorrupt when its checksum is another.
  Task<> receive_body(FrameHeader header, std::span<const iovec> body);
  Task<std::string> receive_body(FrameHeader header);
  /// The next frame, which must be of this type and request. An error frame comes back as the error
  /// in it, error_was_said().
  Task<FrameHeader> expect_header(FrameType type, uint64_t request);
  Task<std::string> expect(FrameType type, uint64_t request);  // and its body
  /// `bytes` in data frames; the memory grows as they come.
  Task<std::string> receive_data(uint64_t request, uint64_t bytes);
  /// Whether the last error was said by the peer in a frame; then the connection is still good.
  bool error_was_said() const { return said_; }

  /// Waits between two requests: true when one comes, false when the peer has closed.
  Task<bool> wait_for_request(std::chrono::milliseconds patience);
  /// Whether it is idle and open as far as one can see.
  bool looks_alive() const { return stream_.is_idle(); }
  /// Says no more, and takes for a moment what still comes: closing at once would make the kernel
  /// send a reset, which can overtake the last words.
  asio::awaitable<void> linger();
  /// Ends both directions; whoever waits on it gets kUnavailable.
  void cut() { stream_.cut(); }

  /// When the last byte came.
  Deadline last_received() const { return stream_.last_received(); }
  const std::string& peer_address() const { return peer_address_; }
  const std::string& dialed() const { return dialed_; }

 private:
  ByteStream stream_;
  std::string peer_address_, dialed_;
  std::shared_ptr<PeerCounters> counters_;
  bool said_ = false;
};

/// The error of a frame that has no place here.
Error unexpected(const FrameHeader& header);

/// Puts memory behind the pieces; where it lies behind the last one, that one grows.
void add_piece(std::vector<iovec>& pieces, const std::byte* at, size_t bytes);

}  // namespace ptc
