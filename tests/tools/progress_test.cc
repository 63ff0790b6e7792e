#include "tools/ptc/progress.h"

#include <gmock/gmock.h>

#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kMiB = 1 << 20;

TEST(Progress, BarShowsShareBytesRateAndTimeLeft) {
  ProgressView view{"importing base", 30 * kMiB, 120 * kMiB, 10.0 * kMiB};
  EXPECT_EQ(progress_bar(view, 79, false),
            "importing base   25% ###............  30.0 MiB/120.0 MiB  10.0 MiB/s  0:09 left");
}

TEST(Progress, BarNeverIsWiderThanTheTerminal) {
  ProgressView view{"a label of some length, in words", 3'999'999'999, 4'000'000'000, 123456789};
  for (bool utf8 : {false, true}) {
    for (size_t width = 20; width < 200; ++width)
      EXPECT_LE(text_width(progress_bar(view, width, utf8)), width);
  }
}

TEST(Progress, NarrowTerminalGoesWithoutTheBar) {
  ProgressView view{"job", 30 * kMiB, 120 * kMiB, 0};
  EXPECT_THAT(progress_bar(view, 34, false), Not(HasSubstr("#")));
  EXPECT_THAT(progress_bar(view, 34, false), HasSubstr("25%"));
}

TEST(Progress, UnknownTotalShowsBytesOnly) {
  ProgressView view{"job", 30 * kMiB, 0, 0};
  EXPECT_EQ(progress_bar(view, 80, true), "job  30.0 MiB");
  EXPECT_EQ(progress_text(view), "job: 30.0 MiB");
}

TEST(Progress, MoreDoneThanPlannedIsAHundredPercent) {
  ProgressView view{"job", 200, 100, 50};
  EXPECT_EQ(progress_text(view), "job: 100%, 200 B of 100 B, 50 B/s");
}

TEST(Progress, LineForALog) {
  ProgressView view{"job: copying base", 60 * kMiB, 120 * kMiB, 0.5 * kMiB};
  EXPECT_EQ(progress_text(view),
            "job: copying base: 50%, 60.0 MiB of 120.0 MiB, 512.0 KiB/s, 2:00 left");
}

}  // namespace
}  // namespace ptc::cli
