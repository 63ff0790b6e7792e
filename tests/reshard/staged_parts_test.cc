// What is said of who has written into incoming/: until when, and of which directory.
#include "reshard/job/staged_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "reshard/job/job_place.h"
#include "reshard/job/job_record.h"
#include "store/base/step_pool.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StagedPartsTest : public ::testing::Test {
 protected:
  StagedPartsTest() {
    place_.name = "job";
    place_.id = "job-id";
    place_.dir = dir_.path().string();
    place_.services.meta = &cluster_.meta();
    place_.services.cluster = &cluster_.as_seen_by(1);
    place_.services.own_store = own_store();
    fs::create_directories(place_.incoming_dir());
    make_job(place_.id);
  }
  void make_job(const std::string& id) {
    JobDecision creates("job");
    creates.create(id, "2026-01-01T00:00:00Z");
    EXPECT_TRUE(cluster_.meta().commit(std::move(creates).transaction()).has_value());
  }
  void end_job() { EXPECT_TRUE(cluster_.meta().commit({.deletes = {"jobs/job"}}).has_value()); }
  std::shared_ptr<const OwnStore> own_store() {
    return StagedParts::own_store(cluster_.meta(), cluster_.as_seen_by(1), "store").value();
  }
  int64_t put(const std::string& key, const std::string& value) {
    return cluster_.meta().commit({.puts = {{key, value}}}).value();
  }
  std::set<std::string> keys() {
    std::set<std::string> keys;
    const auto entries = cluster_.meta().list("staged/").value();
    for (const MetaEntry& entry : entries) keys.insert(entry.key);
    return keys;
  }
  bool become(const std::set<std::string>& wanted) {
    return becomes([&] { return keys() == wanted; });
  }
  std::string directory(const std::string& name) { return place_.incoming_dir() + "/" + name; }
  void write_into(const std::string& name) {
    fs::create_directories(directory(name) + "/rank/0");
    staged_.closed(name + "/rank/0/model.safetensors");
  }

  TempDir dir_;
  LocalCluster cluster_{2};
  JobPlace place_;
  StepPool pool_{1};
  StagedParts staged_{place_};
};

TEST_F(StagedPartsTest, ItIsSaidOfWhatWasThereAtTheStartAndOfWhatIsClosed) {
  fs::create_directories(directory("early") + "/rank");
  fs::create_directory_symlink("/", directory("elsewhere"));
  staged_.start(pool_);
  EXPECT_TRUE(become({"staged/job/early/w1"}));
  write_into("late");
  staged_.closed("a file of incoming itself");
  EXPECT_TRUE(become({"staged/job/early/w1", "staged/job/late/w1"}));
  put("staged/job/late/w0", place_.id);
  put("staged/job/late/w7", "another-id");
  EXPECT_THAT(staged_.nodes_of("late").value(), ElementsAre("w0", "w1"));
  EXPECT_THAT(staged_.nodes_of("lat").value(), IsEmpty());
}

TEST_F(StagedPartsTest, WhatIsClosedInANodeThatIsCutOffIsSaidLater) {
  staged_.start(pool_);
  cluster_.fence(1, true);
  write_into("base");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_THAT(keys(), IsEmpty());
  cluster_.fence(1, false);
  EXPECT_TRUE(become({"staged/job/base/w1"}));
}

TEST_F(StagedPartsTest, ACommitEndsWhatThisNodeSaidAndNobodyElse) {
  put("staged/job/base/w0", place_.id);  // perhaps what comes next there
  staged_.start(pool_);
  write_into("base");
  EXPECT_TRUE(become({"staged/job/base/w0", "staged/job/base/w1"}));
  fs::remove_all(directory("base"));
  staged_.closed("base/");
  EXPECT_TRUE(become({"staged/job/base/w0"}));
  write_into("base");
  EXPECT_TRUE(become({"staged/job/base/w0", "staged/job/base/w1"}));
  // And where nothing is left in it.
  fs::remove_all(directory("base") + "/rank");
  staged_.closed("base/");
  EXPECT_TRUE(become({"staged/job/base/w0"}));
}

/// Others may have gone on without what it had.
TEST_F(StagedPartsTest, AfterItWasAwayANodeSaysItAgain) {
  staged_.start(pool_);
  write_into("base");
  EXPECT_TRUE(become({"staged/job/base/w1"}));
  EXPECT_TRUE(cluster_.meta().commit({.deletes = {"staged/job/base/w1"}}).has_value());
  cluster_.fence(1, true);
  cluster_.fence(1, false);
  write_into("base");
  EXPECT_TRUE(become({"staged/job/base/w1"}));
}

TEST_F(StagedPartsTest, WhatThisStoreSaidBeforeItsStartOfWhatIsGoneIsForgotten) {
  put("staged/job/gone/w1", place_.id + " store");
  put("staged/job/base/w1", place_.id + " store");
  put("staged/job/gone/w0", place_.id + " store");
  put("staged/jobs/gone/w1", place_.id + " store");
  place_.services.own_store = own_store();
  fs::create_directories(directory("base") + "/rank/0");
  staged_.start(pool_);
  EXPECT_TRUE(become({"staged/job/base/w1", "staged/job/gone/w0", "staged/jobs/gone/w1"}));
}

TEST_F(StagedPartsTest, ADirectoryThatIsGoneOrRenamedIsNotSpokenOf) {
  staged_.start(pool_);
  write_into("tmp");
  write_into("gone");
  EXPECT_TRUE(become({"staged/job/gone/w1", "staged/job/tmp/w1"}));
  fs::rename(directory("tmp"), directory("base"));
  fs::remove_all(directory("gone"));
  write_into("other");  // wakes it
  EXPECT_TRUE(become({"staged/job/base/w1", "staged/job/other/w1"}));
}

TEST_F(StagedPartsTest, OfWhatIsGoneByTheEndNothingIsSaid) {
  staged_.start(pool_);
  write_into("base");
  write_into("gone");
  EXPECT_TRUE(become({"staged/job/base/w1", "staged/job/gone/w1"}));
  fs::remove_all(directory("gone"));
  staged_.stop();
  EXPECT_THAT(keys(), ElementsAre("staged/job/base/w1"));
}

TEST_F(StagedPartsTest, WhatAFormerStoreHadIsLost) {
  put("staged/job/base/w1", place_.id + " store");
  put("staged/job/other/w1", place_.id + " former");
  put("staged/job/next/w1", "another-id former");
  put("staged/job/base/w0", place_.id + " former");
  place_.services.own_store = own_store();
  EXPECT_FALSE(staged_.was_lost("base").value());  // it was removed here
  EXPECT_TRUE(staged_.was_lost("other").value());
  EXPECT_FALSE(staged_.was_lost("next").value());
  EXPECT_FALSE(staged_.was_lost("another").value());
  put("staged/job/other/w1", place_.id + " store");  // and was written again
  EXPECT_FALSE(staged_.was_lost("other").value());
}

TEST_F(StagedPartsTest, NothingIsSaidOfAJobThatIsGone) {
  staged_.start(pool_);
  write_into("base");
  EXPECT_TRUE(become({"staged/job/base/w1"}));
  end_job();
  make_job("next-id");
  put("staged/job/base/w0", "next-id");
  write_into("late");
  staged_.stop();
  EXPECT_EQ(keys(), (std::set<std::string>{"staged/job/base/w0", "staged/job/base/w1"}));
  EXPECT_THAT(staged_.nodes_of("base").value(), ElementsAre("w1"));
}

TEST_F(ClusterTest, WhatIsSaidOfIncomingGoesWithTheJob) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const JobRef job = cluster_.job(2, "job");
  ASSERT_NE(job, nullptr);
  write(2, LayoutSpec());
  job->note_closed("base/rank/0/model.safetensors");
  const auto said = [&] { return cluster_.meta().list("staged/job/").value(); };
  ASSERT_TRUE(becomes([&] { return said().size() == 1; }));
  ASSERT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
  EXPECT_THAT(said(), IsEmpty());
}

class WithoutTest : public ClusterTest {
 protected:
  void make_job() {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    ASSERT_NE(cluster_.job(2, "job"), nullptr);
    write(0, LayoutSpec());
  }
  void w2_writes() {
    write_file(incoming(2) + "/rank/0/notes.bin", "of w2");
    cluster_.job(2, "job")->note_closed("base/rank/0/notes.bin");
    ASSERT_TRUE(becomes([&] { return said().size() == 1; }));
  }
  void go_without(const std::string& nodes) {
    write_file(incoming(0) + ".without", nodes);
    cluster_.job(0, "job")->note_closed("base.without");
  }
  std::vector<MetaEntry> said() { return cluster_.meta().list("staged/job/").value(); }
  void refused(const std::string& why) {
    const Result<> outcome = cluster_.job(0, "job")->commit("base", "base");
    ASSERT_TRUE(outcome.has_error());
    EXPECT_THAT(outcome.error().message(), HasSubstr(why));
  }
};

TEST_F(WithoutTest, IsOfWhatHadBeenSaidWhenItWasWritten) {
  make_job();
  w2_writes();
  const std::string value = said()[0].value;
  cluster_.stop(2);
  refused("node w2 is away");
  go_without("w1\nw2\n");
  ASSERT_TRUE(becomes([&] { return said().empty(); }));
  // It was back, and is away again.
  ASSERT_TRUE(cluster_.meta().commit({.puts = {{"staged/job/base/w2", value}}}).has_value());
  refused("node w2 is away");
  EXPECT_EQ(said().size(), 1u);
  go_without("w2 ");
  commit(0);
  EXPECT_FALSE(fs::exists(incoming(0) + ".without"));
  expect_everywhere({0, 1}, LayoutSpec());
}

TEST_F(WithoutTest, SaysNothingOfNodesThatAnswer) {
  make_job();
  w2_writes();
  write_file(incoming(2) + "/rank/0/broken.safetensors", "no header");
  go_without("w2");
  refused("broken.safetensors");
  fs::remove(incoming(2) + "/rank/0/broken.safetensors");
  commit(0);
  EXPECT_TRUE(becomes([&] { return said().empty(); }));  // of w2's, by w2
}

TEST_F(WithoutTest, OfWhatIsSaidWhileACommitIsDecidedNothingIsForgotten) {
  make_job();
  const std::string value = cluster_.job(0, "job")->id();
  ASSERT_TRUE(cluster_.meta().commit({.puts = {{"staged/job/base/w2", value}}}).has_value());
  commit(0);
  EXPECT_TRUE(becomes([&] { return said().size() == 1; }));  // w0 takes back its own
}

/// What a node has it may add to, without saying it again.
TEST_F(WithoutTest, OfWhatANodeHasNothingIsForgottenOnceThatIsLost) {
  make_job();
  w2_writes();
  const std::string value = said()[0].value, id = value.substr(value.find(' ') + 1);
  ASSERT_NE(id, value);
  ASSERT_TRUE(cluster_.meta()
                  .commit({.puts = {{"stores/" + id, R"({"node": "w2", "done": 0, "starts": 1})"}}})
                  .has_value());
  // With one that is away, of which can be seen when it was heeded.
  ASSERT_TRUE(cluster_.meta().commit({.puts = {{"staged/job/base/w9", value}}}).has_value());
  go_without("w2 w9");
  ASSERT_TRUE(becomes([&] { return said().size() == 1; }));
  cluster_.stop(2);
  for (const auto& entry : fs::directory_iterator(cluster_.directory(2)))
    fs::remove_all(entry.path());
  cluster_.start(2);
  refused("node w2 had written something into incoming/base, and has lost it");
  // Nor is it, when only the directory is made again.
  fs::create_directories(incoming(2) + "/rank/0");
  refused("node w2 had written something into incoming/base, and has lost it");
  Result<> by_itself = cluster_.job(2, "job")->commit("base", "base");
  ASSERT_TRUE(by_itself.has_error());
  EXPECT_THAT(by_itself.error().message(), HasSubstr("has lost it"));
  go_without("w2");
  commit(0);
  EXPECT_TRUE(becomes([&] { return said().empty(); }));
}

TEST_F(WithoutTest, OfAnEarlierStartOfTheDaemonIsNotHeeded) {
  make_job();
  w2_writes();
  const std::string without = incoming(0) + ".without";
  cluster_.stop(0);
  write_file(without, "w2");
  cluster_.start(0);
  cluster_.stop(2);
  refused("node w2 is away");
  go_without("w2");
  commit(0);
}

/// A power cut takes the memory, and the node comes back under its name with nothing.
TEST_F(ClusterTest, WhatANodeHasLostWithItsStoreIsNotLeftOutInSilence) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  ASSERT_NE(cluster_.job(2, "job"), nullptr);
  write_file(incoming(2) + "/rank/0/rng.bin", "of w2");
  cluster_.job(2, "job")->note_closed("base/rank/0/rng.bin");
  ASSERT_TRUE(becomes([&] { return cluster_.meta().list("staged/job/").value().size() == 1; }));
  write(0, LayoutSpec());
  cluster_.stop(2);
  for (const auto& entry : fs::directory_iterator(cluster_.directory(2)))
    fs::remove_all(entry.path());
  cluster_.start(2);
  Result<> refused = cluster_.job(0, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("node w2 had written something"));
  refused = cluster_.job(2, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("node w2 had written something"));
  write_file(incoming(0) + ".without", "w2\n");
  commit(0);
  expect_everywhere({0, 1, 2}, LayoutSpec());
  EXPECT_TRUE(becomes([&] { return cluster_.meta().list("staged/job/").value().empty(); }));
}

}  // namespace
}  // namespace ptc::testing
