// Coroutines that wait for the network, on Asio's executors. Only this header and the sources of
// store/net and of what is above it know of Asio.
//
//   Task<std::string> line(Connection& connection) {
//     PTC_CO_TRY(auto header, co_await connection.receive_header());
//     co_return co_await connection.receive_body(header);
//   }
//
// GCC 12 destroys an aggregate or a lambda twice that is made among the arguments of an awaited
// call: give it a name before. A coroutine that is a member or has references among its parameters
// is awaited where it is called.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "store/base/error.h"

namespace ptc {

namespace asio = boost::asio;
using IoExecutor = asio::any_io_executor;
template <class T = void>
using Task = asio::awaitable<Result<T>>;
inline constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

/// PTC_TRY in a Task.
#define PTC_CO_TRY(...) BOOST_OUTCOME_CO_TRY(__VA_ARGS__)

/// The executor of the coroutine that asks.
inline asio::awaitable<IoExecutor> own_executor() { co_return co_await asio::this_coro::executor; }

/// Until then, or until it is stopped.
asio::awaitable<void> pause(std::chrono::milliseconds time, std::stop_token stop);

/// A coroutine that goes on in the background for as long as this is there. Threads: one; not that
/// of its executor.
class Background {
 public:
  Background() = default;
  Background(const Background&) = delete;
  ~Background() { stop(); }

  /// Once. It is told to stop by the token, and may use what is there until stop() returns.
  void start(const IoExecutor& executor,
             std::function<asio::awaitable<void>(std::stop_token)> work);
  void stop();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// work(0), work(1) … work(count − 1), at most `at_once` of them at the same time, on the executor
/// of the coroutine that asks, which must run one thing at a time. What is thrown comes out of here
/// when all have ended.
asio::awaitable<void> for_each_of(size_t count, size_t at_once,
                                  std::function<asio::awaitable<void>(size_t)> work);

namespace internal {

template <class T>
asio::awaitable<void> put(Task<T> task, std::optional<Result<T>>& result) {
  result.emplace(co_await std::move(task));
}
struct Lanes;
/// Of this thread; it is run by whoever waits for something on it.
asio::io_context& loop_of_this_thread();

}  // namespace internal

/// Runs the task that `start(executor)` returns on the calling thread, which waits for the network
/// itself: nobody else is woken. Not from within a task. Errors: the task's; kUnavailable: this
/// machine lacks what it takes to wait.
template <class Start>
auto run_here(Start start) {
  using R = typename decltype(start(std::declval<IoExecutor>()))::value_type;
  std::optional<R> result;
  try {
    asio::io_context& loop = internal::loop_of_this_thread();
    loop.restart();
    bool ended = false;
    std::exception_ptr thrown;
    auto end = [&](std::exception_ptr what) {
      thrown = what;
      ended = true;
    };
    asio::co_spawn(loop, internal::put(start(IoExecutor(loop.get_executor())), result),
                   std::move(end));
    while (!ended) loop.run_one();
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {  // no memory, no descriptor
    return R(Error(Code::kUnavailable, error.what()));
  }
  return *std::move(result);
}

}  // namespace ptc
