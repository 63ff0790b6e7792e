#include "dataset/source/own_files.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

TEST(OwnFiles, NoPathLeadsIntoAMount) {
  const TempDir directory;
  const std::string top = directory.file("top");
  const std::string mount = top + "/a mount", data = top + "/data";
  std::filesystem::create_directories(mount + "/job");
  std::filesystem::create_directories(data + "/below");
  std::filesystem::create_directory_symlink(mount, data + "/link");
  std::filesystem::create_directory_symlink("below/../link/job", data + "/chain");
  std::filesystem::create_symlink("loop", data + "/loop");
  std::string point = mount;
  point.replace(point.find(' '), 1, "\\040");
  const std::string mountinfo =
      "24 1 0:22 / /sys rw - sysfs sysfs rw\n"
      "31 1 0:40 / " +
      point +
      " rw,nosuid shared:7 master:1 - fuse.ptcfs ptcfs rw\n"
      "32 1 0:41 / " +
      data + "/below rw - fuse.other other rw\n";
  OwnFiles own(mountinfo);
  for (const std::string& path :
       {mount, mount + "/job/x.tar", data + "/link", data + "/link/x.tar", data + "/chain/x",
        data + "/../a mount", data + "/./below/.././../a mount/job", mount + "/"}) {
    const Result<> refused = own.refuse(path);
    ASSERT_FALSE(refused) << path;
    EXPECT_EQ(refused.error().code(), Code::kInvalidArgument);
    EXPECT_NE(refused.error().message().find(mount), std::string::npos)
        << refused.error().message();
    EXPECT_FALSE(own.refuse(path)) << "asked again: " << path;
  }
  for (const std::string& path : {data, data + "/below/x.tar", mount + "s/x", data + "/none/x",
                                  data + "/loop/x", std::string("/")}) {
    EXPECT_TRUE(own.refuse(path)) << path;
    EXPECT_TRUE(own.refuse(path)) << "asked again: " << path;
  }
  for (const std::string& pattern : {top + "/*/*.tar", top + "/a*", top + "/[a]?mount/job/*",
                                     data + "/link/*.tar", data + "/chain/?.tar"}) {
    EXPECT_FALSE(own.refuse_pattern(pattern)) << pattern;
  }
  for (const std::string& pattern : {data + "/*.tar", top + "/d*/*.tar", top + "/[!a]*/*"}) {
    EXPECT_TRUE(own.refuse_pattern(pattern)) << pattern;
  }
}

}  // namespace
}  // namespace ptc
