#include "store/base/resident.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <vector>

namespace ptc {
namespace {

using Some = std::span<const std::byte>;

TEST(Resident, WhatIsNotInMemoryIsSeenAndComes) {
  constexpr size_t kPage = 4096, kPages = 2000;
  std::string path = testing::TempDir() + "ptc-resident-XXXXXX";
  const int fd = ::mkstemp(path.data());
  ASSERT_GE(fd, 0);
  ::unlink(path.c_str());
  const std::vector<char> bytes(kPages * kPage, 'x');
  ASSERT_EQ(::write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  ASSERT_EQ(::fsync(fd), 0);
  void* const mapping = ::mmap(nullptr, bytes.size(), PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  const Some all(static_cast<const std::byte*>(mapping), bytes.size());
  EXPECT_TRUE(is_in_memory(all));
  EXPECT_TRUE(is_in_memory({}));
  ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
  if (!is_in_memory(all)) {
    const std::array some = {all.subspan(10, 1), all.subspan(1000 * kPage - 1, 2)};
    read_into_memory(some);
    EXPECT_TRUE(is_in_memory(all.first(kPage)));
    EXPECT_TRUE(is_in_memory(all.subspan(999 * kPage, 2 * kPage)));
    const std::array whole = {all};
    read_into_memory(whole);
    EXPECT_TRUE(is_in_memory(all));
    EXPECT_EQ(static_cast<char>(all.back()), 'x');
  }
  // Where the file has become shorter nothing comes, and nobody dies.
  ASSERT_EQ(::ftruncate(fd, kPage), 0);
  const std::array gone = {all.subspan(100 * kPage, kPage)};
  read_into_memory(gone);
  ::munmap(mapping, bytes.size());
  ::close(fd);
}

}  // namespace
}  // namespace ptc
