#include "fs/mount/mount_point.h"

#include <gtest/gtest.h>

#include "fs/mount/beneath.h"

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

TEST(LastingService, IsWhatAUnitWasMadeToStart) {
  EXPECT_TRUE(
      is_lasting_service("0::/system.slice/system-ptcfs.slice/ptcfs@mnt-ptc.service\n", "", 7));
  EXPECT_TRUE(is_lasting_service("1:name=systemd:/system.slice/own.service\n0::/\n", "7", 7));
  EXPECT_FALSE(is_lasting_service("0::/system.slice/cron.service\n", "6",
                                  7));  // started by what cron started
  EXPECT_FALSE(is_lasting_service("0::/system.slice/ssh.service\n", "", 7));
  EXPECT_FALSE(is_lasting_service(
      "0::/user.slice/user-1000.slice/user@1000.service/app.slice/x-terminal.service", "12", 7));
  EXPECT_FALSE(is_lasting_service("0::/user.slice/user-0.slice/session-1.scope\n", "7", 7));
  EXPECT_FALSE(is_lasting_service("0::/system.slice/run-u12.service\n", "7", 7));
  EXPECT_FALSE(is_lasting_service("0::/system.slice/ptcfs@mnt.service/of-a-container\n", "", 7));
  EXPECT_FALSE(is_lasting_service("", "7", 7));
}

}  // namespace
}  // namespace ptc
