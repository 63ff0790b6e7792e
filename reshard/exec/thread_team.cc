#include "reshard/exec/thread_team.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

void give_way() {
  constexpr int kNice = 5;  // a third of the others' share of a processor
  thread_local bool given = false;
  if (!std::exchange(given, true))
    (void)setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNice);  // of this thread
}

ThreadTeam::ThreadTeam(unsigned threads)
    : size_(std::max(threads, 1u)), threads_("ptcfs-copy", size_) {}

Result<> ThreadTeam::parallel_for(size_t count, const std::function<Result<>(size_t)>& body,
                                  std::stop_token stop) {
  const unsigned wanted = std::min<size_t>(size_, count);
  struct Shared {
    std::atomic<size_t> next{0};
    Mutex mutex;
    ConditionVariable done;
    unsigned running PTC_GUARDED_BY(mutex) = 0;
    std::optional<Error> error PTC_GUARDED_BY(mutex);  // the first one
  } shared{.running = wanted};
  // Where others wait for a thread, each call has one for so long at a time: a small one is done
  // soon beside any number of large ones.
  constexpr auto kTurn = std::chrono::milliseconds(2);
  std::function<void()> handed_on;
  auto work = [&] {
    using Clock = std::chrono::steady_clock;
    const auto turn_ends = Clock::now() + kTurn;
    for (;;) {
      if (threads_.any_waits() && Clock::now() >= turn_ends) {
        try {
          threads_.run(handed_on);
          return;
        } catch (const std::exception&) {  // no memory: it goes on here
        }
      }
      size_t i = shared.next.fetch_add(1);
      if (i >= count) break;
      Result<> result = ok();
      try {
        result = stop.stop_requested() ? Result<>(Error(Code::kCancelled, "cancelled")) : body(i);
      } catch (
          const std::exception& error) {  // no memory: an error of this call, not of the daemon
        result = make_error(Code::kNoSpace, "{}", error.what());
      }
      if (result.has_error()) {
        shared.next = count;
        MutexLock lock(shared.mutex);
        if (!shared.error) shared.error = result.error();
      }
    }
    MutexLock lock(shared.mutex);
    if (--shared.running == 0) shared.done.notify_all();
  };
  handed_on = [&work] { work(); };  // small enough to take no memory
  unsigned posted = 0;
  try {
    for (; posted < wanted; ++posted) threads_.run(handed_on);
  } catch (const std::exception&) {  // no memory or thread: those that have begun use what is here,
                                     // and do the rest
    MutexLock lock(shared.mutex);
    shared.running -= wanted - std::max(posted, 1u);
  }
  if (posted == 0 && wanted > 0) work();
  MutexLock lock(shared.mutex);
  shared.done.wait(shared.mutex, [&]() PTC_REQUIRES(shared.mutex) { return shared.running == 0; });
  if (shared.error) return *std::move(shared.error);
  return ok();
}

}  // namespace ptc
