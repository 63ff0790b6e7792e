#include "store/base/fan_out.h"

#include <gtest/gtest.h>

#include <latch>
#include <memory>
#include <set>
#include <stdexcept>

#include "tests/support/no_threads.h"

namespace ptc {
namespace {

using testing::NoThreads;

TEST(FanOut, DoesEachOnceAndAllAtTheSameTime) {
  constexpr size_t kCount = 20;
  std::latch all(kCount);  // each waits for all others
  std::vector<int> done(kCount);
  FanOut work(kCount, [&](size_t i) {
    all.arrive_and_wait();
    ++done[i];
  });
  work.finish();
  EXPECT_EQ(done, std::vector<int>(kCount, 1));
  work.finish();
  EXPECT_EQ(done, std::vector<int>(kCount, 1));
}

TEST(FanOut, DoesAllAtTheSameTimeHoweverManyTheyAre) {
  constexpr size_t kCount = 600;
  std::latch all(kCount);
  std::atomic<size_t> done = 0;
  FanOut(
      kCount,
      [&](size_t) {
        all.arrive_and_wait();
        ++done;
      },
      kAllAtOnce)
      .finish();
  EXPECT_EQ(done, kCount);
}

TEST(FanOut, TakesNoMoreThreadsThanItMay) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  FanOut(
      200,
      [&](size_t) {
        std::lock_guard lock(mutex);
        threads.insert(std::this_thread::get_id());
      },
      3)
      .finish();
  EXPECT_LE(threads.size(), 4u);  // and the caller's
}

TEST(FanOut, DoesAllWhereThereAreNoThreads) {
  for (const int more : {0, 2}) {
    const NoThreads none(more);
    std::atomic<int> done = 0;
    FanOut(10, [&](size_t) { ++done; }).finish();
    EXPECT_EQ(done, 10);
    EXPECT_EQ(NoThreads::refused(), 1);
  }
}

TEST(Answers, AreInOrderAndWhatThrowsIsNotReached) {
  Answers<std::string> asked(3, [](size_t i) -> Result<std::string> {
    if (i == 1) throw std::runtime_error("no room");
    if (i == 2) return make_error(Code::kNotFound, "it has none");
    return std::string("zero");
  });
  const std::vector<Result<std::string>> answers = asked.wait();
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_EQ(answers[0].value(), "zero");
  EXPECT_EQ(answers[1].error().code(), Code::kUnavailable);
  EXPECT_NE(answers[1].error().message().find("no room"), std::string::npos);
  EXPECT_EQ(answers[2].error().code(), Code::kNotFound);
}

TEST(Answers, ThatNobodyWaitsForAreWaitedForAtTheEnd) {
  auto asked = std::make_shared<std::atomic<int>>(0);
  {
    Answers<void> answers(5, [asked](size_t) { return ++*asked, ok(); });
  }
  EXPECT_EQ(*asked, 5);
}

}  // namespace
}  // namespace ptc
