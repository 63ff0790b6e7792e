// A checkpoint of which no node that is there has what describes it: it is said, it holds up
// nothing else, and it can go.
#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "reshard/cluster/tombstones.h"
#include "reshard/node/store_identity.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class LostTest : public ClusterTest {
 protected:
  /// w0 alone has all of it, and is gone.
  explicit LostTest(bool pinned = false) {
    cluster_.loses = [](const std::string&, std::string_view method) {
      return method == "job/file" || method == "job/files";
    };
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
    if (pinned) {
      EXPECT_TRUE(cluster_.job(0, "job")->pin_checkpoint("base", true).has_value());
    }
    for (unsigned node : {1u, 2u}) EXPECT_NE(cluster_.job(node, "job"), nullptr);
    cluster_.stop(0);
    cluster_.loses = nullptr;
  }
  std::string status(unsigned node) { return cluster_.store(node).find("job")->status_json(); }
};

/// It is seen before what it has is within reach again.
TEST_F(ClusterTest, NoLayoutIsRefusedForWantOfWhatANodeHasThatHasJustComeBack) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  const JobRef job = cluster_.job(1, "job");
  const std::string text = R"({"tp": 2, "pp": 1, "dp": 1})";
  cluster_.stop(0);
  ASSERT_TRUE(becomes([&] { return job->find_checkpoint("base")->loss().has_value(); }));
  EXPECT_EQ(job->save_layout(text).error().code(), Code::kInvalidArgument);  // it is away
  std::atomic<bool> holds = true;
  const auto listing = cluster_.lists.during([&](const std::string& node, std::string_view prefix) {
    while (node == "w1" && prefix.starts_with("jobs/") && holds)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  });
  cluster_.start(0);
  const Result<> refused = job->save_layout(text);
  holds = false;
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kUnavailable) << refused.error().message();
  EXPECT_THAT(refused.error().message(), HasSubstr("w0 has just come back"));
  cluster_.lists = nullptr;
  EXPECT_TRUE(becomes([&] { return job->save_layout(text).has_value(); }));
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
}

/// w0's store was lost, and with it all bytes of the newest checkpoint.
TEST_F(ClusterTest, WhatIsLostHoldsUpNoDrain) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "keep": 3})");
  const JobRef writer = cluster_.job(2, "job");
  write_ranks(sample_, LayoutSpec(), writer->files_dir() + "/incoming/older");
  ASSERT_TRUE(writer->commit("older", "older").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  const CheckpointRef base = cluster_.job(1, "job")->find_checkpoint("base");
  const uint64_t held = cluster_.store(1).bytes_on("w2");
  EXPECT_GT(held, 0u);
  EXPECT_GT(cluster_.store(1).bytes_on("w0"), 0u);
  cluster_.stop(0);
  for (const auto& entry : fs::directory_iterator(cluster_.directory(0)))
    fs::remove_all(entry.path());
  cluster_.start(0);
  ASSERT_TRUE(becomes([&] { return cluster_.store(1).bytes_on("w0") == 0; }));
  EXPECT_TRUE(base->loss().has_value());
  const Result<> drained = cluster_.store(1).drain("w2");
  ASSERT_TRUE(drained.has_value()) << drained.error().message();
  for (unsigned node = 0; node < 3; ++node)
    EXPECT_TRUE(becomes([&] { return cluster_.store(node).bytes_on("w2") == 0; })) << node;
  expect_model(*cluster_.job(1, "job")->find_checkpoint("older"), sample_);
  EXPECT_TRUE(cluster_.job(0, "job")->verify("older").has_value());
}

TEST_F(LostTest, IsSaidWithWhoHadItAndWhatToDo) {
  for (unsigned node : {1u, 2u}) {
    SCOPED_TRACE(node);
    ASSERT_TRUE(becomes([&] {
      return status(node).find("ptc rm --force job") != std::string::npos;
    })) << status(node);
    EXPECT_THAT(
        status(node),
        AllOf(HasSubstr("cannot read checkpoint base: no node that is there has manifest.json"),
              HasSubstr("w0 (away)"), HasSubstr(R"("state": "failed")")));
    EXPECT_TRUE(cluster_.store(node).find("job")->is_settled());
  }
  Result<> refused = cluster_.store(1).remove_job("job", false);
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kBusy);
  EXPECT_THAT(refused.error().message(), AllOf(HasSubstr("base"), HasSubstr("cannot be read")));
  cluster_.start(0);
  for (unsigned node : {1u, 2u})
    ASSERT_TRUE(becomes(
        [&] { return cluster_.store(node).find("job")->find_checkpoint("base") != nullptr; }));
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
  for (unsigned node : {1u, 2u})
    EXPECT_THAT(status(node),
                AllOf(HasSubstr(R"("last_error": null)"), HasSubstr(R"("state": "idle")")));
}

TEST_F(LostTest, ItsJobIsRemovedByWhatIsAgreedAlone) {
  Result<> removed = cluster_.store(1).remove_job("job", true);
  ASSERT_TRUE(removed.has_value()) << removed.error().message();
  for (unsigned node : {1u, 2u}) {
    EXPECT_EQ(cluster_.store(node).find("job"), nullptr);
    EXPECT_FALSE(fs::exists(cluster_.directory(node) + "/jobs/job"));
  }
  EXPECT_TRUE(cluster_.meta().list("jobs/").value().empty());
  EXPECT_FALSE(fs::is_empty(cluster_.directory(0) + "/images"));
  cluster_.start(0);
  EXPECT_EQ(cluster_.store(0).find("job"), nullptr);
  EXPECT_TRUE(fs::is_empty(cluster_.directory(0) + "/images"));
  EXPECT_FALSE(fs::exists(cluster_.directory(0) + "/jobs/job"));
  EXPECT_TRUE(becomes([&] { return cluster_.meta().list(kTombstones).value().empty(); }));
}

TEST_F(LostTest, ItCanBeRemovedAloneAndItsJobGoesOn) {
  write(1, LayoutSpec());
  Result<> committed = cluster_.job(1, "job")->commit("base", "next");
  ASSERT_TRUE(committed.has_value()) << committed.error().message();
  Result<> removed = cluster_.job(2, "job")->remove_checkpoint("base");
  ASSERT_TRUE(removed.has_value()) << removed.error().message();
  cluster_.wait_settled();
  edit(1, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  EXPECT_EQ(cluster_.job(2, "job")->current_target(), "checkpoints/next/layouts/tp2-pp1-dp1");
  cluster_.start(0);
  cluster_.wait_settled();
  EXPECT_EQ(cluster_.job(0, "job")->find_checkpoint("base"), nullptr);
}

TEST_F(LostTest, OthersOfItsJobAreCommittedLookedOverAndMended) {
  edit(1, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 2})");
  write(1, LayoutSpec());
  const JobRef job = cluster_.job(1, "job");
  Result<> committed = job->commit("base", "next");
  ASSERT_TRUE(committed.has_value()) << committed.error().message();
  const std::shared_ptr<const StoredState> stored = job->find_checkpoint("next")->stored();
  ASSERT_EQ(stored->nodes, (std::vector<std::string>{"w1", "w2"}));
  const auto damage = [&] {
    for (const StoredImage& image : stored->images) {
      if (image.node != "w2" || image.path != "model.safetensors") continue;
      std::fstream file(cluster_.directory(2) + "/images/" + image.id,
                        std::ios::in | std::ios::out | std::ios::binary);
      ASSERT_TRUE(file.seekp(-1, std::ios::end).put('x').good());
    }
  };
  for (unsigned node : {1u, 2u}) {
    damage();
    const JobRef asked = cluster_.job(node, "job");
    const Result<std::string> verified = asked->verify("next");
    ASSERT_TRUE(verified.has_error());
    EXPECT_THAT(verified.error().message(), HasSubstr("w2"));
    EXPECT_TRUE(becomes([&] { return asked->verify("next").has_value(); })) << "in the background";
    // What mends it looks at it once more: only then is it damaged again.
    EXPECT_TRUE(asked->repair("next").has_value());
  }
  damage();
  const Result<std::string> mended = job->repair("next");
  ASSERT_TRUE(mended.has_value()) << mended.error().message();
  for (unsigned node : {1u, 2u}) {
    const Result<std::string> verified = cluster_.job(node, "job")->verify("next");
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
    const Result<std::string> lost = cluster_.job(node, "job")->verify("base");
    ASSERT_TRUE(lost.has_error());
    EXPECT_THAT(lost.error().message(),
                AllOf(HasSubstr("w0 (away)"), HasSubstr("ptc rm job/base")));
  }
}

TEST_F(LostTest, ItsNameIsTaken) {
  write(1, LayoutSpec());
  Result<> refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kAlreadyExists) << refused.error().message();
}

TEST_F(LostTest, ADoubtIsSettledAllTheSame) {
  write(1, LayoutSpec());
  cluster_.doubt(1, true);
  EXPECT_TRUE(cluster_.job(1, "job")->commit("base", "next").has_error());
  cluster_.doubt(1, std::nullopt);
  bool done = false;
  EXPECT_TRUE(becomes(
      [&] { return done = done || cluster_.job(1, "job")->commit("base", "next").has_value(); }));
}

class LostAndPinnedTest : public LostTest {
 protected:
  LostAndPinnedTest() : LostTest(true) {}
};

TEST_F(LostAndPinnedTest, ItStaysUntilThePinIsTakenOff) {
  const JobRef job = cluster_.job(1, "job");
  for (const Result<>& refused :
       {job->remove_checkpoint("base"), cluster_.store(1).remove_job("job", true)}) {
    ASSERT_TRUE(refused.has_error());
    EXPECT_EQ(refused.error().errno_value(), EPERM) << refused.error().message();
  }
  const Result<> unpinned = job->pin_checkpoint("base", false);
  ASSERT_TRUE(unpinned.has_value()) << unpinned.error().message();
  EXPECT_TRUE(job->remove_checkpoint("base").has_value());
}

/// What the job's data set agrees on changes with each step.
TEST_F(LostTest, ItIsLookedForAgainWhateverElseIsPut) {
  ASSERT_TRUE(becomes([&] { return status(1).find("w0 (away)") != std::string::npos; }))
      << status(1);
  const std::jthread puts([&](const std::stop_token& stop) {
    for (int i = 0; !stop.stop_requested(); ++i) {
      (void)cluster_.meta().commit({.puts = {{"jobs/job/dataset/consumed", std::to_string(i)}}});
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  // By hand.
  fs::copy(cluster_.directory(0) + "/jobs/job/checkpoints",
           cluster_.directory(1) + "/jobs/job/checkpoints", fs::copy_options::recursive);
  const auto is_there = [&] {
    return cluster_.store(1).find("job")->find_checkpoint("base") != nullptr;
  };
  EXPECT_TRUE(becomes(is_there) || becomes(is_there));  // it is lost: not so often
}

/// Until somebody decides: what else was removed is carried out, and said to be.
TEST_F(LostTest, OtherJobsAreTakenOverAndTheirTombstonesCarriedOut) {
  ASSERT_TRUE(cluster_.store(1).create_job("other").has_value());
  ASSERT_TRUE(cluster_.store(1).remove_job("other", true).has_value());
  const std::vector<MetaEntry> tombstones = cluster_.meta().list(kTombstones).value();
  ASSERT_EQ(tombstones.size(), 1u);
  for (const char* node : {"w1", "w2"}) {
    EXPECT_TRUE(becomes([&] {
      const std::vector<RegisteredStore> stores = read_stores(cluster_.meta()).value();
      return std::any_of(stores.begin(), stores.end(), [&](const RegisteredStore& store) {
        return store.node == node && store.done >= tombstones[0].revision;
      });
    })) << node;
  }
}

}  // namespace
}  // namespace ptc::testing
