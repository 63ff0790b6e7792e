#include "store/base/spare_threads.h"

#include <pthread.h>

#include <chrono>
#include <thread>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr auto kKeep = std::chrono::seconds(10);  // a thread without work

}  // namespace

SpareThreads::~SpareThreads() { end(); }

void SpareThreads::end() {
  MutexLock lock(mutex_);
  ending_ = true;
  more_.notify_all();
  less_.wait(mutex_, [&]() PTC_REQUIRES(mutex_) { return threads_ == 0; });
}

void SpareThreads::run(std::function<void()> work) {
  MutexLock lock(mutex_);
  waiting_.push_back(std::move(work));
  if (idle_ < waiting_.size() && threads_ < most_) {
    try {
      begin_thread();
    } catch (...) {
      const bool can_wait = most_ != SIZE_MAX && threads_ > 0;
      if (!can_wait) {
        waiting_.pop_back();
        throw;
      }
    }
  }
  any_waits_ = true;
  more_.notify_one();
}

void SpareThreads::begin_thread() {
  std::thread([this] { serve(); }).detach();
  ++threads_;
}

void SpareThreads::serve() {
  ::pthread_setname_np(::pthread_self(), name_.c_str());
  UniqueLock lock(mutex_);
  for (;;) {
    ++idle_;
    const bool called = more_.wait_for(
        mutex_, kKeep, [&]() PTC_REQUIRES(mutex_) { return ending_ || !waiting_.empty(); });
    --idle_;
    if (waiting_.empty() && (ending_ || !called)) break;
    if (waiting_.empty()) continue;
    std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    any_waits_ = !waiting_.empty();
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
  }
  --threads_;
  less_.notify_all();
}

}  // namespace ptc
