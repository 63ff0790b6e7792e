#include "reshard/job/scrub.h"

#include <pthread.h>
#include <sched.h>
#include <spdlog/spdlog.h>
#include <time.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "reshard/job/job_parts.h"
#include "store/base/mutex.h"
#include "store/base/size_text.h"
#include "store/base/wall_time.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
constexpr auto kLookEvery = 2s, kLookWhenIdle = 30s;
constexpr int64_t kDay = 86'400'000'000'000;  // ns
// Of a round a day: at least so fast, and twice as fast as it takes.
constexpr uint64_t kLeastBytesPerSecond = 64 << 20;
// With less than a quarter of a processor the thread is in somebody's way, if only in the memory's.
constexpr int kStarved = 4;
constexpr int kWindowsAsOthers = 32;  // of each a millisecond: every ten seconds, beside pauses
constexpr auto kBusyPause = 250ms;
constexpr auto kLongestRest = 60s;  // of a job that could not be looked over

std::chrono::nanoseconds thread_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// This thread runs when no other wants to.
class IdlePriority {
 public:
  IdlePriority() {
    const sched_param none{};
    given_ =
        ::sched_getscheduler(0) == SCHED_OTHER && ::sched_setscheduler(0, SCHED_IDLE, &none) == 0;
  }
  ~IdlePriority() {
    const sched_param none{};
    if (given_) ::sched_setscheduler(0, SCHED_OTHER, &none);
  }
  IdlePriority(const IdlePriority&) = delete;
  IdlePriority& operator=(const IdlePriority&) = delete;

 private:
  bool given_ = false;
};

}  // namespace

Result<ScrubRate> ScrubRate::parse(std::string_view text) {
  if (text == "off") return ScrubRate{Kind::kOff};
  if (text == "daily") return ScrubRate{Kind::kDaily};
  Result<uint64_t> bytes = parse_size(text);
  if (bytes.has_error() || bytes.value() == 0)
    return invalid_argument("'{}' is no rate: off, daily, or bytes a second, such as 50M", text);
  return ScrubRate{Kind::kBytes, bytes.value()};
}

Result<> Pace::wait_until(Clock::time_point time) {
  MutexLock lock(mutex_);
  stopped_changed_.wait_until(mutex_, time,
                              [this]() PTC_REQUIRES(mutex_) { return stop_.stop_requested(); });
  if (stop_.stop_requested()) return Error(Code::kCancelled, "shutting down");
  return ok();
}

Result<> Pace::read(uint64_t bytes, const std::function<void()>& read) {
  Clock::time_point turn;
  {
    MutexLock lock(mutex_);
    turn = std::max(next_, Clock::now());
    const double seconds =
        static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(bytes_per_second_, 1));
    next_ =
        turn + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  PTC_TRY(wait_until(turn));
  const auto began = Clock::now();
  const auto had = thread_time();
  const bool as_others = windows_as_others_ > 0;
  {
    std::optional<IdlePriority> idle;
    if (!as_others) idle.emplace();
    read();
  }
  const bool starved = Clock::now() - began > kStarved * (thread_time() - had) + 5ms;
  if (as_others) --windows_as_others_;
  else if (starved) windows_as_others_ = kWindowsAsOthers;
  return starved || as_others ? wait_until(Clock::now() + kBusyPause) : ok();
}

void Pace::stop() {
  MutexLock lock(mutex_);
  stop_.request_stop();
  stopped_changed_.notify_all();
}

Scrubber::Scrubber(ScrubRate rate, Pace& pace,
                   std::function<std::vector<std::shared_ptr<Job>>()> jobs)
    : rate_(rate),
      started_ns_(now_ns()),
      pace_(pace),
      jobs_(std::move(jobs)),
      mending_([this](std::stop_token stop) { mend(std::move(stop)); }),
      looking_(rate.kind == ScrubRate::Kind::kOff
                   ? std::jthread()
                   : std::jthread([this](std::stop_token stop) { look_over(std::move(stop)); })) {}

Scrubber::~Scrubber() {
  looking_.request_stop();
  pace_.stop();
}

void Scrubber::wake() {
  MutexLock lock(mutex_);
  wake_ = true;
  woken_.notify_all();
}

void Scrubber::mend(std::stop_token stop) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-mend");
  bool again = false;  // not all damage could be seen to
  while (!stop.stop_requested()) {
    {
      MutexLock lock(mutex_);
      woken_.wait_for(mutex_, stop, again ? kLookEvery : kLookWhenIdle,
                      [this]() PTC_REQUIRES(mutex_) { return std::exchange(wake_, false); });
    }
    if (stop.stop_requested()) return;
    again = false;
    try {
      for (const JobRef& job : jobs_()) again = !job->see_to_damage() || again;
    } catch (const std::exception& error) {  // no memory
      spdlog::warn("what is damaged is mended later: {}", error.what());
      again = true;
    }
  }
}

void Scrubber::look_over(std::stop_token stop) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-scrub");
  bool idle = false;  // nothing is due to be looked over
  while (!stop.stop_requested()) {
    {
      MutexLock lock(mutex_);
      next_look_.wait_for(mutex_, stop, idle ? kLookWhenIdle : kLookEvery, [] { return false; });
    }
    if (stop.stop_requested()) return;
    try {
      idle = !look_over_one();
    } catch (const std::exception& error) {  // no memory
      spdlog::warn("what is stored is looked over later: {}", error.what());
    }
  }
}

bool Scrubber::look_over_one() {
  JobRef first;
  Job::ToLookOver what;
  uint64_t stored_bytes = 0;
  const auto now = std::chrono::steady_clock::now();
  for (const JobRef& job : jobs_()) {
    stored_bytes += job->stored_bytes_here();
    if (const auto rest = resting_.find(job->name());
        rest != resting_.end() && now < rest->second.until)
      continue;
    const std::optional<Job::ToLookOver> next = job->next_to_look_over(started_ns_);
    if (!next || (first != nullptr && next->last_ns >= what.last_ns)) continue;
    first = job;
    what = *next;
  }
  const bool daily = rate_.kind == ScrubRate::Kind::kDaily;
  pace_.set_rate(daily ? std::max(kLeastBytesPerSecond, stored_bytes / 86400 * 2)
                       : rate_.bytes_per_second);
  if (first == nullptr || (daily && what.last_ns >= std::max(started_ns_, now_ns() - kDay)))
    return !daily || std::any_of(resting_.begin(), resting_.end(),
                                 [&](const auto& rest) { return now < rest.second.until; });
  Result<> looked = first->look_over(what.checkpoint);
  if (looked.has_value()) {
    resting_.erase(first->name());
    return true;
  }
  // All of it is read each time.
  Rest& rest = resting_[first->name()];
  rest.length = std::min(2 * rest.length, std::chrono::seconds(kLongestRest));
  rest.until = std::chrono::steady_clock::now() + rest.length;
  spdlog::debug("job {}: checkpoint {} is looked over later: {}", first->name(), what.checkpoint,
                looked.error().message());
  return true;
}

}  // namespace ptc
