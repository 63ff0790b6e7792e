// Which limits of control groups hold, of version 2 and 1, in files as the kernel has them.
#include "store/base/control_group.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

class ControlGroups : public ::testing::Test {
 protected:
  void put(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = top_ + "/" + path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text << "\n";
  }
  GroupLimits limits() { return group_limits(top_ + "/cgroup", top_); }

  TempDir dir_;
  const std::string top_ = dir_.file("top");
};

TEST_F(ControlGroups, TheLeastOfThoseAroundHolds) {
  put("cgroup", "0::/system.slice/ptcfs.service");
  put("system.slice/ptcfs.service/memory.max", "max");
  put("system.slice/ptcfs.service/memory.current", "5");
  put("system.slice/ptcfs.service/pids.max", "4915");
  put("system.slice/ptcfs.service/pids.current", "30");
  EXPECT_FALSE(limits().memory);
  put("system.slice/memory.max", "2000");
  put("system.slice/memory.current", "70");
  put("memory.max", "3000");
  const GroupLimits found = limits();
  ASSERT_TRUE(found.memory);
  EXPECT_EQ(found.memory->limit, 2000);
  EXPECT_EQ(found.memory->used, 70);
  EXPECT_EQ(found.memory->group, top_ + "/system.slice");
  ASSERT_TRUE(found.threads);
  EXPECT_EQ(found.threads->limit, 4915);
  EXPECT_EQ(found.threads->used, 30);
}

TEST_F(ControlGroups, OfVersion1EachHasItsOwn) {
  put("cgroup", "12:pids:/a\n4:memory:/a/b\n3:cpu,cpuacct:/\n1:name=systemd:/\n0::/");
  put("memory/memory.limit_in_bytes", "9223372036854771712");  // none
  EXPECT_FALSE(limits().memory);
  put("memory/a/memory.limit_in_bytes", "1000");
  put("memory/a/memory.usage_in_bytes", "900");
  put("pids/a/pids.max", "max");
  ASSERT_TRUE(limits().memory);
  EXPECT_EQ(limits().memory->limit, 1000);
  EXPECT_EQ(limits().memory->used, 900);
  EXPECT_FALSE(limits().threads);
}

TEST_F(ControlGroups, NothingIsSeenWhereNothingIs) {
  EXPECT_FALSE(limits().memory);
  put("cgroup", "\n0:\n0::\n0::x\nnonsense\n0::/../..");
  EXPECT_FALSE(limits().memory);
  EXPECT_FALSE(limits().threads);
}

}  // namespace
}  // namespace ptc
