// The scheduler under real std:: threads: one at a time, the same for the same seed, time that
// jumps.
#include "tests/sim/scheduler.h"

#include <gtest/gtest.h>
#include <sys/random.h>

#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <condition_variable>
#include <future>
#include <mutex>
#include <random>
#include <semaphore>
#include <set>
#include <stop_token>
#include <thread>
#include <vector>

namespace ptc::sim {
namespace {

using namespace std::chrono_literals;

RunResult run_seed(uint64_t seed, const std::function<void()>& body) {
  return run({.seed = seed}, body);
}

/// In which order some threads get a mutex.
std::string order_of(uint64_t seed, RunResult* result = nullptr) {
  std::string order;
  const RunResult done = run_seed(seed, [&] {
    std::mutex mutex;
    std::vector<std::jthread> threads;
    for (char name : {'a', 'b', 'c', 'd'})
      threads.emplace_back([&, name] {
        for (int i = 0; i < 3; ++i) {
          std::lock_guard lock(mutex);
          order += name;
        }
      });
  });
  if (result != nullptr) *result = done;
  return order;
}

TEST(Scheduler, TheSameSeedIsTheSameRun) {
  std::set<std::string> orders;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    RunResult first, second;
    const std::string order = order_of(seed, &first);
    EXPECT_EQ(order_of(seed, &second), order) << seed;
    EXPECT_EQ(first.hash, second.hash) << seed;
    EXPECT_EQ(first.steps, second.steps) << seed;
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 40u);
}

TEST(Scheduler, WhatIsNotGuardedIsNotRacedFor) {
  int count = 0;  // no thread is stopped between two calls that wait
  run_seed(1, [&] {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 20; ++i)
      threads.emplace_back([&] {
        for (int n = 0; n < 1000; ++n) ++count;
      });
  });
  EXPECT_EQ(count, 20'000);
}

TEST(Scheduler, TimeJumps) {
  const auto began = std::chrono::steady_clock::now();
  const RunResult done = run_seed(2, [] {
    const auto start = std::chrono::steady_clock::now();
    const auto wall = std::chrono::system_clock::now();
    auto later = std::async(std::launch::async, [] { std::this_thread::sleep_for(24h); });
    std::mutex mutex;
    std::condition_variable never;
    std::unique_lock lock(mutex);
    EXPECT_FALSE(never.wait_for(lock, 1h, [] { return false; }));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 1h + 1s);
    EXPECT_FALSE(never.wait_until(lock, wall + 2h, [] { return false; }));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 2h + 1s);
    EXPECT_EQ(later.wait_for(1min), std::future_status::timeout);
    later.get();
    EXPECT_GE(std::chrono::steady_clock::now() - start, 24h);
    EXPECT_LT(std::chrono::system_clock::now() - wall, 24h + 1s);
  });
  EXPECT_GE(done.time, 24h);
  EXPECT_LT(std::chrono::steady_clock::now() - began, 1h);  // outside it is the machine's
}

TEST(Scheduler, KnowsAllThatWaits) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    unsigned done = 0;
    run_seed(seed, [&] {
      std::mutex mutex;
      std::condition_variable_any changed;
      std::binary_semaphore semaphore(0);
      std::atomic<int> number = 0;
      std::promise<int> promise;
      std::shared_future<int> future = promise.get_future();
      std::once_flag once;
      std::jthread stopped([&](const std::stop_token& stop) {
        std::unique_lock lock(mutex);
        changed.wait(lock, stop, [] { return false; });
        ++done;
      });
      std::vector<std::jthread> threads;
      for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] { done += future.get() == 7; });
        threads.emplace_back([&] {
          std::call_once(once, [&] {
            std::this_thread::sleep_for(1s);
            ++done;
          });
        });
        threads.emplace_back([&] {
          number.wait(0);
          ++done;
        });
      }
      threads.emplace_back([&] {
        semaphore.acquire();
        ++done;
      });
      boost::asio::thread_pool pool(2);
      for (int i = 0; i < 4; ++i)
        boost::asio::post(pool, [&] {
          std::lock_guard lock(mutex);
          ++done;
        });
      promise.set_value(7);
      semaphore.release();
      number = 1;
      number.notify_all();
      pool.join();
    });
    EXPECT_EQ(done, 1u + 3 + 1 + 3 + 1 + 4) << seed;
  }
}

TEST(Scheduler, AFrozenGroupFindsItsDeadlinesOver) {
  run_seed(3, [] {
    constexpr int kGroup = 5;
    Time woke{};
    std::jthread sleeper([&] {
      set_group(kGroup);
      sleep(1s);
      woke = now();
    });
    sleep(100ms);
    const Time begun = now();
    freeze(kGroup);
    sleep(10s);
    EXPECT_EQ(woke, Time());
    thaw(kGroup);
    sleeper.join();
    EXPECT_GE(woke - begun, 10s);
    EXPECT_LT(woke - begun, 11s);
  });
}

TEST(Scheduler, RandomBytesAreOfTheSeed) {
  auto draw = [](uint64_t seed) {
    uint64_t value = 0;
    run_seed(seed, [&] { EXPECT_EQ(getrandom(&value, sizeof value, 0), 8); });
    return value;
  };
  EXPECT_EQ(draw(5), draw(5));
  EXPECT_NE(draw(5), draw(6));
}

/// Two mutexes in both orders: some seed finds it, and says who waits for what.
TEST(SchedulerDeathTest, FindsADeadlock) {
  auto lock_both = [](uint64_t seed) {
    run_seed(seed, [] {
      std::mutex first, second;
      auto both = [](const char* name, std::mutex& one, std::mutex& other) {
        name_thread(name);
        std::lock_guard lock(one);
        std::lock_guard another(other);
      };
      std::jthread there([&] { both("there", first, second); });
      std::jthread back([&] { both("back", second, first); });
    });
  };
  EXPECT_EXIT(
      {
        for (uint64_t seed = 0; seed < 1000; ++seed) lock_both(seed);
      },
      ::testing::ExitedWithCode(70),
      "nobody can run:\n  main waits for the end of a thread\n  there waits for a mutex");
}

}  // namespace
}  // namespace ptc::sim
