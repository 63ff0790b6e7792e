#include "store/base/step_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

namespace ptc {
namespace {

using std::chrono::milliseconds;

StepPool::Time in(milliseconds time) { return std::chrono::steady_clock::now() + time; }

TEST(StepPool, AStepIsTakenAtTheStartAtItsTimeAndWhenWoken) {
  StepPool pool(2);
  std::promise<void> first, second, third;
  std::atomic<int> steps = 0;
  Loop loop;
  loop.start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    switch (++steps) {
      case 1:
        first.set_value();
        return in(milliseconds(20));
      case 2:
        second.set_value();
        return std::nullopt;
      default:
        third.set_value();
        return std::nullopt;
    }
  });
  first.get_future().get();
  second.get_future().get();
  loop.wake();
  third.get_future().get();
  loop.stop();
  EXPECT_EQ(steps, 3);
  loop.wake();
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(steps, 3);
}

TEST(StepPool, WhoeverIsWokenWhileItTakesAStepTakesAnother) {
  StepPool pool(1);
  std::promise<void> entered, go, again;
  std::atomic<int> steps = 0, at_once = 0;
  Loop loop;
  loop.start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    EXPECT_EQ(++at_once, 1);
    if (++steps == 1) {
      entered.set_value();
      go.get_future().get();
    } else {
      again.set_value();
    }
    --at_once;
    return std::nullopt;
  });
  entered.get_future().get();
  for (int i = 0; i < 100; ++i) loop.wake();
  go.set_value();
  again.get_future().get();
  loop.stop();
  EXPECT_EQ(steps, 2);
}

TEST(StepPool, AStepThatTakesLongHoldsUpNoOther) {
  StepPool pool(2);
  std::promise<void> hung, release;
  Loop slow, quick;
  slow.start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    hung.set_value();
    release.get_future().get();
    return std::nullopt;
  });
  hung.get_future().get();
  std::atomic<int> steps = 0;
  quick.start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    return ++steps < 10 ? std::optional(in(milliseconds(1))) : std::nullopt;
  });
  while (steps < 10) std::this_thread::yield();
  release.set_value();
}

TEST(StepPool, ManyLoopsShareItsThreads) {
  constexpr int kLoops = 5000;
  StepPool pool(4);
  std::atomic<int> at_once = 0, most = 0;
  std::deque<std::atomic<int>> steps(kLoops);
  std::deque<Loop> loops(kLoops);
  for (int i = 0; i < kLoops; ++i) {
    loops[i].start(pool, [&, i](const std::stop_token&) -> std::optional<StepPool::Time> {
      int now = ++at_once;
      for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
      }
      ++steps[i];
      --at_once;
      return std::nullopt;
    });
  }
  std::vector<std::thread> wakers;
  for (int t = 0; t < 3; ++t)
    wakers.emplace_back([&] {
      for (Loop& loop : loops) loop.wake();
    });
  for (std::thread& waker : wakers) waker.join();
  for (int i = 0; i < kLoops; ++i) {
    while (steps[i] == 0) std::this_thread::yield();
  }
  EXPECT_LE(most, 4);
  EXPECT_LE(pool.threads(), 4u);
}

TEST(StepPool, StopAsksTheStepAndWaitsForItsEnd) {
  StepPool pool(1);
  std::promise<void> entered;
  std::atomic<bool> ended = false;
  Loop loop;
  loop.start(pool, [&](const std::stop_token& stop) -> std::optional<StepPool::Time> {
    entered.set_value();
    while (!stop.stop_requested()) std::this_thread::yield();
    std::this_thread::sleep_for(milliseconds(10));
    ended = true;
    return in(milliseconds(0));
  });
  entered.get_future().get();
  loop.stop();
  EXPECT_TRUE(ended);
}

TEST(StepPool, ThreadsThatAreNotNeededEnd) {
  StepPool pool(8);
  std::atomic<int> at_once = 0;
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  std::deque<Loop> loops(8);
  for (Loop& loop : loops)
    loop.start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
      ++at_once;
      released.wait();
      return std::nullopt;
    });
  while (at_once < 8) std::this_thread::yield();
  EXPECT_EQ(pool.threads(), 8u);
  release.set_value();
  const auto deadline = in(std::chrono::seconds(60));
  while (pool.threads() > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(pool.threads(), 0u);
  loops.back().wake();
  while (at_once < 9) std::this_thread::yield();
}

/// Though a thread waits for something later already, and who put it back finds another waiting.
TEST(StepPool, WhatComesDueBeforeWhatIsWaitedForIsNotLate) {
  StepPool pool(2);
  std::atomic<int> slow_steps = 0, quick_steps = 0, other_steps = 0;
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  std::deque<Loop> loops(3);
  const auto until = [deadline = in(std::chrono::seconds(30))](const std::atomic<int>& count,
                                                               int n) {
    while (count < n && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(milliseconds(1));
    return count >= n;
  };
  loops[0].start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    ++slow_steps;
    return in(std::chrono::hours(1));
  });
  ASSERT_TRUE(until(slow_steps, 1));
  loops[1].start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    if (++quick_steps == 1) released.wait();
    return in(milliseconds(20));
  });
  ASSERT_TRUE(until(quick_steps, 1));
  std::this_thread::sleep_for(milliseconds(100));  // the other thread waits for the slow one
  release.set_value();
  EXPECT_TRUE(until(quick_steps, 5));
  loops[2].start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
    ++other_steps;
    return std::nullopt;
  });
  EXPECT_TRUE(until(other_steps, 1));
  for (Loop& loop : loops) loop.stop();
}

TEST(StepPool, OneThreadWaitsForWhatComesDue) {
  StepPool pool(8);
  EXPECT_EQ(pool.threads(), 0u);
  std::atomic<int> taken = 0;
  std::deque<Loop> loops(20);
  for (Loop& loop : loops)
    loop.start(pool, [&](const std::stop_token&) -> std::optional<StepPool::Time> {
      ++taken;
      return in(std::chrono::hours(1));
    });
  const auto deadline = in(std::chrono::seconds(60));
  while ((taken < 20 || pool.threads() > 1) && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(pool.threads(), 1u);
  loops.front().wake();
  while (taken < 21 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(taken, 21);
}

}  // namespace
}  // namespace ptc
