// What MetaClient backends of one process share: the rules of a transaction, and watches.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "store/meta/meta_client.h"

namespace ptc {

/// kInvalidArgument for an empty or overlong key, a value over 1 MiB, a key written twice.
Result<> check_transaction(const MetaTransaction& transaction);

/// kConflict that names the key; 0 stands for a key that does not exist.
Error compare_failed(std::string_view key, int64_t expected_revision, int64_t found_revision);

/// Least string above every one that begins with `prefix`; empty: there is none.
std::string prefix_end(std::string_view prefix);

/// Calls the watchers of one client, in the order of publish(), on one thread of its own.
/// Threads: any. The destructor waits for a running call; events still queued are dropped.
class WatchHub {
 public:
  WatchHub();
  ~WatchHub();

  /// The watcher sees what is published after this call. Its handle may outlive the hub.
  std::shared_ptr<void> watch(std::string prefix, MetaClient::OnEvent on_event);

  /// The backend calls it in order of revision, so under the lock of its commits.
  void publish(std::vector<MetaEvent> events);

 private:
  struct Watcher {
    std::string prefix;
    MetaClient::OnEvent on_event;
    uint64_t first_event;  // number of the first event that it sees
  };
  struct State;
  class Handle;

  static void dispatch(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ptc
