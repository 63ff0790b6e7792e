#include "fs/kernel/server_threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "store/base/mutex.h"

namespace ptc {

ServerThreads::~ServerThreads() {
  for (const PlaceRef& place : places_) place->thread_.join();
  for (const PlaceRef& place : spare_) place->thread_.join();
}

Result<> ServerThreads::start() {
  MutexLock lock(mutex_);
  try {
    const int first = std::min(options_.fewest, static_cast<int>(options_.most));
    for (int i = 0; i < first; ++i) begin_thread();
  } catch (const std::exception& error) {
    return make_error(Code::kUnavailable, "threads that answer requests: {}", error.what());
  }
  return ok();
}

void ServerThreads::begin_thread() {
  Place& place = *places_.emplace_back(std::make_unique<Place>(*this));
  ++running_;
  ++free_;
  try {
    place.thread_ = std::thread([this, &place] { run(place); });
  } catch (...) {
    places_.pop_back();
    --running_;
    --free_;
    throw;
  }
}

bool ServerThreads::enough() const {
  return running_.load() - waiting_.load() >= static_cast<int>(options_.most);
}

/// Unless another is free by now, or as many as may be are at work: the last of these to wait
/// begins one. False: it cannot be had.
bool ServerThreads::begin_another() {
  if (enough()) return true;
  std::vector<PlaceRef> ended;
  bool there = false;
  {
    MutexLock lock(mutex_);
    if (free_.load() > 0 || enough()) return true;
    if (stopping_ || gone_) return false;
    ended.swap(spare_);
    try {
      begin_thread();
      there = true;
    } catch (const std::exception& error) {
      if (const auto more = told_.pass())
        spdlog::warn("no further thread can be had to answer requests: {}{}", error.what(), *more);
    }
  }
  for (const PlaceRef& place : ended) place->thread_.join();
  return there;
}

void ServerThreads::took_one() {
  const int left = free_.fetch_sub(1) - 1;
  if (left < least_free_.load(std::memory_order_relaxed))
    least_free_.store(left, std::memory_order_relaxed);
  if (left <= 0) begin_another();
  note_use();
}

bool ServerThreads::note_waiting(int change) {
  waiting_.fetch_add(change);
  if (change < 0 || free_.load() > 0) return true;
  return begin_another() || running_.load() > waiting_.load();
}

bool ServerThreads::is_spare(Place& place) {
  const auto too_many = [this] {
    return running_.load() - waiting_.load() > static_cast<int>(options_.most);
  };
  if (leaving_.load(std::memory_order_relaxed) == 0 && !too_many()) return false;
  MutexLock lock(mutex_);
  if (stopping_) return false;
  if (too_many()) {
    --free_;
  } else {
    if (leaving_ == 0 || running_ - waiting_ <= options_.fewest) return false;
    if (free_.fetch_sub(1) <= 1) {  // it is the last that takes requests
      ++free_;
      return false;
    }
    --leaving_;
  }
  const auto self = std::find_if(places_.begin(), places_.end(),
                                 [&](const PlaceRef& one) { return one.get() == &place; });
  spare_.push_back(std::move(*self));
  places_.erase(self);
  --running_;
  return place.spare_ = true;
}

void ServerThreads::run(Place& place) {
  ::pthread_setname_np(::pthread_self(), "ptcfs-fuse");
  options_.serve(place);
  if (place.spare_) return;
  {
    MutexLock lock(mutex_);
    gone_ = true;
    --running_;
    --free_;
  }
  ended_.notify_all();
  options_.stirred();
}

void ServerThreads::end_spare() {
  std::vector<PlaceRef> ended;
  {
    MutexLock lock(mutex_);
    ended.swap(spare_);
    const int free = free_.load();  // some may have ended since the least was noted
    const int not_needed =
        std::min(least_free_.exchange(free), free) - 1;  // one is left to receive
    int many = std::max(0, std::min(not_needed, running_ - waiting_ - options_.fewest));
    leaving_ = many;
    for (auto place = places_.begin(); many > 0 && place != places_.end(); ++place)
      if ((*place)->wake(options_.wake_signal)) --many;
  }
  for (const PlaceRef& place : ended) place->thread_.join();
}

bool ServerThreads::wait(std::chrono::milliseconds patience) {
  MutexLock lock(mutex_);
  return ended_.wait_for(mutex_, patience,
                         [this]() PTC_REQUIRES(mutex_) { return gone_ && running_ <= waiting_; });
}

void ServerThreads::stop() {
  MutexLock lock(mutex_);
  stopping_ = true;
  while (running_ > 0) {
    for (const PlaceRef& place : places_)
      ::pthread_kill(place->thread_.native_handle(), options_.wake_signal);
    ended_.wait_for(mutex_, std::chrono::milliseconds(20),
                    [this]() PTC_REQUIRES(mutex_) { return running_ == 0; });
  }
}

void ServerThreads::stop(std::chrono::milliseconds most) {
  const auto until = std::chrono::steady_clock::now() + most;
  MutexLock lock(mutex_);
  stopping_ = true;
  while (running_ > waiting_ && std::chrono::steady_clock::now() < until) {
    for (const PlaceRef& place : places_)
      ::pthread_kill(place->thread_.native_handle(), options_.wake_signal);
    ended_.wait_for(mutex_, std::chrono::milliseconds(5),
                    [this]() PTC_REQUIRES(mutex_) { return running_ <= waiting_; });
  }
}

void ServerThreads::Place::received(bool took) {
  int expected = kReceiving;
  if (!state_.compare_exchange_strong(expected, kServing)) {
    while (state_.load() == kWaking) ::sched_yield();
    ::sched_yield();  // the signal comes no later than at the end of this call
    state_.store(kServing);
  }
  if (took) of_.took_one();
}

bool ServerThreads::Place::wake(int signal) {
  int now = state_.load();
  if ((now != kReceiving && now != kWoken) || !state_.compare_exchange_strong(now, kWaking))
    return false;
  ::pthread_kill(thread_.native_handle(), signal);
  state_.store(kWoken);
  return true;
}

}  // namespace ptc
