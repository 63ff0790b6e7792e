// One connection between two nodes: frames out, frames in, checked, and every wait with an end.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/rpc/address.h"
#include "store/rpc/frame.h"
#include "store/rpc/peer_numbers.h"
#include "store/rpc/tls_session.h"

namespace ptc {

/// How long a connection is waited for.
struct Patience {
  std::chrono::milliseconds silence{5'000};  // without one byte more
  Deadline deadline = Deadline::max();       // for everything
  std::stop_token stop;
};

/// Threads: one at a time, but cut() and looks_alive(), which are for any.
/// Errors, after each of which the connection is good for nothing more: kUnavailable (broken, silent, deadline),
/// kCorrupt (damage or nonsense), kCancelled.
class Connection {
 public:
  /// `dialed`: the address it was made to, where it was made from here.
  explicit Connection(UniqueFd socket, std::string dialed = {});

  /// Before anything else is sent. kPermissionDenied: a certificate is not of the authority.
  Result<> start_tls(const TlsContext& context, TlsSession::Side side);
  /// Whether the peer may say that it is this node: by its certificate, or because there is no TLS.
  bool may_be(const std::string& node) const { return !tls_ || tls_->peer_is(node); }

  void set_patience(Patience patience) { patience_ = std::move(patience); }
  /// Where bytes and checksum failures are counted from now on; what was before, too.
  void count_in(std::shared_ptr<PeerCounters> counters);

  /// A frame whose body is the pieces, one behind the other.
  Result<> send(FrameType type, uint64_t request, std::span<const iovec> body);
  Result<> send(FrameType type, uint64_t request, std::string_view body = {});
  /// `text` in data frames.
  Result<> send_data(uint64_t request, std::string_view text);

  /// The next frame but pings; its body must be received next.
  Result<FrameHeader> receive_header();
  /// Fills the pieces, which are as long as the body; kCorrupt when its checksum is another.
  Result<> receive_body(const FrameHeader& header, std::span<const iovec> body);
  Result<std::string> receive_body(const FrameHeader& header);
  /// The next frame, which must be of this type and request. An error frame comes back as the error in
  /// it, error_was_said().
  Result<FrameHeader> expect_header(FrameType type, uint64_t request);
  Result<std::string> expect(FrameType type, uint64_t request);  // and its body
  /// `bytes` in data frames; the memory grows as they come.
  Result<std::string> receive_data(uint64_t request, uint64_t bytes);
  /// Whether the last error was said by the peer in a frame; then the connection is still good.
  bool error_was_said() const { return said_; }

  /// Waits between two requests: true when one comes, false when the peer has closed.
  Result<bool> wait_for_request(std::chrono::milliseconds patience);
  /// Whether it is idle and open as far as one can see.
  bool looks_alive() const;
  /// Says no more, and takes for a moment what still comes: closing at once would make the kernel send a
  /// reset, which can overtake the last words.
  void linger();
  /// Ends both directions; whoever waits on it gets kUnavailable.
  void cut();

  /// When the last byte came.
  Deadline last_received() const { return last_received_; }
  const std::string& peer_address() const { return peer_address_; }
  const std::string& dialed() const { return dialed_; }

 private:
  Result<> transfer(std::span<iovec> pieces, bool out);
  Result<> wait(short events);
  Error tls_error();

  UniqueFd socket_;
  std::unique_ptr<TlsSession> tls_;
  std::string peer_address_, dialed_;
  Patience patience_;
  std::shared_ptr<PeerCounters> counters_;
  Deadline last_received_{};
  bool said_ = false;
};

/// The error of a frame that has no place here.
Error unexpected(const FrameHeader& header);

/// Puts memory behind the pieces; where it lies behind the last one, that one grows.
void add_piece(std::vector<iovec>& pieces, const std::byte* at, size_t bytes);

}  // namespace ptc
