// A bad network between a client and one HTTP server of this machine.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <string>

#include "tests/support/relay_base.h"

namespace ptc {

/// Listens on a port of its own and passes requests and answers on, but for those that are to be
/// lost. Threads: any. The destructor cuts all connections.
class HttpRelay {
 public:
  enum class Fate {
    kPass,
    kLoseRequest,  // the connection breaks before the server sees it
    kLoseAnswer,   // the connection breaks once the server has answered
    kDeliverLate,  // the connection breaks at once; the server sees the request after
                   // deliver_late()
  };
  /// Of every request, its head and body as text; called by several threads.
  using Decide = std::function<Fate(const std::string& request)>;

  /// `target`: "http://127.0.0.1:2379".
  explicit HttpRelay(const std::string& target);

  std::string url() const;
  void decide(Decide decide);
  /// Cuts all connections, and refuses others until asked otherwise.
  void cut(bool cut = true);
  void deliver_late();

 private:
  void serve(const RelayBase::Connection& connection);
  /// Passes on what can be read now; false: the connection is over.
  bool pass_request(const RelayBase::Connection& connection, std::string& pending, Fate& fate);

  std::atomic<bool> cut_ = false;
  std::mutex mutex_;  // guards all below, but the last
  Decide decide_;
  std::list<std::string> late_;
  RelayBase base_;
};

}  // namespace ptc
