// Files gathered into memory: what becomes of those whose making fails.
#include "fs/tree/gather_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <new>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

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

/// A file of many pieces, each of which takes a while.
class SlowGathering : public GatherCacheTest {
 protected:
  static constexpr uint64_t kPiece = 1 << 20, kPieces = 120;
  static std::byte byte_of(size_t piece) { return static_cast<std::byte>(piece % 251 + 1); }
  GatherCache::Content slow() {
    return {.bytes = kPieces * kPiece,
            .fill = [this](uint64_t offset, std::span<std::byte> out) -> Result<> {
              const size_t piece = offset / kPiece;
              EXPECT_EQ(out.size(), kPiece);
              ++made_[piece];
              if (piece == lost_) return make_error(Code::kCorrupt, "lost");
              std::this_thread::sleep_for(pause_.load());
              std::memset(out.data(), static_cast<int>(byte_of(piece)), out.size());
              return ok();
            }};
  }
  /// What is read across the end of a piece; nullopt: it is not there.
  std::optional<std::pair<std::byte, std::byte>> bytes_at_end_of(const GatherCache::FileRef& file,
                                                                 size_t piece) {
    std::byte two[2];
    if (!large_.read(file, (piece + 1) * kPiece - 1, two)) return std::nullopt;
    return std::pair(two[0], two[1]);
  }
  void wait_until_whole(const GatherCache::FileRef& file) {
    pause_ = std::chrono::milliseconds(0);
    while (!file->is_whole()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::array<std::atomic<int>, kPieces> made_{};
  std::atomic<size_t> lost_{SIZE_MAX};
  std::atomic<std::chrono::milliseconds> pause_{std::chrono::milliseconds(200)};
  GatherCache large_{2 * kPieces * kPiece, 2};
};

TEST_F(SlowGathering, AnOpenWaitsForAWhileAndReadsWhatIsThere) {
  const auto begun = std::chrono::steady_clock::now();
  const GatherCache::FileRef file = large_.get("a", slow());  // it would take twelve seconds
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(4));
  ASSERT_NE(file, nullptr);
  EXPECT_FALSE(file->is_whole());
  // One that is there, one that nobody has begun.
  EXPECT_EQ(bytes_at_end_of(file, 0), std::pair(byte_of(0), byte_of(1)));
  EXPECT_EQ(bytes_at_end_of(file, kPieces - 2),
            std::pair(byte_of(kPieces - 2), byte_of(kPieces - 1)));
  // The next one who opens it need not wait for anything.
  EXPECT_EQ(large_.get("a", slow(), [] { return true; }), file);
  wait_until_whole(file);
  EXPECT_EQ(large_.get("a", slow()), file);
  for (size_t piece = 0; piece + 1 < kPieces; ++piece)
    EXPECT_EQ(bytes_at_end_of(file, piece), std::pair(byte_of(piece), byte_of(piece + 1)));
  for (const auto& times : made_) EXPECT_EQ(times, 1);
  while (large_.numbers().gathered_bytes == 0) std::this_thread::yield();  // it is counted then
  EXPECT_EQ(large_.numbers().gathered_bytes, kPieces * kPiece);
  EXPECT_EQ(large_.numbers().files, 1u);
}

TEST_F(SlowGathering, WhoHasWaitedElsewhereDoesNotWaitHere) {
  const auto begun = std::chrono::steady_clock::now();
  const GatherCache::FileRef file = large_.get("a", slow(), nullptr, std::chrono::seconds(3));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(1));
  ASSERT_NE(file, nullptr);
  wait_until_whole(file);
}

TEST_F(SlowGathering, WhoIsKilledDoesNotWait) {
  std::atomic<bool> killed{false};
  auto got = std::async(std::launch::async,
                        [&] { return large_.get("a", slow(), [&] { return killed.load(); }); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(got.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  killed = true;
  const auto begun = std::chrono::steady_clock::now();
  const GatherCache::FileRef file = got.get();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(1));
  ASSERT_NE(file, nullptr);
  wait_until_whole(file);  // for the next one
}

TEST_F(SlowGathering, ManyReadersMakeEachPieceOnce) {
  pause_ = std::chrono::milliseconds(5);
  const GatherCache::FileRef file = large_.get("a", slow(), [] { return true; });
  std::vector<std::thread> readers;
  std::atomic<int> wrong{0};
  for (int reader = 0; reader < 4; ++reader)
    readers.emplace_back([&, reader] {
      for (size_t i = 0; i + 1 < kPieces; ++i) {
        const size_t piece = reader % 2 == 0 ? i : kPieces - 2 - i;
        const auto got = bytes_at_end_of(file, piece);
        if (got && *got != std::pair(byte_of(piece), byte_of(piece + 1))) ++wrong;
      }
    });
  for (std::thread& reader : readers) reader.join();
  wait_until_whole(file);
  EXPECT_EQ(wrong, 0);
  for (const auto& times : made_) EXPECT_EQ(times, 1);
}

TEST_F(SlowGathering, WhatIsMendedWhileItIsGatheredIsRightAfterwards) {
  std::atomic<bool> mended{false};
  auto fill = [&](uint64_t offset, std::span<std::byte> out) -> Result<> {
    const std::byte byte = mended ? byte_of(offset / kPiece) : std::byte{0};
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::memset(out.data(), static_cast<int>(byte), out.size());
    return ok();
  };
  const GatherCache::Content damaged{.bytes = kPieces * kPiece, .fill = fill, .again = [&] {
                                       return Result<GatherCache::Fill>(fill);
                                     }};
  const GatherCache::FileRef file = large_.get("c/a", damaged, [] { return true; });
  auto refreshed = std::async(std::launch::async, [&]() -> bool {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    mended = true;
    return large_.refresh("c/").has_value();
  });
  for (size_t piece = 0; piece < 60; piece += 6)  // some of it before that, some after
    bytes_at_end_of(file, kPieces - 2 - piece);
  EXPECT_TRUE(refreshed.get());
  EXPECT_TRUE(file->is_whole());
  for (size_t piece = 0; piece + 1 < kPieces; ++piece)
    EXPECT_EQ(bytes_at_end_of(file, piece), std::pair(byte_of(piece), byte_of(piece + 1)));
}

TEST_F(SlowGathering, WhenItIsStoppedNothingIsMadeAnyMoreAndNobodyWaits) {
  const GatherCache::FileRef file = large_.get("a", slow(), [] { return true; });
  const GatherCache::FileRef queued = large_.get("b", slow(), [] { return true; });
  ASSERT_NE(queued, nullptr);
  auto refreshed = std::async(std::launch::async, [&] { return large_.refresh("").has_value(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  large_.stop();
  auto made = [&] {
    int pieces = 0;
    for (const auto& times : made_) pieces += times;
    return pieces;
  };
  const int made_by_then = made();
  EXPECT_GT(made_by_then, 0);
  EXPECT_TRUE(refreshed.get());
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_EQ(made(), made_by_then);
  EXPECT_FALSE(file->is_whole());
}

TEST_F(GatherCacheTest, MemoryIsTakenFromNobodyWhoReadsIt) {
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  auto reader = [&](uint64_t number) {
    std::vector<std::byte> buffer(kBytes);
    for (uint64_t turn = number; !stop; ++turn) {
      const auto right = static_cast<std::byte>(turn % 20 + 1);
      auto fill = [right](uint64_t, std::span<std::byte> out) -> Result<> {
        std::fill(out.begin(), out.end(), right);
        return ok();
      };
      const GatherCache::FileRef file = cache_.get(std::to_string(turn % 20), content(fill));
      if (file != nullptr && cache_.read(file, 0, buffer) &&
          std::count(buffer.begin(), buffer.end(), right) != static_cast<ptrdiff_t>(kBytes))
        ++wrong;
    }
  };
  std::vector<std::jthread> threads;
  for (uint64_t number = 0; number < 3; ++number) threads.emplace_back(reader, number);
  threads.emplace_back([&] {
    while (!stop) cache_.drop_unused();
  });
  std::this_thread::sleep_for(std::chrono::seconds(1));
  stop = true;
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

TEST_F(SlowGathering, WhatFailsLaterIsNoPartOfTheCacheAnyMore) {
  lost_ = kPieces - 1;
  const GatherCache::FileRef file = large_.get("a", slow(), [] { return true; });
  ASSERT_NE(file, nullptr);
  while (large_.numbers().files != 0) {  // its memory may come late
    EXPECT_EQ(bytes_at_end_of(file, kPieces - 2), std::nullopt);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(bytes_at_end_of(file, 0), std::nullopt);  // its reader has them from elsewhere
  EXPECT_FALSE(file->is_whole());
  EXPECT_EQ(large_.numbers().bytes, 0u);
  lost_ = SIZE_MAX;
  pause_ = std::chrono::milliseconds(0);
  const GatherCache::FileRef again = large_.get("a", slow());
  ASSERT_NE(again, nullptr);
  EXPECT_NE(again, file);
  wait_until_whole(again);
}

}  // namespace
}  // namespace ptc
