#include "fs/mount_point.h"

#include <gtest/gtest.h>

namespace ptc {
namespace {

TEST(EscapePath, AsSystemdDoes) {
  EXPECT_EQ(escape_path("/mnt/ptc"), "mnt-ptc");
  EXPECT_EQ(escape_path("/"), "-");
  EXPECT_EQ(escape_path("//mnt//a-b/"), "mnt-a\\x2db");
  EXPECT_EQ(escape_path("/.hidden/x y"), "\\x2ehidden-x\\x20y");
  EXPECT_EQ(escape_path("/mnt/.hidden"), "mnt-.hidden");
}

TEST(MountPoint, KnowsWhatIsMounted) {
  auto mounted = mounted_on("/proc");
  ASSERT_TRUE(mounted);
  EXPECT_EQ(mounted->type, "proc");
  EXPECT_FALSE(mounted_on("/no/such/place"));
  EXPECT_EQ(resolve_mount_point("/no/such/place").error().code(), Code::kNotFound);
}

}  // namespace
}  // namespace ptc
