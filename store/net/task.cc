#include "store/net/task.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>

#include "store/base/mutex.h"

namespace ptc {

asio::awaitable<void> pause(std::chrono::milliseconds time, std::stop_token stop) {
  auto timer = std::make_shared<asio::steady_timer>(co_await asio::this_coro::executor, time);
  std::function<void()> end = [timer] {
    asio::post(timer->get_executor(), [timer] { timer->cancel(); });
  };
  std::stop_callback<std::function<void()>> cancel(std::move(stop), std::move(end));
  co_await timer->async_wait(kTuple);
}

struct Background::State {
  std::function<asio::awaitable<void>(std::stop_token)> work;
  std::stop_source stop;
  Mutex mutex;
  ConditionVariable changed;
  bool ended PTC_GUARDED_BY(mutex) = false;
};

void Background::start(const IoExecutor& executor,
                       std::function<asio::awaitable<void>(std::stop_token)> work) {
  state_ = std::make_shared<State>();
  state_->work = std::move(work);
  auto end = [state = state_](std::exception_ptr) {  // no memory: it ends
    MutexLock lock(state->mutex);
    state->ended = true;
    state->changed.notify_all();
  };
  try {
    asio::co_spawn(executor, state_->work(state_->stop.get_token()), std::move(end));
  } catch (...) {  // no memory
    state_.reset();
    throw;
  }
}

void Background::stop() {
  if (!state_) return;
  state_->stop.request_stop();
  UniqueLock lock(state_->mutex);
  state_->changed.wait(state_->mutex, [&]() PTC_REQUIRES(state_->mutex) { return state_->ended; });
  lock.unlock();
  state_.reset();
}

struct internal::Lanes {
  std::function<asio::awaitable<void>(size_t)> work;
  size_t next = 0, count, running;
  std::exception_ptr thrown;
  asio::steady_timer all_ended;

  asio::awaitable<void> run() {
    while (next < count) co_await work(next++);
  }
};

asio::awaitable<void> for_each_of(size_t count, size_t at_once,
                                  std::function<asio::awaitable<void>(size_t)> work) {
  const IoExecutor executor = co_await asio::this_coro::executor;
  const size_t lanes = std::min(count, at_once);
  if (lanes == 0) co_return;
  internal::Lanes shared{
      std::move(work), 0,  count,
      lanes,           {}, asio::steady_timer(executor, asio::steady_timer::time_point::max())};
  std::function<void(std::exception_ptr)> end = [&shared](std::exception_ptr thrown) {
    if (thrown) {
      shared.thrown = thrown;
      shared.next = shared.count;
    }
    if (--shared.running == 0) shared.all_ended.cancel();
  };
  for (size_t lane = 0; lane < lanes; ++lane) asio::co_spawn(executor, shared.run(), end);
  while (shared.running > 0) co_await shared.all_ended.async_wait(kTuple);
  if (shared.thrown) std::rethrow_exception(shared.thrown);
}

asio::io_context& internal::loop_of_this_thread() {
  thread_local asio::io_context loop(1);
  return loop;
}

}  // namespace ptc
