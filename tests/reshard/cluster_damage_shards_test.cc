// Damage where copies are cut in different ways: whole files, and shards of a writer.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "tests/reshard/damage_fixture.h"
#include "tests/support/becomes.h"

namespace ptc::testing {
namespace {

using ::testing::HasSubstr;

/// What ranks of FSDP wrote lies in rows, a file each; copies of it are made whole. Neither's boxes
/// are in the other's.
class DamageInShardsTest : public DamageTest {
 protected:
  DamageInShardsTest() { sample_ = llama_sample(false, 4); }
  void commit_shards(unsigned replicas) {
    ASSERT_TRUE(cluster_.store(0).create_job("job").has_value());
    edit(0, with_replicas(replicas));
    for (unsigned shard = 0; shard < kShards; ++shard)
      write_file(incoming(0) +
                     fmt::format("/rank/0/shard-{:05}-model-00001-of-00001.safetensors", shard + 1),
                 shard_file(shard));
    write_file(incoming(0) + "/rank/0/config.json", sample_.config);
    commit(0);
    cluster_.wait_settled();
    ASSERT_EQ(images_named("shard").size(), kShards);
    ASSERT_EQ(images_named("model").size(), replicas);
    const auto verified = cluster_.job(0, "job")->verify("base");
    ASSERT_TRUE(verified.has_value()) << verified.error().message();
  }
  static std::string with_replicas(unsigned replicas) {
    return fmt::format(R"({{"tp": 1, "pp": 1, "dp": 1, "replicas": {}}})", replicas);
  }
  /// Node and file of the images whose written or new name begins so.
  std::vector<std::pair<unsigned, std::string>> images_named(std::string_view name) {
    const auto checkpoint = cluster_.job(0, "job")->find_checkpoint("base");
    std::vector<std::pair<unsigned, std::string>> files;
    for (const auto stored_now = checkpoint->stored();
         const StoredImage& image : stored_now->images) {
      const std::string& path =
          image.written >= 0 ? checkpoint->manifest().files[image.written].path : image.path;
      if (!path.starts_with(name)) continue;
      const unsigned node = image.node[1] - '0';
      files.emplace_back(node, cluster_.store(node).images().directory() + "/" + image.id);
    }
    return files;
  }

  static constexpr unsigned kShards = 3;

 private:
  std::string shard_file(unsigned shard) const {
    std::vector<TensorEntry> entries;
    std::vector<std::string> bytes;
    std::string boxes;
    for (size_t i = 0; i < sample_.tensors.size(); ++i) {
      const TensorInfo& tensor = sample_.tensors[i];
      const uint64_t rows = tensor.shape[0], step = (rows + kShards - 1) / kShards;
      const uint64_t begin = std::min(shard * step, rows), end = std::min(begin + step, rows);
      if (begin == end) continue;
      TensorEntry entry{tensor.name, tensor.dtype, tensor.shape};
      entry.shape[0] = end - begin;
      const uint64_t row_bytes = sample_.bytes[i].size() / rows;
      bytes.push_back(sample_.bytes[i].substr(begin * row_bytes, (end - begin) * row_bytes));
      std::string offsets = std::to_string(begin);
      for (size_t axis = 1; axis < tensor.shape.size(); ++axis) offsets += ", 0";
      boxes += fmt::format(R"({}"{}": {{"saved_offsets": [{}]}})", boxes.empty() ? "" : ", ",
                           tensor.name, offsets);
      entries.push_back(std::move(entry));
    }
    return safetensors_file(
        entries, bytes,
        {{"DCP_SHARDING_INFO", "{" + boxes + "}"}, {"DCP_VERSION", "1.0"}, {"format", "pt"}});
  }
};

TEST_F(DamageInShardsTest, AShardIsNamedAndMendedFromTheWholeCopy) {
  commit_shards(1);
  const auto [node, file] = images_named("shard")[1];
  flip_last_byte(file);
  Result<std::string> verified = cluster_.job(2, "job")->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_THAT(verified.error().message(), HasSubstr("shard-00002-model"));
  EXPECT_THAT(verified.error().message(), HasSubstr("--repair"));
  EXPECT_GE(cluster_.job(2, "job")->numbers().counts.damaged_found, 1u);
  Result<std::string> repaired = cluster_.job(2, "job")->repair("base");
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  cluster_.wait_settled();
  EXPECT_EQ(images_named("shard").size(), kShards) << "it is mended where it lies";
  EXPECT_EQ(cluster_.job(2, "job")->numbers().counts.damaged_mended, 1u);
  expect_everywhere({0, 1, 2}, spec_of(with_replicas(1)));
}

TEST_F(DamageInShardsTest, TheWholeCopyIsNamedAndMendedFromTheShards) {
  commit_shards(1);
  const auto [node, file] = images_named("model")[0];
  for (const uint64_t back : {1, 2000, 5000})
    flip_byte(file, std::filesystem::file_size(file) - back);
  Result<std::string> verified = cluster_.job(2, "job")->verify("base");
  ASSERT_TRUE(verified.has_error());
  EXPECT_THAT(verified.error().message(), HasSubstr("on " + LocalCluster::name(node)));
  Result<std::string> repaired = cluster_.job(2, "job")->repair("base");
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  cluster_.wait_settled();
  EXPECT_EQ(images_named("model")[0].second, file) << "it is mended where it lies";
  expect_everywhere({0, 1, 2}, spec_of(with_replicas(1)));
}

/// A copy of which nothing is right any more, and no box of another is that of all of it.
TEST_F(DamageInShardsTest, ACopyThatIsWrongEverywhereIsMended) {
  commit_shards(1);
  const auto [node, file] = images_named("model")[0];
  ASSERT_EQ(chmod(file.c_str(), 0600), 0);
  {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(0);
    stream << std::string(std::filesystem::file_size(file), 'x');
  }
  ASSERT_TRUE(cluster_.job(2, "job")->verify("base").has_error());
  Result<std::string> repaired = cluster_.job(2, "job")->repair("base");
  ASSERT_TRUE(repaired.has_value()) << repaired.error().message();
  cluster_.wait_settled();
  expect_everywhere({0, 1, 2}, spec_of(with_replicas(1)));
}

TEST_F(DamageInShardsTest, NoWholeCopyIsMadeOfADamagedShard) {
  commit_shards(0);
  flip_last_byte(images_named("shard")[1].second);
  edit(0, with_replicas(1));
  cluster_.wait_settled();
  EXPECT_EQ(images_named("model").size(), 0u);
  EXPECT_THAT(cluster_.job(0, "job")->status_json() + cluster_.job(1, "job")->status_json() +
                  cluster_.job(2, "job")->status_json(),
              HasSubstr("do not have the checksum they had"));
}

TEST_F(DamageInShardsTest, ACopyOneTooManyGoesWhenTheOthersAreGood) {
  commit_shards(2);
  edit(0, with_replicas(1));
  cluster_.wait_settled();
  EXPECT_EQ(images_named("shard").size(), kShards);
  EXPECT_EQ(images_named("model").size(), 1u);
  expect_everywhere({0, 1, 2}, spec_of(with_replicas(1)));
}

}  // namespace
}  // namespace ptc::testing
