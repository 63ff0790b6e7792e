// A look over everything that is stored, as time permits: what is damaged is found before somebody
// needs it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stop_token>
#include <string_view>
#include <thread>
#include <vector>

#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

class Job;

/// How often a node looks over what it stores.
struct ScrubRate {
  enum class Kind : uint8_t {
    kOff,
    kDaily,  // each checkpoint once a day; what is there at the start as soon as may be
    kBytes,  // round after round, `bytes_per_second`
  };
  Kind kind = Kind::kOff;
  uint64_t bytes_per_second = 0;

  /// "off", "daily", or bytes a second: "50M".
  static Result<ScrubRate> parse(std::string_view text);
};

/// Reads slowly: the thread takes processors that nobody else wants (SCHED_IDLE), so many bytes a
/// second. Where it hardly gets any, it takes them as everybody does, for a window, then pauses: on
/// a machine that is always busy a look comes to its end, too. Threads: any; all share the rate.
class Pace {
 public:
  static constexpr uint64_t kWindowBytes = 1 << 20;
  explicit Pace(uint64_t bytes_per_second = UINT64_MAX) : bytes_per_second_(bytes_per_second) {}
  void set_rate(uint64_t bytes_per_second) { bytes_per_second_ = bytes_per_second; }

  /// Waits until it is time for so many bytes, then calls `read`. kCancelled once stop() was
  /// called.
  Result<> read(uint64_t bytes, const std::function<void()>& read);
  void stop();
  std::stop_token stopped() const { return stop_.get_token(); }

 private:
  using Clock = std::chrono::steady_clock;
  Result<> wait_until(Clock::time_point time);
  std::atomic<uint64_t> bytes_per_second_;
  std::atomic<int> windows_as_others_{0};  // until it is tried again to leave them all others
  Mutex mutex_;
  ConditionVariable stopped_changed_;
  std::stop_source stop_;
  Clock::time_point next_ PTC_GUARDED_BY(mutex_);  // when the next bytes may be read
};

/// Two threads of a node. One looks over its jobs' checkpoints, one at a time, the one longest not
/// looked at first; a checkpoint on several nodes is seen to by the first of these that is there,
/// which asks the others to read what lies on them. The other does not wait for that, which may
/// take hours: it mends what somebody's verify found, and sees to caches on this node that hold
/// what was mended elsewhere. Threads: any.
class Scrubber {
 public:
  /// All outlive it. Of a rate that is off, known damage and caches alone are seen to.
  Scrubber(ScrubRate rate, Pace& pace, std::function<std::vector<std::shared_ptr<Job>>()> jobs);
  ~Scrubber();
  /// There may be damage, or caches, to see to.
  void wake();

 private:
  void look_over(std::stop_token stop);
  void mend(std::stop_token stop);
  /// Whether one was, or would have been if it could be.
  bool look_over_one();

  const ScrubRate rate_;
  const int64_t started_ns_;
  Pace& pace_;
  const std::function<std::vector<std::shared_ptr<Job>>()> jobs_;
  struct Rest {
    std::chrono::steady_clock::time_point until;
    std::chrono::seconds length{1};
  };
  std::map<std::string, Rest> resting_;  // jobs that could not be looked over; of that thread
  Mutex mutex_;
  StoppableConditionVariable woken_, next_look_;
  bool wake_ PTC_GUARDED_BY(mutex_) = false;
  std::jthread mending_, looking_;  // last
};

}  // namespace ptc
