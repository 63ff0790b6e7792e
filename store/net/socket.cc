#include "store/net/socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;

Error cancelled() { return Error(Code::kCancelled, "cancelled"); }
Error late() { return Error(Code::kUnavailable, "no answer in time"); }

}  // namespace

/// What handlers that come late may still look at: they hold it weakly.
struct Socket::Waiter : std::enable_shared_from_this<Waiter> {
  Waiter(const IoExecutor& executor, int fd) : descriptor(executor, fd), watchdog(executor) {}

  asio::posix::stream_descriptor descriptor;  // does not own it
  asio::steady_timer watchdog;
  Deadline until = Deadline::max();     // of the wait that is under way; max(): none is
  Deadline looks_at = Deadline::max();  // when the watchdog does
  bool ended_it = false;                // the watchdog did

  /// The watchdog looks by then, and again if the wait that is under way then has a later end.
  void watch(Deadline end) {
    until = end;
    if (looks_at <= end) return;
    looks_at = end;
    watchdog.expires_at(end);
    watchdog.async_wait([held = weak_from_this()](const boost::system::error_code& error) {
      auto waiter = error ? nullptr : held.lock();
      if (waiter) waiter->look();
    });
  }

  void look() {
    looks_at = Deadline::max();
    if (until == Deadline::max()) return;
    if (Clock::now() < until) return watch(until);
    ended_it = true;
    descriptor.cancel();
  }
};

void Socket::attach(const IoExecutor& executor) {
  detach();
  waiter_ = std::make_shared<Waiter>(executor, fd_.get());
  set_patience(std::move(patience_));
}

void Socket::detach() {
  when_stopped_.reset();
  if (waiter_) (void)waiter_->descriptor.release();
  waiter_.reset();
}

void Socket::set_patience(Patience patience) {
  when_stopped_.reset();
  patience_ = std::move(patience);
  if (!waiter_ || !patience_.stop.stop_possible()) return;
  std::function<void()> stop = [held = std::weak_ptr(waiter_),
                                executor = waiter_->descriptor.get_executor()] {
    asio::post(executor, [held] {
      if (auto waiter = held.lock()) waiter->descriptor.cancel();
    });
  };
  when_stopped_.emplace(patience_.stop, std::move(stop));
}

Task<> Socket::wait(For what, std::chrono::milliseconds silence) {
  late_ = false;
  if (patience_.stop.stop_requested()) co_return cancelled();
  const Deadline now = Clock::now(), end = std::min(now + silence, patience_.deadline);
  late_ = end <= now;
  if (late_) co_return late();
  auto waiter = waiter_;
  waiter->ended_it = false;
  waiter->watch(end);
  const auto event = what == For::kReading ? asio::posix::stream_descriptor::wait_read
                                           : asio::posix::stream_descriptor::wait_write;
  auto [error] = co_await waiter->descriptor.async_wait(event, kTuple);
  waiter->until = Deadline::max();
  if (patience_.stop.stop_requested()) co_return cancelled();
  late_ = error && waiter->ended_it;
  if (late_) co_return late();
  if (error)
    co_return make_error(Code::kUnavailable, "waiting for the network: {}", error.message());
  co_return ok();
}

UniqueFd Socket::release() {
  detach();
  return std::move(fd_);
}

void Socket::cut() { ::shutdown(fd_.get(), SHUT_RDWR); }

}  // namespace ptc
