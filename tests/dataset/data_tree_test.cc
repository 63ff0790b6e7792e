#include "dataset/run/data_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace ptc {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// 250 lines of different lengths in 3 files; some are longer than others.
class DataTreeTest : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/ptc_data_tree_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    std::filesystem::create_directory(dir_ + "/data");
    for (int i = 0; i < 250; ++i) {
      lines_.push_back(
          fmt::format("{{\"i\": {}, \"t\": \"{}\"}}\n", i, std::string(i % 7 * 10, 'x')));
      std::ofstream(fmt::format("{}/data/{}.jsonl", dir_, i / 100), std::ios::app) << lines_.back();
    }
    const SourceSpec spec =
        parse_source(fmt::format("{{\"shards\": [\"{}/data\"]}}", dir_)).value();
    IndexProgress progress;
    source_ = open_source(spec, dir_ + "/index", progress).value();
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  DataDirRef tree(const Segment& segment) {
    const ptc::Run run{
        .samples = source_->samples(), .fingerprint = source_->fingerprint(), .seed = 3};
    shown_ = std::make_shared<const ShownGeneration>(
        ShownGeneration{1, Generation(run, segment), source_});
    return make_generation_dir(shown_);
  }
  static Result<DataNode> at(const DataDirRef& root, const std::string& path) {
    DataNode node{.directory = root, .file = {}};
    for (size_t begin = 0; begin <= path.size();) {
      const size_t end = std::min(path.find('/', begin), path.size());
      if (node.directory == nullptr) return make_error(Code::kNotFound, "no directory");
      PTC_TRY(node, node.directory->find(path.substr(begin, end - begin)));
      begin = end + 1;
    }
    return node;
  }
  static std::vector<std::string> names(const DataDirRef& root, const std::string& path) {
    std::vector<std::string> all;
    const DataNode node =
        path.empty() ? DataNode{.directory = root, .file = {}} : at(root, path).value();
    const std::vector<DataDir::Name> listed = node.directory->list().value();
    for (const DataDir::Name& name : listed) {
      all.push_back(name.name);
      const auto found = node.directory->find(name.name);
      EXPECT_TRUE(found) << name.name;
      EXPECT_EQ(found.value().directory != nullptr, name.directory) << name.name;
    }
    return all;
  }
  static std::string bytes(const DataDirRef& root, const std::string& path) {
    const VirtualFileRef file = at(root, path).value().file().value();
    std::string content(file->size(), '?');
    EXPECT_EQ(file->read(0, std::as_writable_bytes(std::span(content))).value(), content.size());
    return content;
  }
  static std::vector<uint64_t> ids(const std::string& content) {
    std::vector<uint64_t> numbers(content.size() / 8);
    std::memcpy(numbers.data(), content.data(), content.size());
    return numbers;
  }

  std::string dir_;
  std::vector<std::string> lines_;
  SampleSourceRef source_;
  ShownGenerationRef shown_;
};

TEST_F(DataTreeTest, NamesSortAsNumbersWhateverTheirCount) {
  std::filesystem::remove_all(dir_ + "/data");
  std::filesystem::create_directory(dir_ + "/data");
  std::ofstream lines(dir_ + "/data/0.jsonl");
  for (int i = 0; i < 1'100'000; ++i) lines << "1\n";
  lines.close();
  IndexProgress progress;
  source_ = open_source(parse_source(fmt::format("{{\"shards\": [\"{}/data\"]}}", dir_)).value(),
                        dir_ + "/index", progress)
                .value();
  const DataDirRef root = tree({.generation = 1, .batch = 1100, .dp = 1100, .epochs = 1001});
  const DataDirRef one = tree({.generation = 1, .batch = 1, .dp = 1, .epochs = 1});
  auto sorted = [&](const DataDirRef& top, const std::string& path, size_t count) {
    std::vector<std::string> all;
    const std::vector<DataDir::Name> listed = at(top, path).value().directory->list().value();
    for (const DataDir::Name& name : listed)
      if (name.name != "README") all.push_back(name.name);
    EXPECT_EQ(all.size(), count) << path;
    EXPECT_TRUE(std::is_sorted(all.begin(), all.end()))
        << path << ": " << all.front() << " … " << all.back();
    EXPECT_TRUE(at(top, path + "/" + all.back())) << path;
    EXPECT_FALSE(at(top, path + "/0" + all.front())) << path;
  };
  std::vector<std::string> ranks;
  const std::vector<DataDir::Name> listed = root->list().value();
  for (const DataDir::Name& name : listed)
    if (name.name != "global") ranks.push_back(name.name);
  EXPECT_EQ(ranks.size(), 1100u);
  EXPECT_TRUE(std::is_sorted(ranks.begin(), ranks.end()));
  for (const char* format : {"tar", "jsonl", "tfrecord", "files"})
    sorted(root, fmt::format("rank-0000/{}", format), 1001);
  sorted(one, "rank-000/files/e000", 1100);
  sorted(one, "rank-000/tar/e000", 1'100'000);
  for (const char* path : {"rank-000/jsonl/e000", "rank-000/tfrecord/e000", "global/mds/e000"})
    sorted(one, path, at(one, path).value().directory->list().value().size());
  sorted(one, "rank-000/files/e000/1099", 1000);
}

TEST_F(DataTreeTest, Names) {
  const DataDirRef root = tree({.generation = 1, .batch = 20, .dp = 2, .epochs = 2});
  EXPECT_THAT(names(root, ""), ElementsAre("global", "rank-000", "rank-001"));
  EXPECT_THAT(names(root, "rank-001"), ElementsAre("ids.u64", "tar", "jsonl", "tfrecord", "files"));
  EXPECT_THAT(names(root, "rank-001/tar"), ElementsAre("README", "e000", "e001"));
  EXPECT_THAT(bytes(root, "rank-001/tar/README"), HasSubstr("shardshuffle=False"));
  const std::vector<std::string> tars = names(root, "rank-001/tar/e000");
  EXPECT_EQ(tars.size(), 13u);  // the last one goes on in the next epoch
  EXPECT_EQ(tars.back(), "000012.tar");
  EXPECT_EQ(names(root, "rank-001/tar/e001").size(), 12u);
  EXPECT_THAT(names(root, "rank-000/jsonl/e000"),
              ElementsAre("00000.jsonl", "00001.jsonl", "00002.jsonl", "00003.jsonl", "00004.jsonl",
                          "00005.jsonl", "00006.jsonl"));
  EXPECT_THAT(names(root, "global/mds/e000"), ElementsAre("index.json", "shard.00000.mds"));
}

TEST_F(DataTreeTest, NoOtherNames) {
  const DataDirRef root = tree({.generation = 1, .from = 240, .batch = 20, .dp = 2, .epochs = 12});
  for (const char* path : {"rank-2",
                           "rank-002",
                           "rank-0000",
                           "rank-00",
                           "rank--01",
                           "rank-+01",
                           "rank-00x",
                           "Rank-000",
                           "",
                           "..",
                           "x",
                           "rank-000/e000",
                           "rank-000/tar/e12",
                           "rank-000/tar/e012",
                           "rank-000/tar/e0000",
                           "rank-000/tar/e000/00001.tar",
                           "rank-000/tar/e000/000001.tar",
                           "rank-000/tar/e001/0000000.tar",
                           "rank-000/tar/e001/.tar",
                           "rank-000/files/e001/000/0000000_0.json",
                           "rank-000/files/e001/000/00000000_.json",
                           "rank-000/files/e001/000/00000000",
                           "global/mds/e001/shard.0.mds",
                           "global/mds/e001/shard.99999.mds",
                           "rank-000/tar/e000/18446744073709551616.tar",
                           "global/megatron"}) {
    const auto node = at(root, path);
    ASSERT_FALSE(node) << path;
    EXPECT_EQ(node.error().code(), Code::kNotFound) << path;
  }
}

TEST_F(DataTreeTest, EachTreeHasTheRanksSamplesInOrder) {
  for (const Tail tail : {Tail::kCarry, Tail::kShort, Tail::kDrop, Tail::kPad}) {
    const DataDirRef root =
        tree({.generation = 1, .from = 36, .batch = 18, .dp = 3, .tail = tail, .epochs = 3});
    for (uint64_t rank = 0; rank < 3; ++rank) {
      SCOPED_TRACE(fmt::format("{} rank {}", tail_name(tail), rank));
      const std::string prefix = fmt::format("rank-{:03}/", rank);
      std::string expected, jsonl, files, tar_ids;
      std::vector<uint64_t> epoch_ids;
      for (const uint64_t id : ids(bytes(root, prefix + "ids.u64"))) {
        expected += lines_[id];
        epoch_ids.push_back(id);
      }
      size_t samples = 0;
      for (const char* epoch : {"e000", "e001", "e002"}) {
        const std::string shards = prefix + "jsonl/" + epoch;
        for (const std::string& name : names(root, shards))
          jsonl += bytes(root, shards + "/" + name);
        const std::string directories = prefix + "files/" + epoch;
        for (const std::string& part : names(root, directories)) {
          for (const std::string& name : names(root, directories + "/" + part)) {
            files += bytes(root, directories + "/" + part + "/" + name);
            if (files.back() != '\n') files += '\n';
            EXPECT_THAT(name, HasSubstr(fmt::format("_{}.", epoch_ids[samples++])));
          }
        }
        const std::string tars = prefix + "tar/" + epoch;
        for (const std::string& name : names(root, tars)) {
          const std::string tar = bytes(root, tars + "/" + name);
          EXPECT_EQ(tar.size() % 512, 0u);
          for (size_t p = 0; p + 512 <= tar.size() && tar[p] != '\0';) {
            tar_ids += fmt::format("{} ", std::strtoull(tar.c_str() + p, nullptr, 10));
            p += 512 +
                 (std::strtoull(tar.substr(p + 124, 11).c_str(), nullptr, 8) + 511) / 512 * 512;
          }
        }
      }
      EXPECT_EQ(jsonl, expected);
      EXPECT_EQ(files, expected);
      std::string expected_ids;
      for (const uint64_t id : epoch_ids) expected_ids += fmt::format("{} ", id);
      EXPECT_EQ(tar_ids, expected_ids);
    }
  }
}

TEST_F(DataTreeTest, ListingMakesNoFile) {
  // 10⁸ tars for an epoch would not be made in this time, nor their sizes be known.
  const DataDirRef root = tree({.generation = 1, .batch = 1, .dp = 1, .epochs = 1'000'000});
  EXPECT_EQ(names(root, "rank-000/tar/e999999").size(), 250u);
  EXPECT_EQ(at(root, "rank-000/tar").value().directory->list().value().size(), 1'000'001u);
  const VirtualFileRef all = at(root, "rank-000/ids.u64").value().file().value();
  EXPECT_EQ(all->size(), 250u * 1'000'000 * 8);
  std::array<std::byte, 8> last{};
  EXPECT_EQ(all->read(all->size() - 8, last).value(), 8u);
  EXPECT_EQ(all->read(all->size() - 3, last).value(), 3u);
  EXPECT_EQ(all->read(all->size(), last).value(), 0u);
}

TEST_F(DataTreeTest, RemembersSomeFiles) {
  FileLru files(100);
  int made = 0;
  auto make = [&]() -> Result<VirtualFileRef> {
    ++made;
    return make_shard(TreeKind::kJsonl, source_, {1, 2, 3});
  };
  for (const char* name : {"a", "b", "a", "b"}) ASSERT_TRUE(files.get(name, 40, make));
  EXPECT_EQ(made, 2);
  ASSERT_TRUE(files.get("c", 40, make));
  ASSERT_TRUE(files.get("b", 40, make));
  EXPECT_EQ(made, 3);
  ASSERT_TRUE(files.get("a", 40, make));
  EXPECT_EQ(made, 4);
  ASSERT_TRUE(files.get("large", 1000, make));
  ASSERT_TRUE(files.get("large", 1000, make));
  EXPECT_EQ(made, 5);
  EXPECT_FALSE(
      files.get("bad", 1, [] { return Result<VirtualFileRef>(Error(Code::kCorrupt, "no")); }));
}

}  // namespace
}  // namespace ptc
