// Nodes whose agreement store refuses some of what they ask, or lets them wait: what is left of it
// harms nobody.
#include <atomic>
#include <filesystem>
#include <thread>

#include "reshard/job/job_record.h"
#include "reshard/move/placement.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;

class AgreementTest : public ClusterTest {
 protected:
  void put(const std::string& key, const std::string& value) {
    ASSERT_TRUE(cluster_.meta().commit({.puts = {{key, value}}}).has_value());
  }
  /// More than go in one transaction; and one, of a name that every job may have, that comes last
  /// of all.
  void put_many_keys() {
    for (int i = 0; i < 150; ++i) put(fmt::format("jobs/job/looked_over/{:016x}", i), "{}");
    put("jobs/job/rules", "of the old one");
  }
  size_t count(const std::string& prefix) { return cluster_.meta().list(prefix).value().size(); }
  static bool removes_more(const MetaTransaction& transaction) {
    return transaction.puts.empty() && transaction.deletes.size() > 1 &&
           transaction.deletes.front().starts_with("jobs/job/looked_over/");
  }
  void expect_only_the_new_job() {
    EXPECT_EQ(count("jobs/job/looked_over/"), 0u);
    auto rules = cluster_.meta().get("jobs/job/rules").value();
    ASSERT_TRUE(rules.has_value());
    EXPECT_EQ(rules->value, "of the new one");
    EXPECT_TRUE(cluster_.meta().get("jobs/job/layout").value().has_value());
    EXPECT_TRUE(cluster_.meta().get("jobs/job/in_force").value().has_value());
  }
};

TEST_F(AgreementTest, WhatIsRemovedInStepsTakesNothingOfAJobMadeMeanwhile) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  put_many_keys();
  std::atomic<bool> made = false;
  cluster_.loses = [](const std::string& node, std::string_view method) {
    return node == "w0" && method == "job/changed";  // it is at the removal
  };
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        if (node == "w0" && removes_more(transaction) && !made.exchange(true)) {
          EXPECT_TRUE(becomes([&] {
            (void)cluster_.store(1).answer(PeerMethod::kChanged, "");
            return cluster_.store(1).find("job") == nullptr;
          }));
          Result<JobRef> job = cluster_.store(1).create_job("job");
          EXPECT_TRUE(job.has_value()) << job.error().message();
          put("jobs/job/rules", "of the new one");
        }
        return std::nullopt;
      });
  Result<> removed = cluster_.store(0).remove_job("job", true);
  EXPECT_TRUE(removed.has_value()) << removed.error().message();
  EXPECT_TRUE(made);
  expect_only_the_new_job();
  cluster_.wait_settled();
  for (unsigned node : {0u, 1u, 2u}) EXPECT_NE(cluster_.job(node, "job"), nullptr);
}

TEST_F(AgreementTest, WhatARemovalLeftThatWasCutOffGoesWhenTheNameIsUsedAgain) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  put_many_keys();
  std::atomic<bool> away = true;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        if (node != "w0" || !away || !removes_more(transaction)) return std::nullopt;
        return make_error(Code::kUnavailable, "the metadata are away");
      });
  EXPECT_TRUE(cluster_.store(0).remove_job("job", true).has_error());
  EXPECT_EQ(cluster_.meta().get("jobs/job").value(), std::nullopt);
  EXPECT_GT(count("jobs/job/"), 64u);
  cluster_.stop(0);
  ASSERT_TRUE(becomes([&] { return cluster_.store(1).find("job") == nullptr; }));
  ASSERT_TRUE(cluster_.store(1).create_job("job").has_value());
  put("jobs/job/rules", "of the new one");
  expect_only_the_new_job();
  away = false;
  cluster_.start(0);
  cluster_.wait_settled();
  expect_only_the_new_job();
  EXPECT_NE(cluster_.store(0).find("job"), nullptr);
}

TEST_F(AgreementTest, OfARemovedJobNobodyHasLooked) {
  for (const char* name : {"job", "other"}) {
    ASSERT_TRUE(cluster_.store(0).create_job(name).has_value());
    cluster_.wait_settled();
    ASSERT_TRUE(becomes([&] { return count("looked/") == 1; }));
    ASSERT_TRUE(cluster_.store(1).remove_job(name, false).has_value());
    cluster_.wait_settled();
    EXPECT_EQ(count("looked/"), 0u);
    EXPECT_EQ(count("leaders/"), 0u);
  }
}

TEST_F(AgreementTest, AJobIntoWhichADataSetJustCameIsNotRemoved) {
  for (const char* key : {"source", "order", "consumed", "saved"}) {
    const std::string job = std::string("with-") + key;
    ASSERT_TRUE(cluster_.store(0).create_job(job).has_value());
    cluster_.wait_settled();
    std::atomic<bool> came = false;
    const auto refusing = cluster_.refuses.during(
        [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
          if (node == "w0" && is_among(transaction.deletes, "jobs/" + job) && !came.exchange(true))
            put(fmt::format("jobs/{}/dataset/{}", job, key), "{}");
          return std::nullopt;
        });
    const Result<> removed = cluster_.store(0).remove_job(job, false);
    EXPECT_TRUE(came);
    ASSERT_TRUE(removed.has_error()) << key;
    EXPECT_EQ(removed.error().code(), Code::kBusy) << removed.error().message();
    EXPECT_TRUE(cluster_.meta().get("jobs/" + job).value().has_value());
    EXPECT_TRUE(cluster_.meta().get(fmt::format("jobs/{}/dataset/{}", job, key)).value());
    EXPECT_NE(cluster_.store(0).find(job), nullptr);
  }
}

TEST_F(AgreementTest, RulesThatJustCameAreNotRemovedInThePlaceOfOthers) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  put("jobs/job/rules", "known");
  cluster_.wait_settled();
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        if (node == "w0" && is_among(transaction.deletes, "jobs/job/rules"))
          put("jobs/job/rules", "newer");
        return std::nullopt;
      });
  const Result<> removed = cluster_.job(0, "job")->remove_rules("known");
  ASSERT_TRUE(removed.has_error());
  EXPECT_EQ(removed.error().code(), Code::kConflict);
  EXPECT_EQ(cluster_.meta().get("jobs/job/rules").value()->value, "newer");
}

/// Its key could not be deleted when it had led: that stops nobody, nor itself.
TEST_F(AgreementTest, ALeaderWhoseKeyWasLeftLeadsAgain) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  std::atomic<bool> full = true;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        if (!full || node != "w0" || !is_among(transaction.deletes, "leaders/job"))
          return std::nullopt;
        return make_error(Code::kNoSpace, "etcd is full");
      });
  auto settles = [&](const std::string& layout) {
    return becomes([&] {
      return cluster_.job(1, "job")->current_target() == "checkpoints/base/layouts/" + layout;
    });
  };
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  ASSERT_TRUE(settles("tp2-pp1-dp1"));
  ASSERT_TRUE(becomes([&] { return cluster_.meta().get("leaders/job").value().has_value(); }));
  edit(0, R"({"tp": 1, "pp": 2, "dp": 1})");
  EXPECT_TRUE(settles("tp1-pp2-dp1"));
  full = false;
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1})");
  EXPECT_TRUE(settles("tp1-pp1-dp1"));
  EXPECT_TRUE(becomes([&] { return !cluster_.meta().get("leaders/job").value().has_value(); }));
  edit(2, R"({"tp": 2, "pp": 1, "dp": 1})");
  EXPECT_TRUE(settles("tp2-pp1-dp1"));
}

TEST_F(AgreementTest, WhenCheckpointsWereLookedOverThatAreGoneIsForgottenInSteps) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  for (int i = 0; i < 120; ++i)
    put(fmt::format("jobs/job/looked_over/{:016x}", i),
        LookedOver{.time_ns = 1'000'000'000}.to_text());
  cluster_.wait_settled();
  size_t before = count("jobs/job/looked_over/");
  ASSERT_EQ(before, 120u);
  while (before > 1) {
    Result<> looked = cluster_.job(0, "job")->look_over("base");
    ASSERT_TRUE(looked.has_value()) << looked.error().message();
    const size_t now = count("jobs/job/looked_over/");
    ASSERT_LT(now, before);
    before = now;
  }
  const auto status = [&] { return cluster_.job(1, "job")->status_json(); };
  EXPECT_TRUE(becomes([&] {  // it hears of it
    return status().find("\"looked_over\": null") == std::string::npos;
  })) << status();
}

/// Nothing can be written for one of its jobs, as where there is no room.
TEST_F(AgreementTest, AJobThatCannotBeTakenOverHoldsUpNoOther) {
  for (const char* name : {"a", "job", "z"})
    ASSERT_TRUE(cluster_.store(0).create_job(name).has_value());
  for (const char* name : {"a", "job", "z"}) ASSERT_NE(cluster_.job(1, name), nullptr);
  write_file(cluster_.store(1).directory() + "/jobs/job/checkpoints", "");
  write(0, LayoutSpec());
  commit(0);
  EXPECT_TRUE(cluster_.job(1, "job")->sync().has_error());
  const std::string text = R"({"tp": 2, "pp": 1, "dp": 1})";
  for (const char* name : {"a", "z"}) {
    ASSERT_TRUE(cluster_.job(0, name)->save_layout(text).has_value());
    EXPECT_TRUE(becomes([&] { return cluster_.job(1, name)->layout_text() == text; })) << name;
  }
  ASSERT_TRUE(cluster_.store(0).create_job("new").has_value());
  EXPECT_TRUE(becomes([&] { return cluster_.store(1).find("new") != nullptr; }));
  for (const char* name : {"a", "new", "z"}) {
    ASSERT_TRUE(cluster_.store(0).remove_job(name, true).has_value());
    EXPECT_TRUE(becomes([&] { return cluster_.store(1).find(name) == nullptr; })) << name;
  }
  EXPECT_EQ(cluster_.job(1, "job")->find_checkpoint("base"), nullptr);
  ASSERT_TRUE(fs::remove(cluster_.store(1).directory() + "/jobs/job/checkpoints"));
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
}

TEST_F(AgreementTest, AJobThatCannotBeMadeHereKeepsNoOtherFromWhatItLacks) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  ASSERT_NE(cluster_.job(1, "job"), nullptr);
  const std::string in_the_way = cluster_.store(1).directory() + "/jobs/new";
  write_file(in_the_way, "");
  ASSERT_TRUE(cluster_.store(0).create_job("new").has_value());
  cluster_.loses = [](const std::string& node, std::string_view method) {
    return node == "w1" && (method == "job/files" || method == "job/part");
  };
  write(0, LayoutSpec());
  commit(0);
  const auto knows = [&] { return cluster_.store(1).find("job")->find_checkpoint("base"); };
  EXPECT_TRUE(becomes([&] { return knows() != nullptr; }));
  EXPECT_EQ(cluster_.store(1).find("new"), nullptr);
  cluster_.loses = nullptr;
  ASSERT_TRUE(fs::remove(in_the_way));
  EXPECT_TRUE(becomes([&] { return cluster_.store(1).find("new") != nullptr; }));
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
}

}  // namespace
}  // namespace ptc::testing
