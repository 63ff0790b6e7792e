// A socket of which every wait has an end. The only place where a coroutine of ours waits for a
// peer.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/net/task.h"

namespace ptc {

using Deadline = std::chrono::steady_clock::time_point;

/// How long a peer is waited for.
struct Patience {
  std::chrono::milliseconds silence{5'000};  // at a time
  Deadline deadline = Deadline::max();       // for everything
  std::stop_token stop;
};

/// A non-blocking socket. It waits on the executor that it is attached to, and between two uses,
/// attached to none, costs its descriptor only. One timer looks after all its waits: a wait that
/// bytes end sets none. Threads: those of its executor, one at a time; between detach() and
/// attach() any. cut(): any.
class Socket {
 public:
  enum class For { kReading, kWriting };

  explicit Socket(UniqueFd fd) : fd_(std::move(fd)) {}
  ~Socket() { detach(); }

  int fd() const { return fd_.get(); }
  void attach(const IoExecutor& executor);
  void detach();
  void set_patience(Patience patience);
  const Patience& patience() const { return patience_; }

  /// kUnavailable when the patience has an end; kCancelled.
  Task<> wait(For what) { return wait(what, patience_.silence); }
  Task<> wait(For what, std::chrono::milliseconds silence);
  /// Of the last wait that failed: because nothing came in time.
  bool waited_too_long() const { return late_; }
  /// The descriptor; only while nobody waits.
  UniqueFd release();
  /// Ends both directions; whoever waits goes on.
  void cut();

 private:
  struct Waiter;

  UniqueFd fd_;
  Patience patience_;
  bool late_ = false;
  std::shared_ptr<Waiter> waiter_;
  std::optional<std::stop_callback<std::function<void()>>> when_stopped_;  // posts to the waiter
};

}  // namespace ptc
