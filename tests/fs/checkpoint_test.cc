// What is committed: names, bytes, refusals, removal.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

const std::string kRank = "checkpoints/a/layouts/tp1-pp1-dp1/rank/0/";

class CheckpointTest : public MountTest {
 protected:
  void SetUp() override {
    MountTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    write_incoming(job(), "a");
    ASSERT_EQ(commit(job(), "a"), 0) << mount_.log();
  }
};

TEST_F(CheckpointTest, BytesUnderEveryName) {
  EXPECT_EQ(::access(job("incoming/a").c_str(), F_OK), -1);
  EXPECT_EQ(read_file(job(kRank + "model.safetensors")), tiny_safetensors(4, 8));
  EXPECT_EQ(read_file(job("current/rank/0/model.safetensors")), tiny_safetensors(4, 8));
  EXPECT_EQ(std::filesystem::read_symlink(job("current")), "checkpoints/a/layouts/tp1-pp1-dp1");
  EXPECT_NE(read_file(job("checkpoints/a/meta.json")).find("model.norm.weight"), std::string::npos);
  size_t arrays = 0;
  for (const auto& file :
       std::filesystem::recursive_directory_iterator(job("checkpoints/a/model"))) {
    arrays += file.path().filename() == "weight.npy" && file.file_size() == 128 + 4 * 8 * 4;
  }
  EXPECT_EQ(arrays, 1u);
  EXPECT_EQ(errno_of(::access(job("checkpoints/a/layouts/tp01-pp1-dp1").c_str(), F_OK)), ENOENT);
  EXPECT_EQ(errno_of(::access(job("checkpoints/a/layouts/tp1-pp1-dp2/rank/2").c_str(), F_OK)),
            ENOENT);
  EXPECT_EQ(read_file(job("checkpoints/a/layouts/tp1-pp1-dp2/rank/1/model.safetensors")),
            tiny_safetensors(4, 8));
}

TEST_F(CheckpointTest, NothingCanBeWritten) {
  std::string file = job(kRank + "model.safetensors");
  EXPECT_EQ(write_file(file, "x"), EROFS);
  EXPECT_EQ(write_file(file, "x", O_RDWR), EROFS);
  EXPECT_EQ(write_file(job(kRank + "new"), "x"), EROFS);
  EXPECT_EQ(errno_of(::truncate(file.c_str(), 0)), EROFS);
  EXPECT_EQ(errno_of(::chmod(file.c_str(), 0600)), EROFS);
  EXPECT_EQ(errno_of(::mkdir(job("checkpoints/a/new").c_str(), 0755)), EROFS);
  EXPECT_EQ(errno_of(::rename(file.c_str(), (file + "x").c_str())), EROFS);
  EXPECT_EQ(errno_of(::rename(job("checkpoints/a").c_str(), job("checkpoints/b").c_str())), EPERM);
  EXPECT_EQ(errno_of(::setxattr(file.c_str(), "user.x", "y", 1, 0)), EROFS);
  struct stat stat;
  ASSERT_EQ(::stat(file.c_str(), &stat), 0);
  EXPECT_EQ(stat.st_mode, S_IFREG | 0444u);
  EXPECT_GT(stat.st_blocks, 0) << "it is held in memory";
}

TEST_F(CheckpointTest, AnExistingNameIsRefused) {
  write_incoming(job(), "a");
  EXPECT_EQ(commit(job(), "a"), EEXIST);
  EXPECT_EQ(errno_of(::rename(job("layout.json").c_str(), job("checkpoints/l").c_str())), EPERM);
}

TEST_F(CheckpointTest, RemovalTakesTheNamesFirst) {
  int fd = ::open(job(kRank + "model.safetensors").c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(errno_of(::rmdir(job("checkpoints/a").c_str())), ENOTEMPTY);
  ASSERT_EQ(::unlink(job("checkpoints/a/meta.json").c_str()), 0);
  EXPECT_EQ(::access(job("checkpoints/a/meta.json").c_str(), F_OK), -1);
  EXPECT_EQ(shell("rm -r " + job("checkpoints/a")), 0);
  EXPECT_EQ(::access(job("checkpoints/a").c_str(), F_OK), -1);
  EXPECT_EQ(::access(job("current").c_str(), F_OK), -1);
  std::string whole = tiny_safetensors(4, 8), got(whole.size(), '\0');
  EXPECT_EQ(::pread(fd, got.data(), got.size(), 0), static_cast<ssize_t>(got.size()));
  EXPECT_EQ(got, whole) << "who had it open reads it on";
  ::close(fd);
  write_incoming(job(), "a");
  EXPECT_EQ(commit(job(), "a"), 0);
  EXPECT_EQ(read_file(job(kRank + "model.safetensors")), whole);
}

/// What rm -r has listed goes, though another layout is materialised by the time it has.
TEST_F(CheckpointTest, AFlipDoesNotKeepWhatIsBeingRemoved) {
  const std::string layouts = job("checkpoints/a/layouts/"), before = layouts + "tp1-pp1-dp1",
                    after = "tp1-pp1-dp2";
  ASSERT_TRUE(std::filesystem::exists(before + "/rank/0/model.safetensors"));
  ASSERT_EQ(write_file(job("layout.json"), R"({"tp": 1, "pp": 1, "dp": 2})"), 0);
  auto listed = [&] {
    for (const auto& entry : std::filesystem::directory_iterator(layouts))
      if (entry.path().filename() == after) return true;
    return false;
  };
  for (int i = 0; i < 500 && !listed(); ++i) ::usleep(10'000);
  ASSERT_TRUE(listed());
  for (const std::string& path : {before, job("checkpoints/a/model"), job("checkpoints/a/hf"),
                                  job("checkpoints/a/dcp"), job("checkpoints/a/meta.json")})
    EXPECT_EQ(shell("rm -r " + path), 0) << path;
  EXPECT_EQ(errno_of(::rmdir(layouts.c_str())), 0);
  EXPECT_EQ(errno_of(::rmdir(job("checkpoints/a").c_str())), 0);
  EXPECT_EQ(::access(job("checkpoints/a").c_str(), F_OK), -1);
}

/// Though some of it had gone before.
TEST_F(CheckpointTest, AFlipBetweenTwoNamesOfARemovalBringsNoneBack) {
  const std::string layouts = job("checkpoints/a/layouts/"), after = "tp1-pp1-dp2";
  for (const std::string& path : {job("checkpoints/a/model"), layouts + "tp1-pp1-dp1/rank/0"})
    EXPECT_EQ(shell("rm -r " + path), 0) << path;
  ASSERT_EQ(write_file(job("layout.json"), R"({"tp": 1, "pp": 1, "dp": 2})"), 0);
  const auto listed = [&](const std::string& name) {
    for (const auto& entry : std::filesystem::directory_iterator(layouts))
      if (entry.path().filename() == name) return true;
    return false;
  };
  for (int i = 0; i < 500 && !listed(after); ++i) ::usleep(10'000);
  ASSERT_TRUE(listed(after));
  EXPECT_EQ(::access(job("checkpoints/a/model").c_str(), F_OK), -1);
  EXPECT_EQ(shell("rm -r " + job("checkpoints/a")), 0);
  EXPECT_EQ(::access(job("checkpoints/a").c_str(), F_OK), -1);
  ASSERT_EQ(::mkdir(job("incoming/a").c_str(), 0755), 0) << "the name is free";
}

TEST_F(CheckpointTest, RemovingAJob) {
  EXPECT_EQ(errno_of(::rmdir(job().c_str())), ENOTEMPTY);
  EXPECT_EQ(shell("rm -r " + job()), 0);
  EXPECT_EQ(::access(job().c_str(), F_OK), -1);
  EXPECT_EQ(::mkdir(job().c_str(), 0755), 0);
  EXPECT_EQ(::access(job("checkpoints/a").c_str(), F_OK), -1);
}

TEST_F(CheckpointTest, QuestionsAreAnswered) {
  EXPECT_NE(ask(mount_, R"({"do":"verify","job":"job","checkpoint":"a"})").find("\"ok\":true"),
            std::string::npos);
  EXPECT_NE(ask(mount_, R"({"do":"plan","job":"job","layout":{"tp":1,"pp":1,"dp":2}})")
                .find("\"ok\":true"),
            std::string::npos);
  EXPECT_NE(ask(mount_, R"({"do":"dance","job":"job"})").find("invalid argument"),
            std::string::npos);
  EXPECT_NE(ask(mount_, "nonsense").find("\"ok\":false"), std::string::npos);
  EXPECT_NE(ask(mount_, R"({"do":"remove","job":"job","force":true})").find("\"ok\":true"),
            std::string::npos);
  EXPECT_EQ(::access(job().c_str(), F_OK), -1) << "gone at once, not when the cache is";
}

}  // namespace
}  // namespace ptc
