// A few threads that share the pieces of one piece of work.
#pragma once

#include <cstddef>
#include <functional>
#include <stop_token>

#include "store/base/error.h"
#include "store/base/spare_threads.h"

namespace ptc {

/// Lets the calling thread's work wait a little for what others do at the same time; for the rest
/// of its life.
void give_way();

/// Threads: any; calls run at the same time and take turns at the threads, which are there while
/// they are needed, and for a while after.
class ThreadTeam {
 public:
  explicit ThreadTeam(unsigned threads);
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  unsigned size() const { return size_; }

  /// Runs body(0) … body(count − 1) and waits; the first error stops those that have not begun.
  /// kCancelled once `stop` is asked for. Not to be called from within a body.
  Result<> parallel_for(size_t count, const std::function<Result<>(size_t)>& body,
                        std::stop_token stop = {});

 private:
  const unsigned size_;
  SpareThreads threads_;
};

}  // namespace ptc
