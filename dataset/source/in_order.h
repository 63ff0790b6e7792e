// Work of many pieces on several threads, whose results are used one by one in their order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// make(i) → Result<Piece> runs on `threads` threads; use(i, Result<Piece>) → Result<> on this one, for
/// i = 0, 1 …; its first error ends all. No more than 4 · threads results wait at a time.
template <class Piece, class Make, class Use>
Result<> in_order(uint64_t count, unsigned threads, std::stop_token stop, const Make& make, const Use& use) {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, Result<Piece>> made;  // guarded by mutex, as the next two
  uint64_t begun = 0, used = 0;
  bool ended = false;
  auto work = [&] {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return ended || begun == count || begun < used + uint64_t{4} * threads; });
      if (ended || begun == count) return;
      const uint64_t i = begun++;
      lock.unlock();
      Result<Piece> piece = make(i);
      lock.lock();
      made.emplace(i, std::move(piece));
      changed.notify_all();
    }
  };
  std::vector<std::jthread> workers;
  for (unsigned i = 0; i < threads && i < count; ++i) workers.emplace_back(work);
  Result<> result = ok();
  std::unique_lock lock(mutex);
  while (used < count && result) {
    changed.wait(lock, [&] { return made.contains(used); });
    Result<Piece> piece = std::move(made.extract(used).mapped());
    lock.unlock();
    result = stop.stop_requested() ? Result<>(Error(Code::kCancelled, "stopped")) : use(used, std::move(piece));
    lock.lock();
    ++used;
    changed.notify_all();
  }
  ended = true;
  changed.notify_all();
  lock.unlock();
  return result;  // the workers are waited for
}

}  // namespace ptc
