// Every way to save layout.json, and what is refused.
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

const std::string kGood = R"({"format":"ptc-layout/1","tp":1,"pp":1,"dp":2})";
const std::string kOther = R"({"format":"ptc-layout/1","tp":2,"pp":1,"dp":1})";
const std::string kBad = R"({"format":"ptc-layout/1","tpp":2,"pp":1,"dp":1})";

class LayoutFileTest : public MountTest {
 protected:
  std::string layout() const { return job("layout.json"); }
  void expect_refused() {
    EXPECT_NE(read_file(job("status.json")).find("did you mean 'tp'"), std::string::npos)
        << read_file(job("status.json"));
  }
};

TEST_F(LayoutFileTest, InPlace) {
  EXPECT_EQ(write_file(layout(), kGood), 0);
  EXPECT_EQ(read_file(layout()), kGood);
  EXPECT_EQ(write_file(layout(), kBad), EINVAL);
  EXPECT_EQ(read_file(layout()), kGood);
  expect_refused();
}

TEST_F(LayoutFileTest, TheSameHandleMendsARefusedDraft) {
  int fd = ::open(layout().c_str(), O_RDWR | O_TRUNC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::write(fd, kBad.data(), kBad.size()), static_cast<ssize_t>(kBad.size()));
  EXPECT_EQ(errno_of(::fsync(fd)), EINVAL);
  char draft[200];
  EXPECT_EQ(::pread(fd, draft, sizeof(draft), 0), static_cast<ssize_t>(kBad.size()));
  ASSERT_EQ(::ftruncate(fd, 0), 0);
  ASSERT_EQ(::pwrite(fd, kOther.data(), kOther.size(), 0), static_cast<ssize_t>(kOther.size()));
  EXPECT_EQ(errno_of(::close(fd)), 0);
  EXPECT_EQ(read_file(layout()), kOther);
}

TEST_F(LayoutFileTest, RenameOverIt) {
  ASSERT_EQ(write_file(job("new"), kGood), 0);
  EXPECT_EQ(errno_of(::rename(job("new").c_str(), layout().c_str())), 0);
  EXPECT_EQ(read_file(layout()), kGood);
  EXPECT_EQ(::access(job("new").c_str(), F_OK), -1);
  ASSERT_EQ(write_file(job("new"), kBad), 0);
  EXPECT_EQ(errno_of(::rename(job("new").c_str(), layout().c_str())), ECANCELED);
  EXPECT_EQ(read_file(layout()), kGood);
  EXPECT_EQ(read_file(job("new")), kBad) << "the refused file stays";
  expect_refused();
}

TEST_F(LayoutFileTest, WhatIsNoTextIsRefusedWithAReason) {
  const std::string before = read_file(layout());
  auto reason = [&](const std::string& name, int error) {
    EXPECT_EQ(errno_of(::rename(job(name).c_str(), layout().c_str())), error) << name;
    EXPECT_EQ(read_file(layout()), before);
    struct stat stat = {};
    EXPECT_EQ(::lstat(job(name).c_str(), &stat), 0) << name << " is gone";
    return read_file(job("status.json"));
  };
  ASSERT_EQ(write_file(job("target"), kGood), 0);
  ASSERT_EQ(::symlink("target", job("link").c_str()), 0);
  EXPECT_NE(reason("link", ECANCELED)
                .find("layout.json refused: link is a symbolic link; save the file "
                      "that it leads to"),
            std::string::npos);
  ASSERT_EQ(::mkfifo(job("pipe").c_str(), 0600), 0);
  EXPECT_NE(reason("pipe", ECANCELED).find("layout.json refused: pipe is no regular file"),
            std::string::npos);
  ASSERT_EQ(write_file(job("long"), kGood + std::string(1 << 20, ' ')), 0);
  EXPECT_NE(reason("long", EFBIG).find("layout.json refused: long is longer than 1048576 bytes"),
            std::string::npos);
  EXPECT_EQ(errno_of(::rename(job("target").c_str(), layout().c_str())), 0);
  EXPECT_EQ(read_file(job("status.json")).find("refused"), std::string::npos);
}

TEST_F(LayoutFileTest, RenameAwayAndCreate) {
  std::string before = read_file(layout());
  ASSERT_EQ(errno_of(::rename(layout().c_str(), job("layout.json~").c_str())), 0);
  EXPECT_EQ(::access(layout().c_str(), F_OK), -1);
  EXPECT_EQ(read_file(job("layout.json~")), before);
  EXPECT_EQ(write_file(layout(), kGood), 0);
  EXPECT_EQ(read_file(layout()), kGood);
  EXPECT_EQ(::unlink(job("layout.json~").c_str()), 0);
}

TEST_F(LayoutFileTest, UnlinkAndCreate) {
  ASSERT_EQ(::unlink(layout().c_str()), 0);
  EXPECT_EQ(::access(layout().c_str(), F_OK), -1);
  EXPECT_EQ(write_file(layout(), kGood, O_WRONLY | O_CREAT | O_EXCL), 0);
  EXPECT_EQ(read_file(layout()), kGood);
}

TEST_F(LayoutFileTest, CopyAndShell) {
  ASSERT_EQ(write_file(job("copy"), kGood), 0);
  EXPECT_EQ(shell("cp " + job("copy") + " " + layout()), 0);
  EXPECT_EQ(read_file(layout()), kGood);
  EXPECT_EQ(shell("echo '" + kOther + "' > " + layout()), 0);
  EXPECT_EQ(read_file(layout()), kOther + "\n");
  EXPECT_EQ(shell("sed -i 's/\"tp\":2/\"tp\":4/' " + layout()), 0);
  EXPECT_NE(read_file(layout()).find("\"tp\":4"), std::string::npos);
  EXPECT_EQ(shell("echo ' ' >> " + layout()), 0);
  EXPECT_EQ(shell("chmod 640 " + layout()), 0);
}

TEST_F(LayoutFileTest, TruncateByPathThenWrite) {
  ASSERT_EQ(::truncate(layout().c_str(), 0), 0);
  EXPECT_EQ(write_file(layout(), kGood, O_WRONLY), 0);
  EXPECT_EQ(read_file(layout()), kGood);
}

TEST_F(LayoutFileTest, EmptiedAndNeverWrittenIsRefused) {
  std::string before = read_file(layout());
  EXPECT_EQ(write_file(layout(), ""), 0) << "it may be the early close of a redirection";
  EXPECT_EQ(read_file(layout()), before);
  std::string status;
  for (int i = 0; i < 200 && status.find("refused") == std::string::npos; ++i) {
    ::usleep(10000);
    status = read_file(job("status.json"));
  }
  EXPECT_NE(status.find("refused"), std::string::npos) << status;
}

TEST_F(LayoutFileTest, TooLong) {
  std::string before = read_file(layout());
  EXPECT_EQ(write_file(layout(), kGood + std::string(1 << 20, ' ')), EFBIG);
  EXPECT_EQ(write_file(layout(), kGood + std::string(500 << 10, '\n')), EINVAL);
  EXPECT_NE(read_file(job("status.json")).find("layout.json refused: 512046 bytes"),
            std::string::npos)
      << read_file(job("status.json"));
  EXPECT_EQ(read_file(layout()), before);
  const std::string longest = kGood + std::string((500 << 10) - kGood.size(), '\n');
  EXPECT_EQ(write_file(layout(), longest), 0);
  EXPECT_EQ(read_file(layout()), longest);
}

TEST_F(LayoutFileTest, OtherNamesOfTheJobCannotBeReplaced) {
  ASSERT_EQ(write_file(job("mine"), "x"), 0);
  for (const char* name : {"status.json", "plan.json", "plan.svg"}) {
    EXPECT_EQ(errno_of(::rename(job("mine").c_str(), job(name).c_str())), EPERM) << name;
    EXPECT_EQ(write_file(job(name), "x"), EROFS) << name;
  }
  EXPECT_EQ(errno_of(::rename(job("incoming").c_str(), job("elsewhere").c_str())), EPERM);
  EXPECT_EQ(errno_of(::mkdir(job("checkpoints/x").c_str(), 0755)), EPERM);
}

}  // namespace
}  // namespace ptc
