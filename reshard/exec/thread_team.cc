#include "reshard/exec/thread_team.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

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
  struct Shared {
    std::atomic<size_t> next{0};
    std::mutex mutex;
    std::condition_variable done;
    unsigned running = 0;
    std::optional<Error> error;  // the first one
  } shared;
  auto work = [&] {
    for (;;) {
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
        std::lock_guard lock(shared.mutex);
        if (!shared.error) shared.error = result.error();
      }
    }
    std::lock_guard lock(shared.mutex);
    if (--shared.running == 0) shared.done.notify_all();
  };
  const unsigned wanted = shared.running = std::min<size_t>(size_, count);
  unsigned posted = 0;
  try {
    for (; posted < wanted; ++posted) threads_.run(work);
  } catch (const std::exception&) {  // no memory or thread: those that have begun use what is here,
                                     // and do the rest
    std::lock_guard lock(shared.mutex);
    shared.running -= wanted - std::max(posted, 1u);
  }
  if (posted == 0 && wanted > 0) work();
  std::unique_lock lock(shared.mutex);
  shared.done.wait(lock, [&] { return shared.running == 0; });
  if (shared.error) return *std::move(shared.error);
  return ok();
}

}  // namespace ptc
