// What describes a checkpoint goes from node to node, and while it does nothing else waits.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <latch>
#include <map>
#include <mutex>

#include "reshard/job/job_record.h"
#include "tests/reshard/cluster_fixture.h"

namespace ptc::testing {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

constexpr unsigned kNodes = 9;
constexpr PieceSizes kSmall{.piece = 1000, .with_question = 0, .fan_out = 2};

class PiecesTest : public ClusterTest {
 protected:
  PiecesTest() : ClusterTest(kNodes, kSmall) {
    EXPECT_TRUE(cluster_.store(0).create_job("job").has_value());
    write(0, LayoutSpec());
    for (unsigned node = 0; node < kNodes; ++node) EXPECT_NE(cluster_.job(node, "job"), nullptr);
  }
  /// Counts pieces that nodes give, by node.
  void count() {
    counting_ = cluster_.breaks.during([this](const std::string&, const std::string& node,
                                              std::string_view method, const std::string&) {
      std::lock_guard lock(mutex_);
      if (method == "job/file") ++given_[node];
      return false;
    });
  }
  fs::path directory_of(unsigned node) const {
    const fs::path all = cluster_.directory(node) + "/jobs/job/checkpoints";
    return fs::exists(all) && !fs::is_empty(all) ? fs::directory_iterator(all)->path() : fs::path();
  }
  static std::string text_of(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static unsigned pieces_of(const fs::path& directory) {
    unsigned pieces = 0;
    for (const auto& file : fs::directory_iterator(directory)) {
      const uint64_t bytes = fs::file_size(file);
      pieces += std::max<uint64_t>(1, (bytes + kSmall.piece - 1) / kSmall.piece);
    }
    return pieces;
  }

  std::mutex mutex_;
  std::map<std::string, unsigned> given_;  // guarded
  decltype(LocalCluster::breaks)::Meanwhile counting_;
};

TEST_F(PiecesTest, EachGivesItToAFewOthers) {
  count();
  commit(0);
  std::lock_guard lock(mutex_);
  const unsigned pieces = pieces_of(directory_of(0));
  EXPECT_GT(pieces, 5u);
  unsigned all = 0;
  for (const auto& [node, given] : given_) {
    EXPECT_LE(given, kSmall.fan_out * pieces) << node;
    all += given;
  }
  EXPECT_EQ(all, (kNodes - 1) * pieces);
  EXPECT_GE(given_.size(), 4u);
}

TEST_F(PiecesTest, WhatIsDamagedOnOneNodeIsGivenToNone) {
  commit(0);
  cluster_.wait_settled();
  const fs::path good = directory_of(1), last = directory_of(kNodes - 1);
  std::map<std::string, std::string> contents;
  cluster_.stop(kNodes - 1);
  for (const char* name : {"manifest.json", "headers.bin", "stored-1.json"}) {
    contents[name] = text_of(good / name);
    fs::remove(last / name);
    // The first that w8 asks; of the same length, and no less a JSON text.
    std::string other = contents[name];
    other[other.find('0')] = '1';
    std::ofstream(directory_of(0) / name, std::ios::binary | std::ios::trunc) << other;
  }
  cluster_.start(kNodes - 1);
  cluster_.wait_settled();
  for (const auto& [name, content] : contents) EXPECT_TRUE(text_of(last / name) == content) << name;
}

TEST_F(PiecesTest, WhatSaysWhereCopiesLieIsAgreedOnFromTheBeginning) {
  edit(0, R"({"tp": 1, "pp": 1, "dp": 1, "replicas": 1})");
  commit(0);
  const JobRecord record = JobRecord::read(cluster_.meta(), "job").value();
  const CheckpointEntry& entry = record.checkpoints.at("base");
  std::map<std::string, FileFacts, std::less<>> files;
  for (const std::string& name :
       {std::string("manifest.json"), std::string("headers.bin"), entry.stored})
    files[name] = FileFacts::of(text_of(directory_of(0) / name));
  EXPECT_EQ(entry.generation, 2);
  EXPECT_EQ(entry.files, files);
}

TEST_F(PiecesTest, OfOneThatIsGoneNobodyDepends) {
  // It takes all, and gives nothing.
  cluster_.loses = [](const std::string& node, std::string_view method) {
    return method == "job/file" && node == "w1";
  };
  commit(0);
  for (unsigned node = 0; node < kNodes; ++node) {
    EXPECT_TRUE(fs::exists(directory_of(node) / "stored-1.json")) << node;
    EXPECT_TRUE(fs::exists(directory_of(node) / "manifest.json")) << node;
  }
}

TEST_F(PiecesTest, OneThatWasNotToldAsksForIt) {
  cluster_.loses = [](const std::string& node, std::string_view method) {
    return method == "job/files" && node != "w1";
  };
  commit(0);
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2, 3, 4, 5, 6, 7, 8}, LayoutSpec());
  edit(3, R"({"tp": 2, "pp": 2, "dp": 1})");
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2, 3, 4, 5, 6, 7, 8}, spec_of(R"({"tp": 2, "pp": 2, "dp": 1})"));
}

TEST_F(PiecesTest, WhileItComesNothingElseWaits) {
  std::latch asked(1), go_on(1);
  std::once_flag once;
  const auto losing = cluster_.loses.during([&](const std::string& node, std::string_view method) {
    if (method == "job/file" && node == "w3") {
      std::call_once(once, [&] { asked.count_down(); });
      go_on.wait();
    }
    return method == "job/files" && node == "w2";  // which asks w3, the next, itself
  });
  // w3 gives it to nobody else: it is among the last that are told.
  auto committed = std::async(std::launch::async, [&] { commit(4); });
  asked.wait();
  auto others = std::async(std::launch::async, [&] {
    const JobRef job = cluster_.store(2).find("job");
    const Result<> saved = job->save_layout(R"({"tp": 1, "pp": 1, "dp": 1, "keep": 3})");
    EXPECT_TRUE(saved.has_value()) << saved.error().message();
    EXPECT_TRUE(cluster_.store(2).create_job("another").has_value());
  });
  EXPECT_EQ(others.wait_for(30s), std::future_status::ready);
  go_on.count_down();
  others.wait();
  committed.wait();
  cluster_.loses = nullptr;
  cluster_.wait_settled();
  expect_everywhere({2}, LayoutSpec());
}

}  // namespace
}  // namespace ptc::testing
