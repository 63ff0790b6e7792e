#include "store/image/memory_reserve.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mount.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <optional>

#include "expect_error.h"
#include "store/base/file.h"
#include "store/image/image_store.h"

namespace ptc {
namespace {

constexpr uint64_t kMiB = 1 << 20;

/// Of this process's memory so much is no file's, as the kernel counts it.
uint64_t anonymous_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;)
    if (word == "RssAnon:" && status >> word) return std::stoull(word) << 10;
  return 0;
}

class Reserve : public testing::Test {
 protected:
  MemoryReserve& open(MemoryReserveOptions options) {
    options.to_spare = [this] { return to_spare_.load(); };
    return reserve_.emplace(std::move(options), [this] { return used_.load(); });
  }
  std::atomic<uint64_t> used_{1024 * kMiB}, to_spare_{4096 * kMiB};
  std::optional<MemoryReserve> reserve_;
};

TEST_F(Reserve, KeepsWhatWasLeftAndGivesItBackWhenItIsNeeded) {
  const uint64_t before = anonymous_memory();
  MemoryReserve& reserve = open({.follows = true});
  reserve.settle();
  EXPECT_EQ(reserve.held(), 0u);
  for (int i = 0; i < 4; ++i) reserve.gone(40 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 160 * kMiB);
  EXPECT_GE(anonymous_memory(), before + 100 * kMiB);
  reserve.give(33 * kMiB);
  EXPECT_EQ(reserve.held(), 96 * kMiB);
  reserve.give(31 * kMiB);  // of the block that was begun
  EXPECT_EQ(reserve.held(), 96 * kMiB);
  reserve.give(1 * kMiB);
  EXPECT_EQ(reserve.held(), 64 * kMiB);
  reserve.give(1024 * kMiB);
  EXPECT_EQ(reserve.held(), 0u);
  EXPECT_LE(anonymous_memory(), before + 60 * kMiB);
}

TEST_F(Reserve, NeverKeepsMoreThanTheStoreHoldsOrThanThereIsToSpare) {
  MemoryReserve& reserve = open({.follows = true});
  used_ = 70 * kMiB;
  reserve.gone(500 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 64 * kMiB);
  used_ = 200 * kMiB;
  to_spare_ = kMiB;
  reserve.gone(100 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 64 * kMiB);
  to_spare_ = 4096 * kMiB;
  reserve.gone(40 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 96 * kMiB);
  used_ = 0;  // everything was removed
  reserve.gone(40 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 0u);
}

TEST_F(Reserve, GivesBackWhatNobodyUses) {
  MemoryReserve& reserve =
      open({.for_good = 32 * kMiB, .follows = true, .idle = std::chrono::milliseconds(50)});
  reserve.settle();
  EXPECT_EQ(reserve.held(), 32 * kMiB);
  reserve.gone(100 * kMiB);
  reserve.settle();  // it has been taken, and may be on its way back
  while (reserve.held() != 32 * kMiB) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  reserve.gone(100 * kMiB);
  reserve.settle();
  while (reserve.held() != 32 * kMiB) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

TEST_F(Reserve, WhatIsForGoodIsTakenAtTheStartAndAgain) {
  MemoryReserve& reserve = open({.for_good = 64 * kMiB});
  reserve.settle();
  EXPECT_EQ(reserve.held(), 64 * kMiB);
  reserve.give(50 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 0u);
  reserve.gone(500 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 64 * kMiB);
}

TEST_F(Reserve, FollowsThoseWhoWrite) {
  MemoryReserve& reserve = open({.follows = true});
  reserve.gone(640 * kMiB);
  reserve.settle();
  EXPECT_EQ(reserve.held(), 736 * kMiB);  // with what is given in vain
  reserve.writing();
  while (reserve.held() != 672 * kMiB) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  used_ += 100 * kMiB;  // then more is given, and more ahead
  while (reserve.held() > 416 * kMiB) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  reserve.settle();  // nobody writes any more: what was given beyond that is taken back
  EXPECT_GE(reserve.held(), 640 * kMiB);
  EXPECT_LE(reserve.held(), 704 * kMiB);
}

TEST_F(Reserve, GivesWritersNothingForWhatIsTakenApart) {
  MemoryReserve& reserve = open({.follows = true});
  reserve.gone(640 * kMiB);
  reserve.settle();
  reserve.writing();
  while (reserve.held() != 672 * kMiB) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  reserve.give(320 * kMiB);  // of a file that takes its space at once
  used_ += 320 * kMiB;
  EXPECT_EQ(reserve.held(), 352 * kMiB);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(reserve.held(), 352 * kMiB);
  reserve.settle();
}

/// Images of a tmpfs, of which the reserve hears.
class ReserveOfImages : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(path_.data()), nullptr);
    if (::mount("ptcfs-test", path_.c_str(), "tmpfs", 0, "size=512m") != 0)
      GTEST_SKIP() << "no tmpfs can be mounted here: " << std::strerror(errno);
    ImageStoreOptions options;
    options.reserve = {.follows = true, .to_spare = [] { return 4096 * kMiB; }};
    store_ = ImageStore::open(path_ + "/images", options).value();
    ASSERT_NE(store_->reserve(), nullptr);
  }
  void TearDown() override {
    store_.reset();
    ::umount2(path_.c_str(), MNT_DETACH);
    ::rmdir(path_.c_str());
  }
  ImageRef publish(uint64_t bytes) {
    return store_->publish(store_->create(bytes).value()).value();
  }
  uint64_t held() {
    store_->reserve()->settle();
    return store_->reserve()->held();
  }
  std::string path_ = testing::TempDir() + "ptc-reserve-XXXXXX";
  std::unique_ptr<ImageStore> store_;
};

TEST_F(ReserveOfImages, AFileThatTakesItsSpaceHasItFromThere) {
  const ImageRef kept = publish(160 * kMiB);
  EXPECT_TRUE(is_ok(store_->remove(publish(128 * kMiB)->id())));
  EXPECT_EQ(held(), 128 * kMiB);
  const UniqueFd file(::open(path_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  EXPECT_EQ(store_->take_space(file.get(), 0, 0, 4096 * kMiB), ENOSPC);
  EXPECT_EQ(held(), 128 * kMiB);  // in vain nothing is given
  EXPECT_EQ(store_->take_space(file.get(), 0, 0, 72 * kMiB), 0);
  EXPECT_EQ(held(), 32 * kMiB);
  EXPECT_EQ(store_->take_space(file.get(), 0, 0, 72 * kMiB), 0);  // it has it
  EXPECT_EQ(held(), 32 * kMiB);
}

TEST_F(ReserveOfImages, AFileThatGrowsTakesWhatItLacks) {
  const ImageRef kept = publish(160 * kMiB);
  EXPECT_TRUE(is_ok(store_->remove(publish(128 * kMiB)->id())));
  EXPECT_EQ(held(), 128 * kMiB);
  const UniqueFd file(::open(path_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  EXPECT_EQ(store_->take_space(file.get(), FALLOC_FL_KEEP_SIZE, 0, 64 * kMiB), 0);
  EXPECT_EQ(held(), 64 * kMiB);
  EXPECT_EQ(store_->take_space(file.get(), 0, 0, 72 * kMiB), 0);
  EXPECT_EQ(held(), 32 * kMiB);
  for (uint64_t size = 73; size < 80; ++size)
    EXPECT_EQ(store_->take_space(file.get(), 0, 0, size * kMiB), 0);
  EXPECT_EQ(held(), 32 * kMiB);
}

TEST_F(ReserveOfImages, AnImageHasItFromThereInAnyOrder) {
  const ImageRef kept = publish(160 * kMiB);
  EXPECT_TRUE(is_ok(store_->remove(publish(128 * kMiB)->id())));
  EXPECT_EQ(held(), 128 * kMiB);
  ImageWriter writer = store_->create(128 * kMiB, ImageStore::TakeSpace::kLater).value();
  EXPECT_TRUE(is_ok(writer.take_space(64 * kMiB, 128 * kMiB)));
  EXPECT_EQ(held(), 64 * kMiB);
  EXPECT_TRUE(is_ok(writer.take_space(0, 32 * kMiB)));
  EXPECT_EQ(held(), 32 * kMiB);
  EXPECT_TRUE(is_ok(writer.take_space(32 * kMiB, 64 * kMiB)));
  EXPECT_EQ(held(), 0u);
}

/// To read a hole of a tmpfs takes a page, of a full one raises SIGBUS.
TEST_F(ReserveOfImages, WhatAFileHasBehindItsEndFillsNoHole) {
  const std::string upload = path_ + "/upload";
  for (const uint64_t behind : {kMiB, 4 * kMiB}) {
    const UniqueFd file(::open(upload.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::pwrite(file.get(), "a", 1, 0), 1);
    ASSERT_EQ(::ftruncate(file.get(), kMiB), 0);
    ASSERT_EQ(::fallocate(file.get(), FALLOC_FL_KEEP_SIZE, 8 * kMiB, behind - 4096), 0);
    struct stat before = {}, after = {};
    ASSERT_EQ(::fstat(file.get(), &before), 0);
    ASSERT_EQ(static_cast<uint64_t>(before.st_blocks) * 512, behind);
    const auto image = store_->adopt(AT_FDCWD, upload);
    ASSERT_TRUE(is_ok(image));
    ASSERT_EQ(::fstat(file.get(), &after), 0);
    EXPECT_EQ(static_cast<uint64_t>(after.st_blocks) * 512, kMiB);
    EXPECT_EQ(after.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
    const std::span<const std::byte> bytes = image.value()->host_bytes().value();
    EXPECT_TRUE(bytes[0] == std::byte{'a'} && bytes[kMiB - 1] == std::byte{});
    ASSERT_EQ(::fstat(file.get(), &after), 0);
    EXPECT_EQ(static_cast<uint64_t>(after.st_blocks) * 512, kMiB);
    ASSERT_EQ(::unlink(upload.c_str()), 0);
  }
}

TEST_F(ReserveOfImages, HearsWhenTheirMemoryGoesAndComes) {
  const ImageRef kept = publish(100 * kMiB);
  ImageRef held_on = publish(64 * kMiB);
  const ImageId let_go = publish(32 * kMiB)->id();
  EXPECT_TRUE(is_ok(store_->remove(let_go)));  // nobody holds it
  EXPECT_EQ(held(), 32 * kMiB);
  EXPECT_TRUE(is_ok(store_->remove(held_on->id())));
  EXPECT_EQ(held(), 32 * kMiB);
  held_on.reset();
  EXPECT_EQ(held(), 96 * kMiB);
  {
    ImageWriter writer = store_->create(40 * kMiB, ImageStore::TakeSpace::kLater).value();
    EXPECT_EQ(held(), 96 * kMiB);
    EXPECT_TRUE(is_ok(writer.take_space(0, 20 * kMiB)));
    EXPECT_EQ(held(), 64 * kMiB);
  }
  EXPECT_EQ(held(), 96 * kMiB);  // it was given up
  publish(64 * kMiB);
  EXPECT_EQ(held(), 32 * kMiB);
}

TEST(ReserveOfFiles, IsNoneWhereTheyLieOnADisk) {
  std::string path = testing::TempDir() + "ptc-reserve-XXXXXX";
  ASSERT_NE(::mkdtemp(path.data()), nullptr);
  ImageStoreOptions options;
  options.reserve.for_good = 32 * kMiB;
  struct statfs info {};
  ASSERT_EQ(::statfs(path.c_str(), &info), 0);
  const auto store = ImageStore::open(path + "/images", options).value();
  EXPECT_EQ(store->reserve() != nullptr, info.f_type == TMPFS_MAGIC);
  EXPECT_TRUE(is_ok(remove_tree(AT_FDCWD, path)));
}

}  // namespace
}  // namespace ptc
