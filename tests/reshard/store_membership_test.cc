// A store and the cluster that it belongs to: what is refused, and that nothing goes by mistake.
#include "reshard/node/store_membership.h"

#include <random>
#include <thread>

#include "reshard/cluster/tombstones.h"
#include "reshard/node/agreed_facts.h"
#include "reshard/node/recover.h"
#include "tests/reshard/membership_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A node that was overlooked when what was agreed was made anew: its key and its lease may have
/// come back with a backup.
TEST(Decisions, NameTheClusterAsItWasWhenTheNodeJoined) {
  std::unique_ptr<MetaClient> meta = make_memory_meta();
  OneNode cluster(*meta, "w0");
  auto make_anew = [&] {
    return meta->commit({.puts = {{std::string(kIdentityKey), "{}"}}}).value();
  };
  cluster.belongs_to({std::string(kIdentityKey), make_anew()});
  auto decide = [&] { return commit_fenced(*meta, cluster, {.puts = {{"jobs/a", "{}"}}}); };
  ASSERT_TRUE(decide().has_value());
  make_anew();
  const Result<int64_t> decided = decide();
  ASSERT_TRUE(decided.has_error());
  EXPECT_EQ(decided.error().code(), Code::kConflict);
}

/// Who leads a commit gives it up while this node seals its part of it.
class GivesUpWhileItSeals final : public JobListener {
 public:
  std::unique_ptr<JobStore> store;
  void names_changed() override {}
  void checkpoint_changed(const std::string&, const std::string&) override {}
  Result<std::unique_ptr<Seal>> seal(const std::string& job, const std::string&,
                                     GivesWay) override {
    EXPECT_TRUE(store->find(job)->answer(PeerMethod::kUntake, R"({"id": "one"})").has_value());
    return std::unique_ptr<Seal>();
  }
};

TEST(Decisions, WhatIsGivenUpWhileItIsTakenIsTakenByNobody) {
  const TempDir dir;
  std::unique_ptr<MetaClient> meta = make_memory_meta();
  OneNode cluster(*meta, "w0");
  GivesUpWhileItSeals listener;
  JobStoreOptions options;
  options.directory = dir.path();
  options.node = "w0";
  options.cluster = services(meta.get(), cluster);
  listener.store = JobStore::open(options, &listener).value();
  JobRef job = listener.store->create_job("job").value();
  write_file(fs::path(job->files_dir()) / "incoming/base/rank/0/notes", "staged");
  const std::string take = R"({"id": "one", "incoming": "base", "from": "w0", "fence": 1})";
  const Result<std::string> taken = job->answer(PeerMethod::kTake, take);
  ASSERT_TRUE(taken.has_error()) << taken.value();
  EXPECT_EQ(taken.error().code(), Code::kConflict);
  job.reset();
  listener.store.reset();
}

TEST_F(Membership, NoOtherClusterAndNoneThatForgot) {
  ASSERT_TRUE(open(meta_.get()).has_value());
  make_job("llama");
  close();
  EXPECT_THAT(refusal(other_.get()), HasSubstr("knows no such cluster"));
  ASSERT_TRUE(
      other_->commit({.puts = {{kIdentityKey, R"({"id": "0123456789abcdef", "history": 1})"}}})
          .has_value());
  EXPECT_THAT(refusal(other_.get()), HasSubstr("is another one (0123456789abcdef)"));
  ASSERT_TRUE(open(meta_.get()).has_value());
  expect_job("llama");
}

TEST_F(Membership, WhatWasAgreedIsMadeAnewOfWhatAStoreHasSeen) {
  ASSERT_TRUE(open(meta_.get()).has_value());
  make_job("llama");
  make_job("gone");
  ASSERT_TRUE(store_->remove_job("gone", true).has_value());
  ASSERT_TRUE(becomes([&] {
    auto facts = AgreedFacts::open(agreed_facts_path(dir_.path()), true);
    return facts.has_value() && facts.value().entries().contains("jobs/llama/in_force") &&
           !facts.value().entries().contains("jobs/gone");
  }));
  close();
  EXPECT_THAT(refusal(other_.get()), HasSubstr("ptc recover"));
  std::vector<SeenStore> stores;
  stores.push_back(look_at_store(dir_.path()).value());
  Result<RecoverReport> report = look_at_all(stores, *other_);
  ASSERT_TRUE(report.has_value()) << report.error().message();
  EXPECT_EQ(report.value().jobs, std::vector<std::string>{"llama"});
  ASSERT_EQ(report.value().checkpoints.size(), 1u);
  EXPECT_GT(report.value().checkpoints[0].files, 0u);
  EXPECT_EQ(report.value().checkpoints[0].missing, 0u);
  ASSERT_TRUE(recover(stores, 0, *other_).has_value());
  Result<> opened = open(other_.get());
  ASSERT_TRUE(opened.has_value()) << opened.error().message();
  expect_job("llama");
  close();
  EXPECT_THAT(refusal(meta_.get()), HasSubstr("was set back"));  // the old one goes on without it
}

TEST_F(Membership, WhatIsNamedNoMoreIsKeptWhileItRunsAndAtTheNextStart) {
  ASSERT_TRUE(open(meta_.get()).has_value());
  make_job("llama");
  ASSERT_TRUE(becomes([&] {
    return AgreedFacts::open(agreed_facts_path(dir_.path()), true)
        .value()
        .entries()
        .contains("jobs/llama/in_force");
  }));
  const auto before = files();
  remove_all(*meta_, "jobs/");
  ASSERT_TRUE(becomes([&] { return store_->distrusted().has_value(); }));
  EXPECT_THAT(*store_->distrusted(), HasSubstr("nothing says that it was removed"));
  expect_job("llama");
  EXPECT_EQ(files(), before);
  Result<JobRef> made = store_->create_job("another");
  ASSERT_TRUE(made.has_error());
  EXPECT_EQ(made.error().code(), Code::kUnavailable);
  close();
  EXPECT_THAT(refusal(meta_.get()), HasSubstr("nothing says that it was removed"));
}

TEST_F(Membership, AStoreThatWasForgottenKeepsWhatNothingNames) {
  ASSERT_TRUE(open(meta_.get()).has_value());
  make_job("llama");
  ASSERT_TRUE(becomes([&] {
    return AgreedFacts::open(agreed_facts_path(dir_.path()), true)
        .value()
        .entries()
        .contains("jobs/llama/in_force");
  }));
  close();
  const auto before = files();
  remove_all(*meta_, "jobs/");
  remove_all(*meta_, "stores/");
  Result<> opened = open(meta_.get());
  ASSERT_TRUE(opened.has_value()) << opened.error().message();
  EXPECT_EQ(store_->find("llama"), nullptr);
  EXPECT_THAT(store_->kept(), ::testing::Contains("jobs/llama"));
  EXPECT_EQ(files(), before);
  ASSERT_TRUE(store_->create_job("llama").has_value());  // beside it
  EXPECT_TRUE(fs::exists(dir_.path() / "kept"));
}

/// In the place of what is there.
void put_copy(const fs::path& from, const fs::path& to) {
  fs::remove_all(to);
  fs::copy(from, to, fs::copy_options::recursive);
}

TEST_F(Membership, AnOlderCopyOfAStoreIsRefused) {
  ASSERT_TRUE(open(meta_.get()).has_value());
  make_job("llama");
  close();
  const TempDir older, newer;
  put_copy(dir_.path(), older.path());
  ASSERT_TRUE(open(meta_.get()).has_value());
  ASSERT_TRUE(store_->create_job("later").has_value());
  close();
  put_copy(dir_.path(), newer.path());
  put_copy(older.path(), dir_.path());
  EXPECT_THAT(refusal(meta_.get()), AllOf(HasSubstr("is an older copy: it was started 1 times"),
                                          HasSubstr("2 times, as node w0")));
  EXPECT_THAT(refusal(meta_.get()),
              HasSubstr("2 times, as node w0"));  // a start that was refused is none
  put_copy(newer.path(), dir_.path());
  Result<> moved = open(meta_.get());
  ASSERT_TRUE(moved.has_value()) << moved.error().message();
  expect_job("llama");
  close();
  put_copy(older.path(), dir_.path());
  Result<> given = open(meta_.get(), true);
  ASSERT_TRUE(given.has_value()) << given.error().message();
  expect_job("llama");
}

TEST_F(Membership, AnOlderCopyIsRefusedAlsoWhereWhatWasAgreedWasMadeAnew) {
  ASSERT_TRUE(open(meta_.get()).has_value());
  make_job("llama");
  close();
  const TempDir older, newer;
  put_copy(dir_.path(), older.path());
  ASSERT_TRUE(open(meta_.get()).has_value());
  close();
  put_copy(dir_.path(), newer.path());
  std::vector<SeenStore> stores;
  stores.push_back(look_at_store(dir_.path()).value());
  ASSERT_TRUE(recover(stores, 0, *other_).has_value());
  put_copy(older.path(), dir_.path());
  EXPECT_THAT(refusal(other_.get()), HasSubstr("is an older copy: it was started 1 times"));
  put_copy(newer.path(), dir_.path());
  Result<> opened = open(other_.get());
  ASSERT_TRUE(opened.has_value()) << opened.error().message();
  expect_job("llama");
}

TEST_F(Membership, WhatWasDecidedJustBeforeANodeStopsIsInItsCopy) {
  TellsNothing late(*meta_);
  ASSERT_TRUE(open(&late).has_value());
  make_job("llama");
  close();
  std::vector<SeenStore> stores;
  stores.push_back(look_at_store(dir_.path()).value());
  ASSERT_TRUE(recover(stores, 0, *other_).has_value());
  Result<> opened = open(other_.get());
  ASSERT_TRUE(opened.has_value()) << opened.error().message();
  expect_job("llama");
}

/// Nothing has changed since, and there are as many keys: so what is read is not completed by what
/// the store itself has seen.
TEST_F(Membership, WhatWasSetBackIsNotBelievedHoweverOftenItIsLookedAt) {
  SetBack meta(*meta_);
  OneNode node(meta, "w0");
  MembershipOptions options;
  options.directory = dir_.path();
  options.node = "w0";
  options.cluster_name = "ptcfs";
  options.where = "etcd";
  auto membership = StoreMembership::open(std::move(options), meta, node).value();
  const auto put = [&](const std::string& key, const std::string& value) {
    ASSERT_TRUE(meta_->commit({.puts = {{key, value}}}).has_value());
  };
  put("jobs/a", "1");
  put("jobs/b", "1");
  const std::vector<MetaEntry> before = meta_->list("jobs/").value();
  for (const char* value : {"2", "3"}) {  // the first is read whole
    put("jobs/b", value);
    auto agreed = membership->look();
    ASSERT_TRUE(agreed.has_value()) << agreed.error().message();
    EXPECT_EQ(agreed.value().jobs.back().value, value);
    membership->taken_over(agreed.value(), {}, true);
  }
  meta.before = before;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(membership->look().has_error());
    EXPECT_THAT(node.distrusted().value_or(""), HasSubstr("jobs/b"));
  }
  meta.before.reset();
  EXPECT_TRUE(membership->look().has_value());
  EXPECT_FALSE(node.distrusted());
}

/// A store that reads what changed alone, and one that reads all, know the same after each change.
TEST_F(Membership, WhatChangedIsAllThatHasToBeRead) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE(fmt::format("PTC_SEED={}", seed));
  std::mt19937_64 random(seed);
  OneNode node(*meta_, "w0");
  MembershipOptions options;
  options.directory = dir_.path();
  options.node = "w0";
  options.cluster_name = "ptcfs";
  options.where = "etcd";
  auto membership = StoreMembership::open(std::move(options), *meta_, node).value();
  int in_part = 0;
  for (int step = 0; step < 400; ++step) {
    for (size_t changes = random() % 4; changes > 0; --changes) {
      const std::string job = fmt::format("jobs/{}", random() % 5);
      const size_t kind = random() % 8;
      const std::string key = job + (kind < 2   ? "/layout"
                                     : kind < 4 ? "/leader"
                                     : kind < 6 ? "/parts/" + std::to_string(random() % 3)
                                                : "/dataset/head");
      if (random() % 3 == 0) {
        auto gone = meta_->commit({.deletes = {key}});
        ASSERT_TRUE(gone.has_value());
        if (random() % 8 != 0) membership->note_gone(key, gone.value());  // or nobody says so
      } else {
        ASSERT_TRUE(meta_->commit({.puts = {{key, std::to_string(step)}}}).has_value());
      }
    }
    auto agreed = membership->look();
    ASSERT_TRUE(agreed.has_value()) << agreed.error().message();
    in_part += !agreed.value().whole;
    const std::vector<MetaEntry> all = meta_->list("jobs/").value();
    for (int job = 0; job < 5; ++job) {
      std::map<std::string_view, int64_t> wanted;
      for (const MetaEntry& entry : all)
        if (entry.key.starts_with(fmt::format("jobs/{}/", job)) &&
            entry.key.find("/dataset/") == std::string::npos)
          wanted.emplace(entry.key, entry.revision);
      EXPECT_EQ(membership->keys_of(std::to_string(job), agreed.value()), wanted);
    }
    if (random() % 4 == 0) continue;  // it could not be carried out
    membership->taken_over(agreed.value(), {}, true);
    const AgreedFacts copy = AgreedFacts::open(agreed_facts_path(dir_.path()), true).value();
    std::vector<std::pair<std::string, int64_t>> has, wanted;
    for (const auto& [key, entry] : copy.entries())
      if (key.starts_with("jobs/")) has.emplace_back(key, entry.revision);
    for (const MetaEntry& entry : all) wanted.emplace_back(entry.key, entry.revision);
    ASSERT_EQ(has, wanted);
    ASSERT_EQ(copy.jobs_keys(), wanted.size());
  }
  EXPECT_GT(in_part, 100);
}

/// There are as many as nodes, and each of these looks after each change.
TEST_F(Membership, StoresAreListedWhereOneWasStartedAndNotAfterEachChange) {
  StoreListings meta(*meta_);
  ASSERT_TRUE(open(&meta).has_value());
  const auto has_copied = [&](const std::string& text) {
    return becomes(
        [&] { return read_file(agreed_facts_path(dir_.path())).find(text) != std::string::npos; });
  };
  ASSERT_TRUE(store_->create_job("first").has_value());
  ASSERT_TRUE(has_copied("jobs/first"));
  const int listed = meta.stores_listed;
  EXPECT_GT(listed, 0);
  for (const char* name : {"second", "third"}) {
    ASSERT_TRUE(store_->create_job(name).has_value());
    ASSERT_TRUE(has_copied(std::string("jobs/") + name));
  }
  EXPECT_EQ(meta.stores_listed, listed);
  const RegisteredStore another{"0123456789abcdef", "w1", 0, 1};
  ASSERT_TRUE(meta_
                  ->commit({.puts = {{store_key(another.store), another.to_text()},
                                     {std::string(kMembership), "w1"}}})
                  .has_value());
  ASSERT_TRUE(store_->create_job("fourth").has_value());
  EXPECT_TRUE(has_copied(another.store));
  EXPECT_EQ(meta.stores_listed, listed + 1);
  close();  // while there is what it asks
}

TEST_F(Membership, AWriterThatIsCutOffLosesTheLastLineAlone) {
  const std::string path = dir_.path() / "facts";
  AgreedFacts facts = AgreedFacts::open(path).value();
  facts.take("jobs/", {{"jobs/a", "1", 3}, {"jobs/b", "2", 4}});
  facts.set_seen(9);
  ASSERT_TRUE(facts.write().has_value());
  facts.take("jobs/", {{"jobs/b", "5", 10}});
  ASSERT_TRUE(facts.write().has_value());
  fs::resize_file(path, fs::file_size(path) - 3);
  AgreedFacts again = AgreedFacts::open(path).value();
  EXPECT_EQ(again.seen(), 9);
  ASSERT_EQ(again.entries().size(), 2u);
  EXPECT_EQ(again.entries().at("jobs/b").value, "5");
  EXPECT_TRUE(again.check({{"jobs/a", "1", 3}, {"jobs/b", "5", 10}}, {}, true).has_value());
  EXPECT_TRUE(again.check({{"jobs/a", "1", 3}, {"jobs/b", "2", 4}}, {}, true).has_error());
  EXPECT_TRUE(again.check({{"jobs/b", "5", 10}}, {}, true).has_error());
  EXPECT_TRUE(again.check({{"jobs/b", "5", 10}}, {}, false).has_value());
  EXPECT_TRUE(again.check({{"jobs/a", "1", 3}, {"jobs/b", "5", 10}, {"jobs/c", "7", 2}}, {}, true)
                  .has_error());
}

}  // namespace
}  // namespace ptc::testing
