// Who was there, and since when, as all nodes know it, and what the agreement store is asked for
// that.
#include "reshard/node/seen_nodes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;

/// Counts what it is asked.
class CountingMeta final : public MetaClient {
 public:
  explicit CountingMeta(MetaClient& meta) : meta_(meta) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override {
    ++gets;
    return meta_.get(key);
  }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    ++lists;
    return meta_.list(prefix);
  }
  Result<int64_t> commit(const MetaTransaction& transaction) override {
    ++commits;
    return meta_.commit(transaction);
  }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    return meta_.lease(ttl);
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    on_events.push_back(on_event);
    return meta_.watch(std::move(prefix), [this, on_event](const MetaEvent& event) {
      if (!deaf) on_event(event);
    });
  }
  std::vector<OnEvent> on_events;
  std::atomic<bool> deaf = false;
  std::atomic<int> gets = 0, lists = 0, commits = 0;

 private:
  MetaClient& meta_;
};

/// One node: its key nodes/<name> under its lease, as in ClusterNode.
class OneNode final : public Cluster {
 public:
  OneNode(MetaClient& meta, std::string name) : meta_(meta), name_(std::move(name)) {
    seen_nodes_ = SeenNodes::open(meta_).value();
    join();
  }
  void join() {
    lease_ = meta_.lease(60s).value();
    MetaTransaction transaction;
    transaction.puts = {SeenNodes::joined(name_)};
    transaction.leased_puts = {{std::string(kMemberKeys) + name_, ""}};
    transaction.lease = lease_.get();
    revision_ = meta_.commit(transaction).value();
  }
  void dies() { lease_.reset(); }
  Result<> looks() { return seen_nodes_->update(*this, alive()); }

  const std::string& self() const override { return name_; }
  std::vector<std::string> alive() const override {
    std::vector<std::string> names;
    const std::vector<MetaEntry> entries = meta_.list(kMemberKeys).value();
    for (const MetaEntry& entry : entries) names.push_back(entry.key.substr(kMemberKeys.size()));
    return names;
  }
  Result<std::string> call(const std::string&, const PeerRow&, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    return make_error(Code::kUnavailable, "");
  }
  std::optional<MetaTransaction::Compare> fence() const override {
    return MetaTransaction::Compare{std::string(kMemberKeys) + name_, revision_};
  }
  MetaTransaction::Compare fence_of(const std::string& node) const override {
    return {std::string(kMemberKeys) + node, 0};
  }
  std::shared_ptr<const MetaLease> lease() const override { return lease_; }
  std::vector<Seen> seen() const override { return seen_nodes_->all(); }

  Seen seen_of(const std::string& node) const {
    for (const Seen& one : seen())
      if (one.node == node) return one;
    return {};
  }

 private:
  MetaClient& meta_;
  const std::string name_;
  std::shared_ptr<MetaLease> lease_;
  int64_t revision_ = 0;
  std::unique_ptr<SeenNodes> seen_nodes_;
};

class SeenNodesTest : public ::testing::Test {
 protected:
  SeenNodesTest() {
    for (int i = 0; i < 9; ++i)
      nodes_.push_back(std::make_unique<OneNode>(counted_, "w" + std::to_string(i)));
  }
  /// What is noted arrives by a watch.
  void until_all_say(const std::string& node, bool there) {
    for (const auto& one : nodes_)
      while (one->seen_of(node).node != node || one->seen_of(node).there != there)
        std::this_thread::sleep_for(1ms);
  }

  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
  CountingMeta counted_{*meta_};
  std::vector<std::unique_ptr<OneNode>> nodes_;
};

TEST_F(SeenNodesTest, ThatANodeIsGoneIsWrittenOnceAndKnownToAll) {
  until_all_say("w8", true);
  const int64_t before = nodes_[0]->seen_of("w3").since_ns;
  nodes_[3]->dies();
  nodes_[8]->dies();  // the last by name
  counted_.commits = counted_.gets = counted_.lists = 0;
  for (const auto& node : nodes_) EXPECT_TRUE(is_ok(node->looks()));
  EXPECT_EQ(counted_.commits, 2) << "not one for each that sees it";
  EXPECT_EQ(counted_.gets, 2);
  EXPECT_EQ(counted_.lists, static_cast<int>(nodes_.size())) << "of members, by this test";
  until_all_say("w3", false);
  until_all_say("w8", false);
  const Cluster::Seen gone = nodes_[0]->seen_of("w3");
  EXPECT_GE(gone.since_ns, before);
  for (const auto& node : nodes_) EXPECT_EQ(node->seen_of("w3").since_ns, gone.since_ns);
  OneNode newcomer(*meta_, "w9");
  EXPECT_EQ(newcomer.seen_of("w3").since_ns, gone.since_ns) << "it was not there to see it";
  EXPECT_FALSE(newcomer.seen_of("w3").there);

  counted_.commits = counted_.gets = 0;
  for (const auto& node : nodes_) EXPECT_TRUE(is_ok(node->looks()));
  EXPECT_EQ(counted_.commits + counted_.gets, 0) << "all is known";
  nodes_[3]->join();
  until_all_say("w3", true);
  EXPECT_GE(nodes_[0]->seen_of("w3").since_ns, gone.since_ns);
}

TEST_F(SeenNodesTest, WhoIsNoMemberWritesNothing) {
  for (const auto& node : nodes_) node->dies();
  counted_.commits = 0;
  for (const auto& node : nodes_) EXPECT_TRUE(is_ok(node->looks()));
  EXPECT_EQ(counted_.commits, 0);
  nodes_[5]->join();  // the first that comes back notes all others
  EXPECT_TRUE(is_ok(nodes_[5]->looks()));
  until_all_say("w4", false);
  EXPECT_TRUE(nodes_[5]->seen_of("w5").there);
}

TEST_F(SeenNodesTest, WhatIsGoneForAWeekIsForgotten) {
  nodes_[1]->dies();
  MetaTransaction long_ago;
  long_ago.puts = {{"seen/w1", R"({"there": false, "since_ns": 1})"}};
  ASSERT_TRUE(is_ok(meta_->commit(long_ago)));
  until_all_say("w1", false);
  for (const auto& node : nodes_) EXPECT_TRUE(is_ok(node->looks()));
  EXPECT_FALSE(meta_->get("seen/w1").value().has_value());
  while (nodes_[0]->seen_of("w1").node == "w1") std::this_thread::sleep_for(1ms);
}

TEST_F(SeenNodesTest, WhatWentUnheardIsListedAnewAfterTheGap) {
  until_all_say("w1", true);
  counted_.deaf = true;
  MetaTransaction forgets;
  forgets.deletes = {"seen/w1"};
  const int64_t revision = meta_->commit(forgets).value();
  for (const MetaClient::OnEvent& on_event : counted_.on_events)
    on_event({{}, std::nullopt, revision});
  EXPECT_TRUE(is_ok(nodes_[0]->looks()));
  EXPECT_EQ(nodes_[0]->seen_of("w1").node, "");
  EXPECT_EQ(nodes_[0]->seen_of("w2").node, "w2");
}

TEST_F(SeenNodesTest, WhatIsNoNoteIsNoHarm) {
  MetaTransaction strange;
  strange.puts = {{"seen/x", "["}, {"seen/y", R"({"there": 1, "since_ns": "a"})"}};
  ASSERT_TRUE(is_ok(meta_->commit(strange)));
  until_all_say("y", false);
  for (const auto& node : nodes_) EXPECT_TRUE(is_ok(node->looks()));
}

}  // namespace
}  // namespace ptc
