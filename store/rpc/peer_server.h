// Answers other nodes: named calls, and fetches of image bytes. PROTOCOL.md has the bytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/descriptors.h"
#include "store/base/error.h"
#include "store/image/image_store.h"
#include "store/net/io_threads.h"
#include "store/rpc/credentials.h"
#include "store/rpc/device_links.h"
#include "store/rpc/peer_numbers.h"

namespace ptc {

struct PeerServerOptions {
  std::string listen;   // "host:port", "[::1]:7070"; port 0: one that is free
  std::string node;     // this node's name
  std::string cluster;  // a peer of another cluster is refused
  PeerAuth auth;
  ImageStore* images = nullptr;             // what fetches read; outlives the server
  DeviceLinks* links = nullptr;             // of devices; null: none. Outlives the server
  std::shared_ptr<IoThreads> io = nullptr;  // null: threads of its own
  size_t max_connections =
      descriptors_for_peers();  // that were let in; for a further one an idle one is closed
  size_t max_strangers = 256;   // connections that are not let in yet, besides
  size_t max_calls = 2048;      // of those that may wait: at a time, each with a thread
  std::chrono::milliseconds handshake{3'000};  // from the accept to a peer that is let in
  std::chrono::milliseconds silence{10'000};   // within a request, or of a peer that does not read
  std::chrono::milliseconds idle{300'000};     // between requests
};

/// Connections share a few threads. Calls that are answered at once share some others, for which
/// they wait; each that may wait has one of its own while it is answered, up to a limit, beyond
/// which it is told to come again (too_busy()): if it waited for a thread here, nodes that wait for
/// each other might wait for ever. Nothing is kept for a peer but one chunk of a stream, while that
/// lasts: one that does not read stops its own connection only, and is cut off after a while. Where
/// as many were let in as may be, a further one takes the place of the one that has been idle for
/// longest, and is closed at once where none is idle. One that speaks nonsense is logged with its
/// address and cut off. Of more strangers than may be, the oldest is cut off of those addresses
/// that have most of them; what is logged of strangers is limited in rate.
class PeerServer {
 public:
  /// Answers a call of `from_node`: up to kMaxCallBytes, or an Error whose code and message travel.
  /// Called on any thread, several at once; may take minutes. What it throws is a kInternal.
  using Handler =
      std::function<Result<std::string>(std::string_view request, const std::string& from_node)>;

  /// Listens and answers at once. Off loopback it refuses to without authentication, unless
  /// `auth.insecure`. Errors say what to do.
  static Result<std::unique_ptr<PeerServer>> start(PeerServerOptions options);
  /// Cuts all connections and waits for handlers that run; what those wait for must end before.
  ~PeerServer();

  uint16_t port() const;
  /// "127.0.0.1:7070", with the true port.
  std::string address() const;

  /// kAtOnce: the handler waits for no other node, nor for what does, and does no long work.
  enum class Pace { kAtOnce, kMayWait };
  static constexpr size_t kThreadsAtOnce = 4;  // for all calls of that pace
  /// Threads: any, also while calls come in; those of a method that is not there yet get
  /// kUnavailable.
  void handle(std::string method, Handler handler, Pace pace = Pace::kMayWait);
  /// There will be no further method: one that is not there gets kInvalidArgument from now on.
  void handles_all();

  /// Of the connections that others made, by the name they proved (or, without authentication,
  /// said).
  std::vector<PeerNumbers> numbers() const;
  /// Connections that never were let in: nonsense, another cluster, a wrong secret, too slow.
  uint64_t refused() const;

 private:
  struct Impl;
  explicit PeerServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ptc
