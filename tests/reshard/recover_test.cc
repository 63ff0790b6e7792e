// What was agreed is made anew of what stores have seen.
#include "reshard/node/recover.h"

#include "reshard/cluster/tombstones.h"
#include "reshard/node/agreed_facts.h"
#include "tests/reshard/membership_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// How often the others were started a store knows, too, and of all that are given the one that has
/// seen most is right.
TEST_F(Membership, WhatIsMadeAnewKnowsHowOftenEachStoreWasStarted) {
  LocalCluster cluster(2);
  ASSERT_TRUE(cluster.store(0).create_job("llama").has_value());
  cluster.stop(1);
  cluster.start(1);
  const std::string other = read_store_identity(cluster.directory(1)).value()->store;
  auto starts_seen = [&] {
    auto facts = AgreedFacts::open(agreed_facts_path(cluster.directory(0)), true);
    const auto seen = facts.value().entries().find(store_key(other));
    return seen == facts.value().entries().end() ? 0 : registered_store_of(seen->second).starts;
  };
  EXPECT_TRUE(becomes([&] { return starts_seen() == 2; })) << starts_seen();
  cluster.stop(0);
  cluster.stop(1);
  cluster.start(1);
  cluster.stop(1);
  auto starts_after = [&](const std::vector<std::string>& directories) {
    std::vector<SeenStore> stores;
    for (const std::string& directory : directories)
      stores.push_back(look_at_store(directory).value());
    std::unique_ptr<MetaClient> anew = make_memory_meta();
    EXPECT_TRUE(recover(stores, 0, *anew).has_value());
    const std::vector<RegisteredStore> registered = read_stores(*anew).value();
    EXPECT_EQ(registered.size(), 2u);
    const auto one = std::find_if(registered.begin(), registered.end(),
                                  [&](const auto& store) { return store.store == other; });
    return one == registered.end() ? 0 : one->starts;
  };
  EXPECT_EQ(starts_after({cluster.directory(0)}), 2);
  EXPECT_EQ(starts_after({cluster.directory(0), cluster.directory(1)}), 3);
}

/// w0 was away when the store of w2 was replaced.
TEST_F(Membership, WhatIsMadeAnewKnowsNoStoreThatWasReplaced) {
  LocalCluster cluster(3);
  ASSERT_TRUE(cluster.store(0).create_job("llama").has_value());
  const std::string replaced = read_store_identity(cluster.directory(2)).value()->store;
  const auto knows = [&](unsigned node, const std::string& store) {
    auto facts = AgreedFacts::open(agreed_facts_path(cluster.directory(node)), true);
    return facts.has_value() && facts.value().entries().contains(store_key(store));
  };
  ASSERT_TRUE(becomes([&] { return knows(0, replaced); }));
  cluster.stop(0);
  cluster.stop(2);
  for (const auto& entry : fs::directory_iterator(cluster.directory(2)))
    fs::remove_all(entry.path());
  // It is there before it registers, as a node is whose lease has not ended.
  cluster.start(2);
  const std::string now = read_store_identity(cluster.directory(2)).value()->store;
  ASSERT_TRUE(becomes([&] { return !cluster.meta().get(store_key(replaced)).value(); }));
  ASSERT_TRUE(cluster.store(1).create_job("mistral").has_value());
  ASSERT_TRUE(becomes([&] { return knows(1, now) && !knows(1, replaced); }));
  for (unsigned node : {1u, 2u}) cluster.stop(node);
  std::vector<SeenStore> stores;
  for (unsigned node : {0u, 1u}) stores.push_back(look_at_store(cluster.directory(node)).value());
  const std::unique_ptr<MetaClient> anew = make_memory_meta();
  const Result<RecoverReport> report = look_at_all(stores, *anew);
  ASSERT_TRUE(report.has_value()) << report.error().message();
  EXPECT_EQ(report.value().newest, 1u);
  ASSERT_EQ(report.value().others.size(), 1u);
  EXPECT_EQ(report.value().others[0].store, now);
  ASSERT_TRUE(recover(stores, 1, *anew).has_value());
  std::set<std::string> registered;
  const std::vector<RegisteredStore> all = read_stores(*anew).value();
  for (const RegisteredStore& store : all) registered.insert(store.store);
  EXPECT_EQ(registered,
            (std::set<std::string>{stores[0].identity.store, stores[1].identity.store, now}));
}

/// A store that has seen something agreed, and lies in its directory.
class Seen {
 public:
  explicit Seen(const std::string& node, int64_t history = 1) {
    StoreIdentity identity;
    identity.store = node + "-store";
    identity.node = node;
    identity.cluster = "0123456789abcdef";
    identity.cluster_name = "ptcfs";
    identity.history = history;
    identity.starts = 1;
    EXPECT_TRUE(write_store_identity(dir_.path(), identity).has_value());
  }
  Seen& job(const std::string& name, const std::string& id, int64_t revision) {
    return put("jobs/" + name, fmt::format(R"({{"id": "{}"}})", id), revision);
  }
  Seen& checkpoint(const std::string& job, const std::string& name, int64_t revision) {
    return put(fmt::format("jobs/{}/checkpoints/{}", job, name),
               fmt::format(R"({{"id": "{}-{}", "stored": "stored.json"}})", job, name), revision);
  }
  Seen& removed(const std::string& job_id, int64_t revision) {
    return put(removed_job_key(job_id), removed_job_text("name", true), revision);
  }
  Seen& put(const std::string& key, const std::string& value, int64_t revision) {
    (key.starts_with("jobs/") ? jobs_ : removed_).push_back({key, value, revision});
    latest_ = std::max(latest_, revision);
    return *this;
  }
  SeenStore look() const {
    AgreedFacts facts = AgreedFacts::open(agreed_facts_path(dir_.path())).value();
    facts.take("jobs/", jobs_);
    facts.take(kTombstones, removed_);
    facts.set_seen(latest_);
    EXPECT_TRUE(facts.write().has_value());
    return look_at_store(dir_.path()).value();
  }

 private:
  TempDir dir_;
  std::vector<MetaEntry> jobs_, removed_;
  int64_t latest_ = 0;
};

using LeftOut = std::vector<RecoverReport::LeftOut>;

/// etcd was set back to revision 5, and w2, which had seen nothing of what came then, went on.
TEST_F(Membership, WhereViewsHavePartedEachChoiceSaysWhatItLeavesOut) {
  Seen w0("w0"), w1("w1"), w2("w2");
  for (Seen* one : {&w0, &w1})
    one->job("old", "a", 3)
        .job("both", "b", 4)
        .job("acked", "c", 6)
        .checkpoint("acked", "base", 7)
        .checkpoint("old", "next", 8)
        .put("jobs/both/layout", "2", 9)
        .put("jobs/both/sequence", "{}", 9);
  w1.job("last", "d", 10);
  w2.job("both", "b", 4).job("fresh", "e", 6).job("acked", "f", 11);
  w2.put("jobs/both/layout", "3", 12).removed("a", 13);
  std::vector<SeenStore> stores;
  for (const Seen* one : {&w0, &w1, &w2}) stores.push_back(one->look());
  Result<RecoverReport> report = look_at_all(stores, *other_);
  ASSERT_TRUE(report.has_value()) << report.error().message();
  EXPECT_EQ(report.value().newest, 2u);
  EXPECT_EQ(report.value().parted, 6);
  EXPECT_EQ(report.value().left_out[0], (LeftOut{{"changes of job both (layout)", {"w2"}},
                                                 {"job acked, in whose place is another", {"w2"}},
                                                 {"job fresh", {"w2"}},
                                                 {"job last", {"w1"}},
                                                 {"that job old was removed", {"w2"}}}));
  EXPECT_EQ(report.value().left_out[2],
            (LeftOut{{"changes of job both (layout)", {"w0", "w1"}},
                     {"job acked with 1 checkpoint, in whose place is another", {"w0", "w1"}},
                     {"job last", {"w1"}}}));
  const auto why = [&](const std::string& node) {
    const Result<RecoverReport> from = look_at_all(stores, *other_, node);
    return from.has_error() ? from.error().message() : "";
  };
  EXPECT_THAT(why("w7"), HasSubstr("none of these stores is of node w7"));
  report = look_at_all(stores, *other_, "w0");
  ASSERT_TRUE(report.has_value()) << report.error().message();
  EXPECT_EQ(report.value().chosen, 0u);
  EXPECT_EQ(report.value().jobs, (std::vector<std::string>{"acked", "both", "old"}));
  ASSERT_TRUE(other_->commit({.puts = {{"jobs/fresh", R"({"id": "e"})"}}}).has_value());
  EXPECT_EQ(look_at_all(stores, *other_, "w0").value().gone, std::vector<std::string>{"job fresh"});
  ASSERT_TRUE(recover(stores, 0, *other_).has_value());
  EXPECT_EQ(job_id_of(other_->get("jobs/acked").value()->value), "c");
  EXPECT_FALSE(other_->get("jobs/fresh").value());
  // Of a history that was given up nobody is chosen, but told what it knows.
  stores.push_back(Seen("w3", 0).job("lost", "l", 90).look());
  EXPECT_THAT(why("w3"),
              HasSubstr("the store of node w3 is of history 0, and that of node w2 of 1"));
  EXPECT_THAT(look_at_all(stores, *make_memory_meta()).value().left_out[2],
              ::testing::Contains(RecoverReport::LeftOut{"job lost", {"w3"}}));
}

TEST_F(Membership, WhoHasSeenLessHasNotPartedFromTheOthers) {
  Seen w0("w0"), w1("w1");
  w0.job("old", "a", 3).job("gone", "g", 4).checkpoint("gone", "base", 5);
  w0.put("jobs/old/in_force", "1", 6).put("jobs/old/dataset/head", "1", 7);
  w0.checkpoint("old", "first", 8);
  w1.job("old", "a", 3).put("jobs/old/in_force", "2", 9).removed("g", 10);
  w1.put(removed_checkpoint_key("old-first"), "{}", 11).job("later", "l", 12);
  std::vector<SeenStore> stores;
  for (const Seen* one : {&w0, &w1}) stores.push_back(one->look());
  const Result<RecoverReport> report = look_at_all(stores, *other_);
  ASSERT_TRUE(report.has_value()) << report.error().message();
  EXPECT_EQ(report.value().parted, 0);
  EXPECT_EQ(report.value().newest, 1u);
  EXPECT_EQ(report.value().left_out[1], LeftOut());
  EXPECT_EQ(report.value().left_out[0],
            (LeftOut{{"changes of job old (in_force)", {"w1"}},
                     {"job later", {"w1"}},
                     {"that checkpoint first of job old was removed", {"w1"}},
                     {"that job gone was removed", {"w1"}}}));
}

}  // namespace
}  // namespace ptc::testing
