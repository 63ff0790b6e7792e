// Of each file there are as many copies as are asked for: what is one too many goes, and nothing
// else does.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>
#include <tuple>

#include "reshard/job/drain.h"
#include "tests/reshard/cluster_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::Each;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class CopiesTest : public ClusterTest {
 protected:
  CopiesTest() : ClusterTest(4) {}

  void commit_in(const std::string& text) {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    edit(0, text);
    write(0, spec_of(text));
    commit(0);
    cluster_.wait_settled();
  }
  /// How many there are of each file.
  std::map<std::string, unsigned> copies(unsigned asked, const std::string& checkpoint = "base") {
    std::map<std::string, unsigned> of_file;
    const auto stored = cluster_.job(asked, "job")->find_checkpoint(checkpoint)->stored();
    for (const StoredImage& image : stored->images)
      ++of_file[fmt::format("{} {} of state {}", image.path,
                            image.path.empty() ? image.written : -1, image.state)];
    return of_file;
  }
  uint64_t files_on(unsigned node) {
    const fs::directory_iterator all(cluster_.directory(node) + "/images");
    return std::distance(begin(all), end(all));
  }
  /// The last byte of the first tensor file's image on the node is another from now on.
  void damage(unsigned node, uint32_t state) {
    const auto stored = cluster_.job(node, "job")->find_checkpoint("base")->stored();
    for (const StoredImage& image : stored->images) {
      if (image.node != LocalCluster::name(node) || image.path != "model.safetensors" ||
          image.state != state)
        continue;
      std::fstream file(cluster_.directory(node) + "/images/" + image.id,
                        std::ios::in | std::ios::out | std::ios::binary);
      ASSERT_TRUE(file.seekp(-1, std::ios::end).put('x').good());
      return;
    }
    FAIL() << "it has none";
  }
};

TEST_F(CopiesTest, ANodeThatComesBackLeavesNoneTooMany) {
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 1})";
  commit_in(text);
  EXPECT_THAT(copies(0), Each(Pair(::testing::_, 2u)));
  for (unsigned node : {0u, 1u, 2u, 3u}) {
    cluster_.stop(node);
    cluster_.wait_settled();
    cluster_.start(node);
    cluster_.wait_settled();
    EXPECT_THAT(copies(0), Each(Pair(::testing::_, 2u))) << "after the return of " << node;
  }
  expect_everywhere({0, 1, 2, 3}, spec_of(text));
  uint64_t files = 0;
  for (unsigned node : {0u, 1u, 2u, 3u}) files += files_on(node);
  EXPECT_EQ(files, cluster_.job(0, "job")->find_checkpoint("base")->stored()->images.size());
}

TEST_F(CopiesTest, AnEditThatAsksForFewerGetsFewer) {
  commit_in(R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 3})");
  EXPECT_THAT(copies(1), Each(Pair(::testing::_, 4u)));
  const FileSetRef files = cluster_.job(3, "job")->find_checkpoint("base")->model_files().value();
  const FileContentRef open = files->open(0).value();
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1})";
  edit(1, text);
  cluster_.wait_settled();
  EXPECT_THAT(copies(1), Each(Pair(::testing::_, 1u)));
  std::string bytes(open->bytes(), '\0');
  EXPECT_TRUE(open->read(0, std::as_writable_bytes(std::span(bytes))).has_value());
  expect_everywhere({0, 1, 2, 3}, spec_of(text));
}

TEST_F(CopiesTest, WhatOnlyTheNewestNeedsGoesWithTheNext) {
  const std::string text =
      R"({"tp": 1, "pp": 1, "dp": 3, "devices": ["w0:0", "w1:0", "w2:0"], "keep": 3})";
  commit_in(text);
  EXPECT_THAT(holders(0, spec_of(text), 0), UnorderedElementsAre("w0", "w1", "w2"));
  write_ranks(sample_, spec_of(text), cluster_.job(0, "job")->files_dir() + "/incoming/next");
  ASSERT_TRUE(cluster_.job(0, "job")->commit("next", "next").has_value());
  cluster_.wait_settled();
  EXPECT_THAT(copies(1, "base"), Each(Pair(::testing::_, 1u)));
  for (const char* name : {"base", "next"}) {
    auto verified = cluster_.job(2, "job")->verify(name);
    EXPECT_TRUE(verified.has_value()) << verified.error().message();
  }
}

/// All that would stay are damaged: the one that would go is the only one that is not.
TEST_F(CopiesTest, TheLastGoodOneIsNeverTooMany) {
  commit_in(R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 3})");
  // Whichever stays, for one state it is a damaged one.
  for (unsigned node : {0u, 1u, 2u}) damage(node, 0);
  for (unsigned node : {1u, 2u, 3u}) damage(node, 1);
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1})";
  edit(1, text);
  cluster_.wait_settled();
  EXPECT_THAT(copies(1), Each(Pair(::testing::_, 1u)));
  expect_everywhere({0, 1, 2, 3}, spec_of(text));
}

TEST_F(CopiesTest, NoneGoesWhileAnotherIsNotRead) {
  commit_in(R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 3})");
  std::atomic<bool> lost = true;
  std::atomic<unsigned> asked = 0;
  const auto losing = cluster_.loses.during([&](const std::string&, std::string_view method) {
    if (method == "job/examine") ++asked;
    return lost && method == "job/examine";
  });
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1})";
  edit(1, text);
  ASSERT_TRUE(becomes([&] { return asked > 2; }));
  EXPECT_THAT(copies(1), Each(Pair(::testing::_, 4u)));
  EXPECT_EQ(cluster_.job(1, "job")->current_target(),
            "checkpoints/base/layouts/" + spec_of(text).name());
  lost = false;
  cluster_.wait_settled();
  cluster_.loses = nullptr;
  EXPECT_THAT(copies(1), Each(Pair(::testing::_, 1u)));
  expect_everywhere({0, 1, 2, 3}, spec_of(text));
}

/// Others were read; then they are to be emptied, before it is decided.
TEST_F(CopiesTest, NoneGoesForAnotherOnANodeThatIsDrained) {
  commit_in(R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 3})");
  std::atomic<bool> drained = false;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    if (method == "job/examine" && !drained.exchange(true)) {
      EXPECT_TRUE(cluster_.meta()
                      .commit({.puts = {{drained_key(node), R"({"since": "2026-01-01T00:00:00Z"})"},
                                        {std::string(kMembership), "drain"}}})
                      .has_value());
    }
    return false;
  });
  const std::string text = R"({"tp": 1, "pp": 2, "dp": 1})";
  edit(1, text);
  cluster_.wait_settled();
  cluster_.loses = nullptr;
  EXPECT_TRUE(drained);
  EXPECT_THAT(copies(1), Each(Pair(::testing::_, 1u)));
  expect_everywhere({0, 1, 2, 3}, spec_of(text));
  for (const auto& node : cluster_.store(0).drained())
    EXPECT_EQ(cluster_.store(0).bytes_on(node), 0u) << node;
}

/// Each that the decision rests on, put once more just before it is made: it is not, and the next
/// is. The last is put by every node that starts, of which one may have what stays.
TEST_F(CopiesTest, NoneGoesByWhatHasChangedMeanwhile) {
  const std::string many = R"({"tp": 1, "pp": 2, "dp": 1, "replicas": 3})",
                    few = R"({"tp": 1, "pp": 2, "dp": 1, "devices": ["w1:0", "w2:0"]})";
  commit_in(many);
  for (const std::string& key :
       {std::string("jobs/job/layout"), std::string("leaders/job"), std::string(kMembership)}) {
    EXPECT_THAT(copies(0), Each(Pair(::testing::_, 4u)));
    std::atomic<int> tries = 0;
    const auto refusing = cluster_.refuses.during(
        [&](const std::string&, const MetaTransaction& transaction) -> std::optional<Error> {
          const auto puts = [&](const char* end) {
            return std::any_of(transaction.puts.begin(), transaction.puts.end(),
                               [&](const auto& put) { return put.first.ends_with(end); });
          };
          const bool trims =
              puts("/checkpoints/base") && !puts("/in_force") &&
              std::any_of(transaction.compares.begin(), transaction.compares.end(),
                          [](const auto& one) { return one.key == "jobs/job/layout"; });
          if (!trims || tries++ > 0) return std::nullopt;
          const auto entry = cluster_.meta().get(key).value();
          EXPECT_TRUE(entry.has_value()) << key;
          if (entry) {
            EXPECT_TRUE(cluster_.meta().commit({.puts = {{key, entry->value}}}));
          }
          return std::nullopt;
        });
    edit(0, few);
    cluster_.wait_settled();
    EXPECT_TRUE(becomes([&] { return copies(0).begin()->second == 1; })) << key;
    EXPECT_GE(tries, 2) << key;
    cluster_.refuses = nullptr;
    edit(0, many);
    cluster_.wait_settled();
  }
}

}  // namespace
}  // namespace ptc::testing
