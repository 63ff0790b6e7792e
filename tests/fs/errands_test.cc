#include "fs/tree/errands.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <new>
#include <thread>

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;

TEST(Errands, WhoAsksWaitsForSoLongAndTheSameAgainWaitsOn) {
  std::promise<void> end;
  std::atomic<int> begun = 0, others = 0;
  Errands errands;
  const auto errand = [&, ended = end.get_future().share()]() -> FsResult<> {
    ++begun;
    ended.wait();
    return Errno{EPERM};
  };
  const auto other = [&]() -> FsResult<> {
    ++others;
    return ok();
  };
  const Clock::time_point asked = Clock::now();
  EXPECT_EQ(errands.ask("mode", "0700", errand).error().value, EAGAIN);
  EXPECT_EQ(errands.ask("mode", "0755", other).error().value, EAGAIN);
  EXPECT_LT(Clock::now() - asked, std::chrono::seconds(5));
  EXPECT_TRUE(errands.ask("owner", "0", other).has_value());
  EXPECT_EQ(others, 1);
  std::jthread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    end.set_value();
  });
  EXPECT_EQ(errands.ask("mode", "0700", errand).error().value, EPERM);
  EXPECT_EQ(begun, 1);
  EXPECT_TRUE(errands.ask("mode", "0755", other).has_value());
  EXPECT_EQ(others, 2);
}

TEST(Errands, AnErrandThatHasNoMemoryAnswers) {
  Errands errands;
  const auto errand = []() -> FsResult<> { throw std::bad_alloc(); };
  EXPECT_EQ(errands.ask("mode", "0700", errand).error().value, ENOMEM);
}

}  // namespace
}  // namespace ptc
