// Jobs on several nodes: the same state of affairs everywhere, the least moved, nobody's loss
// matters.
#include <atomic>
#include <boost/json/parse.hpp>
#include <filesystem>
#include <map>
#include <memory>
#include <thread>

#include "tests/reshard/cluster_fixture.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

TEST_F(ClusterTest, WhatOneNodeCommitsAndEditsIsTheSameEverywhere) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
  EXPECT_GT(cluster_.bytes_moved(), 0u);  // the others read it over the network

  const std::string even = R"({"tp": 1, "pp": 3, "dp": 1, "devices": ["w0:0", "w1:0", "w2:0"]})";
  edit(1, even);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(even));
  for (unsigned rank = 0; rank < 3; ++rank)
    EXPECT_THAT(holders(0, spec_of(even), rank), ::testing::ElementsAre(LocalCluster::name(rank)));
}

TEST_F(ClusterTest, TheLeastMoves) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  for (const char* text :
       {R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w1:0", "w1:1"]})",
        R"({"tp": 2, "pp": 1, "dp": 2, "devices": ["w1:0", "w1:1", "w2:0", "w2:1"]})",
        R"({"tp": 1, "pp": 3, "dp": 1})", R"({"tp": 2, "pp": 2, "dp": 1})"}) {
    SCOPED_TRACE(text);
    const uint64_t before = cluster_.bytes_moved();
    edit(0, text);
    cluster_.wait_settled();
    const uint64_t moved = cluster_.bytes_moved() - before;
    const std::string plan = cluster_.job(0, "job")->plan_json();
    for (unsigned node = 1; node < 3; ++node) {
      EXPECT_EQ(cluster_.job(node, "job")->plan_json(), plan) << node;
      EXPECT_EQ(cluster_.job(node, "job")->plan_svg(), cluster_.job(0, "job")->plan_svg()) << node;
    }
    const auto value = boost::json::parse(plan);
    EXPECT_EQ(value.at("to").as_string(), spec_of(text).name());
    boost::system::error_code bad;
    ASSERT_NE(value.find_pointer("/bytes/minimum", bad), nullptr) << plan;
    EXPECT_EQ(moved, value.at_pointer("/bytes/minimum").to_number<uint64_t>());
    EXPECT_EQ(moved, value.at_pointer("/bytes/moved").to_number<uint64_t>());
    expect_everywhere({0, 1, 2}, spec_of(text));
  }
  // A daemon that is started anew knows the last plan too.
  const std::string plan = cluster_.job(0, "job")->plan_json();
  cluster_.stop(1);
  cluster_.start(1);
  EXPECT_EQ(cluster_.job(1, "job")->plan_json(), plan);
}

/// A node that cannot get the file that says where the bytes lie now shows the checkpoint as it
/// was.
TEST_F(ClusterTest, ACheckpointStaysWhileItsFilesAreOutOfReach) {
  std::atomic<bool> lost = false;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    return lost && ((method == "job/files" && node == "w2") || method == "job/file");
  });
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  JobRef there = cluster_.job(2, "job");
  lost = true;
  const std::string wanted = R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w0:0", "w1:0"]})";
  edit(0, wanted);
  while (cluster_.job(0, "job")->current_target() != "checkpoints/base/layouts/tp2-pp1-dp1")
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  Result<> synced = there->sync();
  ASSERT_TRUE(synced.has_error());
  EXPECT_EQ(synced.error().code(), Code::kUnavailable) << synced.error().message();
  EXPECT_NE(there->find_checkpoint("base"), nullptr);
  lost = false;
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(wanted));
}

TEST_F(ClusterTest, WithACopyTheLossOfANodeLosesNothing) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 1})";
  edit(0, text);
  cluster_.wait_settled();
  write(0, spec_of(text));
  commit(0);
  cluster_.wait_settled();
  for (uint64_t rank = 0; rank < 2; ++rank) EXPECT_EQ(holders(0, spec_of(text), rank).size(), 2u);
  cluster_.stop(0);
  cluster_.wait_settled();
  expect_everywhere({1, 2}, spec_of(text));
  for (uint64_t rank = 0; rank < 2; ++rank)
    EXPECT_THAT(holders(1, spec_of(text), rank), ::testing::UnorderedElementsAre("w1", "w2"));
  cluster_.start(0);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(text));
  cluster_.stop(1);
  cluster_.wait_settled();
  expect_everywhere({0, 2}, spec_of(text));
}

TEST_F(ClusterTest, WithoutACopyWhatIsLostIsSaidAndComesBackWithItsNode) {
  put_on_w1_and_w2();
  cluster_.stop(2);
  cluster_.wait_settled();
  EXPECT_THAT(cluster_.job(0, "job")->status_json(), HasSubstr("\"lost\""));
  Result<> saved = cluster_.job(0, "job")->save_layout(R"({"tp": 1, "pp": 1, "dp": 1})");
  ASSERT_TRUE(saved.has_error());
  EXPECT_THAT(saved.error().message(), HasSubstr("lost"));
  cluster_.start(2);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 1, "pp": 2, "dp": 1})"));
}

/// w0 holds what the three others need.
class RelayTest : public ClusterTest {
 protected:
  RelayTest() : ClusterTest(4) {
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
    cluster_.wait_settled();
    sent_ = cluster_.bytes_sent(0);
    moved_ = cluster_.bytes_moved();
  }
  /// Bytes that w0 sent for it, and all nodes.
  std::pair<uint64_t, uint64_t> spread() {
    edit(1, text_);
    cluster_.wait_settled();
    const std::pair bytes(cluster_.bytes_sent(0) - sent_, cluster_.bytes_moved() - moved_);
    cluster_.loses = nullptr;
    expect_everywhere({0, 1, 2, 3}, spec_of(text_));
    EXPECT_THAT(holders(0, spec_of(text_), 0), ::testing::IsSupersetOf({"w1", "w2", "w3"}));
    return bytes;
  }

  /// Whatever the receivers are asked in this way is lost.
  void without(std::string_view method) {
    std::atomic<int> lost = 0;
    const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view what) {
      return what == method && node != "w0" && ++lost > 0;
    });
    const auto [sent, moved] = spread();
    EXPECT_GT(lost, 0);
    EXPECT_EQ(moved, sent);  // all of it from w0 in the end
  }

  const std::string text_ = R"({"tp": 1, "pp": 1, "dp": 3, "devices": ["w1:0", "w2:0", "w3:0"]})";
  uint64_t sent_, moved_;
};

TEST_F(RelayTest, WhatThreeNeedOfOneItSendsOnce) {
  const auto [sent, moved] = spread();
  EXPECT_GT(sent, 0u);
  EXPECT_EQ(moved, 3 * sent);
}

TEST_F(RelayTest, NodesThatPassNothingOnAreNotMissed) { without("fetch"); }

TEST_F(RelayTest, NodesThatDoNotSayWhatTheyHaveAreNotMissed) { without("job/arrived"); }

TEST_F(RelayTest, ANodeThatStopsPassingOnInTheMiddleIsNotMissed) {
  std::atomic<int> fetches = 0;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view what) {
    return what == "fetch" && node != "w0" && ++fetches > 5;
  });
  const auto [sent, moved] = spread();
  EXPECT_GT(fetches, 5);
  EXPECT_GT(moved, sent);
  EXPECT_LT(moved, 2 * sent);
}

TEST_F(ClusterTest, PartsOfAPlanThatIsGivenUpGoEvenWhenNobodySaysSo) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string before = R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"]})";
  edit(0, before);
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  std::atomic<bool> asked = false;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    if (method == "job/part" && node == "w2") asked = true;
    return method == "job/drop" || (method == "job/part" && node == "w2");
  });
  edit(0, R"({"tp": 1, "pp": 3, "dp": 1, "devices": ["w0:0", "w1:0", "w2:0"]})");
  auto images = [&] {
    std::filesystem::directory_iterator files(cluster_.store(1).images().directory());
    return std::distance(begin(files), end(files));
  };
  auto becomes = [](const auto& condition) {
    for (int i = 0; i < 150 && !condition(); ++i) usleep(100'000);
    return condition();
  };
  EXPECT_TRUE(becomes([&] { return asked && images() > 0; }));
  edit(0, before);
  cluster_.wait_settled();
  EXPECT_TRUE(becomes([&] { return images() == 0; }))
      << images() << " files on w1 are in no checkpoint";
  expect_everywhere({0, 1, 2}, spec_of(before));
}

TEST_F(ClusterTest, KeepLeavesWhatAnotherNodeReads) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  FileContentRef reader = cluster_.job(1, "job")
                              ->find_checkpoint("base")
                              ->rank_files(LayoutSpec(), 0)
                              .value()
                              ->open(0)
                              .value();
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "keep": 1})");
  write_ranks(sample_, LayoutSpec(), cluster_.job(0, "job")->files_dir() + "/incoming/next");
  ASSERT_TRUE(cluster_.job(0, "job")->commit("next", "next").has_value());
  cluster_.wait_settled();
  // Longer than a node takes to look what is too many.
  std::this_thread::sleep_for(std::chrono::seconds(3));
  for (unsigned node = 0; node < 3; ++node)
    EXPECT_NE(cluster_.job(node, "job")->find_checkpoint("base"), nullptr) << node;
  std::vector<std::byte> bytes(reader->bytes());
  EXPECT_TRUE(reader->read(0, bytes).has_value());
  reader.reset();
  for (int i = 0; i < 100 && cluster_.job(0, "job")->find_checkpoint("base") != nullptr; ++i)
    usleep(100'000);
  EXPECT_EQ(cluster_.job(0, "job")->find_checkpoint("base"), nullptr);
}

TEST_F(ClusterTest, AnOpenFileOfAnotherNodeOutlivesTheCheckpoint) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"]})");
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  auto images = [&] {
    std::filesystem::directory_iterator files(cluster_.store(0).images().directory());
    return std::distance(begin(files), end(files));
  };
  ASSERT_GT(images(), 0);
  const CheckpointRef checkpoint = cluster_.job(1, "job")->find_checkpoint("base");
  FileContentRef whole = checkpoint->rank_files(LayoutSpec(), 0).value()->open(0).value();
  FileContentRef gathered = checkpoint->hf_files().value()->open(0).value();
  auto read = [](const FileContentRef& file) {
    std::vector<std::byte> bytes(file->bytes());
    Result<> got = file->read(0, bytes);
    EXPECT_TRUE(got.has_value()) << got.error().message();
    return bytes;
  };
  const std::vector<std::byte> before = read(whole), gathered_before = read(gathered);

  edit(2, R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w2:0", "w0:0"]})");
  cluster_.wait_settled();
  EXPECT_EQ(read(whole), before) << "after the bytes were moved";
  std::vector<ImageId> on_w0;
  for (const auto stored_now = cluster_.job(0, "job")->find_checkpoint("base")->stored();
       const StoredImage& image : stored_now->images)
    if (image.node == "w0") on_w0.push_back({image.id});
  ASSERT_FALSE(on_w0.empty());
  auto kept = [&] { return cluster_.store(0).images().open(on_w0.front()).has_value(); };
  ASSERT_TRUE(cluster_.job(2, "job")->remove_checkpoint("base").has_value());
  EXPECT_EQ(images(), 0);
  EXPECT_EQ(read(whole), before) << "after the checkpoint was removed";
  ASSERT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
  EXPECT_EQ(read(gathered), gathered_before)
      << "not read since the bytes were moved, and the job removed since";

  // Longer than nodes take to ask whether anybody reads.
  std::this_thread::sleep_for(std::chrono::seconds(2));
  EXPECT_TRUE(kept());
  whole.reset();
  gathered.reset();
  for (int i = 0; i < 100 && kept(); ++i) usleep(100'000);
  EXPECT_FALSE(kept()) << "though nobody reads it";
}

TEST_F(ClusterTest, WhatWasOpenedElsewhereIsReadHereAfterTheRemoval) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"]})");
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  const CheckpointRef checkpoint = cluster_.job(1, "job")->find_checkpoint("base");
  FileContentRef opened_before = checkpoint->hf_files().value()->open(0).value();
  edit(0, R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w1:0", "w1:1"]})");
  cluster_.wait_settled();
  for (const auto stored_now = checkpoint->stored();
       const StoredImage& image : stored_now->images) {
    if (image.written < 0 && image.image->bytes() > 0) {
      EXPECT_EQ(image.node, "w1") << image.path;
    }
  }
  std::vector<std::byte> wanted(opened_before->bytes()), got(opened_before->bytes());
  ASSERT_TRUE(checkpoint->hf_files().value()->open(0).value()->read(0, wanted).has_value());
  ASSERT_TRUE(cluster_.job(0, "job")->remove_checkpoint("base").has_value());
  Result<> read = opened_before->read(0, got);
  ASSERT_TRUE(read.has_value()) << read.error().message();
  EXPECT_EQ(got, wanted);
}

TEST_F(ClusterTest, AReaderOfItsOwnNodeKeepsNothingOnOthers) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w0:0", "w1:0"]})");
  const LayoutSpec spec = spec_of(R"({"tp": 1, "pp": 2, "dp": 1})");
  write(0, spec);
  commit(0);
  cluster_.wait_settled();
  const CheckpointRef checkpoint = cluster_.job(1, "job")->find_checkpoint("base");
  FileContentRef local =
      checkpoint->rank_files(checkpoint->stored()->spec, 1).value()->open(0).value();
  EXPECT_TRUE(checkpoint->in_use());
  std::optional<ImageId> on_w0;
  for (const auto stored_now = checkpoint->stored(); const StoredImage& image : stored_now->images)
    if (image.node == "w0") on_w0 = ImageId{image.id};
  ASSERT_TRUE(on_w0);
  ASSERT_TRUE(cluster_.job(2, "job")->remove_checkpoint("base").has_value());
  auto kept = [&] { return cluster_.store(0).images().open(*on_w0).has_value(); };
  for (int i = 0; i < 50 && kept(); ++i) usleep(100'000);
  EXPECT_FALSE(kept());
  std::vector<std::byte> bytes(local->bytes());
  EXPECT_TRUE(local->read(0, bytes).has_value());
}

TEST_F(ClusterTest, AnOpenFileOfANodeThatDiesIsReadFromItsCopy) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 1, "devices": ["w0:0"]})");
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  const std::vector<std::string> on = holders(0, LayoutSpec(), 0);
  const unsigned reader = std::find(on.begin(), on.end(), "w1") == on.end() ? 1 : 2;
  FileContentRef file = cluster_.job(reader, "job")
                            ->find_checkpoint("base")
                            ->rank_files(LayoutSpec(), 0)
                            .value()
                            ->open(0)
                            .value();
  std::vector<std::byte> before(file->bytes()), after(file->bytes());
  ASSERT_TRUE(file->read(0, before).has_value());
  cluster_.stop(0);
  Result<> got = file->read(0, after);
  ASSERT_TRUE(got.has_value()) << got.error().message();
  EXPECT_EQ(after, before);
}

TEST_F(ClusterTest, WhereBytesLieIsNeverKnownToOneNodeAlone) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 3, "dp": 1})");
  write(0, spec_of(R"({"tp": 1, "pp": 3, "dp": 1})"));
  commit(0);
  cluster_.wait_settled();
  // The plan is carried out, and then nobody hears where the bytes lie.
  std::atomic<int> lost = 0;
  std::atomic<bool> healed = false;
  const auto losing = cluster_.loses.during([&](const std::string&, std::string_view method) {
    return method == "job/files" && !healed && ++lost > 0;
  });
  const std::string before = cluster_.job(0, "job")->current_target().value();
  edit(0, R"({"tp": 1, "pp": 2, "dp": 1})");
  for (int i = 0; i < 300 && lost < 4; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ASSERT_EQ(cluster_.job(0, "job")->current_target(), before);
  }
  EXPECT_GE(lost, 4);
  healed = true;
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 1, "pp": 2, "dp": 1})"));
}

TEST_F(ClusterTest, AnOpenFileOfARemovedCheckpointIsReadFromACopy) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 1, "devices": ["w0:0"]})");
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  const std::vector<std::string> on = holders(0, LayoutSpec(), 0);
  const unsigned reader = std::find(on.begin(), on.end(), "w1") == on.end() ? 1 : 2;
  FileContentRef file = cluster_.job(reader, "job")
                            ->find_checkpoint("base")
                            ->rank_files(LayoutSpec(), 0)
                            .value()
                            ->open(0)
                            .value();
  std::vector<std::byte> before(file->bytes()), after(file->bytes());
  ASSERT_TRUE(file->read(0, before).has_value());
  ASSERT_TRUE(cluster_.job(reader, "job")->remove_checkpoint("base").has_value());
  cluster_.stop(0);
  Result<> got = file->read(0, after);
  ASSERT_TRUE(got.has_value()) << got.error().message();
  EXPECT_EQ(after, before);
}

TEST_F(ClusterTest, ADrainedNodeHoldsNothingAndCanGo) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  edit(0, R"({"tp": 1, "pp": 3, "dp": 1, "keep": 2})");
  write(0, spec_of(R"({"tp": 1, "pp": 3, "dp": 1})"));
  commit(0);
  write_ranks(sample_, LayoutSpec(), cluster_.job(2, "job")->files_dir() + "/incoming/next");
  write_file(cluster_.job(2, "job")->files_dir() + "/incoming/next/layout.json",
             R"({"tp": 1, "pp": 1, "dp": 1})");
  ASSERT_TRUE(cluster_.job(2, "job")->commit("next", "next").has_value());
  cluster_.wait_settled();
  const uint64_t before = cluster_.bytes_moved(), held = cluster_.store(1).bytes_on("w0");
  EXPECT_GT(held, 0u);
  Result<> drained = cluster_.store(1).drain("w0");  // asked of any node
  ASSERT_TRUE(drained.has_value()) << drained.error().message();
  ASSERT_TRUE(cluster_.store(2).drain("w0").has_value()) << "once more";
  cluster_.wait_settled();
  // It alone held the older checkpoint, and a third of the newer one, of which the others hold the
  // rest.
  EXPECT_LE(cluster_.bytes_moved() - before, held);
  for (unsigned node = 0; node < 3; ++node) {
    EXPECT_EQ(cluster_.store(node).bytes_on("w0"), 0u) << node;
    EXPECT_THAT(cluster_.store(node).drained(), ::testing::ElementsAre("w0"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(cluster_.store(0).images().directory()));
  EXPECT_THAT(cluster_.job(1, "job")->status_json(), HasSubstr("\"bytes_left\": 0"));
  cluster_.stop(0);
  cluster_.wait_settled();
  for (const char* name : {"base", "next"}) {
    auto verified = cluster_.job(1, "job")->verify(name);
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
    expect_model(*cluster_.job(2, "job")->find_checkpoint(name), sample_);
  }
  // It is still drained when it is back, until it is taken into service again.
  cluster_.start(0);
  cluster_.wait_settled();
  EXPECT_EQ(cluster_.store(0).bytes_on("w0"), 0u);
  ASSERT_TRUE(cluster_.store(0).cancel_drain("w0").has_value());
  cluster_.wait_settled();
  EXPECT_GT(cluster_.store(1).bytes_on("w0"), 0u);
}

TEST_F(ClusterTest, NothingNewIsPlacedOnADrainedNode) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  ASSERT_TRUE(cluster_.store(0).drain("w1").has_value());
  const std::string text = R"({"tp": 2, "pp": 2, "dp": 1, "replicas": 1})";
  edit(0, text);
  write(1, spec_of(text));  // a job may still write there
  commit(1);
  cluster_.wait_settled();
  EXPECT_EQ(cluster_.store(2).bytes_on("w1"), 0u);
  EXPECT_TRUE(std::filesystem::is_empty(cluster_.store(1).images().directory()));
  for (uint64_t rank = 0; rank < 4; ++rank)
    EXPECT_THAT(holders(0, spec_of(text), rank), ::testing::UnorderedElementsAre("w0", "w2"));
  expect_everywhere({0, 1, 2}, spec_of(text));
  Result<> named =
      cluster_.job(2, "job")->save_layout(R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w1:0"]})");
  ASSERT_TRUE(named.has_error());
  EXPECT_THAT(named.error().message(), HasSubstr("node 'w1' is being drained"));

  ASSERT_TRUE(cluster_.store(2).cancel_drain("w1").has_value());
  const std::string three = R"({"tp": 1, "pp": 3, "dp": 1})";
  edit(0, three);
  cluster_.wait_settled();
  EXPECT_GT(cluster_.store(0).bytes_on("w1"), 0u);
  expect_everywhere({0, 1, 2}, spec_of(three));
  EXPECT_EQ(cluster_.store(0).cancel_drain("w1").error().code(), Code::kNotFound);
}

TEST_F(ClusterTest, WhatIsRemovedWhileOlderOnesGetCopiesIsNoFailure) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  JobRef job = cluster_.job(0, "job");
  for (const std::string name : {"a", "b", "c"}) {
    write_ranks(sample_, LayoutSpec(), job->files_dir() + "/incoming/" + name);
    ASSERT_TRUE(job->commit(name, name).has_value());
  }
  cluster_.wait_settled();
  auto images_of = [&](const char* name) {
    return job->find_checkpoint(name)->stored()->images.size();
  };
  const size_t images = images_of("c");
  std::atomic<bool> removed = false;
  const auto losing = cluster_.loses.during([&](const std::string&, std::string_view method) {
    if (method == "job/part" && images_of("c") > images &&
        !removed.exchange(true)) {  // a is at it, and b comes next
      EXPECT_TRUE(job->remove_checkpoint("b").has_value());
    }
    return false;
  });
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 1})");
  cluster_.wait_settled();
  cluster_.loses = nullptr;
  EXPECT_TRUE(removed);
  EXPECT_EQ(job->numbers().state, JobState::kIdle) << job->status_json();
  EXPECT_GT(images_of("a"), images);
}

TEST_F(ClusterTest, WhatCannotBeDrainedIsSaid) {
  put_on_w1_and_w2();
  auto why = [&](const char* node) {
    Result<> drained = cluster_.store(0).drain(node);
    return drained.has_error() ? drained.error().message() : "";
  };
  EXPECT_THAT(why("w9"), HasSubstr("there is no node 'w9' (nodes: w0, w1, w2)"));
  EXPECT_THAT(why("w2"), HasSubstr("layout.json of job job wants rank 1 on node w2"));
  EXPECT_EQ(why("w0"), "");
  edit(0, R"({"tp": 1, "pp": 2, "dp": 1})");
  EXPECT_EQ(why("w1"), "");
  EXPECT_THAT(why("w2"), HasSubstr("node w2 is the last one in service"));
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(R"({"tp": 1, "pp": 2, "dp": 1})"));
  EXPECT_EQ(cluster_.store(0).bytes_on("w1"), 0u);
  cluster_.stop(2);
  EXPECT_THAT(why("w2"), HasSubstr("node w2 is away"));
}

/// All of it goes with the node, and only its user knows whether that matters.
TEST_F(ClusterTest, WhatStaysOnADrainedNodeIsNamedAndWhatIsNotKnownToo) {
  using ::testing::ElementsAre;
  using ::testing::IsEmpty;
  for (const char* name : {"job", "other", "zero"}) {
    ASSERT_TRUE(cluster_.store(0).create_job(name).has_value());
    ASSERT_NE(cluster_.job(1, name), nullptr);
  }
  JobStore& store = cluster_.store(0);
  EXPECT_THAT(store.uncommitted_on("w1").found, IsEmpty());
  const std::string files = cluster_.job(1, "job")->files_dir();
  for (const char* name : {"incoming/half/rank/0/x", "results/eval.bin", "notes\x01\xff.txt"})
    write_file(files + "/" + name, "x");
  EXPECT_THAT(store.uncommitted_on("w1").found,
              ElementsAre("incoming/half of job job", "notes\\x01\\xff.txt of job job",
                          "results of job job"));
  EXPECT_EQ(cluster_.store(1).uncommitted_on("w1").found, store.uncommitted_on("w1").found);
  EXPECT_THAT(store.uncommitted_on("w1").not_asked, IsEmpty());
  for (int i = 0; i < 40; ++i)
    write_file(fmt::format("{}/many-{:02}", cluster_.job(1, "other")->files_dir(), i), "x");
  const std::vector<std::string> found = store.uncommitted_on("w1").found;
  ASSERT_EQ(found.size(), 3u + 32 + 1);
  EXPECT_EQ(found[3], "many-00 of job other");
  EXPECT_EQ(found.back(), "and 8 more of job other");
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    return node == "w1" && method == "job/holds";
  });
  const JobStore::Uncommitted unknown = store.uncommitted_on("w1");
  cluster_.loses = nullptr;
  EXPECT_THAT(unknown.found, IsEmpty());
  EXPECT_THAT(unknown.not_asked, ElementsAre(HasSubstr("job job: "), "and 2 more jobs"));
}

/// Each node looks for what an edit leaves to do; but one of them looks for all.
TEST_F(ClusterTest, AChangeIsLedByOneNodeAndTheOthersReadThatNothingIsLeft) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  for (unsigned node : {1u, 2u}) ASSERT_NE(cluster_.job(node, "job"), nullptr);
  cluster_.wait_settled();
  std::mutex mutex;
  std::set<std::string> leaders;
  const auto refusing = cluster_.refuses.during(
      [&](const std::string& node, const MetaTransaction& transaction) -> std::optional<Error> {
        std::lock_guard lock(mutex);
        for (const auto& [key, value] : transaction.leased_puts)
          if (key == "leaders/job") leaders.insert(node);
        return std::nullopt;
      });
  edit(0, R"({"tp": 2, "pp": 1, "dp": 1})");
  cluster_.wait_settled();
  cluster_.refuses = nullptr;
  std::lock_guard lock(mutex);
  EXPECT_EQ(leaders.size(), 1u);
}

TEST_F(ClusterTest, ANodeThatIsCutOffDecidesNothing) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  ASSERT_NE(cluster_.job(1, "job"), nullptr);
  write(1, LayoutSpec());
  cluster_.fence(1, true);
  JobStore& store = cluster_.store(1);
  Result<JobRef> created = store.create_job("new");
  ASSERT_TRUE(created.has_error());
  const std::vector<Result<>> refused = {
      created.error(),
      store.remove_job("job", true),
      store.drain("w2"),
      store.cancel_drain("w2"),
      cluster_.job(1, "job")->save_layout(R"({"tp": 2, "pp": 1, "dp": 1})"),
      cluster_.job(1, "job")->commit("base", "base")};
  for (const Result<>& one : refused) {
    ASSERT_TRUE(one.has_error());
    EXPECT_EQ(one.error().code(), Code::kUnavailable);
    EXPECT_THAT(one.error().message(), HasSubstr("node w1 is cut off from its cluster"));
  }
  cluster_.fence(1, false);
  EXPECT_EQ(cluster_.store(0).find("new"), nullptr);
  commit(1);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
}

TEST_F(ClusterTest, ANodeThatCannotTakeOverDecidesNothing) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  ASSERT_TRUE(cluster_.job(0, "job")->commit("base", "older").has_value());
  cluster_.wait_settled();
  // Nothing can be written there, as where there is no room.
  const std::filesystem::path place = cluster_.store(1).directory() + "/jobs/job/checkpoints";
  const std::filesystem::path aside = cluster_.store(1).directory() + "/aside";
  std::filesystem::rename(place, aside);
  write_file(place, "");
  write(0, LayoutSpec());
  commit(0);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    ASSERT_EQ(cluster_.job(0, "job")->current_target(),
              "checkpoints/base/layouts/" + LayoutSpec().name());
  }
  std::filesystem::remove(place);
  std::filesystem::rename(aside, place);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, LayoutSpec());
}

TEST_F(ClusterTest, WhatOneNodeDecidedAllOthersSeeWhenItReturns) {
  for (int round = 0; round < 5; ++round) {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    for (unsigned node = 1; node < 3; ++node) ASSERT_NE(cluster_.store(node).find("job"), nullptr);
    write(0, LayoutSpec());
    commit(0);
    for (unsigned node = 1; node < 3; ++node)
      ASSERT_NE(cluster_.store(node).find("job")->find_checkpoint("base"), nullptr);
    const std::string text = R"({"tp": 2, "pp": 1, "dp": 1})";
    ASSERT_TRUE(cluster_.store(2).find("job")->save_layout(text).has_value());
    for (unsigned node = 0; node < 2; ++node)
      ASSERT_EQ(cluster_.store(node).find("job")->layout_text(), text);
    ASSERT_TRUE(cluster_.store(1).find("job")->remove_checkpoint("base").has_value());
    for (unsigned node : {0u, 2u})
      ASSERT_EQ(cluster_.store(node).find("job")->find_checkpoint("base"), nullptr);
    ASSERT_TRUE(cluster_.store(2).remove_job("job", true).has_value());
    for (unsigned node = 0; node < 2; ++node) ASSERT_EQ(cluster_.store(node).find("job"), nullptr);
  }
}

/// While one node has not begun yet: what the others have done counts, done or not, on all nodes.
TEST_F(ClusterTest, ProgressIsTheSameOnAllNodes) {
  struct Seen {
    std::atomic<int> parts = 0;
    std::atomic<bool> slow = false, holds = false;
    std::string held;  // once it holds
  };
  auto seen = std::make_shared<Seen>();
  cluster_.loses = [seen](const std::string& node, std::string_view method) {
    if (!seen->slow || method != "job/part" || ++seen->parts != 2) return false;
    seen->held = node;
    seen->holds = true;
    while (seen->slow) usleep(1000);
    return false;
  };
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  const std::string thirds = R"({"tp": 1, "pp": 3, "dp": 1, "devices": ["w0:0", "w1:0", "w2:0"]})";
  edit(0, thirds);
  cluster_.wait_settled();
  std::map<std::string, uint64_t>
      bytes;  // of files with tensors: others are copied to no other node
  uint64_t all = 0;
  const auto stored = cluster_.job(0, "job")->find_checkpoint("base")->stored();
  for (size_t i = 0; i < stored->images.size(); ++i)
    if (stored->images[i].written < 0) bytes[stored->images[i].node] += stored->layouts()[i].bytes;
  for (const auto& [node, held] : bytes) all += held;
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w0:0"]})");
  cluster_.wait_settled();

  seen->slow = true;
  edit(1, thirds);
  auto progress = [&](unsigned node) { return cluster_.job(node, "job")->progress(); };
  for (unsigned node : {0u, 1u, 2u})
    for (;; usleep(10'000)) {
      const std::optional<ReshardProgress> shown = progress(node);
      if (!shown || !seen->holds) continue;
      if (shown->bytes_total - shown->bytes_done != bytes[seen->held]) continue;
      EXPECT_EQ(shown->to, spec_of(thirds).name());
      EXPECT_EQ(shown->checkpoint, "base");
      EXPECT_EQ(shown->bytes_total, all);
      EXPECT_EQ(cluster_.job(node, "job")->numbers().progress_bytes, shown->bytes_done);
      break;
    }
  seen->slow = false;
  cluster_.wait_settled();
  for (unsigned node : {0u, 1u, 2u}) {
    for (int i = 0; i < 500 && progress(node); ++i) usleep(10'000);
    EXPECT_FALSE(progress(node)) << node;
  }
}

/// One that has no part in it, too.
TEST_F(ClusterTest, ProgressOfOlderCheckpointsIsTheSameOnAllNodes) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  JobRef job = cluster_.job(0, "job");
  for (const std::string name : {"old", "new"}) {
    write_ranks(sample_, LayoutSpec(), job->files_dir() + "/incoming/" + name);
    ASSERT_TRUE(job->commit(name, name).has_value());
  }
  cluster_.wait_settled();
  ASSERT_TRUE(cluster_.store(0).drain("w2").has_value());
  cluster_.wait_settled();
  std::atomic<int> parts = 0;
  std::atomic<bool> slow = true;
  const auto losing = cluster_.loses.during([&](const std::string&, std::string_view method) {
    if (method == "job/part") ++parts;  // first those of the newest
    while (slow && parts >= 2 && method == "job/part") usleep(1000);
    return false;
  });
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 1})");
  for (unsigned node : {0u, 1u, 2u}) {
    const JobRef there = cluster_.job(node, "job");
    std::optional<ReshardProgress> shown;
    for (int i = 0; i < 1000 && (!shown || shown->checkpoint != "old"); ++i) {
      usleep(10'000);
      shown = there->progress();
    }
    EXPECT_TRUE(shown && shown->checkpoint == "old") << node << there->status_json();
    EXPECT_EQ(there->numbers().state, JobState::kResharding) << node;
    EXPECT_THAT(there->status_json(), HasSubstr(R"("state": "resharding")")) << node;
  }
  slow = false;
  cluster_.wait_settled();
  cluster_.loses = nullptr;
}

/// Nodes, those that are away, too; no byte is counted on two of them.
TEST_F(ClusterTest, EachNodeReportsAll) {
  put_on_w1_and_w2();
  auto report = [&](unsigned asked, unsigned node) {
    for (const NodeReport& one : cluster_.store(asked).node_reports())
      if (one.name == cluster_.name(node)) return one;
    return NodeReport();
  };
  for (unsigned asked : {0u, 1u, 2u})
    for (unsigned node : {0u, 1u, 2u}) {
      while (!report(asked, node).numbers) usleep(10'000);
      const NodeReport one = report(asked, node);
      EXPECT_EQ(std::string(one.state), "up");
      EXPECT_GT(one.stored_bytes, 0u);
      EXPECT_EQ(one.stored_bytes, cluster_.job(node, "job")->numbers().stored_bytes);
      EXPECT_GT(one.numbers->memory_total_bytes, one.numbers->memory_used_bytes);
      EXPECT_EQ(one.numbers->memory_id, report(0, 0).numbers->memory_id)
          << "one file system of one machine";
    }
  EXPECT_EQ(cluster_.job(2, "job")->missing_copy_bytes(), 0u);
  const uint64_t held = report(0, 1).stored_bytes;
  uint64_t only_there = 0;
  const auto stored = cluster_.job(0, "job")->find_checkpoint("base")->stored();
  for (size_t i = 0; i < stored->images.size(); ++i)
    if (stored->images[i].node == "w1" && stored->images[i].written < 0)
      only_there += stored->layouts()[i].bytes;
  cluster_.stop(1);
  EXPECT_EQ(std::string(report(0, 1).state), "away");
  EXPECT_EQ(report(0, 1).stored_bytes, held);
  EXPECT_FALSE(report(0, 1).numbers);
  cluster_.wait_settled();
  for (unsigned asked : {0u, 2u})
    EXPECT_EQ(cluster_.job(asked, "job")->missing_copy_bytes(), only_there);
}

TEST_F(ClusterTest, OfTwoEditorsOneComesFirst) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  std::vector<std::jthread> editors;
  std::atomic<int> accepted = 0;
  for (unsigned node = 0; node < 3; ++node)
    editors.emplace_back([&, node] {
      for (int i = 0; i < 5; ++i) {
        const std::string text = fmt::format(R"({{"tp": {}, "pp": {}, "dp": 1, "keep": {}}})",
                                             1 + i % 2, 1 + node, 10 + i);
        Result<> saved = cluster_.job(node, "job")->save_layout(text);
        if (saved.has_value()) ++accepted;
        else EXPECT_EQ(saved.error().code(), Code::kConflict) << saved.error().message();
      }
    });
  editors.clear();
  cluster_.wait_settled();
  std::string text = cluster_.job(0, "job")->layout_text();
  EXPECT_EQ(
      boost::json::parse(cluster_.job(1, "job")->status_json()).at("revision").to_number<int>(),
      1 + accepted);
  for (unsigned node = 1; node < 3; ++node)
    EXPECT_EQ(cluster_.job(node, "job")->layout_text(), text);
  expect_everywhere({0, 1, 2}, spec_of(text));
}

}  // namespace
}  // namespace ptc::testing
