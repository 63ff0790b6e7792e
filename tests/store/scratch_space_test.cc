#include "store/image/scratch_space.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

namespace ptc {
namespace {

constexpr uint64_t kMebibyte = 1 << 20;

class Scratch : public testing::Test {
 protected:
  void SetUp() override {
    auto opened = ScratchSpace::open(8 * kMebibyte);
    if (!opened) GTEST_SKIP() << "no tmpfs can be mounted here: " << opened.error().message();
    space_ = std::move(opened).value();
  }
  std::unique_ptr<ScratchSpace> space_;
};

TEST_F(Scratch, AFileIsMemoryOfItsSize) {
  auto file = space_->create(3 * kMebibyte + 5).value();
  ASSERT_EQ(file->bytes(), 3 * kMebibyte + 5);
  ASSERT_EQ(file->memory().size(), 3 * kMebibyte + 5);
  std::memset(file->memory().data(), 7, file->bytes());
  ASSERT_TRUE(file->resize(1 * kMebibyte).has_value());
  EXPECT_EQ(file->memory().size(), kMebibyte);
  EXPECT_EQ(file->memory()[kMebibyte - 1], std::byte{7});
}

TEST_F(Scratch, BeyondTheLimitThereIsNoSpaceAndNoSignal) {
  auto file = space_->create(6 * kMebibyte).value();
  auto more = space_->create(6 * kMebibyte);
  ASSERT_TRUE(more.has_error());
  EXPECT_EQ(more.error().code(), Code::kNoSpace);
  file.reset();
  EXPECT_TRUE(space_->create(6 * kMebibyte).has_value());
}

TEST_F(Scratch, IsSharedWhileSomebodyHasItOpenOrMapped) {
  auto file = space_->create(kMebibyte).value();
  EXPECT_TRUE(file->unshared());
  {
    auto other =
        open_file(AT_FDCWD, "/proc/self/fd/" + std::to_string(file->fd()), O_RDONLY).value();
    EXPECT_FALSE(file->unshared());
    void* mapping = ::mmap(nullptr, kMebibyte, PROT_READ, MAP_SHARED, other.get(), 0);
    ASSERT_NE(mapping, MAP_FAILED);
    other.reset();
    EXPECT_FALSE(file->unshared());
    ::munmap(mapping, kMebibyte);
  }
  EXPECT_TRUE(file->unshared());
}

}  // namespace
}  // namespace ptc
