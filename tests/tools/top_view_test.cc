#include "tools/ptc/top_view.h"

#include <gmock/gmock.h>

#include <boost/json/array.hpp>
#include <boost/json/parse.hpp>
#include <string>

#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Not;

json::object object(const char* text) { return json::parse(text).as_object(); }

JobStatus job(const std::string& name) {
  JobStatus status;
  status.job = name;
  status.state = "idle";
  status.layout = status.wanted = "tp2-pp1-dp1";
  status.raw = object(R"({"checkpoints": [{"name": "base", "bytes": 1048576, "tensors": 3,
                          "time": "2001-02-03T04:05:06.123Z", "layouts": ["tp2-pp1-dp1"]}]})");
  return status;
}

JobStatus resharding(const std::string& name) {
  JobStatus status = job(name);
  status.state = "resharding";
  status.wanted = "tp16-pp8-dp64-ep4+0a1b2c3d";
  status.raw["progress"] =
      object(R"({"phase": "moving", "checkpoint": "base", "bytes_done": 1048576,
                                      "bytes_total": 4194304, "seconds": 2})");
  return status;
}

TopSample sample() {
  TopSample sample;
  sample.mount = "/mnt/ptc";
  sample.stats = object(R"({"uptime_seconds": 61, "passthrough": true, "operations": {
      "read": {"requests": 10, "bytes": 1048576}, "write": {"requests": 5, "bytes": 2048},
      "lookup": {"requests": 85}}})");
  sample.nodes =
      object(R"({"nodes": [{"name": "w1", "state": "up", "memory_total_bytes": 1073741824,
      "memory_used_bytes": 1048576, "materialised_bytes": 512,
      "heard_seconds_ago": 0}]})");
  sample.requests = object(R"({"requests": [{}, {}]})");
  sample.taken = std::chrono::steady_clock::time_point(std::chrono::seconds(100));
  return sample;
}

TEST(TopView, ShowsMountNodesRequestsAndJobs) {
  TopSample now = sample();
  now.jobs = {job("llama"), resharding("qwen")};
  const auto lines = top_lines(now, nullptr, 80, true);
  EXPECT_EQ(lines[0], "mount     /mnt/ptc, up 1 min 1 s, passthrough on");
  EXPECT_EQ(lines[1], "node      w1 up, 1.0 MiB of 1.0 GiB used, 512 B in checkpoints");
  EXPECT_EQ(lines[2], "requests  100, 2 in flight");
  EXPECT_EQ(lines[3], "bytes     1.0 MiB read, 2.0 KiB written");
  EXPECT_THAT(lines, Contains(HasSubstr("llama")));
  EXPECT_THAT(lines.back(), HasSubstr("to tp16-pp8-dp64"));
  EXPECT_THAT(lines.back(), HasSubstr("25%"));
}

TEST(TopView, ShowsNodesThatAreAwayAndMissingCopies) {
  TopSample now = sample();
  now.nodes = object(R"({"nodes": [
      {"name": "w1", "state": "up", "memory_total_bytes": 1073741824, "memory_used_bytes": 1048576,
       "materialised_bytes": 512, "heard_seconds_ago": 0.2,
       "traffic": {"sent_bytes": 1024, "received_bytes": 2048, "checksum_failures": 3, "retries": 4}},
      {"name": "w2", "state": "away", "since": "2001-02-03T04:05:06.123Z", "materialised_bytes": 1048576,
       "drain": {"bytes_left": 1048576}}],
      "missing_copies": {"bytes": 2097152}})");
  const auto lines = top_lines(now, nullptr, 200, true);
  EXPECT_EQ(lines[1],
            "node      w1 up, 1.0 MiB of 1.0 GiB used, 512 B in checkpoints, 1.0 KiB sent, 2.0 KiB "
            "received, "
            "3 frames damaged, 4 tried again");
  EXPECT_THAT(
      lines[2],
      testing::MatchesRegex(
          "node      w2 away for .* d \\(draining, 1.0 MiB left\\), 1.0 MiB in checkpoints"));
  EXPECT_EQ(lines[3], "copies    2.0 MiB are missing");
}

TEST(TopView, RatesAreOverTheTimeBetweenTwoLooks) {
  TopSample before = sample(), now = sample();
  now.taken += std::chrono::seconds(2);
  now.stats["operations"].as_object()["read"] = object(R"({"requests": 30, "bytes": 3145728})");
  const auto lines = top_lines(now, &before, 80, true);
  EXPECT_EQ(lines[2], "requests  120 (10/s), 2 in flight");
  EXPECT_EQ(lines[3], "bytes     3.0 MiB (1.0 MiB/s) read, 2.0 KiB (0 B/s) written");
  now.stats["operations"] = json::object();  // another daemon
  EXPECT_THAT(top_lines(now, &before, 80, true), Not(Contains(HasSubstr("/s)"))));
}

TEST(TopView, SaysWhenThereAreNoJobs) {
  EXPECT_THAT(top_lines(sample(), nullptr, 80, true), Contains("No jobs yet; mkdir makes one."));
}

TEST(TopView, NoLineIsWiderThanTheTerminal) {
  TopSample now = sample();
  now.mount = "/a/mount/" + std::string(200, 'm');
  now.jobs = {job(std::string(255, 'j')), resharding("größe-" + std::string(100, 'q')),
              job("\033[31m\nred")};
  now.jobs[0].state = "failed";
  now.jobs[0].last_error = std::string(300, 'e') + " and more words";
  now.jobs[1].raw["progress"].as_object()["checkpoint"] = std::string(200, 'c');
  now.jobs[1].raw["warnings"] = json::array{std::string(200, 'w')};
  for (size_t width : {20, 40, 60, 80, 200})
    for (const std::string& line : top_lines(now, &now, width, true)) {
      EXPECT_LE(text_width(line), width) << line;
      EXPECT_EQ(line.find('\033'), std::string::npos) << line;
    }
  EXPECT_THAT(top_lines(now, nullptr, 40, true), Contains(HasSubstr("25%")));
}

}  // namespace
}  // namespace ptc::cli
