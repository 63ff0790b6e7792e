// A store that was alone, or of another cluster, joins one: with its jobs, under other names, and
// after it was cut off.
#include "reshard/cluster/tombstones.h"
#include "tests/reshard/membership_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

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
  // Of many nodes a checkpoint does not name all.
  const std::string key = "jobs/gpt/checkpoints/base", named = R"("nodes":["w0"])";
  std::string entry = meta_->get(key).value()->value;
  ASSERT_NE(entry.find(named), entry.npos);
  entry.replace(entry.find(named), named.size(), R"("nodes":["a0"],"more_nodes":1)");
  ASSERT_TRUE(meta_->commit({.puts = {{key, entry}}}).has_value());
  EXPECT_THAT(refusal(meta_.get(), true), HasSubstr("has a node w0 already, with another store"));
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

}  // namespace
}  // namespace ptc::testing
