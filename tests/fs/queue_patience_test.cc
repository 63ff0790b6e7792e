#include "fs/tree/queue_patience.h"

#include <gtest/gtest.h>

namespace ptc {
namespace {

using std::chrono::milliseconds;
constexpr uid_t kCarl = 1000, kDora = 1001;

class QueuePatienceTest : public ::testing::Test {
 protected:
  /// One that waits in vain for as long as it may; how long that was.
  milliseconds in_vain(uid_t user) {
    milliseconds waited{};
    (void)patience_.spent(user, [&](milliseconds waits) -> FsResult<> {
      waited = waits;
      now_ += waits;
      return Errno{EAGAIN};
    });
    return waited;
  }

  QueuePatience::Clock::time_point now_ = QueuePatience::Clock::now();
  QueuePatience patience_{[this] { return now_; }};
};

TEST_F(QueuePatienceTest, ThreeInARowTakeLittleMoreThanOne) {
  EXPECT_EQ(in_vain(kCarl), QueuePatience::kMost);
  EXPECT_EQ(in_vain(kCarl), QueuePatience::kLeastAgain);
  now_ += milliseconds(50);
  EXPECT_EQ(in_vain(kCarl), QueuePatience::kLeastAgain);
}

/// Where the machine is slow, they follow each other slowly.
TEST_F(QueuePatienceTest, SoDoManyOnASlowMachine) {
  constexpr milliseconds kGap{500};
  milliseconds all{};
  for (int i = 0; i < 64; ++i) {
    all += in_vain(kCarl);
    now_ += kGap;
  }
  EXPECT_LE(all, QueuePatience::kMost + 64 * kGap);
}

TEST_F(QueuePatienceTest, WhoHasNotWaitedYetHasLongerThanWhoTriesAllTheTime) {
  for (int i = 0; i < 100; ++i) (void)in_vain(kCarl);
  EXPECT_EQ(in_vain(kDora), QueuePatience::kLeast);
  EXPECT_EQ(in_vain(kDora), QueuePatience::kLeastAgain);
}

TEST_F(QueuePatienceTest, SoDoThoseOfManyUsers) {
  milliseconds all{};
  for (uid_t user = 2000; user < 2064; ++user) all += in_vain(user);
  EXPECT_LE(all, QueuePatience::kMost + QueuePatience::kNewOnes * QueuePatience::kLeast +
                     64 * QueuePatience::kLeastAgain);
}

TEST_F(QueuePatienceTest, WhoComesLaterStandsInNoQueue) {
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(in_vain(kCarl), QueuePatience::kMost);
    now_ += QueuePatience::kMost;
  }
}

TEST_F(QueuePatienceTest, OnlyWhatIsInVainCosts) {
  const auto succeeds = [&](milliseconds waits) -> FsResult<> {
    now_ += waits;
    return ok();
  };
  const auto refused_at_once = [&](milliseconds) -> FsResult<> { return Errno{EAGAIN}; };
  const auto is_busy = [&](milliseconds waits) -> FsResult<> {
    now_ += waits;
    return Errno{EBUSY};
  };
  EXPECT_TRUE(patience_.spent(kCarl, succeeds).has_value());
  EXPECT_EQ(patience_.spent(kCarl, refused_at_once).error().value, EAGAIN);
  EXPECT_EQ(patience_.spent(kCarl, is_busy).error().value, EBUSY);
  EXPECT_EQ(in_vain(kCarl), QueuePatience::kMost);
}

}  // namespace
}  // namespace ptc
