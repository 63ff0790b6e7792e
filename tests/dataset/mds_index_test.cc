// index.json of MDS shards: what it says, and of how many samples a read of it asks.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <atomic>
#include <boost/json/parse.hpp>
#include <filesystem>
#include <thread>

#include "dataset/tree/virtual_file.h"
#include "store/base/json.h"
#include "tests/dataset/shard_writers.h"
#include "tests/store/expect_error.h"
#include "tests/store/temp_dir.h"

namespace ptc {
namespace {

class MdsIndexTest : public testing::Test {
 protected:
  SampleSourceRef open(const std::string& path) {
    IndexProgress progress;
    auto source = open_source({{}, {path}, OnError::kRefuse}, path + ".index", progress, {}, 2);
    EXPECT_TRUE(is_ok(source)) << path;
    return source.value();
  }
  SampleSourceRef lines(uint64_t count) {
    std::string text;
    for (uint64_t i = 0; i < count; ++i)
      text += fmt::format("\"{}\"\n", std::string(i * i % 97, 'x'));
    write_test_file(top() + "/lines/0.jsonl", text);
    return open(top() + "/lines");
  }
  /// From the last sample to the first; counts which shards' samples are asked for.
  MdsShards backwards(uint64_t samples, uint64_t each) {
    return {samples, each, [=, this](uint64_t shard) {
              ++asked_;
              return ids(shard, samples, each);
            }};
  }
  static std::vector<uint64_t> ids(uint64_t shard, uint64_t samples, uint64_t each) {
    std::vector<uint64_t> ids;
    for (uint64_t i = shard * each; i < std::min(samples, (shard + 1) * each); ++i)
      ids.push_back(samples - 1 - i);
    return ids;
  }
  static std::string read(const VirtualFile& file, uint64_t offset, uint64_t length) {
    std::string text(length, '?');
    auto got = file.read(offset, std::as_writable_bytes(std::span(text)));
    EXPECT_TRUE(is_ok(got));
    text.resize(got ? got.value() : 0);
    return text;
  }
  std::string top() const { return dir_.file("source"); }

  TempDir dir_;
  std::atomic<uint64_t> asked_ = 0;
};

TEST_F(MdsIndexTest, SaysWhatEachShardHas) {
  constexpr uint64_t kSamples = 1000, kEach = 7, kShards = 143;
  const SampleSourceRef source = lines(kSamples);
  const VirtualFileRef index = make_mds_index(source, backwards(kSamples, kEach));
  const std::string text = read(*index, 0, index->size() + 10);
  EXPECT_EQ(text.size(), index->size());
  const json::value value = json::parse(text);
  EXPECT_EQ(value.at("version").as_int64(), 2);
  const json::array& shards = value.at("shards").as_array();
  ASSERT_EQ(shards.size(), kShards);
  for (uint64_t i = 0; i < kShards; ++i) {
    const std::vector<uint64_t> all = ids(i, kSamples, kEach);
    const VirtualFileRef shard = make_shard(TreeKind::kMds, source, all).value();
    EXPECT_EQ(shards[i].at("samples").to_number<uint64_t>(), all.size());
    EXPECT_EQ(shards[i].at("raw_data").at("bytes").to_number<uint64_t>(), shard->size()) << i;
    EXPECT_EQ(shards[i].at("raw_data").at("basename").as_string(), mds_shard_name(i, kShards));
  }
}

TEST_F(MdsIndexTest, AReadAsksForTheSamplesThatItShowsAndOnce) {
  constexpr uint64_t kSamples = 20'000, kEach = 10, kShards = 2000;
  const SampleSourceRef source = lines(kSamples);
  const VirtualFileRef index = make_mds_index(source, backwards(kSamples, kEach));
  const uint64_t size = index->size(), entry = size / kShards;
  EXPECT_EQ(asked_, 0u) << "to open it, or to look at its size, costs nothing";
  for (const uint64_t offset : {size / 2, size - 1, uint64_t{0}}) {
    asked_ = 0;
    (void)read(*index, offset, 1);
    EXPECT_EQ(asked_, 1u) << offset;
  }
  asked_ = 0;
  (void)read(*index, size / 4, 4096);
  EXPECT_LE(asked_, 4096 / entry + 2);
  const uint64_t known = asked_ + 3;
  (void)read(*index, 0, size);
  EXPECT_EQ(asked_ + 3, kShards) << known << " were known before";
  const std::string whole = read(*index, 0, size);
  EXPECT_EQ(asked_ + 3, kShards) << "all are known";
  // Windows of it, and from many threads.
  for (uint64_t at = 0; at < size; at += 997)
    ASSERT_EQ(read(*index, at, 1500), whole.substr(at, 1500)) << at;
  const VirtualFileRef another = make_mds_index(source, backwards(kSamples, kEach));
  std::vector<std::jthread> readers;
  for (uint64_t i = 0; i < 8; ++i)
    readers.emplace_back([&, i] {
      const uint64_t from = i % 2 == 0 ? 0 : size / i;
      EXPECT_TRUE(read(*another, from, size) == whole.substr(from));
    });
}

TEST_F(MdsIndexTest, WhereAllSamplesAreOfOneSizeNoneIsAskedFor) {
  std::vector<TestSample> samples;
  for (int i = 0; i < 50; ++i)
    samples.push_back({std::to_string(i), {{"a", std::string(8, 'a')}, {"b", "bb"}}});
  const std::string shard = mds_shard(samples, {"a", "b"});
  write_test_file(top() + "/mds/0.mds", shard);
  write_test_file(top() + "/mds/index.json",
                  mds_index_json(samples, {{"0.mds", shard}}, {50}, {"a", "b"}));
  const SampleSourceRef source = open(top() + "/mds");
  const VirtualFileRef index = make_mds_index(source, backwards(50, 8));
  const json::value value = json::parse(read(*index, 0, index->size()));
  EXPECT_EQ(asked_, 0u);
  for (uint64_t i = 0; i < 7; ++i)
    EXPECT_EQ(value.at("shards").at(i).at("raw_data").at("bytes").to_number<uint64_t>(),
              make_shard(TreeKind::kMds, source, ids(i, 50, 8)).value()->size())
        << i;
}

/// Names sort as numbers, in the directory and so here.
TEST_F(MdsIndexTest, NamesAreAsWideAsTheLast) {
  const SampleSourceRef source = lines(1);
  auto one = [](uint64_t) { return std::vector<uint64_t>{0}; };
  const VirtualFileRef index = make_mds_index(source, {100'001, 1, one});
  EXPECT_THAT(read(*index, 0, 1000), testing::HasSubstr("\"shard.000000.mds\""));
  EXPECT_THAT(read(*index, index->size() - 1000, 1000), testing::HasSubstr("\"shard.100000.mds\""));
  const VirtualFileRef none = make_mds_index(source, {0, 1, one});
  EXPECT_TRUE(json::parse(read(*none, 0, none->size())).at("shards").as_array().empty());
}

TEST_F(MdsIndexTest, AShardOf4GiBIsRefused) {
  write_test_file(top() + "/large/0.jsonl", "\"" + std::string(1 << 20, 'x') + "\"\n");
  auto often = [](uint64_t) { return std::vector<uint64_t>(4096, 0); };
  const VirtualFileRef index = make_mds_index(open(top() + "/large"), {4096, 4096, often});
  std::array<std::byte, 10> out;
  const Result<size_t> refused = index->read(0, out);
  ASSERT_TRUE(refused.has_error());
  EXPECT_EQ(refused.error().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message(), testing::HasSubstr("4 GiB are the most"));
}

}  // namespace
}  // namespace ptc
