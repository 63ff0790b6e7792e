// /healthz and /readyz: whether this daemon lives, and whether it is in service. For those who
// start it anew, or send work elsewhere, when it is not.
//
//   /healthz   mount, requests: no other node and no etcd has a part in these
//   /readyz    these; of a node of a cluster also lease, agreement, drain; and leaving
//
// A line for each, "mount: ok" or "drain: this node is drained …"; 200 if all are ok, else 503.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "fs/http/http_server.h"
#include "reshard/node/node_service.h"
#include "store/base/mutex.h"

namespace ptc {

/// Order: construct, mounted(), leaves(), ended(). Threads: any.
class Health {
 public:
  /// Reasons why something is not well; empty: it is. They wait for nothing.
  struct Checks {
    std::function<std::string()> mount;     // it is not where it should be
    std::function<std::string()> requests;  // nobody answers them
    std::function<std::optional<NodeService>()> service;
  };
  /// What the checks ask outlives ended(). Before, the daemon starts: it neither lives nor is
  /// ready, which is for its starter to have patience with.
  void mounted(Checks checks);
  /// It goes on for a moment, but nobody should begin to rely on it.
  void leaves();
  /// No check is called any more.
  void ended();

  /// nullopt: neither of the two paths.
  std::optional<HttpReply> answer(std::string_view path) const;

 private:
  mutable Mutex mutex_;
  std::optional<Checks> checks_ PTC_GUARDED_BY(mutex_);
  bool leaves_ PTC_GUARDED_BY(mutex_) = false;
};

}  // namespace ptc
