#include "reshard/job/scrub.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace ptc {
namespace {

using namespace std::chrono_literals;
using ScrubClock = std::chrono::steady_clock;

void work_for(std::chrono::milliseconds time) {
  for (const auto end = ScrubClock::now() + time; ScrubClock::now() < end;) {
  }
}

/// What a thread gets of processors that all are wanted by others.
TEST(PaceTest, ComesToItsEndOnAMachineThatIsBusy) {
  std::atomic<bool> over = false;
  std::vector<std::thread> busy;
  for (unsigned i = 0; i < 4 * std::thread::hardware_concurrency(); ++i)
    busy.emplace_back([&] {
      while (!over) work_for(1ms);
    });
  Pace pace;
  int idle = 0;
  constexpr int kWindows = 6;
  for (int window = 0; window < kWindows; ++window)
    ASSERT_TRUE(pace.read(Pace::kWindowBytes,
                          [&] {
                            idle += ::sched_getscheduler(0) == SCHED_IDLE;
                            for (int i = 0; i < 4; ++i) {
                              work_for(1ms);
                              std::this_thread::yield();
                            }
                          })
                    .has_value());
  over = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_GT(idle, 0) << "others go first";
  EXPECT_LT(idle, kWindows) << "it would wait for seconds each time";
  EXPECT_NE(::sched_getscheduler(0), SCHED_IDLE);
}

TEST(PaceTest, LeavesProcessorsToOthersWhereThereAreSome) {
  Pace pace;
  bool idle = false;
  ASSERT_TRUE(pace.read(Pace::kWindowBytes, [&] { idle = ::sched_getscheduler(0) == SCHED_IDLE; })
                  .has_value());
  EXPECT_TRUE(idle);
}

}  // namespace
}  // namespace ptc
