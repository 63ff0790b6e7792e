// What nodes tell each other of themselves, and what it costs.
#include "reshard/cluster/node_reports.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

ReshardProgress part(uint64_t done, uint64_t total, bool leads = false) {
  return {leads, "moving", "base", "tp1-pp1-dp1", "tp2-pp1-dp1", done, total, 1.5};
}

TEST(ReshardProgressTest, AddsUpWhatNodesDo) {
  EXPECT_FALSE(add_up({}));
  ReshardProgress leads = part(20, 100, true);
  leads.phase = "committing";
  const auto whole = add_up({part(10, 100), leads, part(30, 100)});
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->bytes_done, 60);
  EXPECT_EQ(whole->bytes_total, 100);
  EXPECT_EQ(whole->phase, "committing") << "the leader knows it";
  const auto without_leader = add_up({part(10, 100), part(30, 100)});
  EXPECT_EQ(without_leader->bytes_done, 40);
  EXPECT_EQ(without_leader->bytes_total, 100);
  ReshardProgress other = part(7, 100);
  other.to = "tp4-pp1-dp1";
  EXPECT_EQ(add_up({part(20, 100, true), other})->bytes_done, 20) << "of a moment before";
  EXPECT_EQ(add_up({part(90, 100, true), part(90, 100)})->bytes_done, 100);
}

TEST(NodeAnswerTest, IsReadAsItWasWritten) {
  NodeAnswer answer;
  answer.numbers.memory_total_bytes = 1 << 30;
  answer.numbers.memory_id = "0-1:2";
  answer.numbers.version = "1.2.3";
  answer.numbers.time_ns = 1'800'000'000'123'456'789;
  answer.numbers.add({"w1", 1, 2, 3, 4, 5, 6});
  answer.numbers.add({"w2", 10, 20, 30, 40, 50, 60});
  answer.reshards["a \"job\""] = part(1, 2, true);
  auto read = NodeAnswer::from_text(answer.to_text());
  ASSERT_TRUE(is_ok(read));
  EXPECT_EQ(read.value().to_text(), answer.to_text());
  EXPECT_EQ(read.value().numbers.received_bytes, 22);
  EXPECT_EQ(read.value().numbers.checksum_failures, 55);
  EXPECT_EQ(read.value().numbers.memory_id, "0-1:2");
  EXPECT_EQ(read.value().numbers.version, "1.2.3");
  EXPECT_EQ(read.value().numbers.time_ns, 1'800'000'000'123'456'789);
  EXPECT_TRUE(read.value().reshards.at("a \"job\"").leads);
  for (const char* text :
       {"", "[]", "{\"retries\": -1}", "{\"reshards\": {\"a\": {\"bytes_done\": \"x\"}}}"})
    EXPECT_FALSE(NodeAnswer::from_text(text)) << text;
  EXPECT_TRUE(is_ok(NodeAnswer::from_text("{\"reshards\": 1, \"memory_id\": 3, \"more\": 2}")));
}

TEST(ClockOffsetTest, IsNoBetterThanTheAnswerWasFast) {
  const uint64_t second = 1'000'000'000;
  const auto ahead = ClockOffset::of(100 * second, 107 * second, 104 * second);
  ASSERT_TRUE(ahead);
  EXPECT_DOUBLE_EQ(ahead->ahead_seconds, 5);
  EXPECT_DOUBLE_EQ(ahead->within_seconds, 2);
  EXPECT_DOUBLE_EQ(ClockOffset::of(100 * second, 90 * second, 100 * second)->ahead_seconds, -10);
  EXPECT_FALSE(ClockOffset::of(100 * second, 0, 100 * second)) << "an older node says no time";
  EXPECT_FALSE(ClockOffset::of(100 * second, 100 * second, 90 * second)) << "it was set back";
}

/// Nodes of which each says how often it was asked; those that hang say nothing until the question
/// is withdrawn.
class Others final : public Cluster {
 public:
  explicit Others(std::vector<std::string> names) : names_(std::move(names)) {}
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override {
    std::lock_guard lock(mutex_);
    return names_;
  }
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string&,
                           std::chrono::milliseconds, std::stop_token stop) override {
    EXPECT_EQ(row.method, PeerMethod::kNumbers);
    std::unique_lock lock(mutex_);
    const uint64_t count = ++asked_[node];
    if (node.starts_with("hangs")) {
      changed_.wait(lock, stop, [] { return false; });
      return make_error(Code::kCancelled, "");
    }
    NodeAnswer answer;
    answer.numbers.sent_bytes = count;
    if (reshards_) answer.reshards["job"] = part(1, 10);
    return answer.to_text();
  }
  std::optional<MetaTransaction::Compare> fence() const override { return std::nullopt; }
  MetaTransaction::Compare fence_of(const std::string&) const override { return {"", 0}; }
  std::shared_ptr<const MetaLease> lease() const override { return nullptr; }

  uint64_t asked(const std::string& node) {
    std::lock_guard lock(mutex_);
    return asked_[node];
  }
  void end_reshards() {
    std::lock_guard lock(mutex_);
    reshards_ = false;
  }
  void leaves(const std::string& node) {
    std::lock_guard lock(mutex_);
    std::erase(names_, node);
  }

 private:
  const std::string self_ = "w0";
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::vector<std::string> names_;         // guarded
  std::map<std::string, uint64_t> asked_;  // guarded
  bool reshards_ = true;                   // guarded
};

TEST(NodeReportsTest, HoweverManyLookNodesAreAskedOnceASecond) {
  Others others({"w0", "w1", "w2"});
  const auto start = Clock::now();
  {
    NodeReports reports(others);
    for (int look = 0; look < 10000; ++look) (void)reports.heard();
    EXPECT_EQ(reports.heard().at("w1").answer.numbers.received_bytes, 0u);
    EXPECT_EQ(reports.reshard_of("job", std::chrono::seconds(5)).size(), 2u);
    EXPECT_EQ(reports.reshard_of("another", std::chrono::seconds(5)).size(), 0u);
  }
  const uint64_t most = 1 + static_cast<uint64_t>((Clock::now() - start) / 1s);
  for (const char* node : {"w1", "w2"}) {
    EXPECT_GE(others.asked(node), 1u);
    EXPECT_LE(others.asked(node), most) << node;
  }
  EXPECT_EQ(others.asked("w0"), 0u) << "it knows what it does itself";
}

TEST(NodeReportsTest, WhatWasHeardBeforeADecisionIsOver) {
  Others others({"w0", "w1", "w2"});
  NodeReports reports(others);
  while (reports.reshard_of("job", 5s).size() < 2) std::this_thread::yield();
  const uint64_t before = others.asked("w1");
  others.end_reshards();
  reports.decided("another job");
  EXPECT_EQ(reports.reshard_of("job", 5s).size(), 2u) << "that is not over";
  reports.decided("job");
  EXPECT_EQ(reports.reshard_of("job", 5s).size(), 0u);
  EXPECT_EQ(others.asked("w1"), before + 1) << "at once, and who looked has waited for it";
}

TEST(NodeReportsTest, NobodyWaitsForThoseThatHang) {
  Others others({"hangs", "w0", "w1"});
  NodeReports reports(others);
  while (!reports.heard().contains("w1")) std::this_thread::yield();
  EXPECT_FALSE(reports.heard().contains("hangs"));
  EXPECT_EQ(others.asked("hangs"), 1u) << "one question at a time";
}  // the destructor withdraws what nobody has answered

TEST(NodeReportsTest, WhoHasGoneIsForgotten) {
  Others others({"w0", "w1", "w2"});
  NodeReports reports(others);
  while (!reports.heard().contains("w2")) std::this_thread::yield();
  others.leaves("w2");
  while (reports.heard().contains("w2")) std::this_thread::sleep_for(10ms);
  EXPECT_TRUE(reports.heard().contains("w1"));
}

}  // namespace
}  // namespace ptc
