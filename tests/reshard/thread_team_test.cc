// Work that is shared, where there is no memory to hand it on.
#include "reshard/exec/thread_team.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

namespace {

thread_local int left = INT_MAX;  // allocations that this thread may still make

bool is_refused() { return left != INT_MAX && left-- <= 0; }

}  // namespace

/// In place of libc's, and of the one that calls it: whichever the work is handed on by.
extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  static const auto libcs =
      reinterpret_cast<decltype(&aligned_alloc)>(dlsym(RTLD_NEXT, "aligned_alloc"));
  return is_refused() ? nullptr : libcs(alignment, size);
}
void* operator new(size_t size) {
  void* memory = is_refused() ? nullptr : std::malloc(size);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace ptc {
namespace {

TEST(ThreadTeam, DoesEachOnceWithoutMemory) {
  ThreadTeam team(4);
  for (const int more : {0, 1, 2, 3, 4, INT_MAX}) {
    SCOPED_TRACE(more);
    std::vector<std::atomic<int>> done(1000);
    const std::function<Result<>(size_t)> body = [&](size_t i) -> Result<> {
      ++done[i];
      return ok();
    };
    left = more;
    const Result<> worked = team.parallel_for(done.size(), body);
    left = INT_MAX;
    EXPECT_TRUE(worked.has_value());
    EXPECT_TRUE(std::all_of(done.begin(), done.end(), [](int times) { return times == 1; }));
  }
}

TEST(ThreadTeam, ASmallCallIsDoneBesideLargeOnes) {
  ThreadTeam team(2);
  std::atomic<int> left = 3 * 1000;
  const std::function<Result<>(size_t)> large = [&](size_t) -> Result<> {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --left;
    return ok();
  };
  std::vector<std::jthread> others;
  for (int i = 0; i < 3; ++i)
    others.emplace_back([&] { EXPECT_TRUE(team.parallel_for(1000, large).has_value()); });
  while (left > 2900) std::this_thread::yield();
  std::atomic<int> done = 0;
  EXPECT_TRUE(team.parallel_for(10,
                                [&](size_t) -> Result<> {
                                  ++done;
                                  return ok();
                                })
                  .has_value());
  EXPECT_EQ(done, 10);
  EXPECT_GT(left, 1500);
  others.clear();
  EXPECT_EQ(left, 0);
}

}  // namespace
}  // namespace ptc
