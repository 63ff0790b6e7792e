// A node's membership over an agreement store and calls of functions, alone: no store, no jobs.
#include "reshard/node/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <set>
#include <thread>

#include "tests/store/expect_error.h"

namespace ptc {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Of all nodes: who can be reached, and where.
struct Wires {
  mutable std::mutex mutex;
  std::map<std::string, std::string> up;                  // name → address
  std::set<std::pair<std::string, std::string>> refused;  // from, to
  std::set<std::pair<std::string, std::string>> called;   // who would call whom
  std::vector<std::pair<std::string, std::string>> met;   // who connected to whom
};

class FakeCalls final : public PeerCalls {
 public:
  FakeCalls(Wires& wires, std::string self) : wires_(wires), self_(std::move(self)) {}
  void set(const std::string& node, const std::string&) override {
    std::lock_guard lock(wires_.mutex);
    wires_.called.insert({self_, node});
  }
  void remove(const std::string& node) override {
    std::lock_guard lock(wires_.mutex);
    wires_.called.erase({self_, node});
  }
  Result<> meet(const std::string& node, const std::string& address) override {
    std::lock_guard lock(wires_.mutex);
    wires_.met.emplace_back(self_, node);
    const auto found = wires_.up.find(node);
    if (found == wires_.up.end() || found->second != address)
      return make_error(Code::kUnavailable, "nobody listens at {}", address);
    if (wires_.refused.contains({self_, node}))
      return make_error(Code::kPermissionDenied, "node {} has another secret", node);
    return ok();
  }
  Result<std::string> call(const std::string& node, const PeerRow& row, const std::string& request,
                           std::chrono::milliseconds, std::stop_token) override {
    if (row.handler != PeerHandler::kMeetings) return std::string("answer of " + node);
    FakeCalls theirs(wires_, node);
    return answer_meeting(theirs, self_, request);
  }
  size_t meets_at_once() const override { return at_once; }
  size_t at_once = 16;

 private:
  Wires& wires_;
  const std::string self_;
};

/// Leases that a test ends, and watches that it breaks.
class MetaWithLeases final : public MetaClient {
 public:
  explicit MetaWithLeases(MetaClient& meta) : meta_(meta) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override { return meta_.get(key); }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    return meta_.list(prefix);
  }
  Result<int64_t> commit(const MetaTransaction& transaction) override {
    if (before) before(transaction);
    Result<int64_t> done = meta_.commit(transaction);
    // Whom it does not see yet it may take for gone: that is refused, and nothing is written.
    if (done.has_value() || !transaction.leased_puts.empty()) ++commits;
    if (after) after(transaction);
    return done;
  }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    if (lends_nothing) {
      ++refused_leases;
      return make_error(Code::kUnavailable, "no lease now");
    }
    PTC_TRY(auto lease, meta_.lease(ttl));
    ended = std::make_shared<std::atomic<bool>>(false);
    return std::unique_ptr<MetaLease>(std::make_unique<Lease>(std::move(lease), ended, *this));
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    on_events.push_back(on_event);
    return meta_.watch(std::move(prefix), [this, on_event](const MetaEvent& event) {
      if (!deaf) on_event(event);
    });
  }

  std::vector<OnEvent> on_events;  // of all watches
  std::atomic<bool> deaf = false;
  std::shared_ptr<std::atomic<bool>> ended;  // of the last one
  std::atomic<bool> lends_nothing = false;
  std::atomic<int> refused_leases = 0;
  std::atomic<int> commits = 0;
  std::function<void(const MetaTransaction&)> before, after;  // each, done or not
  std::function<void()> gives_back;                           // a lease, which takes a while

 private:
  struct Lease final : public MetaLease {
    Lease(std::unique_ptr<MetaLease> lease, std::shared_ptr<std::atomic<bool>> ended,
          MetaWithLeases& meta)
        : lease_(std::move(lease)), ended_(std::move(ended)), meta_(meta) {}
    ~Lease() override {
      if (meta_.gives_back) meta_.gives_back();
    }
    int64_t id() const override { return lease_->id(); }
    Clock::time_point deadline() const override {
      return *ended_ ? Clock::time_point::min() : lease_->deadline();
    }
    const std::unique_ptr<MetaLease> lease_;
    const std::shared_ptr<std::atomic<bool>> ended_;
    MetaWithLeases& meta_;
  };
  MetaClient& meta_;
};

class MembershipTest : public ::testing::Test {
 protected:
  struct Node {
    Node(MetaClient& agreed, Wires& wires, const std::string& name, std::chrono::seconds lease)
        : meta(agreed), calls(wires, name), membership({name, lease}, meta, calls) {}
    MetaWithLeases meta;
    FakeCalls calls;
    std::atomic<int> changes = 0;
    Membership membership;
  };

  Node& make(const std::string& name, std::chrono::seconds lease = 60s) {
    nodes_.push_back(std::make_unique<Node>(*meta_, wires_, name, lease));
    return *nodes_.back();
  }
  void listen(const std::string& name) {
    std::lock_guard lock(wires_.mutex);
    wires_.up[name] = "at " + name;
  }
  Result<> join(Node& node, const std::string& store) {
    const std::string name = node.membership.self();
    PTC_TRY(node.membership.begin(store));
    listen(name);
    return node.membership.join("at " + name, [&] { ++node.changes; });
  }
  Node& joined(const std::string& name) {
    Node& node = make(name);
    const Result<> done = join(node, "store of " + name);
    EXPECT_TRUE(done.has_value()) << done.error().message();
    return node;
  }
  static void until(const std::function<bool()>& holds) {
    while (!holds()) std::this_thread::sleep_for(1ms);
  }
  /// Its key, as its lease has not ended yet. Nobody listens there.
  int64_t left_by_a_killed_one(const std::string& name) {
    MetaTransaction leaves;
    leaves.puts = {
        {"nodes/" + name,
         fmt::format(R"({{"address": "at {0}", "store": "store of {0}", "boot": "1"}})", name)}};
    const Result<int64_t> done = meta_->commit(leaves);
    EXPECT_TRUE(done.has_value());
    return done.has_value() ? done.value() : 0;
  }
  int64_t revision(const std::string& key) {
    const auto entry = meta_->get(key).value();
    return entry ? entry->revision : 0;
  }

  std::unique_ptr<MetaClient> meta_ = make_memory_meta();
  Wires wires_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

TEST_F(MembershipTest, WhoComesAndGoesIsSeenByAllWithTheRevisionThatDecisionsName) {
  Node& a = joined("a");
  const int alone = a.changes;
  Node& b = joined("b");
  until([&] { return a.membership.alive().size() == 2 && a.changes > alone; });
  EXPECT_THAT(b.membership.alive(), ElementsAre("a", "b"));
  EXPECT_EQ(a.membership.fence_of("b").revision, revision("nodes/b"));
  EXPECT_EQ(a.membership.fence()->revision, revision("nodes/a"));
  EXPECT_EQ(a.membership.ask("b", PeerMethod::kSpace, "").value(), "answer of b");
  const int both = a.changes;
  b.membership.leave();
  until([&] { return a.membership.alive().size() == 1 && a.changes > both; });
  EXPECT_EQ(a.membership.fence_of("b").revision, INT64_MAX);
  EXPECT_EQ(b.membership.fence()->revision, INT64_MAX) << "it decides nothing any more";
  until([&] {
    for (const Cluster::Seen& seen : a.membership.seen())
      if (seen.node == "b") return !seen.there;
    return false;
  });
}

TEST_F(MembershipTest, TwoThatComeAtOnceHaveMetEachOther) {
  constexpr int kNodes = 8;
  for (int i = 0; i < kNodes; ++i) make("w" + std::to_string(i));
  std::vector<std::jthread> threads;
  for (auto& node : nodes_)
    threads.emplace_back([&, node = node.get()] {
      const Result<> done = join(*node, "store of " + node->membership.self());
      EXPECT_TRUE(done.has_value()) << done.error().message();
    });
  threads.clear();
  std::set<std::pair<std::string, std::string>> met(wires_.met.begin(), wires_.met.end());
  for (auto& one : nodes_)
    for (auto& other : nodes_)
      if (one != other) {
        EXPECT_TRUE(met.contains({one->membership.self(), other->membership.self()}))
            << one->membership.self() << " and " << other->membership.self();
      }
}

/// Else many that come at once would all stand at the doors of the first few.
TEST_F(MembershipTest, ItMeetsThoseFirstThatAreBehindItsOwnName) {
  for (const char* name : {"a", "b", "x", "y"}) joined(name);
  Node& m = make("m");
  m.calls.at_once = 0;  // whoever waits meets them himself
  wires_.met.clear();
  ASSERT_TRUE(join(m, "store of m").has_value());
  std::vector<std::string> in_order;
  for (const auto& [from, to] : wires_.met)
    if (from == "m") in_order.push_back(to);
  EXPECT_THAT(in_order, ElementsAre("x", "y", "a", "b"));
}

/// Before its store is opened, when it says that it joins, and when it has.
TEST_F(MembershipTest, HoweverManyComeAtOnceEachWritesThreeTimes) {
  for (int i = 0; i < 12; ++i) make("w" + std::to_string(i));
  std::vector<std::jthread> threads;
  for (auto& node : nodes_)
    threads.emplace_back([&, node = node.get()] {
      EXPECT_TRUE(join(*node, "store of " + node->membership.self()).has_value());
    });
  threads.clear();
  for (auto& node : nodes_) {
    EXPECT_EQ(node->meta.commits, 3) << node->membership.self();
    EXPECT_EQ(revision("joining/" + node->membership.self()), 0);
    until([&] { return node->membership.alive().size() == nodes_.size(); });
  }
}

TEST_F(MembershipTest, WhoSaidEarlierThatItJoinsIsMetAndWaitedForAndWhoSaidSoLaterIsNot) {
  auto lease = meta_->lease(60s).value();
  const auto says = [&](const std::string& name) {
    MetaTransaction transaction;
    transaction.leased_puts = {{"joining/" + name, R"({"address": "at )" + name + "\"}"}};
    transaction.lease = lease.get();
    ASSERT_TRUE(meta_->commit(transaction).has_value());
  };
  says("early");
  listen("early");
  wires_.refused.insert({"early", "b"});  // but it may never be a member
  Node& b = make("b");
  b.meta.after = [&](const MetaTransaction& transaction) {
    if (!transaction.leased_puts.empty() && transaction.deletes.empty()) says("late");
  };
  std::jthread waits([&] {
    until([&] {
      std::lock_guard lock(wires_.mutex);
      return std::find(wires_.met.begin(), wires_.met.end(),
                       std::pair<std::string, std::string>("b", "early")) != wires_.met.end();
    });
    EXPECT_EQ(revision("nodes/b"), 0);
    MetaTransaction gives_up;
    gives_up.deletes = {"joining/early"};
    EXPECT_TRUE(meta_->commit(gives_up).has_value());
  });
  const Result<> done = join(b, "store of b");
  EXPECT_TRUE(done.has_value()) << done.error().message();
  EXPECT_NE(revision("joining/late"), 0);
  for (const auto& [from, to] : wires_.met) EXPECT_NE(to, "late");
}

TEST_F(MembershipTest, WhoIsNotLetInIsNoMemberAndSaysWhy) {
  joined("a");
  Node& b = make("b");
  wires_.refused.insert({"a", "b"});  // a does not believe b
  const Result<> refused = join(b, "store of b");
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kPermissionDenied);
  EXPECT_THAT(refused.error().message(), HasSubstr("this node, b at at b, is not let into"));
  EXPECT_EQ(revision("nodes/b"), 0);
}

TEST_F(MembershipTest, WhatAFormerLifePromisedIsForgottenBeforeTheStoreIsOpened) {
  const int64_t before = left_by_a_killed_one("a");
  Node& again = make("a");
  ASSERT_TRUE(again.membership.begin("store of a").has_value());
  EXPECT_EQ(revision("nodes/a"), 0);
  EXPECT_GT(revision(std::string(kMembership)), before);
}

TEST_F(MembershipTest, AFormerLifeWhoseLeaseEndsJustThenIsForgottenToo) {
  left_by_a_killed_one("a");
  Node& again = make("a");
  again.meta.before = [&](const MetaTransaction&) {  // it was read, and is gone
    again.meta.before = nullptr;
    MetaTransaction ends;
    ends.deletes = {"nodes/a"};
    ASSERT_TRUE(meta_->commit(ends).has_value());
  };
  const Result<> begun = again.membership.begin("store of a");
  EXPECT_TRUE(begun.has_value()) << begun.error().message();
}

TEST_F(MembershipTest, OneThatStillRunsIsNotPushedOut) {
  joined("a");
  Node& copy = make("a");
  const Result<> refused = copy.membership.begin("store of a");
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kAlreadyExists);
  EXPECT_NE(revision("nodes/a"), 0);
}

TEST_F(MembershipTest, WhoseLeaseMayHaveEndedDecidesNothingAndJoinsAgainUnderAnother) {
  Node& a = joined("a");
  joined("b");
  const int64_t before = revision("nodes/a");
  a.meta.lends_nothing = true;
  *a.meta.ended = true;
  EXPECT_EQ(a.membership.fence()->revision, INT64_MAX);
  EXPECT_THAT(a.membership.alive(), ::testing::Not(::testing::Contains("a")));
  a.meta.lends_nothing = false;
  until([&] { return a.membership.fence()->revision != INT64_MAX; });
  EXPECT_GT(revision("nodes/a"), before);
  EXPECT_EQ(a.membership.fence()->revision, revision("nodes/a"));
}

TEST_F(MembershipTest, ALeaseThatComesBackIsBelievedAndSaid) {
  Node& a = joined("a");
  const int64_t before = revision("nodes/a");
  const std::shared_ptr<std::atomic<bool>> ended = a.meta.ended;
  a.meta.lends_nothing = true;
  *ended = true;
  until([&] { return a.meta.refused_leases > 0; });
  const int changes = a.changes;
  *ended = false;
  until([&] { return a.changes > changes; });
  EXPECT_EQ(a.membership.fence()->revision, before);
}

TEST_F(MembershipTest, WhoseKeyWasTakenAwayJoinsAgain) {
  Node& a = joined("a");
  joined("b");
  const int64_t before = revision("nodes/a");
  a.meta.lends_nothing = true;
  MetaTransaction removes;
  removes.deletes = {"nodes/a"};
  ASSERT_TRUE(meta_->commit(removes).has_value());
  until([&] { return a.membership.fence()->revision == INT64_MAX; });
  a.meta.lends_nothing = false;
  until([&] { return a.membership.fence()->revision != INT64_MAX; });
  EXPECT_GT(revision("nodes/a"), before);
  EXPECT_EQ(a.membership.fence()->revision, revision("nodes/a"));
  EXPECT_THAT(a.membership.alive(), ElementsAre("a", "b"));
}

/// The watch tells neither: b came and went while what was compacted could not be heard.
TEST_F(MembershipTest, WhoWasReadAndWentUnheardIsGoneAfterTheGap) {
  Node& a = joined("a");
  a.meta.deaf = true;
  left_by_a_killed_one("b");
  listen("b");
  *a.meta.ended = true;
  until([&] { return a.membership.alive().size() == 2; });
  MetaTransaction ends;
  ends.deletes = {"nodes/b"};
  const int64_t gone = meta_->commit(ends).value();
  const MetaEvent gap{{}, std::nullopt, gone};
  for (const MetaClient::OnEvent& on_event : a.meta.on_events) on_event(gap);
  until([&] { return a.membership.alive() == std::vector<std::string>{"a"}; });
  EXPECT_EQ(a.membership.fence_of("b").revision, INT64_MAX);
}

TEST_F(MembershipTest, WhoJoinedBesideAnAttemptThatIsGivenUpIsCalledNoMore) {
  Node& a = joined("a");
  auto lease = meta_->lease(60s).value();
  MetaTransaction joins;
  joins.leased_puts = {{"joining/early", R"({"address": "at early"})"}};
  joins.lease = lease.get();
  ASSERT_TRUE(meta_->commit(joins).has_value());
  const auto called = [&] {
    std::lock_guard lock(wires_.mutex);
    return wires_.called.contains({"a", "early"});
  };
  const std::shared_ptr<std::atomic<bool>> ended = a.meta.ended;
  *ended = true;
  until(called);
  const int changes = a.changes;
  *ended = false;
  until([&] { return a.changes > changes; });
  EXPECT_FALSE(called());
}

TEST_F(MembershipTest, WhileALeaseIsGivenBackItIsSaidWhoIsThere) {
  Node& a = joined("a");
  auto lease = meta_->lease(60s).value();
  MetaTransaction joins;  // one that does not answer: a waits for it under the new lease
  joins.leased_puts = {{"joining/early", R"({"address": "at early"})"}};
  joins.lease = lease.get();
  ASSERT_TRUE(meta_->commit(joins).has_value());
  std::future<std::vector<std::string>> asked;
  std::atomic<bool> given_back = false, answered = false;
  a.meta.gives_back = [&] {
    asked = std::async(std::launch::async, [&] { return a.membership.alive(); });
    answered = asked.wait_for(2s) == std::future_status::ready;
    given_back = true;
  };
  const std::shared_ptr<std::atomic<bool>> ended = a.meta.ended;
  *ended = true;
  until([&] { return revision("joining/a") != 0; });
  const int changes = a.changes;
  *ended = false;
  until([&] { return a.changes > changes; });
  EXPECT_TRUE(given_back);
  EXPECT_TRUE(answered);
  a.meta.gives_back = nullptr;
}

TEST_F(MembershipTest, OfTwoCopiesThatReachOnlyTheAgreementStoreTheLaterStays) {
  Node& first = joined("a");
  joined("b");
  {
    std::lock_guard lock(wires_.mutex);
    wires_.up["a"] = "at the copy";
  }
  Node& copy = make("a");
  ASSERT_TRUE(is_ok(copy.membership.begin("store of a")));
  ASSERT_TRUE(is_ok(copy.membership.join("at the copy", [&] { ++copy.changes; })));
  until([&] { return first.membership.fence()->revision == INT64_MAX; });
  const int64_t joined = revision("nodes/a");
  std::this_thread::sleep_for(1500ms);  // it tries again after 0.5 s
  EXPECT_EQ(revision("nodes/a"), joined);
  EXPECT_EQ(copy.membership.fence()->revision, joined);
  copy.membership.leave();
  std::this_thread::sleep_for(700ms);
  EXPECT_EQ(first.membership.fence()->revision, INT64_MAX)
      << "what the copy has stored since it does not have";
}

}  // namespace
}  // namespace ptc
