// Jobs on several nodes: the same state of affairs everywhere, the least moved, nobody's loss matters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <boost/json/parse.hpp>
#include <filesystem>
#include <fstream>
#include <latch>
#include <thread>

#include "tests/support/local_cluster.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

class ClusterTest : public ::testing::Test {
 protected:
  explicit ClusterTest(unsigned nodes = 3) : cluster_(nodes) {}
  void write(unsigned node, const LayoutSpec& spec) {
    write_ranks(sample_, spec, incoming(node));
  }
  std::string incoming(unsigned node) {
    return cluster_.job(node, "job")->files_dir() + "/incoming/base";
  }
  void edit(unsigned node, const std::string& text) {
    Result<> saved = cluster_.job(node, "job")->save_layout(text);
    ASSERT_TRUE(saved.has_value()) << saved.error().message();
  }
  void commit(unsigned node) {
    Result<> committed = cluster_.job(node, "job")->commit("base", "base");
    ASSERT_TRUE(committed.has_value()) << committed.error().message();
  }
  /// A checkpoint written on w0 of which each of the others holds half, and w0 nothing.
  void put_on_w1_and_w2() {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    commit(0);
    edit(0, R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w1:0", "w2:0"]})");
    cluster_.wait_settled();
  }
  /// Every node that is in `nodes` shows the checkpoint whole, and `current` in the layout.
  void expect_everywhere(std::initializer_list<unsigned> nodes, const LayoutSpec& spec) {
    for (unsigned node : nodes) {
      SCOPED_TRACE(fmt::format("node {}", node));
      JobRef job = cluster_.job(node, "job");
      ASSERT_NE(job, nullptr);
      CheckpointRef checkpoint = job->find_checkpoint("base");
      ASSERT_NE(checkpoint, nullptr) << job->status_json();
      EXPECT_EQ(job->current_target(), "checkpoints/base/layouts/" + spec.name()) << job->status_json();
      expect_model(*checkpoint, sample_);
      expect_layout(*checkpoint, sample_, spec);
      auto verified = job->verify("base");
      EXPECT_TRUE(verified.has_value()) << verified.error().message();
    }
  }
  /// Nodes that hold the rank's model file.
  std::vector<std::string> holders(unsigned asked, const LayoutSpec& spec, uint64_t rank) {
    CheckpointRef checkpoint = cluster_.job(asked, "job")->find_checkpoint("base");
    std::vector<std::string> nodes;
    const uint32_t state = state_index(spec, state_of(spec, spec.coords(rank)));
    for (const StoredImage& image : checkpoint->stored()->images)
      if (image.state == state && image.path == "model.safetensors" && image.image != nullptr)
        nodes.push_back(image.node);
    return nodes;
  }

  Sample sample_ = llama_sample(true, 4);
  LocalCluster cluster_;
};

LayoutSpec spec_of(const std::string& text) { return Layout::parse(text).value().spec; }

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
  for (const char* text : {R"({"tp": 2, "pp": 1, "dp": 1, "devices": ["w1:0", "w1:1"]})",
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

/// A node that cannot get the file that says where the bytes lie now shows the checkpoint as it was.
TEST_F(ClusterTest, ACheckpointStaysWhileItsFilesAreOutOfReach) {
  std::atomic<bool> lost = false;
  cluster_.loses = [&](const std::string& node, std::string_view method) {
    return lost && ((method == "job/files" && node == "w2") || method == "job/file");
  };
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

/// Neither knows of the other when it is decided: they have the same number, and both are listed, everywhere.
TEST_F(ClusterTest, TwoNodesCommitAtTheSameTime) {
  std::latch both(2);
  std::atomic<bool> wait = true;
  cluster_.loses = [&](const std::string& node, std::string_view method) {
    if (wait && method == "job/files" && node != "w2") both.arrive_and_wait();
    return false;
  };
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  std::vector<std::jthread> commits;
  for (unsigned node : {0u, 1u})
    commits.emplace_back([this, node] {
      JobRef job = cluster_.job(node, "job");
      const std::string name = "of" + std::to_string(node);
      write_ranks(sample_, LayoutSpec(), job->files_dir() + "/incoming/" + name);
      Result<> committed = job->commit(name, name);
      EXPECT_TRUE(committed.has_value()) << committed.error().message();
    });
  both.wait();
  wait = false;
  commits.clear();
  cluster_.wait_settled();
  for (unsigned node : {0u, 1u, 2u}) {
    std::vector<std::string> names;
    for (const CheckpointRef& checkpoint : cluster_.job(node, "job")->checkpoints()) names.push_back(checkpoint->name());
    EXPECT_THAT(names, ::testing::UnorderedElementsAre("of0", "of1")) << node;
    EXPECT_EQ(cluster_.job(node, "job")->current_target(),  // the later of the two, whatever its name
              "checkpoints/" + names.back() + "/layouts/" + LayoutSpec().name());
  }
}

/// Files of all nodes that are in no checkpoint, after a moment.
class CommitTest : public ClusterTest {
 protected:
  static constexpr const char* kHalves = R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 1, "devices": ["w0:0", "w1:0"]})";
  CommitTest() {
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    edit(0, kHalves);
    cluster_.wait_settled();
    for (unsigned node : {0u, 1u}) write_rank(node);
  }
  void write_rank(unsigned node) {
    TempDir all;
    write_ranks(sample_, spec_of(kHalves), all.path().string());
    std::filesystem::create_directories(incoming(node) + "/rank");
    std::filesystem::copy(all.path().string() + "/rank/" + std::to_string(node), incoming(node) + "/rank/" + std::to_string(node),
                          std::filesystem::copy_options::recursive);
  }
  size_t files_of(unsigned node) {
    std::filesystem::directory_iterator files(cluster_.store(node).images().directory());
    return std::distance(begin(files), end(files));
  }
  void expect_nothing_left() {
    auto left = [&] { return files_of(0) + files_of(1) + files_of(2); };
    for (int i = 0; i < 200 && left() > 0; ++i) usleep(100'000);
    EXPECT_EQ(left(), 0u);
    for (unsigned node : {0u, 1u}) {
      EXPECT_TRUE(std::filesystem::exists(incoming(node) + "/rank/" + std::to_string(node))) << node;
      const std::string directory = cluster_.store(node).directory() + "/jobs/job/checkpoints";
      EXPECT_TRUE(!std::filesystem::exists(directory) || std::filesystem::is_empty(directory)) << node;
    }
  }
};

TEST_F(CommitTest, OneThatFailsLeavesNoCopies) {
  auto still_lost = std::make_shared<std::atomic<bool>>(true);
  std::atomic<bool>& lost = *still_lost;
  // Nobody says that it has failed either.
  cluster_.loses = [still_lost](const std::string&, std::string_view method) {
    return *still_lost && (method == "job/hide" || method == "job/untake" || method == "job/drop");
  };
  Result<> failed = cluster_.job(0, "job")->commit("base", "base");
  ASSERT_TRUE(failed.has_error());
  expect_nothing_left();
  lost = false;
  commit(0);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(CommitTest, OneThatTakesLongerGoesOnWithTheNextCall) {
  // Asked after the test, too.
  struct Seen {
    std::atomic<int> takes = 0, parts = 0;
    std::atomic<bool> slow = true;
  };
  auto seen = std::make_shared<Seen>();
  auto& [takes, parts, slow] = *seen;
  cluster_.loses = [seen](const std::string&, std::string_view method) {
    if (method == "job/take") ++seen->takes;
    if (method == "job/part") ++seen->parts;
    while (seen->slow && method == "job/part") usleep(10'000);
    return false;
  };
  JobRef job = cluster_.job(0, "job");
  for (int i = 0; i < 2; ++i) {
    const auto start = std::chrono::steady_clock::now();
    Result<> waited = job->commit("base", "base", std::chrono::milliseconds(600));
    ASSERT_TRUE(waited.has_error());
    EXPECT_EQ(waited.error().errno_value(), EAGAIN) << waited.error().message();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1500));
    EXPECT_TRUE(std::filesystem::exists(incoming(0) + "/rank/0"));
  }
  while (parts == 0) usleep(10'000);
  EXPECT_THAT(job->status_json(), HasSubstr("copying"));
  const int asked = parts;
  slow = false;
  usleep(500'000);
  EXPECT_EQ(job->find_checkpoint("base"), nullptr);  // not before somebody asks again
  Result<> committed = job->commit("base", "base", std::chrono::seconds(10));
  EXPECT_TRUE(committed.has_value()) << committed.error().message();
  EXPECT_EQ(takes, 2);
  EXPECT_EQ(parts, asked);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

TEST_F(CommitTest, OneThatFailsMeanwhileIsToldToTheNextCall) {
  std::filesystem::remove_all(incoming(1));
  auto still_slow = std::make_shared<std::atomic<bool>>(true);
  std::atomic<bool>& slow = *still_slow;
  cluster_.loses = [still_slow](const std::string&, std::string_view method) {
    while (*still_slow && method == "job/take") usleep(10'000);
    return false;
  };
  JobRef job = cluster_.job(0, "job");
  EXPECT_EQ(job->commit("base", "base", std::chrono::milliseconds(100)).error().errno_value(), EAGAIN);
  slow = false;
  while (!std::filesystem::exists(incoming(0) + ".error")) usleep(10'000);
  usleep(100'000);
  Result<> told = job->commit("base", "base", std::chrono::seconds(10));
  ASSERT_TRUE(told.has_error());
  EXPECT_EQ(told.error().code(), Code::kInvalidArgument) << told.error().message();
  write_rank(1);
  commit(0);
}

/// One decision is in doubt: what it was for stays, all else goes on, and it is settled when it can be.
TEST_F(CommitTest, ADoubtIsSettledAndForgotten) {
  for (const bool done : {false, true}) {
    SCOPED_TRACE(done);
    cluster_.doubt(0, done);
    Result<> doubtful = cluster_.job(0, "job")->commit("base", "base");
    ASSERT_TRUE(doubtful.has_error());
    EXPECT_EQ(doubtful.error().code(), Code::kInDoubt) << doubtful.error().message();
    EXPECT_FALSE(std::filesystem::exists(incoming(0)));
    // One that is refused later loses nothing.
    const std::string other = cluster_.job(0, "job")->files_dir() + "/incoming/other";
    std::filesystem::create_directories(other + "/rank/0");
    write_file(other + "/rank/0/notes.txt", "no tensor");
    EXPECT_EQ(cluster_.job(0, "job")->commit("other", "other").error().code(), Code::kInvalidArgument);
    EXPECT_TRUE(std::filesystem::exists(other + "/rank/0/notes.txt"));
    std::filesystem::remove_all(other);
    cluster_.doubt(0, std::nullopt);
    if (!done) {
      for (int i = 0; i < 100 && !std::filesystem::exists(incoming(0)); ++i) usleep(100'000);
      EXPECT_TRUE(std::filesystem::exists(incoming(0) + "/rank/0"));
      expect_nothing_left();
    }
  }
  for (int i = 0; i < 100 && cluster_.job(0, "job")->find_checkpoint("base") == nullptr; ++i) usleep(100'000);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
  const std::string committing = cluster_.store(0).directory() + "/jobs/job/committing";
  for (int i = 0; i < 100 && !std::filesystem::is_empty(committing); ++i) usleep(100'000);
  EXPECT_TRUE(std::filesystem::is_empty(committing));
}

/// A job cannot go while a commit that another node leads is being decided.
TEST_F(CommitTest, AJobIsNotRemovedBesideItsCommit) {
  std::atomic<bool> once = true;
  cluster_.loses = [&](const std::string& node, std::string_view method) {
    if (method == "job/hide" && once.exchange(false)) {
      Result<> removed = cluster_.store(2).remove_job("job", false);
      EXPECT_TRUE(removed.has_error());
    }
    return node.empty();
  };
  commit(0);
  Result<> removed = cluster_.store(2).remove_job("job", false);
  ASSERT_TRUE(removed.has_error());
  EXPECT_EQ(removed.error().code(), Code::kBusy);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(kHalves));
}

/// Each node writes some of the ranks.
TEST_F(ClusterTest, RanksMayBeWrittenOnAnyNode) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  const std::string text = R"({"tp": 2, "pp": 3, "dp": 1, "replicas": 1})";
  edit(0, text);
  cluster_.wait_settled();
  const LayoutSpec spec = spec_of(text);
  auto write_all = [&] {
    for (unsigned node = 0; node < 3; ++node) {
      write(node, spec);
      for (uint64_t rank = 0; rank < 6; ++rank)
        if (rank / 2 != node) std::filesystem::remove_all(fmt::format("{}/rank/{}", incoming(node), rank));
    }
  };
  write_all();
  // Refused as a whole, and nothing is lost: then on each node it is where it was.
  std::filesystem::resize_file(incoming(2) + "/rank/5/model.safetensors", 100);
  Result<> refused = cluster_.job(1, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("rank/5/model.safetensors"));
  for (unsigned node = 0; node < 3; ++node)
    EXPECT_TRUE(std::filesystem::exists(incoming(node) + "/rank")) << node;
  write_all();
  const uint64_t before = cluster_.bytes_moved();
  commit(1);
  // Committed means safe: each file has its copy, and that is all that moved.
  for (uint64_t rank = 0; rank < 6; ++rank) EXPECT_EQ(holders(1, spec, rank).size(), 2u);
  const uint64_t copied = cluster_.bytes_moved() - before;
  cluster_.wait_settled();
  EXPECT_EQ(cluster_.bytes_moved() - before, copied);
  for (unsigned node = 0; node < 3; ++node)
    EXPECT_FALSE(std::filesystem::exists(incoming(node))) << node;
  expect_everywhere({0, 1, 2}, spec);
  cluster_.stop(2);
  cluster_.wait_settled();
  expect_everywhere({0, 1}, spec);
}

TEST_F(ClusterTest, ARankWrittenOnTwoNodesIsRefused) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  for (unsigned node = 0; node < 2; ++node) write(node, LayoutSpec());
  Result<> refused = cluster_.job(0, "job")->commit("base", "base");
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("was written on two nodes"));
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

/// Copies are damaged on the disk of a node: bytes change, or a file is cut.
class DamageTest : public ClusterTest {
 protected:
  void commit_with_copies(unsigned replicas) {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    spec_text_ = fmt::format(R"({{"tp": 1, "pp": 3, "dp": 1, "replicas": {}}})", replicas);
    edit(0, spec_text_);
    write(0, spec_of(spec_text_));
    commit(0);
    cluster_.wait_settled();
    ASSERT_TRUE(cluster_.job(0, "job")->verify("base").has_value());
  }
  /// The file of a rank's image on a node that has it.
  std::string image_file(unsigned node, uint64_t rank) {
    const auto stored = cluster_.job(node, "job")->find_checkpoint("base")->stored();
    for (const StoredImage& image : stored->images)
      if (image.state == rank && image.path == "model.safetensors" && image.node == LocalCluster::name(node))
        return cluster_.store(node).images().directory() + "/" + image.id;
    return "";
  }
  unsigned holder_of(uint64_t rank) { return holders(0, spec_of(spec_text_), rank).front()[1] - '0'; }
  static void flip_last_byte(const std::string& file) { flip_byte(file, std::filesystem::file_size(file) - 1); }
  static void flip_byte(const std::string& file, uint64_t offset) {
    ASSERT_EQ(chmod(file.c_str(), 0600), 0) << file;
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(stream.get() ^ 0x10);
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put(byte);
    ASSERT_TRUE(stream.good());
  }
  std::string spec_text_;
};

TEST_F(DamageTest, ADamagedCopyIsNamedAndMadeAnew) {
  commit_with_copies(1);
  const unsigned node = holder_of(1);
  const std::string file = image_file(node, 1);
  flip_last_byte(file);
  const unsigned asked = (node + 1) % 3;
  Result<std::string> verified = cluster_.job(asked, "job")->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_EQ(verified.error().code(), Code::kCorrupt);
  EXPECT_THAT(verified.error().message(), HasSubstr("on " + LocalCluster::name(node)));
  EXPECT_THAT(verified.error().message(), HasSubstr("--repair"));

  Result<std::string> repaired = cluster_.job(asked, "job")->repair("base");
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  EXPECT_THAT(repaired.value(), HasSubstr("is not what was committed"));
  EXPECT_EQ(image_file(node, 1), file) << "it is mended where it lies, for those who have it open";
  EXPECT_EQ(cluster_.job(asked, "job")->numbers().counts.damaged_mended, 1u);
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(asked, "job")->verify("base").has_value());
  EXPECT_EQ(holders(0, spec_of(spec_text_), 1).size(), 2u);
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// No tensor's checksum covers it, but whoever reads the file gets it.
TEST_F(DamageTest, PaddingThatIsNotZeroAnyMoreIsFound) {
  commit_with_copies(1);
  spec_text_ = R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1})";  // of an odd vocabulary
  edit(0, spec_text_);
  cluster_.wait_settled();
  const auto stored = cluster_.job(0, "job")->find_checkpoint("base")->stored();
  const StoredImage* flipped = nullptr;
  for (size_t i = 0; i < stored->images.size() && flipped == nullptr; ++i) {
    for (const ArraySlot& slot : stored->layouts()[i].arrays) {
      const uint64_t elements = num_elements(slot.part.local_shape).value();
      uint64_t held = 0;
      for (const Piece& piece : slot.part.pieces) held += piece.global.volume();
      if (held == elements) continue;
      flipped = &stored->images[i];
      flip_byte(cluster_.store(flipped->node[1] - '0').images().directory() + "/" + flipped->id,
                slot.byte_offset + elements * sizeof(uint16_t) - 1);
      break;
    }
  }
  ASSERT_NE(flipped, nullptr);
  Result<std::string> verified = cluster_.job(0, "job")->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_THAT(verified.error().message(), HasSubstr("its padding is not zero any more"));
  EXPECT_THAT(verified.error().message(), HasSubstr("on " + flipped->node));
  ASSERT_TRUE(cluster_.job(0, "job")->repair("base").has_value());
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(0, "job")->verify("base").has_value());
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

TEST_F(DamageTest, ACopyThatIsCutIsMadeAnew) {
  commit_with_copies(1);
  const unsigned node = holder_of(2);
  const std::string file = image_file(node, 2);
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  std::filesystem::resize_file(file, 1000);
  Result<std::string> repaired = cluster_.job(node, "job")->repair("base");
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  EXPECT_THAT(repaired.value(), HasSubstr("1000 bytes instead of"));
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(0, "job")->verify("base").has_value());
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// As after a reboot of a node whose store was memory.
TEST_F(DamageTest, ANodeThatComesBackWithoutItsFilesGetsThemAnew) {
  commit_with_copies(1);
  const unsigned node = holder_of(1);
  const std::string images = cluster_.store(node).images().directory();
  cluster_.stop(node);
  std::filesystem::remove_all(images);
  cluster_.start(node);
  cluster_.wait_settled();
  for (uint64_t rank = 0; rank < 3; ++rank) EXPECT_GE(holders(node, spec_of(spec_text_), rank).size(), 2u) << rank;
  for (unsigned other = 0; other < 3; ++other)
    EXPECT_TRUE(cluster_.job(other, "job")->verify("base").has_value()) << other;
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

/// As after a start whose store was not mounted yet: what is nowhere else is lost as long as that lasts.
TEST_F(DamageTest, FilesThatWereAwayAreTakenForGoodAgain) {
  commit_with_copies(0);
  const unsigned node = holder_of(1), other = (node + 1) % 3;
  const std::string images = cluster_.store(node).images().directory(), away = images + "-away";
  auto start_with = [&](const std::string& from, const std::string& to) {
    cluster_.stop(node);
    std::filesystem::rename(from, to);
    cluster_.start(node);
    cluster_.wait_settled();
  };
  start_with(images, away);
  EXPECT_FALSE(cluster_.job(other, "job")->find_checkpoint("base")->lost_tensors().empty());
  std::filesystem::remove_all(images);
  start_with(away, images);
  EXPECT_TRUE(cluster_.job(other, "job")->find_checkpoint("base")->lost_tensors().empty());
  expect_everywhere({0, 1, 2}, spec_of(spec_text_));
}

TEST_F(DamageTest, AReshardDoesNotCarryDamageOn) {
  commit_with_copies(1);
  flip_last_byte(image_file(holder_of(0), 0));
  const std::string text = R"({"tp": 2, "pp": 1, "dp": 1, "replicas": 1})";
  edit(1, text);
  cluster_.wait_settled();
  EXPECT_TRUE(cluster_.job(2, "job")->verify("base").has_value());
  expect_everywhere({0, 1, 2}, spec_of(text));
}

/// Nothing is cut anew, and still what is copied is compared before anybody counts on it.
TEST_F(DamageTest, NoCopyIsMadeOfWhatIsDamaged) {
  commit_with_copies(0);
  const std::vector<std::string> before = holders(0, spec_of(spec_text_), 1);
  ASSERT_LT(before.size(), 3u);
  for (const std::string& node : before) flip_last_byte(image_file(node[1] - '0', 1));
  edit(0, R"({"tp": 1, "pp": 3, "dp": 1, "replicas": 2})");
  cluster_.wait_settled();
  EXPECT_EQ(holders(0, spec_of(spec_text_), 1), before);
  EXPECT_THAT(cluster_.job(0, "job")->status_json() + cluster_.job(1, "job")->status_json() +
                  cluster_.job(2, "job")->status_json(),
              HasSubstr("do not have the checksum they had"));
}

TEST_F(DamageTest, WhatNoOtherCopyHasIsSaidAndKept) {
  commit_with_copies(0);
  std::string file;
  for (const std::string& node : holders(0, spec_of(spec_text_), 1)) {
    file = image_file(node[1] - '0', 1);
    flip_last_byte(file);
  }
  for (bool repair : {false, true}) {
    JobRef job = cluster_.job(0, "job");
    Result<std::string> answer = repair ? job->repair("base") : job->verify("base");
    ASSERT_TRUE(answer.has_error());
    EXPECT_THAT(answer.error().message(), HasSubstr("do not have the checksum they had"));
  }
  EXPECT_TRUE(std::filesystem::exists(file));
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
    cluster_.loses = [&](const std::string& node, std::string_view what) {
      return what == method && node != "w0" && ++lost > 0;
    };
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
  cluster_.loses = [&](const std::string& node, std::string_view what) {
    return what == "fetch" && node != "w0" && ++fetches > 5;
  };
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
  cluster_.loses = [&](const std::string& node, std::string_view method) {
    if (method == "job/part" && node == "w2") asked = true;
    return method == "job/drop" || (method == "job/part" && node == "w2");
  };
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
  EXPECT_TRUE(becomes([&] { return images() == 0; })) << images() << " files on w1 are in no checkpoint";
  expect_everywhere({0, 1, 2}, spec_of(before));
}

TEST_F(ClusterTest, KeepLeavesWhatAnotherNodeReads) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  cluster_.wait_settled();
  FileContentRef reader =
      cluster_.job(1, "job")->find_checkpoint("base")->rank_files(LayoutSpec(), 0).value()->open(0).value();
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
  for (int i = 0; i < 100 && cluster_.job(0, "job")->find_checkpoint("base") != nullptr; ++i) usleep(100'000);
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
  for (const StoredImage& image : cluster_.job(0, "job")->find_checkpoint("base")->stored()->images)
    if (image.node == "w0") on_w0.push_back({image.id});
  ASSERT_FALSE(on_w0.empty());
  auto kept = [&] { return cluster_.store(0).images().open(on_w0.front()).has_value(); };
  ASSERT_TRUE(cluster_.job(2, "job")->remove_checkpoint("base").has_value());
  EXPECT_EQ(images(), 0);
  EXPECT_EQ(read(whole), before) << "after the checkpoint was removed";
  ASSERT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
  EXPECT_EQ(read(gathered), gathered_before) << "not read since the bytes were moved, and the job removed since";

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
  for (const StoredImage& image : checkpoint->stored()->images) {
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
  FileContentRef local = checkpoint->rank_files(checkpoint->stored()->spec, 1).value()->open(0).value();
  EXPECT_TRUE(checkpoint->in_use());
  std::optional<ImageId> on_w0;
  for (const StoredImage& image : checkpoint->stored()->images)
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
  FileContentRef file =
      cluster_.job(reader, "job")->find_checkpoint("base")->rank_files(LayoutSpec(), 0).value()->open(0).value();
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
  cluster_.loses = [&](const std::string&, std::string_view method) {
    return method == "job/files" && !healed && ++lost > 0;
  };
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
  FileContentRef file =
      cluster_.job(reader, "job")->find_checkpoint("base")->rank_files(LayoutSpec(), 0).value()->open(0).value();
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
  // It alone held the older checkpoint, and a third of the newer one, of which the others hold the rest.
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
  Result<> named = cluster_.job(2, "job")->save_layout(
      R"({"tp": 1, "pp": 1, "dp": 1, "devices": ["w1:0"]})");
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

TEST_F(ClusterTest, AJobRemovedOnOneNodeIsGoneEverywhere) {
  ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
  write(0, LayoutSpec());
  commit(0);
  ASSERT_NE(cluster_.job(2, "job"), nullptr);
  ASSERT_TRUE(cluster_.job(1, "job")->remove_checkpoint("base").has_value());
  write_file(incoming(2) + "/rank/0/notes.txt", "not to be lost");
  Result<> refused = cluster_.store(0).remove_job("job", false);
  ASSERT_TRUE(refused.has_error());
  EXPECT_THAT(refused.error().message(), HasSubstr("on node w2"));
  ASSERT_TRUE(cluster_.store(0).remove_job("job", true).has_value());
  EXPECT_EQ(cluster_.store(2).find("job"), nullptr);
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
      created.error(), store.remove_job("job", true), store.drain("w2"),
      store.cancel_drain("w2"), cluster_.job(1, "job")->save_layout(R"({"tp": 2, "pp": 1, "dp": 1})"),
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
    ASSERT_EQ(cluster_.job(0, "job")->current_target(), "checkpoints/base/layouts/" + LayoutSpec().name());
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
        const std::string text = fmt::format(R"({{"tp": {}, "pp": {}, "dp": 1, "keep": {}}})", 1 + i % 2,
                                             1 + node, 10 + i);
        Result<> saved = cluster_.job(node, "job")->save_layout(text);
        if (saved.has_value()) ++accepted;
        else EXPECT_EQ(saved.error().code(), Code::kConflict) << saved.error().message();
      }
    });
  editors.clear();
  cluster_.wait_settled();
  std::string text = cluster_.job(0, "job")->layout_text();
  EXPECT_EQ(boost::json::parse(cluster_.job(1, "job")->status_json()).at("revision").to_number<int>(),
            1 + accepted);
  for (unsigned node = 1; node < 3; ++node) EXPECT_EQ(cluster_.job(node, "job")->layout_text(), text);
  expect_everywhere({0, 1, 2}, spec_of(text));
}

}  // namespace
}  // namespace ptc::testing
