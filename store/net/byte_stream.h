// Bytes in both directions between two processes, under TLS or not; every wait has an end.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "store/base/error.h"
#include "store/net/socket.h"
#include "store/net/tls_session.h"

namespace ptc {

/// It waits on the executor it is attached to; attached to none, it rests.
/// Threads: as of a Socket.
/// Errors, after each of which it is good for nothing more: kUnavailable (broken, closed, silent,
/// deadline), kCancelled, and those of TLS: kPermissionDenied, kCorrupt.
class ByteStream {
 public:
  explicit ByteStream(UniqueFd socket);

  void attach(const IoExecutor& executor) { socket_.attach(executor); }
  void detach() { socket_.detach(); }
  void set_patience(Patience patience) { socket_.set_patience(std::move(patience)); }
  const Patience& patience() const { return socket_.patience(); }
  int fd() const { return socket_.fd(); }

  /// Before anything else is sent. `server`: of a client, whose certificate it must be, by name or
  /// address; empty: who it is is asked later, with peer_is().
  Task<> start_tls(const TlsContext& context, TlsSession::Side side, std::string server = {});
  bool has_tls() const { return tls_ != nullptr; }
  bool peer_is(const std::string& node) const { return tls_->peer_is(node); }  // has_tls()

  /// All of the pieces, which it uses up.
  Task<> send(std::span<iovec> pieces) { return transfer(pieces, true); }
  Task<> receive(std::span<iovec> pieces) { return transfer(pieces, false); }
  /// What has come, at least a byte, at most `space`; 0: the other side has closed.
  Task<size_t> receive_some(std::span<char> space);
  /// Whether there is something to receive, a close for one; false: not within that time.
  Task<bool> wait_to_receive(std::chrono::milliseconds time);

  /// Counted there from now on; they outlive it. Bytes are those without what TLS adds; `damaged`:
  /// what TLS refused.
  void count_in(std::atomic<uint64_t>& sent, std::atomic<uint64_t>& received,
                std::atomic<uint64_t>& damaged);
  /// When the last byte came.
  Deadline last_received() const { return last_received_; }
  /// Nothing has come, and neither side has closed, as far as one can see. Any thread.
  bool is_idle() const;
  /// Ends both directions; whoever waits goes on.
  void cut() { socket_.cut(); }

 private:
  Task<> transfer(std::span<iovec> pieces, bool out);
  Result<bool> move_some(std::span<iovec>& pieces, bool out, short& wait_for);
  Task<> wait(short events);
  Error tls_error() const;

  Socket socket_;
  std::unique_ptr<TlsSession> tls_;
  std::atomic<uint64_t>*sent_ = nullptr, *received_ = nullptr, *damaged_ = nullptr;
  Deadline last_received_{};
};

/// Text as a piece to send.
iovec piece_of(std::string_view text);

}  // namespace ptc
