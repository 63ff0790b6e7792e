// Starting, ending, and being killed.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "tests/fs/mount_fixture.h"

namespace ptc {
namespace {

class DaemonTest : public MountTest {
 protected:
  int ptcfs(const std::string& arguments, std::string* output = nullptr) {
    std::string log = mount_.top() + "/output";
    int status = shell(std::string(PTCFS_BINARY) + " " + arguments + " >" + log + " 2>&1");
    if (output != nullptr) *output = read_file(log);
    return status;
  }
};

TEST_F(DaemonTest, KilledAndStartedAgainItHasEverything) {
  ASSERT_EQ(write_file(job("layout.json"), R"({"tp":1,"pp":1,"dp":2})"), 0);
  ASSERT_EQ(write_file(job("mine"), "notes"), 0);
  ASSERT_EQ(::mkdir(job("incoming/a").c_str(), 0755), 0);
  ASSERT_EQ(write_file(job("incoming/a/f"), "half"), 0);
  mount_.kill();
  ASSERT_NO_FATAL_FAILURE(mount_.start());
  EXPECT_NE(mount_.log().find("dead ptcfs mount"), std::string::npos);
  EXPECT_EQ(read_file(job("layout.json")), R"({"tp":1,"pp":1,"dp":2})");
  EXPECT_EQ(read_file(job("mine")), "notes");
  EXPECT_EQ(read_file(job("incoming/a/f")), "half");
}

TEST_F(DaemonTest, EndsWhileAFileIsOpen) {
  int keep = ::open(job("layout.json").c_str(), O_RDONLY);
  ASSERT_GE(keep, 0);
  EXPECT_EQ(mount_.terminate(), 0);
  EXPECT_NE(mount_.log().find("kept in"), std::string::npos);
  ::close(keep);
}

TEST_F(DaemonTest, RefusesWhatCannotBe) {
  std::string said, top = mount_.top();
  EXPECT_EQ(ptcfs("", &said), 1);
  EXPECT_EQ(ptcfs("--help", &said), 0);
  EXPECT_NE(said.find("--memory"), std::string::npos);
  EXPECT_EQ(ptcfs("--version", &said), 0);
  EXPECT_EQ(ptcfs("-o ro " + mount_.path(), &said), 1);
  EXPECT_NE(said.find("read-only"), std::string::npos);
  EXPECT_EQ(ptcfs("-o nonsense " + mount_.path(), &said), 1);
  EXPECT_EQ(ptcfs(top + "/nowhere", &said), 32);
  EXPECT_EQ(ptcfs(top + "/log", &said), 32);
  EXPECT_NE(said.find("not a directory"), std::string::npos);
  EXPECT_EQ(ptcfs(mount_.path(), &said), 32);
  EXPECT_NE(said.find("already mounted"), std::string::npos);
  ASSERT_EQ(::mkdir((top + "/second").c_str(), 0755), 0);
  EXPECT_EQ(ptcfs("--store " + mount_.store() + " " + top + "/second", &said), 2) << said;
  EXPECT_EQ(ptcfs("--discard " + mount_.path(), &said), 2);
  EXPECT_NE(said.find("is mounted"), std::string::npos);
}

TEST_F(DaemonTest, ItsMemoryOutlivesItUntilItIsDiscarded) {
  std::string said, second = mount_.top() + "/second", store = mount_.top() + "/memory";
  ASSERT_EQ(::mkdir(second.c_str(), 0755), 0);
  std::string options = "--store " + store + " ";
  ASSERT_EQ(ptcfs(options + "--memory 64M " + second, &said), 0) << said;
  EXPECT_EQ(::mkdir((second + "/kept").c_str(), 0755), 0);
  EXPECT_EQ(shell("mount | grep -q 'ptcfs on " + second + " type fuse.ptcfs'"), 0);
  EXPECT_EQ(shell("umount " + second), 0);
  for (int i = 0; i < 100 && ptcfs(options + "--memory 96M " + second, &said) != 0; ++i) {
    ::usleep(50000);  // the first daemon ends in the background
  }
  EXPECT_EQ(::access((second + "/kept/layout.json").c_str(), F_OK), 0) << said;
  EXPECT_EQ(shell("umount " + second), 0);
  int status = 2;
  for (int i = 0; i < 100 && status != 0; ++i) {
    ::usleep(50000);
    status = ptcfs(options + "--discard " + second, &said);
  }
  EXPECT_EQ(status, 0) << said;
  EXPECT_NE(shell("mountpoint -q " + store), 0);
}

TEST_F(DaemonTest, ItTellsAboutItself) {
  std::string dir = mount_.path() + "/.ptc/";
  EXPECT_EQ(read_file(dir + "version").find("ptcfs "), 0u);
  EXPECT_NE(read_file(dir + "nodes.json").find("\"up\""), std::string::npos);
  EXPECT_NE(read_file(dir + "stats").find("\"lookup\""), std::string::npos);
  EXPECT_NE(read_file(dir + "requests").find("\"open\""), std::string::npos) << "this very one";
  EXPECT_NE(read_file(dir + "metrics").find("ptcfs_jobs 1\n"), std::string::npos);
}

}  // namespace
}  // namespace ptc
