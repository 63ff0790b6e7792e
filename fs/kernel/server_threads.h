// The threads of a mount that take requests: a few while there is little to do, more while all of
// them are at work or wait for others.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "store/base/error.h"
#include "store/base/log_rate.h"
#include "store/base/mutex.h"

namespace ptc {

/// Whoever takes a request and leaves nobody to take the next begins another thread first, as long
/// as fewer than `most` are there beside those that wait for others. Threads: any.
class ServerThreads {
 public:
  class Place;
  struct Options {
    unsigned most = 24;   // beside those that wait for others
    int wake_signal = 0;  // has a handler, and ends the receiving of the thread that gets it
    /// What a thread does until it is_spare(), or nothing can be received any more.
    std::function<void(Place&)> serve;
    /// Nothing can be received any more, or a request came after tell_next().
    std::function<void()> stirred;
    /// So many stay. One of them that has to begin another first is late with its request: with two
    /// a caller whose close() has returned may be answered before its RELEASE is served.
    int fewest = 2;
  };
  explicit ServerThreads(Options options) : options_(std::move(options)) {}
  ~ServerThreads();  // after stop()
  ServerThreads(const ServerThreads&) = delete;
  ServerThreads& operator=(const ServerThreads&) = delete;

  /// The first ones. kUnavailable: there are none to be had.
  Result<> start();
  /// +1: the calling thread may wait for others from now on; −1: not any more. False: no thread is
  /// left for all else, nor can one be had.
  bool note_waiting(int change);
  /// Those end that nobody has needed since the last call, but for the few that stay. Now and then.
  void end_spare();
  /// Calls `stirred` for the next request.
  void tell_next() { tells_next_ = true; }
  /// A request came, to one of these or to others.
  void note_use() {
    if (tells_next_.load(std::memory_order_relaxed) && tells_next_.exchange(false))
      options_.stirred();
  }

  int threads() const { return running_.load(); }
  /// Nobody takes the next request, just now.
  bool none_is_free() const { return free_.load(std::memory_order_relaxed) <= 0; }
  /// Nothing can be received any more.
  bool is_gone() const { return gone_.load(); }
  /// And all have ended but those that may wait for ever.
  bool wait(std::chrono::milliseconds patience);
  /// No thread begins any more; returns when all have ended. What they do ends when it is
  /// interrupted.
  void stop();
  /// The same, but for those that wait for others; no longer than `most`.
  void stop(std::chrono::milliseconds most);

 private:
  using PlaceRef = std::unique_ptr<Place>;

  bool begin_another();
  void begin_thread() PTC_REQUIRES(mutex_);
  void took_one();
  bool is_spare(Place& place);
  void run(Place& place);
  bool enough() const;

  const Options options_;
  mutable Mutex mutex_;
  ConditionVariable ended_;
  std::list<PlaceRef> places_ PTC_GUARDED_BY(mutex_);
  std::vector<PlaceRef> spare_ PTC_GUARDED_BY(mutex_);  // that end
  bool stopping_ PTC_GUARDED_BY(mutex_) = false;
  std::atomic<bool> gone_{false};  // nothing can be received any more; changes with mutex_ held
  LogRate told_{1, std::chrono::seconds(10)};  // that there are no threads
  std::atomic<int> running_{0}, waiting_{0};   // the former changes with mutex_ held
  std::atomic<int> leaving_{0};                // so many shall end; changes with mutex_ held
  alignas(64) std::atomic<int> free_{0};       // that take the next requests
  std::atomic<int> least_free_{0};             // since end_spare()
  alignas(64) std::atomic<bool> tells_next_{false};
};

/// Of one of the threads, and for it alone.
class ServerThreads::Place {
 public:
  explicit Place(ServerThreads& of) : of_(of) {}

  /// There are enough others: it returns.
  bool is_spare() { return of_.is_spare(*this); }
  /// Around what receives; `took`: there was a request, and served() follows.
  void receives() { state_.store(kReceiving, std::memory_order_relaxed); }
  void received(bool took);
  void served() { of_.free_.fetch_add(1); }

 private:
  friend class ServerThreads;
  enum State : int { kServing, kReceiving, kWaking, kWoken };
  /// By a signal, unless it does something else: that is never interrupted. It may come too soon.
  bool wake(int signal);

  ServerThreads& of_;
  std::thread thread_;
  bool spare_ = false;
  alignas(64) std::atomic<int> state_{kServing};
};

}  // namespace ptc
