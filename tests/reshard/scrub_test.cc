#include "reshard/job/scrub.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/becomes.h"
#include "tests/support/job_fixture.h"

namespace ptc::testing {
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

/// A look may take hours.
TEST(ScrubTest, WhatIsRemovedWhileItIsLookedOverIsNotHeldForThat) {
  TempDir dir;
  const auto store = JobStore::open({.directory = dir.path(),
                                     .node = "n0",
                                     .copy_threads = 2,
                                     .scrub = {ScrubRate::Kind::kBytes, 300 << 10}},
                                    nullptr)
                         .value();
  const JobRef job = store->create_job("job").value();
  const std::filesystem::path incoming = job->files_dir() + "/incoming/base";
  write_ranks(llama_sample(), LayoutSpec(), incoming);
  write_file(incoming / "rank/0/notes.bin", std::string(64 << 20, 'x'));
  ASSERT_TRUE(job->commit("base", "base").has_value());
  std::vector<std::weak_ptr<const Image>> images;
  {
    const auto stored = job->find_checkpoint("base")->stored();
    for (const StoredImage& image : stored->images) images.emplace_back(image.image);
  }
  std::this_thread::sleep_for(4s);  // it has begun
  ASSERT_TRUE(job->remove_checkpoint("base").has_value());
  EXPECT_TRUE(becomes([&] {
    return std::all_of(images.begin(), images.end(), [](const auto& one) { return one.expired(); });
  }));
}

}  // namespace
}  // namespace ptc::testing
