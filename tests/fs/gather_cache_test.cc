// Files gathered into memory: what becomes of those whose making fails.
#include "fs/tree/gather_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <new>
#include <thread>

#include "store/image/scratch_space.h"

namespace ptc {
namespace {

constexpr uint64_t kBytes = 1 << 20;

class GatherCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    if (auto space = ScratchSpace::open(kBytes); !space) GTEST_SKIP() << space.error().message();
  }
  static GatherCache::Content content(GatherCache::Fill fill) {
    return {.bytes = kBytes, .fill = std::move(fill)};
  }
  static Result<> good(uint64_t, std::span<std::byte> out) {
    std::memset(out.data(), 7, out.size());
    return ok();
  }
  [[noreturn]] static Result<> no_memory(uint64_t, std::span<std::byte>) { throw std::bad_alloc(); }
  /// nullptr also where it waits for ever.
  GatherCache::FileRef get_soon(const GatherCache::Content& content) {
    auto got = std::async(std::launch::async, [&] { return cache_.get("a", content); });
    if (got.wait_for(std::chrono::seconds(10)) == std::future_status::ready) return got.get();
    ADD_FAILURE() << "it waits for one that has failed";
    std::abort();
  }

  GatherCache cache_{4 * kBytes, 2};
};

TEST_F(GatherCacheTest, AThrowerLeavesNoEntryBehind) {
  std::atomic<int> begun{0};
  for (int i = 0; i < 3; ++i) {
    cache_.prepare("a", "", [&]() -> Result<GatherCache::Content> {
      return content([&](uint64_t offset, std::span<std::byte> out) {
        ++begun;
        return no_memory(offset, out);
      });
    });
    while (begun == i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    while (cache_.numbers().files != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  cache_.prepare("b", "", []() -> Result<GatherCache::Content> { throw std::bad_alloc(); });
  EXPECT_EQ(get_soon(content(no_memory)), nullptr);
  EXPECT_EQ(cache_.numbers().bytes, 0u);
  EXPECT_NE(get_soon(content(good)), nullptr);
  EXPECT_EQ(cache_.numbers().bytes, kBytes);
}

/// Copied while it is kept, which may be refused the memory for it.
struct NotTwice {
  int* copies;
  explicit NotTwice(int* counted) : copies(counted) {}
  NotTwice(const NotTwice& other) : copies(other.copies) {
    if (++*copies > 1) throw std::bad_alloc();
  }
  Result<GatherCache::Fill> operator()() const { return GatherCache::Fill(); }
};

TEST_F(GatherCacheTest, NorOneThatThrowsWhenItIsGathered) {
  int copies = 0;
  GatherCache::Content kept = content(good);
  kept.again = NotTwice(&copies);
  EXPECT_THROW(cache_.get("a", kept), std::bad_alloc);
  EXPECT_EQ(cache_.numbers().bytes, 0u);
  EXPECT_NE(get_soon(content(good)), nullptr);
}

}  // namespace
}  // namespace ptc
