#include "store/net/others_first.h"

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <exception>
#include <utility>

namespace ptc {

asio::awaitable<void> let_others_go_first() {
  co_await asio::post(co_await asio::this_coro::executor, asio::use_awaitable);
}

Task<> do_elsewhere(SpareThreads& threads, std::function<void()> work) {
  bool done = false;  // written on this executor
  asio::steady_timer woken(co_await asio::this_coro::executor,
                           asio::steady_timer::time_point::max());
  std::function<void()> work_and_wake = [&] {
    work();
    asio::post(woken.get_executor(), [&] {
      done = true;
      woken.cancel();
    });
  };
  try {
    threads.run(std::move(work_and_wake));
  } catch (const std::exception& error) {
    co_return Error(Code::kUnavailable, error.what());
  }
  while (!done) co_await woken.async_wait(kTuple);
  co_return ok();
}

}  // namespace ptc
