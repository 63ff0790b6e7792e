// Work of many pieces on several threads, whose results are used one by one in their order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stop_token>
#include <system_error>
#include <thread>
#include <vector>

#include "dataset/source/caught.h"
#include "store/base/error.h"

namespace ptc {

/// make(i) → Result<Piece> runs on `threads` threads; use(i, Result<Piece>) → Result<> on this one,
/// for i = 0, 1 …; its first error ends all. No more than 4 · threads results wait at a time. What
/// make() throws is an error of its piece; kUnavailable: there is no thread to be had.
template <class Piece, class Make, class Use>
Result<> in_order(uint64_t count, unsigned threads, std::stop_token stop, const Make& make,
                  const Use& use) {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, Result<Piece>> made;  // guarded by mutex, as the next four
  uint64_t begun = 0, used = 0;
  bool ended = false, failed = false;
  auto work_on = [&] {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock,
                   [&] { return ended || begun == count || begun < used + uint64_t{4} * threads; });
      if (ended || begun == count) return;
      const uint64_t i = begun++;
      lock.unlock();
      Result<Piece> piece = caught([&]() -> Result<Piece> { return make(i); });
      lock.lock();
      made.emplace(i, std::move(piece));
      changed.notify_all();
    }
  };
  auto work = [&] {
    try {
      work_on();
    } catch (const std::bad_alloc&) {  // no place for a result
      std::lock_guard lock(mutex);
      failed = true;
      changed.notify_all();
    }
  };
  const auto end = [&](const void*) {
    std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  };
  std::vector<std::jthread> workers;
  workers.reserve(threads);
  const std::unique_ptr<const bool, decltype(end)> ending(&ended,
                                                          end);  // at return, also if use() throws
  try {
    for (unsigned i = 0; i < threads && i < count; ++i) workers.emplace_back(work);
  } catch (const std::system_error& error) {
    if (workers.empty())
      return make_error(Code::kUnavailable, "no thread to read shards: {}", error.what());
  }
  Result<> result = ok();
  std::unique_lock lock(mutex);
  while (used < count && result) {
    changed.wait(lock, [&] { return failed || made.contains(used); });
    if (!made.contains(used)) return Error(Code::kNoSpace, "out of memory", ENOMEM);
    Result<Piece> piece = std::move(made.extract(used).mapped());
    lock.unlock();
    result = stop.stop_requested() ? Result<>(Error(Code::kCancelled, "stopped"))
                                   : use(used, std::move(piece));
    lock.lock();
    ++used;
    changed.notify_all();
  }
  return result;  // the workers are waited for
}

}  // namespace ptc
