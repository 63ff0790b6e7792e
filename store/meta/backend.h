// What MetaClient backends share: the rules of a transaction, watches, and leases that need no
// store.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "store/meta/meta_client.h"

namespace ptc {

/// kInvalidArgument for an empty or overlong key, a value over 1 MiB, a key written twice, more
/// than a transaction may have, no lease for leased puts; kConflict when the lease has ended.
Result<> check_transaction(const MetaTransaction& transaction);

/// kConflict that names the key; 0 stands for a key that does not exist.
Error compare_failed(std::string_view key, int64_t expected_revision, int64_t found_revision);

/// kConflict for a put under a lease that is no more.
Error lease_ended(std::string_view key);

/// kInvalidArgument for a time to live under a second.
Result<> check_ttl(std::chrono::seconds ttl);

/// Least string above every one that begins with `prefix`; empty: there is none.
std::string prefix_end(std::string_view prefix);

/// A lease of a client that is alone with its store: nobody but its owner ends it.
class LocalLease : public MetaLease {
 public:
  LocalLease(int64_t id, std::function<void(int64_t)> end) : id_(id), end_(std::move(end)) {}
  LocalLease(const LocalLease&) = delete;
  ~LocalLease() override { end_(id_); }

  int64_t id() const override { return id_; }
  Clock::time_point deadline() const override { return Clock::time_point::max(); }

 private:
  int64_t id_;
  std::function<void(int64_t)> end_;
};

/// Which keys are under which lease of a client. Threads: under the client's lock.
class LeasedKeys {
 public:
  /// Takes note of a transaction that was committed.
  void note(const MetaTransaction& transaction);
  std::vector<std::string> of(int64_t lease) const;

 private:
  std::map<std::string, int64_t, std::less<>> lease_of_;
};

/// Calls the watchers of one client, in the order of publish(), on one thread of its own, which the
/// first of them begins. Threads: any. The destructor waits for a running call; events still queued
/// are dropped.
class WatchHub {
 public:
  WatchHub();
  ~WatchHub();

  /// The watcher sees what is published after this call. Its handle may outlive the hub.
  /// kUnavailable: there is no thread to call it.
  Result<std::shared_ptr<void>> watch(std::string prefix, MetaClient::OnEvent on_event);

  /// The backend calls it in order of revision, so under the lock of its commits.
  void publish(std::vector<MetaEvent> events);

 private:
  struct Watcher {
    std::string prefix;
    MetaClient::OnEvent on_event;
    uint64_t first_event;  // number of the first event that it sees
    uint64_t number;       // in the order in which they came
    bool removed = false;  // guarded by the hub's mutex
  };
  struct State;
  class Handle;

  static void dispatch(const std::shared_ptr<State>& state);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace ptc
