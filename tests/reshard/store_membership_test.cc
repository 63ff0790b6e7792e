// A store and the cluster that it belongs to: what it joins, what it refuses, and that nothing goes
// by mistake.
#include "reshard/node/store_membership.h"

#include <gmock/gmock.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

#include "reshard/cluster/tombstones.h"
#include "reshard/node/agreed_facts.h"
#include "reshard/node/recover.h"
#include "store/transport/transport.h"
#include "tests/support/becomes.h"
#include "tests/support/job_fixture.h"
#include "tests/support/local_cluster.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// The only node of its cluster.
class OneNode final : public Cluster {
 public:
  OneNode(MetaClient& meta, std::string self)
      : self_(std::move(self)), lease_(meta.lease(std::chrono::seconds(60)).value()) {
    MetaTransaction join;
    join.leased_puts = {{"nodes/" + self_, "up"}};
    join.lease = lease_.get();
    revision_ = meta.commit(join).value();
  }
  const std::string& self() const override { return self_; }
  std::vector<std::string> alive() const override { return {self_}; }
  Result<std::string> call(const std::string& node, const PeerRow&, const std::string&,
                           std::chrono::milliseconds, std::stop_token) override {
    return make_error(Code::kUnavailable, "there is no node {}", node);
  }
  std::optional<MetaTransaction::Compare> fence() const override {
    return MetaTransaction::Compare{"nodes/" + self_, revision_};
  }
  MetaTransaction::Compare fence_of(const std::string&) const override { return *fence(); }
  std::shared_ptr<const MetaLease> lease() const override { return lease_; }

 private:
  std::string self_;
  std::shared_ptr<MetaLease> lease_;
  int64_t revision_;
};

ClusterServices services(MetaClient* meta, Cluster& cluster, bool join = false) {
  return {meta, &cluster, make_loopback_transport, "ptcfs", "etcd", join, {}};
}

/// How often stores are listed.
class StoreListings : public MetaClient {
 public:
  explicit StoreListings(MetaClient& meta) : meta_(meta) {}
  Result<std::optional<MetaEntry>> get(std::string_view key) override { return meta_.get(key); }
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    stores_listed += prefix == kStores;
    return meta_.list(prefix);
  }
  Result<int64_t> commit(const MetaTransaction& transaction) override {
    return meta_.commit(transaction);
  }
  Result<std::unique_ptr<MetaLease>> lease(std::chrono::seconds ttl) override {
    return meta_.lease(ttl);
  }
  Result<std::shared_ptr<void>> watch(std::string prefix, OnEvent on_event) override {
    return meta_.watch(std::move(prefix), std::move(on_event));
  }
  std::atomic<int> stores_listed = 0;

 private:
  MetaClient& meta_;
};

/// Tells nobody of a change.
class TellsNothing final : public StoreListings {
 public:
  using StoreListings::StoreListings;
  Result<std::shared_ptr<void>> watch(std::string, OnEvent) override {
    return std::shared_ptr<void>(std::make_shared<int>());
  }
};

/// From some moment on it is what it was before, as when a backup took its place.
class SetBack final : public StoreListings {
 public:
  explicit SetBack(MetaClient& meta) : StoreListings(meta), meta_(meta) {}
  Result<std::vector<MetaEntry>> list(std::string_view prefix) override {
    return before && prefix == "jobs/" ? *before : meta_.list(prefix);
  }
  Result<std::optional<Changes>> changes(std::string_view prefix, int64_t revision) override {
    if (!before) return meta_.changes(prefix, revision);
    Changes changes{.entries = {}, .keys = before->size()};
    for (const MetaEntry& entry : *before)
      if (entry.revision > revision) changes.entries.push_back(entry);
    return std::optional(std::move(changes));
  }
  std::optional<std::vector<MetaEntry>> before;

 private:
  MetaClient& meta_;
};

class Membership : public ::testing::Test {
 protected:
  /// Null: alone.
  Result<> open(MetaClient* meta, bool join = false, const std::string& node = "w0") {
    close();
    JobStoreOptions options;
    options.directory = dir_.path();
    options.node = node;
    options.copy_threads = 2;
    if (meta != nullptr) {
      cluster_ = std::make_unique<OneNode>(*meta, node);
      options.cluster = services(meta, *cluster_, join);
      options.cluster->join_as = join_as_;
    }
    PTC_TRY(store_, JobStore::open(options, nullptr));
    return ok();
  }
  void close() {
    store_.reset();
    cluster_.reset();
  }
  /// A store that belongs to the cluster, and has gone again.
  void on_another_node(const std::string& node, const std::function<void(JobStore&)>& does) {
    const TempDir elsewhere;
    OneNode first(*meta_, node);
    JobStoreOptions options;
    options.directory = elsewhere.path();
    options.node = node;
    options.cluster = services(meta_.get(), first);
    does(*JobStore::open(options, nullptr).value());
  }
  void begin_cluster() {
    const std::string identity = R"({"id": "0123456789abcdef", "history": 1})";
    ASSERT_TRUE(meta_->commit({.puts = {{kIdentityKey, identity}}}).has_value());
  }
  std::string refusal(MetaClient* meta, bool join = false, const std::string& node = "w0") {
    const auto before = files();
    Result<> opened = open(meta, join, node);
    if (opened.has_value()) return "it was opened";
    close();
    EXPECT_EQ(files(), before);
    return opened.error().message();
  }
  /// A job with a checkpoint, and something in incoming/.
  void make_job(const std::string& name) {
    JobRef job = store_->create_job(name).value();
    write_ranks(sample_, LayoutSpec(), fs::path(job->files_dir()) / "incoming/base");
    Result<> committed = job->commit("base", "base");
    ASSERT_TRUE(committed.has_value()) << committed.error().message();
    job->wait_settled();
    write_file(fs::path(job->files_dir()) / "incoming/next/rank/0/notes", "staged");
  }
  void expect_job(const std::string& name) {
    JobRef job = store_->find(name);
    ASSERT_NE(job, nullptr);
    CheckpointRef base = job->find_checkpoint("base");
    ASSERT_NE(base, nullptr);
    EXPECT_TRUE(base->lost_tensors().empty());
    expect_layout(*base, sample_, LayoutSpec());
    EXPECT_EQ(read_file(fs::path(job->files_dir()) / "incoming/next/rank/0/notes"), "staged");
    EXPECT_TRUE(store_->kept().empty());
    Result<std::string> verified = job->verify("base");
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
  }
  /// What users wrote and images, with sizes.
  std::map<std::string, uint64_t> files() const {
    std::map<std::string, uint64_t> found;
    for (const auto& entry : fs::recursive_directory_iterator(dir_.path())) {
      const std::string path = entry.path().lexically_relative(dir_.path());
      if (entry.is_regular_file() && (path.starts_with("images/") || path.starts_with("jobs/")))
        found[path] = entry.file_size();
    }
    return found;
  }
  static void remove_all(MetaClient& meta, const std::string& prefix) {
    const std::vector<MetaEntry> entries = meta.list(prefix).value();
    for (const MetaEntry& entry : entries)
      ASSERT_TRUE(meta.commit({.deletes = {entry.key}}).has_value());
  }

  TempDir dir_;
  Sample sample_ = llama_sample();
  std::unique_ptr<MetaClient> meta_ = make_memory_meta(), other_ = make_memory_meta();
  std::unique_ptr<Cluster> cluster_;
  JobNames join_as_;
  std::unique_ptr<JobStore> store_;
};

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

TEST_F(Membership, AStoreThatWasAloneJoinsWithItsJobs) {
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  ASSERT_TRUE(open(nullptr).has_value());
  expect_job("llama");
  Result<> joined = open(meta_.get());
  ASSERT_TRUE(joined.has_value()) << joined.error().message();
  expect_job("llama");
  EXPECT_GT(store_->find("llama")->bytes_on("w0"), 0u);
  ASSERT_TRUE(open(meta_.get()).has_value());
  expect_job("llama");
  EXPECT_THAT(refusal(nullptr), HasSubstr("belongs to cluster ptcfs"));
  EXPECT_THAT(refusal(meta_.get(), false, "w7"), HasSubstr("as node w0 and not w7"));
}

TEST_F(Membership, IntoAClusterWithJobsOnlyWhenItIsTold) {
  on_another_node("w1", [](JobStore& other) {
    ASSERT_TRUE(other.create_job("gpt").has_value());
    ASSERT_TRUE(other.create_job("bert").has_value());
  });
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  EXPECT_THAT(refusal(meta_.get()),
              AllOf(HasSubstr("llama"), HasSubstr("bert, gpt"), HasSubstr("--join")));
  ASSERT_TRUE(open(nullptr).has_value());
  ASSERT_TRUE(store_->create_job("gpt").has_value());
  EXPECT_THAT(refusal(meta_.get(), true), HasSubstr("has gpt of its own, and so has cluster"));
  ASSERT_TRUE(open(nullptr).has_value());
  ASSERT_TRUE(store_->remove_job("gpt", false).has_value());
  Result<> joined = open(meta_.get(), true);
  ASSERT_TRUE(joined.has_value()) << joined.error().message();
  expect_job("llama");
  EXPECT_NE(store_->find("bert"), nullptr);
}

TEST_F(Membership, AJobThatBothHaveJoinsUnderAnotherName) {
  on_another_node("w1",
                  [](JobStore& other) { ASSERT_TRUE(other.create_job("llama").has_value()); });
  const std::string theirs = meta_->get("jobs/llama").value()->value;
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  make_job("gpt");
  EXPECT_THAT(refusal(meta_.get(), true),
              AllOf(HasSubstr("has llama of its own, and so has cluster"),
                    HasSubstr("--join-as llama=NAME")));
  for (const auto& [names, why] : std::vector<std::pair<JobNames, std::string>>{
           {{{"bert", "llama-b"}}, "has no job bert"},
           {{{"llama", "gpt"}}, "it has another of that"},
           {{{"llama", "x"}, {"gpt", "x"}}, "it has another of that"},
           {{{"gpt", "llama"}}, "it has another of that"}}) {
    join_as_ = names;
    EXPECT_THAT(refusal(meta_.get()), HasSubstr(why));
  }
  join_as_ = {{"llama", "llama-b"}};
  for (int starts = 0; starts < 2; ++starts) {  // it may stay on the command line
    const Result<> joined = open(meta_.get());
    ASSERT_TRUE(joined.has_value()) << joined.error().message();
    expect_job("llama-b");
    expect_job("gpt");
    EXPECT_EQ(store_->find("llama")->checkpoints().size(), 0u);
    EXPECT_EQ(meta_->get("jobs/llama").value()->value, theirs);
  }
}

/// It would be taken for the one that the cluster knows, and its jobs could not leave any more.
TEST_F(Membership, JobsDoNotComeUnderTheNameOfAnotherStoresNode) {
  on_another_node("w0", [&](JobStore& other) {
    const JobRef gpt = other.create_job("gpt").value();
    write_ranks(sample_, LayoutSpec(), fs::path(gpt->files_dir()) / "incoming/base");
    ASSERT_TRUE(gpt->commit("base", "base").has_value());
  });
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  EXPECT_THAT(refusal(meta_.get(), true), HasSubstr("has a node w0 already, with another store"));
  EXPECT_FALSE(meta_->get("jobs/llama").value().has_value());
  const Result<> joined = open(meta_.get(), true, "w1");
  ASSERT_TRUE(joined.has_value()) << joined.error().message();
  expect_job("llama");
}

/// By then checkpoints lie on the node, which are its own.
TEST_F(Membership, JoiningThatWasCutOffGoesOnInThePlaceOfAnEmptyStore) {
  struct Silent : StoreListings {
    using StoreListings::StoreListings;
    Result<int64_t> commit(const MetaTransaction& transaction) override {
      for (const auto& [key, value] : transaction.puts)
        if (key.starts_with("jobs/llama")) return make_error(Code::kUnavailable, "silent");
      return StoreListings::commit(transaction);
    }
  };
  on_another_node("w0", [](JobStore&) {});
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("gpt");
  make_job("llama");
  Silent silent(*meta_);
  EXPECT_TRUE(open(&silent).has_error());
  EXPECT_TRUE(meta_->get("jobs/gpt/checkpoints/base").value().has_value());
  const Result<> joined = open(meta_.get());
  ASSERT_TRUE(joined.has_value()) << joined.error().message();
  expect_job("gpt");
  expect_job("llama");
}

/// Else what was done in it since would go without a word.
TEST_F(Membership, ACopyOfAStoreWhoseJobsHaveJoinedDoesNotJoin) {
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  close();
  const TempDir copy;
  fs::copy(dir_.path(), copy.path(), fs::copy_options::recursive);
  ASSERT_TRUE(open(meta_.get()).has_value());
  close();
  const auto refused = [&](JobNames as) {
    OneNode node(*meta_, "w1");
    JobStoreOptions options;
    options.directory = copy.path();
    options.node = "w1";
    options.cluster = services(meta_.get(), node, true);
    options.cluster->join_as = std::move(as);
    const auto opened = JobStore::open(options, nullptr);
    return opened.has_error() ? opened.error().message() : "it was opened";
  };
  EXPECT_THAT(refused({}), HasSubstr("has the very same"));
  EXPECT_THAT(refused({{"llama", "another"}}), HasSubstr("has the very same"));
  ASSERT_TRUE(open(meta_.get()).has_value());
  expect_job("llama");
}

TEST_F(Membership, WhoIsToJoinFindsAClusterOrMakesNone) {
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  EXPECT_THAT(refusal(meta_.get(), true), HasSubstr("there is no cluster ptcfs to join"));
  join_as_ = {{"llama", "gpt"}};
  EXPECT_THAT(refusal(meta_.get()), HasSubstr("there is no cluster ptcfs to join"));
  join_as_.clear();
  ASSERT_TRUE(open(nullptr).has_value());
  expect_job("llama");
}

/// After the directory has its name, and before the cluster knows the job.
TEST_F(Membership, JoiningUnderAnotherNameGoesOnAfterACrash) {
  begin_cluster();
  ASSERT_TRUE(meta_->commit({.puts = {{"jobs/llama", R"({"id": "theirs"})"}}}).has_value());
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  close();
  const fs::path jobs = dir_.path() / "jobs";
  fs::rename(jobs / "llama", jobs / "llama-b");
  EXPECT_THAT(refusal(meta_.get(), true), HasSubstr("--join-as llama=NAME"));
  JobNames as;
  ASSERT_TRUE(take_job_name("llama=llama-b", as).has_value());
  const auto own = open_sqlite_meta(dir_.path() / "meta.db").value();
  ASSERT_TRUE(check_job_names(*own, dir_.path(), as).has_value());
  const MetaTransaction::Compare identity{std::string(kIdentityKey),
                                          meta_->get(kIdentityKey).value()->revision};
  for (int times = 0; times < 2; ++times) {
    EXPECT_EQ(compare_jobs(*own, *meta_, as).value().own.size(), times == 0 ? 1u : 0u);
    ASSERT_TRUE(join_jobs(*own, *meta_, dir_.path(), "w0", as, identity).has_value());
  }
  EXPECT_TRUE(meta_->get("jobs/llama-b/checkpoints/base").value().has_value());
  EXPECT_EQ(meta_->get("jobs/llama").value()->value, R"({"id": "theirs"})");
  for (const char* wrong : {"", "llama", "=llama", "llama=", "llama=a/b", "llama=.b"}) {
    JobNames none;
    EXPECT_TRUE(take_job_name(wrong, none).has_error()) << wrong;
  }
  EXPECT_TRUE(take_job_name("llama=other", as).has_error());
}

/// Somebody has made a job of the other name meanwhile.
TEST_F(Membership, JoiningThatWasCutOffGoesOnUnderAThirdName) {
  begin_cluster();
  ASSERT_TRUE(open(nullptr).has_value());
  make_job("llama");
  close();
  const fs::path jobs = dir_.path() / "jobs";
  fs::rename(jobs / "llama", jobs / "llama-b");
  for (const char* name : {"llama", "llama-b"})
    ASSERT_TRUE(meta_->commit({.puts = {{fmt::format("jobs/{}", name), R"({"id": "theirs"})"}}})
                    .has_value());
  join_as_ = {{"llama", "llama-b"}};
  EXPECT_THAT(refusal(meta_.get()), HasSubstr("has a job llama-b already: choose another name"));
  JobNames as{{"llama", "llama-c"}};
  const auto own = open_sqlite_meta(dir_.path() / "meta.db").value();
  ASSERT_TRUE(check_job_names(*own, dir_.path(), as).has_value());
  const MetaTransaction::Compare identity{std::string(kIdentityKey),
                                          meta_->get(kIdentityKey).value()->revision};
  const Result<> joined = join_jobs(*own, *meta_, dir_.path(), "w0", as, identity);
  ASSERT_TRUE(joined.has_value()) << joined.error().message();
  EXPECT_FALSE(fs::exists(jobs / "llama-b"));
  EXPECT_TRUE(fs::exists(jobs / "llama-c" / "checkpoints"));
  EXPECT_TRUE(meta_->get("jobs/llama-c/checkpoints/base").value().has_value());
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
  cluster.start(2);
  const std::string now = read_store_identity(cluster.directory(2)).value()->store;
  // As a node does that registers before it is there: these here are there first.
  ASSERT_TRUE(cluster.meta().commit({.deletes = {store_key(replaced)}}).has_value());
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
