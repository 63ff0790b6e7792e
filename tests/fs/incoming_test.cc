// Passthrough, owners, and files that are open while they are committed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

class IncomingTest : public MountTest {};

TEST_F(IncomingTest, TheKernelReadsAndWritesByItself) {
  std::string before = read_file(mount_.path() + "/.ptc/stats");
  if (before.find("\"passthrough\": true") == std::string::npos) {
    GTEST_SKIP() << "this kernel has no passthrough: " << mount_.log();
  }
  std::string path = job("incoming/f");
  int fd = ::open(path.c_str(), O_RDWR | O_CREAT, 0644);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::pwrite(fd, "0123456789", 10, 0), 10);
  char* map = static_cast<char*>(::mmap(nullptr, 10, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  ASSERT_NE(map, MAP_FAILED);
  map[3] = 'x';
  char got[10];
  ASSERT_EQ(::pread(fd, got, 10, 0), 10);
  EXPECT_EQ(std::string(got, 10), "012x456789");
  ASSERT_EQ(write_file(path, "+", O_WRONLY | O_APPEND), 0);
  EXPECT_EQ(map[9], '9');
  EXPECT_EQ(read_file(path), "012x456789+");
  ::munmap(map, 10);
  ::close(fd);
  std::string stats = read_file(mount_.path() + "/.ptc/stats");
  EXPECT_EQ(stats.find("\"write\""), std::string::npos) << stats;
}

TEST_F(IncomingTest, NoFileGoesWithAJobThatIsRemovedWithoutForce) {
  constexpr int kRounds = 150;
  const std::string other = mount_.path() + "/other", file = other + "/incoming/f";
  int lost = 0;
  for (int round = 0; round < kRounds; ++round) {
    ASSERT_EQ(errno_of(::mkdir(other.c_str(), 0755)), 0);
    std::atomic<bool> go = false;
    int written = -1;
    std::thread writer([&] {
      while (!go) std::this_thread::yield();
      for (int turn = 0; turn < round * 200; ++turn) go = true;  // earlier and later
      written = write_file(file, "kept");
    });
    go = true;
    const int removed = errno_of(::rmdir(other.c_str()));
    writer.join();
    if (removed == 0 && written == 0) ++lost;
    if (removed != 0) {
      EXPECT_EQ(written, 0) << "or it is not removed for nothing: " << removed;
      EXPECT_EQ(read_file(file), "kept");
      EXPECT_EQ(errno_of(::unlink(file.c_str())), 0);
      EXPECT_EQ(errno_of(::rmdir(other.c_str())), 0);
    }
  }
  EXPECT_EQ(lost, 0) << "of " << kRounds;
}

TEST_F(IncomingTest, OwnersAreTheCallers) {
  ASSERT_EQ(::chmod(job("incoming").c_str(), 0777), 0);
  ASSERT_EQ(::chmod(mount_.top().c_str(), 0755), 0);
  ASSERT_EQ(mount_.terminate(), 0);
  ASSERT_NO_FATAL_FAILURE(mount_.start({"-o", "allow_other"}));
  pid_t child = ::fork();
  if (child == 0) {
    bool good = ::setresgid(4321, 4321, 4321) == 0 && ::setresuid(1234, 1234, 1234) == 0 &&
                ::mkdir(job("incoming/theirs").c_str(), 0750) == 0 &&
                write_file(job("incoming/theirs/f"), "x") == 0 &&
                write_file(job("layout.json"), "{}") == EACCES &&
                errno_of(::mkdir((mount_.path() + "/another").c_str(), 0755)) == EACCES;
    ::_exit(good ? 0 : 1);
  }
  int status;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  for (const char* path : {"incoming/theirs", "incoming/theirs/f"}) {
    struct stat stat;
    ASSERT_EQ(::stat(job(path).c_str(), &stat), 0) << path;
    EXPECT_EQ(stat.st_uid, 1234u);
    EXPECT_EQ(stat.st_gid, 4321u);
  }
}

TEST_F(IncomingTest, AFileThatIsOpenForWritingIsNotCommitted) {
  write_incoming(job(), "a");
  std::string path = job("incoming/a/rank/0/model.safetensors");
  int fd = ::open(path.c_str(), O_WRONLY);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(commit(job(), "a"), EBUSY);
  ::close(fd);

  fd = ::open(path.c_str(), O_RDWR);
  void* map = ::mmap(nullptr, 100, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  ::close(fd);
  EXPECT_EQ(commit(job(), "a"), EBUSY) << "mapped for writing, though closed";
  ::munmap(map, 100);
  EXPECT_EQ(commit(job(), "a"), 0) << mount_.log();
}

/// On a tmpfs, where a store into a page that is mapped already moves no time of the file.
class MappedTest : public MountTest {
 protected:
  void SetUp() override {
    if (std::string reason = TestMount::why_not(); !reason.empty()) GTEST_SKIP() << reason;
    ASSERT_NO_FATAL_FAILURE(mount_.start({"--memory", "64M"}));
    ASSERT_EQ(::mkdir(job().c_str(), 0755), 0) << std::strerror(errno);
    write_incoming(job(), "a");
    until_hashed(kTensorBytes);
  }
  /// Waits until so many bytes were hashed that were closed in incoming/.
  void until_hashed(uint64_t bytes) {
    const std::string name = "\nptcfs_job_hashed_bytes_total{job=\"job\"} ";
    uint64_t hashed = 0;
    for (int i = 0; i < 3000 && hashed < bytes; ++i) {
      const std::string metrics = read_file(mount_.path() + "/.ptc/metrics");
      if (const size_t at = metrics.find(name); at != std::string::npos)
        hashed = std::stoull(metrics.substr(at + name.size()));
      if (hashed < bytes) ::usleep(10'000);
    }
    ASSERT_GE(hashed, bytes) << "nothing is hashed in the background";
  }
  char* map(int fd) const {
    return static_cast<char*>(
        ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0));
  }
  /// As it is after its last byte was changed.
  void expect_committed(char last) {
    ASSERT_EQ(commit(job(), "a"), 0) << mount_.log();
    std::string expected = tiny_safetensors(4, 8);
    expected.back() = last;
    EXPECT_EQ(read_file(job("checkpoints/a/layouts/tp1-pp1-dp1/rank/0/model.safetensors")),
              expected);
    const std::string verified = ask(mount_, R"({"do":"verify","job":"job","checkpoint":"a"})");
    EXPECT_NE(verified.find("\"ok\":true"), std::string::npos) << verified;
  }

  static constexpr uint64_t kTensorBytes = 4 * 8 * 4;
  const size_t kFileBytes = tiny_safetensors(4, 8).size();
  const std::string path_ = job("incoming/a/rank/0/model.safetensors");
};

TEST_F(MappedTest, WhatIsWrittenAfterItWasHashedIsHashedAgain) {
  const int fd = ::open(path_.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  char* bytes = map(fd);
  ASSERT_NE(bytes, MAP_FAILED);
  const char last = static_cast<char>(bytes[kFileBytes - 1] ^ 1);
  bytes[kFileBytes - 1] = last;
  ::munmap(bytes, kFileBytes);
  ::close(fd);
  expect_committed(last);
}

TEST_F(MappedTest, WhatOutlivesTheCloseIsNotHashedBefore) {
  const int fd = ::open(path_.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  char* bytes = map(fd);
  ASSERT_NE(bytes, MAP_FAILED);
  ASSERT_EQ(::pwrite(fd, "?", 1, static_cast<off_t>(kFileBytes - 1)), 1);
  ::close(fd);
  // Hashed after it, if at all.
  const std::string other(10 * kTensorBytes, 'o');
  ASSERT_EQ(write_file(job("incoming/a/rank/0/other.txt"), other), 0);
  until_hashed(kTensorBytes + other.size());
  bytes[kFileBytes - 1] = '!';
  ::munmap(bytes, kFileBytes);
  expect_committed('!');
}

TEST_F(IncomingTest, ClosingAndCommittingAtOnce) {
  for (int i = 0; i < 20; ++i) {
    std::string name = "n" + std::to_string(i);
    write_incoming(job(), name);
    EXPECT_EQ(commit(job(), name), 0) << mount_.log();
  }
}

TEST_F(IncomingTest, WhoReadsSinceItWasWrittenDoesNotKeepItOpenForWriting) {
  write_incoming(job(), "a");
  const std::string path = job("incoming/a/rank/0/model.safetensors");
  const int writer = ::open(path.c_str(), O_WRONLY);
  ASSERT_GE(writer, 0);
  const int reader = ::open(path.c_str(), O_RDONLY);
  ASSERT_GE(reader, 0);
  ::close(writer);
  EXPECT_EQ(commit(job(), "a"), 0) << mount_.log();
  ::close(reader);
}

TEST_F(IncomingTest, ACommittedFileCannotBeWrittenThroughAnotherName) {
  write_incoming(job(), "a");
  std::string path = job("incoming/a/rank/0/model.safetensors");
  ASSERT_EQ(::link(path.c_str(), job("other").c_str()), 0);
  int reader = ::open(path.c_str(), O_RDONLY);
  ASSERT_GE(reader, 0);
  std::string before = read_file(path);
  ASSERT_EQ(commit(job(), "a"), 0) << mount_.log();
  EXPECT_EQ(write_file(job("other"), "overwritten"), 0);
  std::string committed = job("checkpoints/a/layouts/tp1-pp1-dp1/rank/0/model.safetensors");
  EXPECT_EQ(read_file(committed), before);
  // The file that was open knows of no other name, but /proc opens it again.
  std::string again = "/proc/self/fd/" + std::to_string(reader);
  (void)write_file(again, "overwritten", O_WRONLY | O_TRUNC);
  EXPECT_EQ(read_file(committed), before);
  ::close(reader);
}

TEST_F(IncomingTest, StatfsIsTheStores) {
  struct statvfs ours, stores;
  ASSERT_EQ(::statvfs(job().c_str(), &ours), 0);
  ASSERT_EQ(::statvfs(mount_.store().c_str(), &stores), 0);
  EXPECT_EQ(ours.f_blocks * ours.f_frsize, stores.f_blocks * stores.f_frsize);
  EXPECT_EQ(ours.f_namemax, 255u);
}

TEST_F(IncomingTest, OtherJobsAreOtherFileSystems) {
  std::string second = mount_.path() + "/second";
  ASSERT_EQ(::mkdir(second.c_str(), 0755), 0);
  write_incoming(job(), "a");
  EXPECT_EQ(errno_of(::rename(job("incoming/a").c_str(), (second + "/incoming/a").c_str())), EXDEV);
  EXPECT_EQ(errno_of(::rename(job("incoming/a").c_str(), (second + "/checkpoints/a").c_str())),
            EXDEV);
}

}  // namespace
}  // namespace ptc
