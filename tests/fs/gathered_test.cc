// Files that are computed on read: gathered into memory, which is used again for others.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

constexpr int kRows = 700, kColumns = 500;  // 1.4 MB: more than is read in one request
constexpr size_t kArrayBytes = sizeof(float) * kRows * kColumns;

class GatheredTest : public MountTest {
 protected:
  void SetUp() override {
    if (std::string reason = TestMount::why_not(); !reason.empty()) GTEST_SKIP() << reason;
    ASSERT_NO_FATAL_FAILURE(mount_.start({"--cache", "4M"}));  // two such files, not three
    ASSERT_EQ(::mkdir(job().c_str(), 0755), 0);
    for (const char* name : {"a", "b", "c"}) {
      const std::string rank = job("incoming/") + name + "/rank/0";
      std::filesystem::create_directories(rank);
      ASSERT_EQ(write_file(rank + "/model.safetensors", file_of(name)), 0);
      ASSERT_EQ(commit(job(), name), 0) << mount_.log();
    }
    auto found = std::filesystem::recursive_directory_iterator(job("checkpoints/a/model"));
    for (const auto& entry : found)
      if (entry.is_regular_file())
        array_ = entry.path().string().substr(job("checkpoints/a").size());
    ASSERT_FALSE(array_.empty());
  }

  static std::string file_of(const std::string& name) {
    std::string text = tiny_safetensors(kRows, kColumns);
    for (size_t i = text.size() - kArrayBytes; i < text.size(); i += 4) text[i] ^= name[0];
    return text;
  }
  static std::string array_of(const std::string& name) {
    return file_of(name).substr(file_of(name).size() - kArrayBytes);
  }
  std::string path(const std::string& name) const { return job("checkpoints/") + name + array_; }
  std::string read_array(const std::string& name) const {
    std::string text = read_file(path(name));
    return text.size() < kArrayBytes ? text : text.substr(text.size() - kArrayBytes);
  }

  std::string array_;  // path of the one array below a checkpoint
};

TEST_F(GatheredTest, AMappingKeepsItsBytesWhileMemoryIsUsedAgain) {
  int fd = ::open(path("a").c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  const size_t size = std::filesystem::file_size(path("a"));
  void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  ::close(fd);  // the daemon hears of this, and nothing of the mapping
  const std::string expected = array_of("a");
  for (int round = 0; round < 10; ++round) {
    EXPECT_EQ(read_array("b"), array_of("b"));
    EXPECT_EQ(read_array("c"), array_of("c"));
    const char* mapped = static_cast<const char*>(mapping) + (size - kArrayBytes);
    ASSERT_EQ(std::memcmp(mapped, expected.data(), kArrayBytes), 0) << "round " << round;
  }
  ::munmap(mapping, size);
  EXPECT_EQ(read_array("a"), expected);
}

TEST_F(GatheredTest, ManyReadersOfMoreThanFitsSeeTheRightBytes) {
  std::vector<std::thread> readers;
  std::atomic<int> wrong{0};
  for (int reader = 0; reader < 4; ++reader) {
    readers.emplace_back([&, reader] {
      for (int i = 0; i < 15; ++i) {
        std::string name(1, static_cast<char>('a' + (reader + i) % 3));
        wrong += read_array(name) != array_of(name);
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(GatheredTest, ALargerFileThanTheCacheIsReadAllTheSame) {
  TearDown();
  ASSERT_NO_FATAL_FAILURE(mount_.start({"--cache", "1M"}));
  EXPECT_EQ(read_array("a"), array_of("a"));
}

TEST_F(GatheredTest, WithoutACacheTheSame) {
  TearDown();
  ASSERT_NO_FATAL_FAILURE(mount_.start({"--cache", "0"}));
  EXPECT_EQ(read_array("b"), array_of("b"));
}

}  // namespace
}  // namespace ptc
