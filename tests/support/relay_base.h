// What relays have in common: a port of their own, connections that are passed on to one target,
// and threads that end with the relay.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

#include "store/net/address.h"

namespace ptc {

/// Accepts connections and makes one to the target for each. Both sockets are non-blocking.
/// Threads: any. The destructor cuts all connections: it is the last member of who has it, whose
/// serve() uses the others.
class RelayBase {
 public:
  struct Connection {
    int number;  // 0, 1 …
    int client, target;
    std::stop_token stop;
  };
  /// On a thread of its own; the connection is closed when it returns.
  using Serve = std::function<void(const Connection&)>;

  RelayBase(const std::string& target, Serve serve);
  ~RelayBase();
  RelayBase(const RelayBase&) = delete;
  RelayBase& operator=(const RelayBase&) = delete;

  const std::string& address() const { return listener_.address; }
  int connections() const { return count_; }
  /// Whoever comes is turned away, until it is asked otherwise.
  void refuse(bool refuse) { refuses_ = refuse; }
  Result<UniqueFd> connect() const;

 private:
  void accept_all();

  const PeerAddress target_;
  const Serve serve_;
  Listener listener_;
  std::stop_source stop_;
  std::atomic<bool> refuses_{false};
  std::atomic<int> count_{0};
  std::list<std::thread> threads_;  // the acceptor's
  std::thread acceptor_;
};

/// All of it, however long the other end takes; false: it has gone, or this ends.
bool send_all(int socket, std::string_view bytes, const std::stop_token& stop);

}  // namespace ptc
