#include "fs/report/metrics_writer.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "fs/tree/stats.h"

namespace ptc {
namespace {

TEST(MetricsWriter, WritesFamiliesAndSamples) {
  MetricsWriter out;
  out.single("up_seconds", "gauge", "Since the start.", 1.5);
  out.family("seen_total", "counter", "Seen.");
  out.sample({{"job", "a"}, {"state", "idle"}}, uint64_t{18446744073709551615u});
  EXPECT_EQ(out.take(),
            "# HELP up_seconds Since the start.\n# TYPE up_seconds gauge\nup_seconds 1.5\n"
            "# HELP seen_total Seen.\n# TYPE seen_total counter\n"
            "seen_total{job=\"a\",state=\"idle\"} 18446744073709551615\n");
}

TEST(MetricsWriter, EscapesWhatUsersName) {
  MetricsWriter out;
  out.family("x", "gauge", "X.");
  out.sample({{"job", "a\"b\\c\nd"}}, 1);
  EXPECT_EQ(out.take(), "# HELP x X.\n# TYPE x gauge\nx{job=\"a\\\"b\\\\c\\nd\"} 1\n");
}

TEST(MetricsWriter, BucketsOfAHistogramAddUp) {
  MetricsWriter out;
  out.family("t_seconds", "histogram", "T.");
  const double ends[] = {0.001, 1};
  const uint64_t counts[] = {2, 0, 3};
  out.histogram("operation", "read", ends, counts, 12.5);
  EXPECT_EQ(out.take(),
            "# HELP t_seconds T.\n# TYPE t_seconds histogram\n"
            "t_seconds_bucket{operation=\"read\",le=\"0.001\"} 2\n"
            "t_seconds_bucket{operation=\"read\",le=\"1\"} 2\n"
            "t_seconds_bucket{operation=\"read\",le=\"+Inf\"} 5\n"
            "t_seconds_sum{operation=\"read\"} 12.5\nt_seconds_count{operation=\"read\"} 5\n");
}

TEST(Stats, CountsOfAllThreadsAddUp) {
  Stats stats;
  std::vector<std::thread> threads;
  for (int i = 0; i < 20; ++i)
    threads.emplace_back([&] {
      for (int request = 0; request < 1000; ++request) {
        InFlight counted(stats, Op::kRead, 1, 1);
        stats.add_bytes(Op::kRead, 3);
        if (request == 0) counted.failed();
      }
    });
  for (std::thread& thread : threads) thread.join();
  const Stats::OpCounts counts = stats.counts(Op::kRead);
  EXPECT_EQ(counts.requests, 20'000u);
  EXPECT_EQ(counts.errors, 20u);
  EXPECT_EQ(counts.bytes, 60'000u);
  uint64_t answered = 0;
  for (uint64_t in_bucket : counts.answered) answered += in_bucket;
  EXPECT_EQ(answered, 20'000u);
  EXPECT_EQ(stats.counts(Op::kWrite).requests, 0u);
  EXPECT_TRUE(stats.in_flight().empty());
}

}  // namespace
}  // namespace ptc
