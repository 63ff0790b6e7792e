// Work of many pieces on several threads, whose results are used one by one in their order.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <stop_token>
#include <system_error>
#include <thread>
#include <vector>

#include "dataset/source/caught.h"
#include "store/base/error.h"
#include "store/base/mutex.h"

namespace ptc {

/// make(i) → Result<Piece> runs on `threads` threads; use(i, Result<Piece>) → Result<> on this one,
/// for i = 0, 1 …; its first error ends all. No more than 4 · threads results wait at a time. What
/// make() throws is an error of its piece; kUnavailable: there is no thread to be had.
template <class Piece, class Make, class Use>
Result<> in_order(uint64_t count, unsigned threads, std::stop_token stop, const Make& make,
                  const Use& use) {
  struct Shared {
    Mutex mutex;
    ConditionVariable changed;
    std::map<uint64_t, Result<Piece>> made PTC_GUARDED_BY(mutex);
    uint64_t begun PTC_GUARDED_BY(mutex) = 0, used PTC_GUARDED_BY(mutex) = 0;
    bool ended PTC_GUARDED_BY(mutex) = false, failed PTC_GUARDED_BY(mutex) = false;
  } all;
  auto work_on = [&] {
    UniqueLock lock(all.mutex);
    while (true) {
      all.changed.wait(all.mutex, [&]() PTC_REQUIRES(all.mutex) {
        return all.ended || all.begun == count || all.begun < all.used + uint64_t{4} * threads;
      });
      if (all.ended || all.begun == count) return;
      const uint64_t i = all.begun++;
      lock.unlock();
      Result<Piece> piece = caught([&]() -> Result<Piece> { return make(i); });
      lock.lock();
      all.made.emplace(i, std::move(piece));
      all.changed.notify_all();
    }
  };
  auto work = [&] {
    try {
      work_on();
    } catch (const std::bad_alloc&) {  // no place for a result
      MutexLock lock(all.mutex);
      all.failed = true;
      all.changed.notify_all();
    }
  };
  const auto end = [&](const void*) {
    MutexLock lock(all.mutex);
    all.ended = true;
    all.changed.notify_all();
  };
  std::vector<std::jthread> workers;
  workers.reserve(threads);
  const std::unique_ptr<const Shared, decltype(end)> ending(
      &all, end);  // at return, also if use() throws
  try {
    for (unsigned i = 0; i < threads && i < count; ++i) workers.emplace_back(work);
  } catch (const std::system_error& error) {
    if (workers.empty())
      return make_error(Code::kUnavailable, "no thread to read shards: {}", error.what());
  }
  Result<> result = ok();
  UniqueLock lock(all.mutex);
  while (all.used < count && result) {
    all.changed.wait(all.mutex, [&]() PTC_REQUIRES(all.mutex) {
      return all.failed || all.made.contains(all.used);
    });
    if (!all.made.contains(all.used)) return Error(Code::kNoSpace, "out of memory", ENOMEM);
    Result<Piece> piece = std::move(all.made.extract(all.used).mapped());
    const uint64_t at = all.used;
    lock.unlock();
    result = stop.stop_requested() ? Result<>(Error(Code::kCancelled, "stopped"))
                                   : use(at, std::move(piece));
    lock.lock();
    ++all.used;
    all.changed.notify_all();
  }
  return result;  // the workers are waited for
}

}  // namespace ptc
