#include "reshard/intake/torch_dist.h"

#include <gtest/gtest.h>

namespace ptc {
namespace {

struct Saved {
  std::string name;
  Shape shape;
  DType dtype = DType::kF32;
};

std::vector<TorchDistPart> parts_of(const std::vector<Saved>& saved,
                                    const MegatronFile* said = nullptr) {
  std::vector<TorchDistTensor> tensors;
  for (const Saved& one : saved) tensors.push_back({one.name, one.dtype, &one.shape});
  return torch_dist_parts(tensors, said);
}

std::string layer_one(const Saved& saved, const TorchDistPart& part) {
  return part.layer_at ? part.name_of(saved.name, 1) : "";
}

TEST(TorchDist, FindsStacksByRulesAndWhatFollowsThem) {
  const std::vector<Saved> saved = {
      {"decoder.layers.mlp.linear_fc2.weight", {4, 16, 24}},
      {"module.decoder.layers.self_attention.linear_qkv.layer_norm_weight", {4, 16}},
      {"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight", {4, 16, 24}},
      {"chained_1.optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight", {4, 24, 16}},
      {"decoder.final_layernorm.weight", {16}},
      {"decoder.layers.3.mlp.linear_fc1.weight", {48, 16}},
      {"decoder.layers.of_another_kind.weight", {4, 16}}};
  const auto parts = parts_of(saved);
  EXPECT_EQ(layer_one(saved[0], parts[0]), "decoder.layers.1.mlp.linear_fc2.weight");
  EXPECT_EQ(layer_one(saved[1], parts[1]),
            "module.decoder.layers.1.self_attention.linear_qkv.layer_norm_weight");
  EXPECT_EQ(layer_one(saved[2], parts[2]),
            "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc2.weight");
  for (size_t other = 3; other < saved.size(); ++other)
    EXPECT_FALSE(parts[other].layer_at) << saved[other].name;
}

TEST(TorchDist, TakesNothingForAStackWhereThatIsNotSure) {
  const Saved stack{"decoder.layers.mlp.linear_fc2.weight", {4, 16, 24}};
  EXPECT_TRUE(parts_of({stack})[0].layer_at);
  const std::vector<Saved> others = {
      {"decoder.layers.mlp.linear_fc1.weight", {3, 48, 16}},  // fewer layers
      {"decoder.layers.0.mlp.linear_fc2.weight", {16, 24}},   // that name is there
      {"decoder.layers.mlp.linear_fc1.weight", {0, 48, 16}}};
  for (const Saved& other : others)
    EXPECT_FALSE(parts_of({stack, other})[0].layer_at) << other.name << other.shape.to_string();
  for (const Shape& shape : {Shape{uint64_t{1} << 40, 0}, Shape{1 << 20, 8}, Shape{4, 0, 8}})
    EXPECT_FALSE(parts_of({{stack.name, shape}})[0].layer_at) << shape.to_string();
}

TEST(TorchDist, TakesOffPaddingThatMoreTensorRanksHad) {
  MegatronFile said;
  said.arguments = {{"vocab_size", 300}, {"tensor_model_parallel_size", 4}};
  const std::vector<Saved> saved = {
      {"embedding.word_embeddings.weight", {512, 16}},
      {"optimizer.state.param.embedding.word_embeddings.weight", {512, 16}},
      {"output_layer.weight", {640, 16}}};
  EXPECT_EQ(parts_of(saved, &said)[0].rows, 384u);
  EXPECT_EQ(parts_of(saved, &said)[1].rows, 384u);
  EXPECT_FALSE(parts_of(saved, &said)[2].rows);
  EXPECT_FALSE(parts_of(saved)[0].rows);
  said.arguments["make_vocab_size_divisible_by"] = 64;
  EXPECT_EQ(parts_of(saved, &said)[0].rows, 320u);
  said.arguments["tensor_model_parallel_size"] = int64_t{1} << 62;
  EXPECT_FALSE(parts_of(saved, &said)[0].rows);
  said.arguments["tensor_model_parallel_size"] = 4;
  said.arguments["make_vocab_size_divisible_by"] = 128;
  std::vector<Saved> with_buckets = saved;
  with_buckets.push_back(
      {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param", {99}});
  EXPECT_FALSE(parts_of(with_buckets, &said)[0].rows);
}

}  // namespace
}  // namespace ptc
