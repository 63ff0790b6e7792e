// What every MetaClient must do. A backend names a way to make an empty client, or null, where what
// it needs is not installed:
//
//   INSTANTIATE_TEST_SUITE_P(Memory, MetaConformance, testing::Values(MetaBackend{"memory",
//   make}));
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "event_log.h"
#include "expect_error.h"
#include "store/meta/meta_client.h"

namespace ptc {

struct MetaBackend {
  std::string name;
  std::function<std::unique_ptr<MetaClient>()> make;
  friend void PrintTo(const MetaBackend& backend, std::ostream* out) { *out << backend.name; }
};

class MetaConformance : public testing::TestWithParam<MetaBackend> {
 protected:
  void SetUp() override {
    if (meta_ == nullptr) GTEST_SKIP() << GetParam().name << " is not installed";
  }
  int64_t put(const std::string& key, const std::string& value) {
    return meta_->commit({.puts = {{key, value}}}).value();
  }
  int64_t erase(const std::string& key) { return meta_->commit({.deletes = {key}}).value(); }
  std::string at(int64_t revision) { return "@" + std::to_string(revision); }

  std::unique_ptr<MetaClient> meta_ = GetParam().make();
};

TEST_P(MetaConformance, GetsWhatWasPut) {
  EXPECT_EQ(meta_->get("a").value(), std::nullopt);
  int64_t first = put("a", "1");
  int64_t second = put("b", std::string("\0\xff", 2));
  EXPECT_GT(first, 0);
  EXPECT_GT(second, first);
  EXPECT_EQ(meta_->get("a").value()->value, "1");
  EXPECT_EQ(meta_->get("a").value()->revision, first);
  EXPECT_EQ(meta_->get("b").value()->value, std::string("\0\xff", 2));
  int64_t third = put("a", "");
  EXPECT_EQ(meta_->get("a").value()->value, "");
  EXPECT_EQ(meta_->get("a").value()->revision, third);
  erase("a");
  EXPECT_EQ(meta_->get("a").value(), std::nullopt);
}

TEST_P(MetaConformance, SaysWhatHasChangedAndHowManyThereAre) {
  put("b", "1");
  put("a/1", "1");
  put("a/2", "1");
  const int64_t since = meta_->get("a/2").value()->revision;
  put("a/2", "2");
  put("a/3", "1");
  put("b", "2");
  erase("a/1");
  const auto changes = meta_->changes("a/", since);
  ASSERT_TRUE(changes.has_value()) << changes.error().message();
  if (!changes.value()) return;  // it lists all
  EXPECT_EQ(changes.value()->keys, 2u);
  std::vector<std::string> found;
  for (const MetaEntry& entry : changes.value()->entries) {
    EXPECT_EQ(entry.revision, meta_->get(entry.key).value()->revision);
    found.push_back(entry.key + "=" + entry.value);
  }
  EXPECT_EQ(found, (std::vector<std::string>{"a/2=2", "a/3=1"}));
  const auto none = meta_->changes("a/", meta_->get("b").value()->revision + 1).value();
  ASSERT_TRUE(none.has_value());
  EXPECT_EQ(none->keys, 2u);
  EXPECT_TRUE(none->entries.empty());
  EXPECT_EQ(meta_->changes("c", 0).value()->keys, 0u);
}

TEST_P(MetaConformance, ListsAPrefixInByteOrder) {
  for (const char* key : {"b", "a/2", "a/1", "a", "a0", "a/\xff", "\xff", "\xff\xff", "a/10"})
    put(key, key);
  auto keys = [&](std::string_view prefix) {
    std::vector<std::string> found;
    std::vector<MetaEntry> entries = meta_->list(prefix).value();
    for (const MetaEntry& entry : entries) {
      EXPECT_EQ(entry.value, entry.key);
      found.push_back(entry.key);
    }
    return found;
  };
  using Keys = std::vector<std::string>;
  EXPECT_EQ(keys("a/"), (Keys{"a/1", "a/10", "a/2", "a/\xff"}));
  EXPECT_EQ(keys("a"), (Keys{"a", "a/1", "a/10", "a/2", "a/\xff", "a0"}));
  EXPECT_EQ(keys("\xff"), (Keys{"\xff", "\xff\xff"}));
  EXPECT_EQ(keys("").size(), 9u);
  EXPECT_EQ(keys("c"), Keys{});
}

TEST_P(MetaConformance, TransactionsAreAllOrNothing) {
  int64_t revision = put("a", "1");
  EXPECT_TRUE(has_error(
      meta_->commit({.compares = {{"a", revision}, {"b", 7}}, .puts = {{"a", "2"}, {"c", "3"}}}),
      Code::kConflict, "'b' is absent, not at revision 7"));
  EXPECT_EQ(meta_->get("a").value()->value, "1");
  EXPECT_EQ(meta_->get("c").value(), std::nullopt);
  auto next = meta_->commit({.compares = {{"a", revision}, {"b", 0}},
                             .puts = {{"b", "2"}, {"c", "3"}},
                             .deletes = {"a", "none"}});
  ASSERT_TRUE(is_ok(next));
  EXPECT_EQ(meta_->get("a").value(), std::nullopt);
  EXPECT_EQ(meta_->get("b").value()->revision, next.value());
  EXPECT_EQ(meta_->get("c").value()->revision, next.value());
  EXPECT_TRUE(has_error(meta_->commit({.compares = {{"b", 0}}}), Code::kConflict));
}

TEST_P(MetaConformance, ADeletedKeyComesBackWithANewRevision) {
  int64_t first = put("a", "1");
  erase("a");
  EXPECT_GT(put("a", "1"), first);
  EXPECT_TRUE(has_error(meta_->commit({.compares = {{"a", first}}}), Code::kConflict));
}

TEST_P(MetaConformance, NothingToChangeKeepsTheRevisionOfAKey) {
  int64_t revision = put("a", "1");
  EXPECT_GE(meta_->commit({}).value(), revision);
  EXPECT_GE(meta_->commit({.compares = {{"a", revision}}}).value(), revision);
  EXPECT_GE(erase("none"), revision);
  EXPECT_EQ(meta_->get("a").value()->revision, revision);
}

TEST_P(MetaConformance, RefusesBadTransactions) {
  auto refused = [&](const MetaTransaction& transaction) {
    return has_error(meta_->commit(transaction), Code::kInvalidArgument);
  };
  EXPECT_TRUE(refused({.puts = {{"", "x"}}}));
  EXPECT_TRUE(refused({.puts = {{std::string(5000, 'k'), "x"}}}));
  EXPECT_TRUE(refused({.puts = {{"a", std::string((1 << 20) + 1, 'x')}}}));
  EXPECT_TRUE(refused({.puts = {{"a", "1"}, {"a", "2"}}}));
  EXPECT_TRUE(refused({.puts = {{"a", "1"}}, .deletes = {"a"}}));
  EXPECT_TRUE(refused({.leased_puts = {{"a", "1"}}}));
  auto lease = meta_->lease(std::chrono::seconds(10)).value();
  EXPECT_TRUE(refused({.puts = {{"a", "1"}}, .leased_puts = {{"a", "2"}}, .lease = lease.get()}));
  EXPECT_TRUE(is_ok(meta_->commit({.puts = {{"a", std::string(1 << 20, 'x')}}})));
}

/// etcd's limits hold everywhere: what passes on one node passes in a cluster.
TEST_P(MetaConformance, ATransactionHasASize) {
  auto refused = [&](const MetaTransaction& transaction, std::string_view part) {
    return has_error(meta_->commit(transaction), Code::kInvalidArgument, part);
  };
  MetaTransaction most;
  for (size_t i = 0; i < kMaxTransactionKeys; ++i) {
    most.puts.emplace_back(std::to_string(i), "x");
    most.compares.push_back({std::to_string(i), 0});
  }
  MetaTransaction more = most;
  more.puts.emplace_back("one", "x");
  EXPECT_TRUE(refused(more, "101 keys"));
  more = most;
  more.deletes = {"one"};
  EXPECT_TRUE(refused(more, "101 keys"));
  more = most;
  more.compares.push_back({"one", 0});
  EXPECT_TRUE(refused(more, "compares 101"));
  EXPECT_TRUE(is_ok(meta_->commit(most)));
  const std::string half(kMaxTransactionBytes / 2 - 1, 'x');
  EXPECT_TRUE(is_ok(meta_->commit({.puts = {{"a", half}, {"b", half}}})));
  EXPECT_TRUE(refused({.puts = {{"a", half}, {"b", half + "x"}}}, "too large"));
  MetaTransaction keys;  // of compares, too
  for (size_t i = 0; i < kMaxTransactionKeys; ++i)
    keys.compares.push_back({std::to_string(i) + std::string(4000, 'k'), 0});
  EXPECT_TRUE(is_ok(meta_->commit(keys)));
  keys.puts = {{"a", half}};
  EXPECT_TRUE(refused(keys, "too large"));
}

TEST_P(MetaConformance, KeysUnderALeaseGoWithIt) {
  EXPECT_TRUE(has_error(meta_->lease(std::chrono::seconds(0)), Code::kInvalidArgument));
  auto lease = meta_->lease(std::chrono::seconds(5)).value();
  auto other = meta_->lease(std::chrono::seconds(5)).value();
  EXPECT_NE(lease->id(), other->id());
  EXPECT_TRUE(lease->alive());
  EXPECT_GT(lease->deadline(), MetaLease::Clock::now() + std::chrono::seconds(2));
  int64_t joined = meta_
                       ->commit({.compares = {{"nodes/1", 0}},
                                 .puts = {{"epoch", "1"}},
                                 .leased_puts = {{"nodes/1", "here"}, {"nodes/kept", "x"}},
                                 .lease = lease.get()})
                       .value();
  EXPECT_EQ(meta_->get("nodes/1").value()->revision, joined);
  EXPECT_TRUE(is_ok(meta_->commit({.leased_puts = {{"nodes/2", "too"}}, .lease = other.get()})));
  put("nodes/kept", "without a lease");
  EXPECT_TRUE(is_ok(meta_->commit({.compares = {{"nodes/1", joined}}, .puts = {{"epoch", "2"}}})));

  EventLog log;
  auto handle = meta_->watch("nodes/", log.collect()).value();
  lease.reset();
  std::vector<std::string> events = log.wait_for(1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(events[0].starts_with("-nodes/1@")) << events[0];
  EXPECT_EQ(meta_->get("nodes/1").value(), std::nullopt);
  EXPECT_EQ(meta_->get("nodes/2").value()->value, "too");
  EXPECT_EQ(meta_->get("nodes/kept").value()->value, "without a lease");
  EXPECT_TRUE(
      has_error(meta_->commit({.compares = {{"nodes/1", joined}}, .puts = {{"epoch", "3"}}}),
                Code::kConflict));
  EXPECT_EQ(meta_->get("epoch").value()->value, "2");
}

TEST_P(MetaConformance, WatchersSeeTheirPrefixInOrder) {
  put("jobs/a", "before");
  EventLog log;
  auto handle = meta_->watch("jobs/", log.collect()).value();
  int64_t one = put("jobs/a", "1");
  put("other", "x");
  int64_t two =
      meta_->commit({.puts = {{"jobs/b", "2"}}, .deletes = {"jobs/a", "jobs/none"}}).value();
  EXPECT_EQ(log.wait_for(3), (std::vector<std::string>{"jobs/a=1" + at(one), "jobs/b=2" + at(two),
                                                       "-jobs/a" + at(two)}));
}

TEST_P(MetaConformance, WatchersMayReadAndAreNotCalledAfterTheirHandleWent) {
  EventLog log, other;
  std::string read;
  auto reader = meta_
                    ->watch("",
                            [&](const MetaEvent& event) {
                              read = meta_->get(event.key).value()->value;
                              log.collect()(event);
                            })
                    .value();
  put("a", "1");
  ASSERT_EQ(log.wait_for(1).size(), 1u);
  EXPECT_EQ(read, "1");
  reader.reset();
  auto second = meta_->watch("", other.collect()).value();
  put("a", "2");
  EXPECT_EQ(other.wait_for(1).size(), 1u);
  EXPECT_EQ(log.wait_for(1).size(), 1u);
}

TEST_P(MetaConformance, DestroyingAHandleWaitsForARunningCall) {
  std::mutex mutex;
  std::condition_variable changed;
  bool entered = false;
  bool left = false;
  auto handle = meta_
                    ->watch("",
                            [&](const MetaEvent&) {
                              {
                                std::lock_guard lock(mutex);
                                entered = true;
                              }
                              changed.notify_all();
                              std::this_thread::sleep_for(std::chrono::milliseconds(50));
                              left = true;
                            })
                    .value();
  put("a", "1");
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return entered; });
  }
  handle.reset();
  EXPECT_TRUE(left);
}

TEST_P(MetaConformance, AHandleMayOutliveItsClient) {
  auto handle = meta_->watch("", [](const MetaEvent&) {}).value();
  put("a", "1");
  meta_.reset();
  handle.reset();
}

TEST_P(MetaConformance, CountersOfRacingThreadsLoseNothing) {
  constexpr int kThreads = 4, kSteps = 25;
  EventLog log;
  auto handle = meta_->watch("n", log.collect()).value();
  put("n", "0");
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this] {
      for (int done = 0; done < kSteps;) {
        MetaEntry entry = meta_->get("n").value().value();
        auto committed =
            meta_->commit({.compares = {{"n", entry.revision}},
                           .puts = {{"n", std::to_string(std::stoi(entry.value) + 1)}}});
        if (committed) {
          ++done;
        } else {
          ASSERT_EQ(committed.error().code(), Code::kConflict);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(meta_->get("n").value()->value, std::to_string(kThreads * kSteps));
  std::vector<std::string> events = log.wait_for(1 + kThreads * kSteps);
  ASSERT_EQ(events.size(), size_t{1 + kThreads * kSteps});
  for (size_t i = 0; i < events.size(); ++i)
    EXPECT_TRUE(events[i].starts_with("n=" + std::to_string(i) + "@")) << events[i];
}

}  // namespace ptc
