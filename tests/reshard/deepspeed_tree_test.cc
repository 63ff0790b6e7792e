// What DeepSpeed's files are by their names, and what they say of parameters.
#include <gmock/gmock.h>

#include "reshard/checkpoint/deepspeed_file.h"
#include "reshard/checkpoint/deepspeed_name.h"
#include "reshard/intake/tree_format.h"
#include "store/codec/torch_compose.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Path = std::vector<TorchStep>;
using NameKind = DeepSpeedName::Kind;

TorchStep key(std::string text) { return {TorchStep::Kind::kKey, std::move(text), 0}; }
TorchStep number(int64_t of) { return {TorchStep::Kind::kNumberKey, {}, of}; }
TorchStep element(int64_t of) { return {TorchStep::Kind::kListIndex, {}, of}; }

TEST(DeepSpeedNames, OfWhatTheEngineSaves) {
  EXPECT_EQ(deepspeed_name("global_step100/mp_rank_00_model_states.pt"),
            (DeepSpeedName{NameKind::kModel, "global_step100/", 0, 0}));
  EXPECT_EQ(deepspeed_name("mp_rank_17_model_states.pt"),
            (DeepSpeedName{NameKind::kModel, "", 0, 17}));
  EXPECT_EQ(deepspeed_name("a/b/zero_pp_rank_12_mp_rank_03_optim_states.pt"),
            (DeepSpeedName{NameKind::kZero, "a/b/", 12, 3}));
  EXPECT_EQ(deepspeed_name("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            (DeepSpeedName{NameKind::kZero, "", 0, 0}));
  EXPECT_EQ(deepspeed_name("fp16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
            (DeepSpeedName{NameKind::kZero, "", 1, 0}));
  EXPECT_EQ(deepspeed_name("zero_pp_rank_2_mp_rank_00_model_states.pt"),
            (DeepSpeedName{NameKind::kZeroModel, "", 2, 0}));
}

TEST(DeepSpeedNames, OfUniversalFolders) {
  EXPECT_EQ(deepspeed_name("t_universal/zero/layers.0.w/exp_avg.pt"),
            (DeepSpeedName{NameKind::kUniversal, "t_universal/", 0, 0, "layers.0.w", "exp_avg"}));
  EXPECT_EQ(deepspeed_name("zero/w/fp32.pt"),
            (DeepSpeedName{NameKind::kUniversal, "", 0, 0, "w", "fp32"}));
  for (const char* other : {"zero/optimizer_state.pt", "w/fp32.pt", "nonzero/w/fp32.pt",
                            "zero/w/fp32.bin", "zero//fp32.pt", "/fp32.pt", ""})
    EXPECT_EQ(deepspeed_name(other), std::nullopt) << other;
}

TEST(DeepSpeedNames, OfExpertsAndOfOthers) {
  for (const char* expert :
       {"layer_0_expert_3_mp_rank_00_model_states.pt", "expert_1_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt"})
    EXPECT_EQ(deepspeed_name(expert).value().kind, NameKind::kExpert) << expert;
  for (const char* other :
       {"mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pth", "mp_rank_model_states.pt",
        "zero_pp_rank_mp_rank_00_optim_states.pt", "my_mp_rank_00_model_states.pt",
        "mp_rank_99999999999_model_states.pt", "mp_rank_00/model_optim_rng.pt",
        "layer_01-model_00-model_states.pt", "latest", "zero_to_fp32.py"})
    EXPECT_EQ(deepspeed_name(other), std::nullopt) << other;
}

TEST(DeepSpeedNames, AModelAloneIsOneOnlyWhereItsFrameworkPutIt) {
  Found file;
  file.path = "global_step1/mp_rank_00_model_states.pt";
  EXPECT_FALSE(deepspeed_trees().reads({file}));
  file.at = file.path;
  EXPECT_TRUE(deepspeed_trees().reads({file}));
  Found zero, weights, universal;
  zero.path = "zero_pp_rank_0_mp_rank_00_optim_states.pt";
  weights.path = "model.safetensors";
  universal.path = "global_step1/zero/w/fp32.pt";
  file.at.clear();
  EXPECT_TRUE(deepspeed_trees().reads({file, zero}));
  EXPECT_TRUE(deepspeed_trees().reads({file, zero, weights}));  // what the Trainer leaves
  EXPECT_FALSE(deepspeed_trees().reads({file, weights}));
  EXPECT_FALSE(deepspeed_trees().reads({universal}));
  EXPECT_TRUE(deepspeed_trees().reads({universal, file}));
  zero.rank = 3;
  EXPECT_EQ(deepspeed_trees().layout(false, {file, zero})->name(), "tp1-pp1-dp4");
}

/// As torch.save writes these; tensors are zeros.
std::string torch_file(const std::vector<std::pair<Path, Shape>>& tensors) {
  std::vector<TorchPathValue> values;
  for (const auto& [path, shape] : tensors) {
    values.emplace_back().path = path;
    values.back().shape = shape;
  }
  const TorchLayout made = compose_torch_file(values).value();
  std::string file(made.zip.file_bytes, '\0');
  for (const ZipWriter::Piece& piece : made.zip.pieces)
    file.replace(piece.offset, piece.bytes.size(), piece.bytes);
  return file;
}
template <class T>
Result<T> read(const std::string& file) {
  return T::read(read_at(std::as_bytes(std::span(file))), file.size());
}

const TorchStep kState = key("optimizer_state_dict"), kBase = key("base_optimizer_state");

TEST(ZeroFiles, HaveMastersAndMomentsOfEachGroup) {
  const TorchStep masters = key("single_partition_of_fp32_groups");
  const std::string file =
      torch_file({{{kState, masters, element(0)}, Shape{6}},
                  {{kState, masters, element(1)}, Shape{4}},
                  {{kState, kBase, key("state"), number(1), key("exp_avg")}, Shape{4}},
                  {{kState, kBase, key("state"), number(0), key("exp_avg")}, Shape{8}},
                  {{kState, kBase, key("state"), number(0), key("step")}, Shape{}}});
  const ZeroFile zero = read<ZeroFile>(file).value();
  EXPECT_FALSE(zero.of_stage_3);
  ASSERT_THAT(zero.groups, SizeIs(2));
  EXPECT_EQ(zero.groups[0].master.elements, 6u);
  EXPECT_EQ(zero.groups[1].master.elements, 4u);
  ASSERT_THAT(zero.groups[0].state, SizeIs(1));
  EXPECT_EQ(zero.groups[0].state[0].first, "exp_avg");
  EXPECT_EQ(zero.groups[0].state[0].second.elements, 8u);
  EXPECT_LT(zero.groups[0].master.offset + 6 * 4, file.size());
  ASSERT_THAT(zero.values, SizeIs(1));
  EXPECT_EQ(zero.values[0].first, "optimizer_state_dict.base_optimizer_state.state.%i0.step");
}

TEST(ZeroFiles, RefuseWhatTheyAreNotKnownToHave) {
  const Path master = {kState, key("fp32_flat_groups"), element(0)};
  auto error = [](const std::vector<std::pair<Path, Shape>>& tensors) {
    return read<ZeroFile>(torch_file(tensors)).error().message();
  };
  EXPECT_THAT(error({{master, Shape{6}}, {{kState, key("worker_error")}, Shape{6}}}),
              HasSubstr("'optimizer_state_dict.worker_error' is none that such files"));
  EXPECT_THAT(error({{master, Shape{6, 1}}}), HasSubstr("and not flat"));
  EXPECT_THAT(error({{{kState, kBase, key("state"), number(0), key("m")}, Shape{6}}}),
              HasSubstr("it is no file of ZeRO's"));
  EXPECT_THAT(error({{master, Shape{6}},
                     {{kState, kBase, key("state"), number(1 << 19), key("m")}, Shape{6}}}),
              HasSubstr("is none that such files"));
}

TEST(UniversalStates, AreOneTensor) {
  EXPECT_EQ(read<UniversalState>(torch_file({{{key("param")}, Shape{2, 3}}})).value().shape,
            (Shape{2, 3}));
  EXPECT_EQ(read<UniversalState>(torch_file({{{}, Shape{7}}})).value().array->elements, 7u);
  EXPECT_THAT(read<UniversalState>(torch_file({{{key("param")}, Shape{2}}, {{key("b")}, Shape{2}}}))
                  .error()
                  .message(),
              HasSubstr("'b'"));
}

}  // namespace
}  // namespace ptc
