#include "store/tensor/mapped_copy.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "store/base/file.h"

namespace ptc {
namespace {

constexpr size_t kBytes = 1 << 20;

/// A file in memory, and a mapping of all that it holds at first.
class MappedCopy : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    file_ = UniqueFd(::memfd_create("mapped", MFD_CLOEXEC));
    std::string text(kBytes, '\0');
    for (size_t i = 0; i < kBytes; ++i) text[i] = static_cast<char>(i * 31 >> 3);
    ASSERT_TRUE(write_exactly(file_.get(), std::as_bytes(std::span(text)), 0));
    map_ = static_cast<std::byte*>(::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, file_.get(), 0));
    ASSERT_NE(map_, MAP_FAILED);
    const auto bytes = std::as_bytes(std::span(text));
    whole_.assign(bytes.begin(), bytes.end());
  }
  void TearDown() override { ::munmap(map_, kBytes); }

  bool copy() { return mapped_copy(target_.data(), map_, kBytes, GetParam()); }

  UniqueFd file_;
  std::byte* map_ = nullptr;
  std::vector<std::byte> whole_, target_ = std::vector<std::byte>(kBytes);
};

TEST_P(MappedCopy, CopiesAll) {
  EXPECT_TRUE(copy());
  EXPECT_EQ(target_, whole_);
}

TEST_P(MappedCopy, SaysThatTheFileWasCutShortAndGoesOn) {
  for (int round = 0; round < 3; ++round) {
    ASSERT_EQ(::ftruncate(file_.get(), kBytes / 2), 0);
    EXPECT_FALSE(copy());
    ASSERT_EQ(::ftruncate(file_.get(), kBytes), 0);
    EXPECT_TRUE(copy());
  }
}

TEST_P(MappedCopy, ChecksumsTheSame) {
  const Checksum before = checksum_of_run(whole_, 12);
  Checksum sum = before;
  EXPECT_TRUE(add_mapped_checksum({map_, kBytes}, 12, sum));
  Checksum twice = before;
  twice += before;
  EXPECT_EQ(sum, twice);
  ASSERT_EQ(::ftruncate(file_.get(), kBytes / 2), 0);
  EXPECT_FALSE(add_mapped_checksum({map_, kBytes}, 12, sum));
  EXPECT_EQ(sum, twice);
}

TEST_P(MappedCopy, OnManyThreadsWhileItIsCut) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      std::vector<std::byte> target(kBytes);
      for (int round = 0; round < 200; ++round)
        (void)mapped_copy(target.data(), map_, kBytes, GetParam());
    });
  }
  for (int round = 0; round < 500; ++round) {
    ASSERT_EQ(::ftruncate(file_.get(), round % 2 == 0 ? 4096 : kBytes), 0);
  }
}

TEST_P(MappedCopy, LeavesOtherBusErrorsFatal) {
  EXPECT_TRUE(copy());
  EXPECT_EXIT(
      {
        (void)::ftruncate(file_.get(), 0);
        const volatile std::byte here = *map_;
        (void)here;
      },
      [](int status) { return status != 0; }, "");
}

INSTANTIATE_TEST_SUITE_P(Stores, MappedCopy, testing::Bool());

}  // namespace
}  // namespace ptc
