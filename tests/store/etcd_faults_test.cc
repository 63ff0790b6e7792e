// A bad network between a client and one real etcd, compaction, and processes that stand still.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <random>

#include "etcd_server.h"
#include "event_log.h"
#include "expect_error.h"
#include "http_relay.h"

namespace ptc {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Fate = HttpRelay::Fate;

class EtcdFaults : public testing::Test {
 protected:
  void SetUp() override {
    if (shared_etcd() == nullptr) GTEST_SKIP() << "etcd is not installed";
    relay_ = std::make_unique<HttpRelay>(shared_etcd()->endpoints()[0]);
    direct_options_ = etcd_options(shared_etcd()->endpoints());
    options_ = direct_options_;
    options_.endpoints = {relay_->url()};
    direct_ = open_etcd_meta(direct_options_).value();
    meta_ = open_etcd_meta(options_).value();
  }
  /// The next request with `text` in it has that fate; the others pass.
  void next(const std::string& text, Fate fate) {
    relay_->decide([text, fate, used = false](const std::string& request) mutable {
      if (used || request.find(text) == std::string::npos) return Fate::kPass;
      used = true;
      return fate;
    });
  }

  std::unique_ptr<HttpRelay> relay_;
  EtcdOptions direct_options_, options_;
  std::unique_ptr<MetaClient> direct_;
  std::unique_ptr<MetaClient> meta_;  // through the relay
};

TEST_F(EtcdFaults, AChangeWhoseAnswerIsLostIsFoundDone) {
  int64_t first = meta_->commit({.puts = {{"a", "1"}}}).value();
  next("/v3/kv/txn", Fate::kLoseAnswer);
  auto second = meta_->commit({.compares = {{"a", first}}, .puts = {{"a", "2"}}});
  ASSERT_TRUE(is_ok(second));
  EXPECT_EQ(direct_->get("a").value()->revision, second.value());
  next("/v3/kv/txn", Fate::kLoseAnswer);
  EXPECT_TRUE(is_ok(meta_->commit({.compares = {{"a", second.value()}}, .deletes = {"a"}})));
}

TEST_F(EtcdFaults, AChangeThatIsLostIsMadeAgain) {
  int64_t first = meta_->commit({.puts = {{"a", "1"}}}).value();
  next("/v3/kv/txn", Fate::kLoseRequest);
  auto second = meta_->commit({.compares = {{"a", first}}, .puts = {{"a", "2"}}});
  ASSERT_TRUE(is_ok(second));
  EXPECT_EQ(direct_->get("a").value()->revision, second.value());
}

TEST_F(EtcdFaults, AChangeThatArrivesLateIsNotMadeTwice) {
  ASSERT_TRUE(is_ok(meta_->commit({.puts = {{"other", "1"}}})));
  next("/v3/kv/txn", Fate::kDeliverLate);
  int64_t done = meta_->commit({.puts = {{"a", "mine"}}}).value();
  int64_t later = direct_->commit({.compares = {{"a", done}}, .puts = {{"a", "theirs"}}}).value();
  relay_->deliver_late();
  EXPECT_EQ(direct_->get("a").value()->value, "theirs");
  EXPECT_EQ(direct_->get("a").value()->revision, later);
}

TEST_F(EtcdFaults, WhatCannotBeKnownIsSaid) {
  options_.patience = milliseconds(500);
  meta_ = open_etcd_meta(options_).value();
  ASSERT_TRUE(is_ok(meta_->commit({.puts = {{"a", "1"}}})));
  relay_->decide([&](const std::string& request) {
    if (request.find("/v3/kv/txn") == std::string::npos) return Fate::kPass;
    relay_->cut();
    return Fate::kDeliverLate;
  });
  EXPECT_TRUE(has_error(meta_->commit({.puts = {{"a", "2"}}}), Code::kInDoubt,
                        "may or may not have been done"));
  EXPECT_TRUE(has_error(meta_->settle(), Code::kUnavailable));
  EXPECT_TRUE(has_error(meta_->get("a"), Code::kUnavailable, relay_->url()));
  relay_->decide([](const std::string&) { return Fate::kPass; });
  relay_->cut(false);
  EXPECT_TRUE(is_ok(meta_->settle()));
  relay_->deliver_late();
  EXPECT_EQ(meta_->get("a").value()->value, "1");

  // Done after all, or not: from then on it stays as it is, and what fails later is in no doubt.
  relay_->decide([&](const std::string& request) {
    if (request.find("/v3/kv/txn") == std::string::npos) return Fate::kPass;
    relay_->cut();
    return Fate::kLoseAnswer;
  });
  EXPECT_TRUE(has_error(meta_->commit({.puts = {{"a", "3"}}}), Code::kInDoubt));
  relay_->decide([](const std::string&) { return Fate::kPass; });
  relay_->cut(false);
  EXPECT_TRUE(is_ok(meta_->settle()));
  const std::string settled = meta_->get("a").value()->value;
  EXPECT_TRUE(
      has_error(meta_->commit({.compares = {{"a", 1}}, .puts = {{"b", "2"}}}), Code::kConflict));
  std::this_thread::sleep_for(milliseconds(300));
  EXPECT_EQ(meta_->get("a").value()->value, settled);
}

/// An etcd that is full lets nobody forbid what is in doubt either: it stays so, for it may be done
/// once there is room.
TEST(EtcdFull, WhatIsInDoubtIsNotSettled) {
  if (!EtcdServers::installed()) GTEST_SKIP() << "etcd is not installed";
  const EtcdServers etcd(1);
  HttpRelay relay(etcd.endpoints()[0]);
  auto be_full = [&](const char* action) {
    ASSERT_TRUE(etcd.post("maintenance/alarm",
                          {{"action", action}, {"memberID", "0"}, {"alarm", "NOSPACE"}}));
  };
  EtcdOptions options = etcd_options({relay.url()});
  options.patience = milliseconds(500);
  std::unique_ptr<MetaClient> meta = open_etcd_meta(options).value();
  ASSERT_TRUE(is_ok(meta->commit({.puts = {{"a", "1"}}})));
  relay.decide([&](const std::string& request) {
    if (request.find("/v3/kv/txn") == std::string::npos) return Fate::kPass;
    relay.cut();
    return Fate::kDeliverLate;
  });
  EXPECT_TRUE(has_error(meta->commit({.puts = {{"a", "2"}}}), Code::kInDoubt));
  be_full("ACTIVATE");
  relay.decide([](const std::string&) { return Fate::kPass; });
  relay.cut(false);
  EXPECT_TRUE(has_error(meta->settle(), Code::kUnavailable, "cannot be settled yet"));
  EXPECT_TRUE(has_error(meta->settle(), Code::kUnavailable));
  be_full("DEACTIVATE");
  EXPECT_TRUE(is_ok(meta->settle()));
  relay.deliver_late();
  EXPECT_EQ(meta->get("a").value()->value, "1");
}

/// Threads count a number up through a network that loses what it likes: nothing is done twice or
/// lost.
TEST_F(EtcdFaults, HistoryIsTotalOverABadNetwork) {
  const char* given = std::getenv("PTC_SEED");
  uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "PTC_SEED=" << seed << "\n";
  const char* rounds = std::getenv("PTC_ROUNDS");
  const int kThreads = 3, kSteps = rounds ? std::atoi(rounds) : 20;

  EventLog log;
  auto handle = meta_->watch("n", log.collect()).value();
  ASSERT_TRUE(is_ok(meta_->commit({.puts = {{"n", "0"}}})));
  relay_->decide([random = std::mt19937_64(seed)](const std::string&) mutable {
    return random() % 4 != 0 ? Fate::kPass : static_cast<Fate>(1 + random() % 3);
  });
  std::atomic<bool> stop = false;
  std::thread late([&] {
    while (!stop) {
      relay_->deliver_late();
      std::this_thread::sleep_for(milliseconds(20));
    }
  });
  std::vector<std::thread> threads;
  std::atomic<int> failed = 0;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int done = 0; done < kSteps && failed == 0;) {
        auto entry = meta_->get("n");
        if (!entry) continue;
        int next = std::stoi(entry.value()->value) + 1;
        auto committed = meta_->commit(
            {.compares = {{"n", entry.value()->revision}}, .puts = {{"n", std::to_string(next)}}});
        if (committed) ++done;
        else if (committed.error().code() != Code::kConflict) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  late.join();
  relay_->decide([](const std::string&) { return Fate::kPass; });
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(direct_->get("n").value()->value, std::to_string(kThreads * kSteps));
  std::vector<std::string> events = log.wait_for(static_cast<size_t>(1 + kThreads * kSteps));
  ASSERT_EQ(events.size(), static_cast<size_t>(1 + kThreads * kSteps));
  for (size_t i = 0; i < events.size(); ++i)
    EXPECT_TRUE(events[i].starts_with(fmt::format("n={}@", i))) << events[i];
}

TEST_F(EtcdFaults, AWatchGoesOnWhereItBroke) {
  EventLog log;
  auto handle = meta_->watch("", log.collect()).value();
  int64_t one = meta_->commit({.puts = {{"a", "1"}}}).value();
  ASSERT_EQ(log.wait_for(1).size(), 1u);
  relay_->cut();
  int64_t two = direct_->commit({.puts = {{"a", "2"}}}).value();
  int64_t three = direct_->commit({.deletes = {"a"}}).value();
  int64_t four = direct_->commit({.puts = {{"a", "4"}, {"b", "4"}}}).value();
  relay_->cut(false);
  EXPECT_EQ(log.wait_for(5),
            (std::vector<std::string>{fmt::format("a=1@{}", one), fmt::format("a=2@{}", two),
                                      fmt::format("-a@{}", three), fmt::format("a=4@{}", four),
                                      fmt::format("b=4@{}", four)}));
}

TEST_F(EtcdFaults, AWatchSurvivesCompaction) {
  ASSERT_TRUE(is_ok(meta_->commit({.puts = {{"same", "0"}, {"gone", "0"}, {"changed", "0"}}})));
  EventLog log;
  auto handle = meta_->watch("", log.collect()).value();
  int64_t marks = meta_->commit({.puts = {{"same", "1"}}}).value();
  ASSERT_EQ(log.wait_for(1).size(), 1u);
  relay_->cut();
  // Until the stream is certainly gone.
  std::this_thread::sleep_for(milliseconds(200));
  for (int i = 1; i <= 3; ++i)
    ASSERT_TRUE(
        is_ok(direct_->commit({.puts = {{"changed", std::to_string(i)}, {"fleeting", "x"}}})));
  int64_t last = direct_->get("changed").value()->revision;
  int64_t erased = direct_->commit({.deletes = {"gone", "fleeting"}}).value();
  int64_t made = direct_->commit({.puts = {{"new", "1"}}}).value();
  shared_etcd()->compact();
  relay_->cut(false);
  std::vector<std::string> events = log.wait_for(5);
  ASSERT_EQ(events.size(), 5u);
  EXPECT_EQ(events[0], fmt::format("same=1@{}", marks));
  EXPECT_EQ(events[1], fmt::format("changed=3@{}", last));
  EXPECT_EQ(events[2], fmt::format("new=1@{}", made));
  ASSERT_TRUE(events[3].starts_with("-gone@")) << events[3];
  EXPECT_GE(std::stoll(events[3].substr(6)), erased);
  EXPECT_EQ(events[4], "-" + events[3].substr(5)) << "a gap: \"fleeting\" was never told";
  int64_t after = direct_->commit({.puts = {{"gone", "back"}}}).value();
  EXPECT_EQ(log.wait_for(6).at(5), fmt::format("gone=back@{}", after));
}

TEST_F(EtcdFaults, AListingSurvivesCompactionBetweenItsPages) {
  MetaTransaction keys;
  for (int i = 0; i < 60; ++i) keys.puts.emplace_back(fmt::format("k{:02}", i), "old");
  ASSERT_TRUE(is_ok(direct_->commit(keys)));
  bool compacted = false;
  relay_->decide([&](const std::string& request) {
    if (!compacted && request.find("\"revision\"") != std::string::npos) {
      compacted = true;
      EXPECT_TRUE(is_ok(direct_->commit({.puts = {{"k00", "new"}}})));
      shared_etcd()->compact();
    }
    return Fate::kPass;
  });
  std::vector<MetaEntry> entries = meta_->list("k").value();
  EXPECT_TRUE(compacted);
  ASSERT_EQ(entries.size(), 60u);
  EXPECT_EQ(entries[0].value, "new");
  EXPECT_EQ(entries[59].key, "k59");
}

TEST_F(EtcdFaults, ALeaseOutOfReachSaysSoInTimeAndIsNoMore) {
  auto lease = meta_->lease(seconds(2)).value();
  ASSERT_TRUE(is_ok(meta_->commit({.leased_puts = {{"node", "me"}}, .lease = lease.get()})));
  std::this_thread::sleep_for(seconds(3));
  EXPECT_TRUE(lease->alive());  // renewed meanwhile
  EXPECT_TRUE(direct_->get("node").value().has_value());
  relay_->cut();
  auto deadline = lease->deadline();
  while (direct_->get("node").value().has_value()) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_GT(MetaLease::Clock::now(), lease->deadline());
  EXPECT_LE(lease->deadline(), deadline + seconds(2));
  EXPECT_FALSE(lease->alive());
  relay_->cut(false);
  EXPECT_TRUE(has_error(meta_->commit({.leased_puts = {{"node", "me"}}, .lease = lease.get()}),
                        Code::kConflict, "taken for dead"));
  EXPECT_TRUE(is_ok(meta_->commit({.puts = {{"other", "x"}}})));
  auto again = meta_->lease(seconds(2)).value();
  EXPECT_TRUE(is_ok(meta_->commit({.leased_puts = {{"node", "me"}}, .lease = again.get()})));
}

/// A process that is stopped for longer than its lease knows so as soon as it goes on.
TEST_F(EtcdFaults, AStoppedProcessKnowsThatItsLeaseIsOver) {
  meta_.reset();
  direct_.reset();
  relay_.reset();  // no thread is left, as fork wants it
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  pid_t child = ::fork();
  if (child == 0) {
    auto meta = open_etcd_meta(direct_options_).value();
    // Long enough for etcd on a busy machine to renew it.
    auto lease = meta->lease(seconds(6)).value();
    int64_t joined = meta->commit({.leased_puts = {{"node", "me"}}, .lease = lease.get()}).value();
    // Says whether it is alive until it is not any more.
    for (;;) {
      auto deadline = lease->deadline();
      if (MetaLease::Clock::now() >= deadline) break;
      PTC_CHECK(::write(pipe_ends[1], &deadline, sizeof deadline) == sizeof deadline);
      std::this_thread::sleep_for(milliseconds(1));
    }
    bool refused = has_error(meta->commit({.leased_puts = {{"x", "x"}}, .lease = lease.get()}),
                             Code::kConflict) &&
                   has_error(meta->commit({.compares = {{"node", joined}}, .puts = {{"x", "x"}}}),
                             Code::kConflict);
    ::_exit(refused ? 0 : 1);
  }
  ::close(pipe_ends[1]);
  direct_ = open_etcd_meta(direct_options_).value();
  MetaLease::Clock::time_point deadline, last_deadline;
  auto read = [&] { return ::read(pipe_ends[0], &deadline, sizeof deadline) == sizeof deadline; };
  ASSERT_TRUE(read());
  for (auto first = deadline; deadline < first + seconds(1);) ASSERT_TRUE(read());  // renewed
  ::kill(child, SIGSTOP);
  while (direct_->get("node").value().has_value()) std::this_thread::sleep_for(milliseconds(10));
  auto gone = MetaLease::Clock::now();
  ::kill(child, SIGCONT);
  while (read()) last_deadline = deadline;
  EXPECT_LT(last_deadline, gone);
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(pipe_ends[0]);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(direct_->get("x").value(), std::nullopt);
}

TEST(EtcdSetBack, NothingIsWrittenOnceItsDataAreLost) {
  if (!EtcdServers::installed()) GTEST_SKIP() << "etcd is not installed";
  EtcdServers servers(1);
  EtcdOptions options = etcd_options(servers.endpoints());
  options.patience = milliseconds(1000);
  auto meta = open_etcd_meta(options).value();
  int64_t last = 0;
  for (const char* text : {"1", "2", "3"}) last = meta->commit({.puts = {{"a", text}}}).value();
  EXPECT_FALSE(meta->set_back());
  servers.signal(0, SIGKILL);
  servers.lose_data(0);
  servers.start(0);
  servers.wait_until_serving(0);
  EXPECT_FALSE(meta->commit({.puts = {{"b", "1"}}}).has_value());  // its connection is gone
  EXPECT_TRUE(has_error(meta->commit({.puts = {{"b", "1"}}}), Code::kUnavailable,
                        "went back from revision"));
  ASSERT_TRUE(meta->set_back());
  EXPECT_TRUE(has_error(meta->list(""), Code::kUnavailable, "went back from revision"));
  auto anew = open_etcd_meta(options).value();  // it knows of no other time
  EXPECT_FALSE(anew->get("b").value());
  EXPECT_LT(anew->commit({}).value(), last);
}

}  // namespace
}  // namespace ptc
