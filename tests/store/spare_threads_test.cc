#include "store/base/spare_threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

namespace ptc {
namespace {

TEST(SpareThreads, WorkBeyondTheLimitWaitsForOneOfThem) {
  std::atomic<int> at_once = 0, most = 0, done = 0;
  {
    SpareThreads threads("test", 3);
    std::promise<void> release;
    std::shared_future<void> released = release.get_future().share();
    for (int i = 0; i < 20; ++i)
      threads.run([&, released] {
        const int now = ++at_once;
        for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
        }
        released.wait();
        --at_once;
        ++done;
      });
    while (at_once < 3) std::this_thread::yield();
    release.set_value();
  }
  EXPECT_EQ(most, 3);
  EXPECT_EQ(done, 20);
}

TEST(SpareThreads, WithoutALimitNoneWaitsForAnother) {
  std::promise<void> last;
  std::shared_future<void> came = last.get_future().share();
  SpareThreads threads("test");
  std::atomic<int> waiting = 0;
  for (int i = 0; i < 50; ++i)
    threads.run([&, came] {
      ++waiting;
      came.wait();
    });
  threads.run([&] { last.set_value(); });
  while (waiting < 50) std::this_thread::yield();
}

}  // namespace
}  // namespace ptc
