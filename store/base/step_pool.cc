#include "store/base/step_pool.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "store/base/mutex.h"

namespace ptc {

struct Loop::State {
  std::weak_ptr<StepPool::Shared> pool;
  StepPool::Step step;
  std::stop_source stop;
  // --- guarded by the pool's mutex, which the compiler cannot see ---
  bool queued = false, running = false, woken = false, stopped = false;
  std::multimap<StepPool::Time, std::shared_ptr<State>>::iterator place;  // while queued
};

struct StepPool::Shared : std::enable_shared_from_this<StepPool::Shared> {
  using LoopRef = std::shared_ptr<Loop::State>;

  Shared(unsigned most, std::string of_each)
      : most_threads(std::max(most, 1u)), name(std::move(of_each)) {}

  void begin_another() noexcept PTC_REQUIRES(mutex) {
    try {
      threads.emplace_back([self = shared_from_this()] { self->work(); });
    } catch (const std::exception&) {  // no more threads on this machine: those that are there go
                                       // on, and it is tried again for the next loop that is woken
    }
  }
  void enqueue(const LoopRef& loop, Time due) PTC_REQUIRES(mutex) {
    if (loop->queued) queue.erase(loop->place);
    loop->place = queue.emplace(due, loop);
    loop->queued = true;
  }
  void put(const LoopRef& loop, Time due) PTC_REQUIRES(mutex) {
    enqueue(loop, due);
    if (loop->place == queue.begin() || threads.empty()) look_at_queue();
  }
  /// By who looks at the queue next. He may find that somebody else waits for what is first there,
  /// and so must be told that it is another now.
  void put_back(const LoopRef& loop, Time due) PTC_REQUIRES(mutex) {
    enqueue(loop, due);
    if (loop->place == queue.begin() && first_waits) first_due_changed.notify_one();
  }
  /// Whoever does looks further, if there is more.
  void look_at_queue() PTC_REQUIRES(mutex) {
    if (first_waits) first_due_changed.notify_one();
    else if (waiting > 0) told.notify_one();
    else if (threads.size() < most_threads) begin_another();
  }
  void work();
  /// Whether this thread, which found nothing to do, shall end.
  bool is_spare() PTC_REQUIRES(mutex);

  const unsigned most_threads;
  const std::string name;
  mutable Mutex mutex;
  std::multimap<Time, LoopRef> queue PTC_GUARDED_BY(mutex);
  ConditionVariable first_due_changed, told, step_ended;
  std::vector<std::thread> threads PTC_GUARDED_BY(mutex), ended
      PTC_GUARDED_BY(mutex);                       // the latter end now
  bool first_waits PTC_GUARDED_BY(mutex) = false;  // a thread, for the next step to come due
  unsigned waiting PTC_GUARDED_BY(mutex) = 0;      // others that wait to be told
  bool stopping PTC_GUARDED_BY(mutex) = false;
};

void StepPool::Shared::work() {
  constexpr auto kSpareAfter = std::chrono::seconds(5);
  ::pthread_setname_np(::pthread_self(), name.c_str());
  UniqueLock lock(mutex);
  while (!stopping) {
    const Time now = std::chrono::steady_clock::now();
    if (queue.empty() || queue.begin()->first > now) {
      // One is there for what comes due next, and sleeps until then; if all did, all would wake.
      if (!queue.empty() && !first_waits) {
        const Time due = queue.begin()->first;  // it may be taken out meanwhile
        first_waits = true;
        first_due_changed.wait_until(mutex, due);
        first_waits = false;
        continue;
      }
      const Time spare_at = now + kSpareAfter;
      ++waiting;
      told.wait_until(mutex, spare_at);
      --waiting;
      const bool idle = std::chrono::steady_clock::now() >= spare_at;
      if (idle && (first_waits || queue.empty()) && is_spare()) return;
      continue;
    }
    const LoopRef loop = queue.begin()->second;
    queue.erase(queue.begin());
    loop->queued = loop->woken = false;
    loop->running = true;
    // Somebody has to wait for what comes due meanwhile.
    if (!queue.empty()) look_at_queue();
    lock.unlock();
    const std::optional<Time> next = loop->step(loop->stop.get_token());
    lock.lock();
    loop->running = false;
    if (loop->stopped) {
      step_ended.notify_all();
    } else if (loop->woken) {
      put_back(loop, std::chrono::steady_clock::now());
    } else if (next) {
      put_back(loop, *next);
    }
  }
}

bool StepPool::Shared::is_spare() {
  auto self = std::find_if(threads.begin(), threads.end(), [](const std::thread& one) {
    return one.get_id() == std::this_thread::get_id();
  });
  if (self == threads.end()) return false;  // the pool ends, and joins it
  std::vector<std::thread> before = std::exchange(ended, {});
  ended.push_back(std::move(*self));
  threads.erase(self);
  told.notify_one();  // it may have been this one that was told
  const MutexUnlock unlock(mutex);
  for (std::thread& thread : before) thread.join();
  return true;
}

StepPool::StepPool(unsigned most_threads, std::string name)
    : shared_(std::make_shared<Shared>(most_threads, std::move(name))) {}

StepPool::~StepPool() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    shared_->queue.clear();
    threads = std::exchange(shared_->threads, {});
    for (std::thread& thread : std::exchange(shared_->ended, {}))
      threads.push_back(std::move(thread));
    shared_->first_due_changed.notify_all();
    shared_->told.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

unsigned StepPool::threads() const {
  MutexLock lock(shared_->mutex);
  return static_cast<unsigned>(shared_->threads.size());
}

void Loop::start(StepPool& pool, StepPool::Step step) {
  auto state = std::make_shared<State>();
  state->pool = pool.shared_;
  state->step = std::move(step);
  MutexLock lock(pool.shared_->mutex);
  state_ = state;
  pool.shared_->put(state, std::chrono::steady_clock::now());
}

void Loop::wake() {
  const std::shared_ptr<State> state = state_;
  if (state == nullptr) return;
  const std::shared_ptr<StepPool::Shared> pool = state->pool.lock();
  if (pool == nullptr) return;
  MutexLock lock(pool->mutex);
  if (state->stopped) return;
  const StepPool::Time now = std::chrono::steady_clock::now();
  if (state->running) state->woken = true;
  else if (!state->queued || state->place->first > now) pool->put(state, now);
  else if (pool->threads.empty()) pool->look_at_queue();  // there was none to be had
}

void Loop::stop() {
  const std::shared_ptr<State> state = state_;
  if (state == nullptr) return;
  state->stop.request_stop();
  const std::shared_ptr<StepPool::Shared> pool = state->pool.lock();
  if (pool == nullptr) return;
  MutexLock lock(pool->mutex);
  state->stopped = true;
  if (state->queued) pool->queue.erase(std::exchange(state->place, {}));
  state->queued = false;
  pool->step_ended.wait(pool->mutex, [&]() PTC_REQUIRES(pool->mutex) { return !state->running; });
}

}  // namespace ptc
