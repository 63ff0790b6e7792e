#include "reshard/ptc/model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "reshard/ptc/model_facts.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

using ptc::testing::synthetic_model;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

LayoutSpec sizes(ParallelConfig config) { return {.sizes = config}; }

uint32_t index_of(const Model& model, std::string_view name) {
  for (uint32_t i = 0; i < model.tensors().size(); ++i) {
    if (model.tensors()[i].name == name) return i;
  }
  ADD_FAILURE() << "no tensor " << name;
  return 0;
}
std::optional<SubTensor> part_of_rank(const Model& model, std::string_view name,
                                      const LayoutSpec& spec, const StateCoords& state) {
  auto found = model.slice(index_of(model, name), spec, state);
  EXPECT_TRUE(found.has_value()) << found.error().message();
  return found ? std::move(found).value() : std::nullopt;
}
std::string check_error(const Model& model, const LayoutSpec& spec) {
  const auto checked = model.check(spec);
  if (checked) return "accepted";
  EXPECT_EQ(checked.error().code(), Code::kInvalidArgument);
  return checked.error().message();
}
Model bind(std::shared_ptr<const RuleSet> rules, std::vector<TensorInfo> tensors,
           std::string_view config = "") {
  auto facts = rules->facts(config);
  EXPECT_TRUE(facts.has_value());
  auto model = Model::bind(rules, facts.value(), std::move(tensors));
  EXPECT_TRUE(model.has_value()) << model.error().message();
  return std::move(model).value();
}
TensorInfo tensor(std::string name, Shape shape) {
  return {"model.safetensors", std::move(name), DType::kF32, shape};
}

constexpr std::string_view kLlama = R"({"model_type": "llama", "hidden_size": 16,
  "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
  "intermediate_size": 24, "vocab_size": 300})";
constexpr std::string_view kGpt2 = R"({"model_type": "gpt2", "n_embd": 1600, "n_layer": 48,
  "n_head": 25, "vocab_size": 50257})";
constexpr std::string_view kMixtral = R"({"model_type": "mixtral", "hidden_size": 16,
  "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8, "vocab_size": 256,
  "num_local_experts": 6})";
constexpr std::string_view kDeepSeek = R"({"model_type": "deepseek_v3", "hidden_size": 256,
  "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "num_attention_heads": 4,
  "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "v_head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 256,
  "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 512,
  "quantization_config": {}})";

TEST(Model, CutsLlamaAsMegatronDoes) {
  const Model model = synthetic_model(kLlama);
  const LayoutSpec spec = sizes({.tp = 4});
  const auto query = part_of_rank(model, "model.layers.1.self_attn.q_proj.weight", spec, {.tp = 1});
  EXPECT_EQ(query->local_shape, (Shape{4, 16}));
  EXPECT_THAT(query->pieces, ElementsAre(Piece{Box{{4, 0}, {4, 16}}, {0, 0}}));
  const auto key = part_of_rank(model, "model.layers.1.self_attn.k_proj.weight", spec, {.tp = 3});
  EXPECT_THAT(key->pieces, ElementsAre(Piece{Box{{2, 0}, {2, 16}}, {0, 0}}));
  const auto down = part_of_rank(model, "model.layers.1.mlp.down_proj.weight", spec, {.tp = 3});
  EXPECT_THAT(down->pieces, ElementsAre(Piece{Box{{0, 18}, {16, 6}}, {0, 0}}));
  const auto embedding = part_of_rank(model, "model.embed_tokens.weight", spec, {.tp = 2});
  EXPECT_EQ(embedding->local_shape, (Shape{128, 16}));
  EXPECT_THAT(embedding->pieces, ElementsAre(Piece{Box{{256, 0}, {44, 16}}, {0, 0}}));
  const auto norm = part_of_rank(model, "model.norm.weight", spec, {.tp = 3});
  EXPECT_EQ(*norm, SubTensor::whole({16}));
}

TEST(Model, RefusesCutsThroughHeads) {
  EXPECT_EQ(check_error(synthetic_model(kGpt2), sizes({.tp = 5})), "accepted");
  EXPECT_EQ(check_error(synthetic_model(kGpt2), sizes({.tp = 2})),
            "transformer.h.0.attn.c_attn.weight: the 25 heads on axis 1 (length 1600) are not "
            "divisible by tp = 2");
  EXPECT_THAT(check_error(synthetic_model(kLlama), sizes({.tp = 3})),
              HasSubstr("the 8 heads on axis 0 (length 16) are not divisible by tp = 3"));
}

TEST(Model, FusedQueriesKeysAndValuesAreCutByThemselves) {
  const Model model = synthetic_model(kGpt2);
  const auto fused =
      part_of_rank(model, "transformer.h.7.attn.c_attn.bias", sizes({.tp = 5}), {.tp = 4});
  EXPECT_THAT(fused->pieces,
              ElementsAre(Piece{Box{{1280}, {320}}, {0}}, Piece{Box{{2880}, {320}}, {320}},
                          Piece{Box{{4480}, {320}}, {640}}));
}

TEST(Model, StagesHoldTheirLayersAndTheEnds) {
  const Model model = synthetic_model(kLlama);
  const LayoutSpec spec = sizes({.pp = 3});
  auto on = [&](std::string_view name) {
    std::string stages;
    for (uint32_t stage = 0; stage < 3; ++stage) {
      if (model.on_stage(index_of(model, name), spec, stage)) stages += std::to_string(stage);
    }
    return stages;
  };
  EXPECT_EQ(on("model.embed_tokens.weight"), "0");
  EXPECT_EQ(on("model.layers.1.input_layernorm.weight"), "0");
  EXPECT_EQ(on("model.layers.2.input_layernorm.weight"), "1");
  EXPECT_EQ(on("model.layers.3.input_layernorm.weight"), "2");
  EXPECT_EQ(on("model.norm.weight"), "2");
  EXPECT_EQ(on("lm_head.weight"), "2");
  LayoutSpec uneven = spec;
  uneven.stages = {1, 1, 3};
  EXPECT_THAT(check_error(model, uneven), HasSubstr("adds up to 5 layers, but the model has 4"));
}

/// What each stage holds follows from on_stage(), as does what a state holds.
TEST(Model, EmbeddingAndHeadAreWhereStagesNameThem) {
  const Model model = synthetic_model(kLlama);  // four layers
  const LayoutSpec spec = Layout::parse(R"({"tp": 1, "pp": 3, "dp": 1,
                        "stages": [1, [2, "embedding"], ["head", 1]]})")
                              .value()
                              .spec;
  EXPECT_TRUE(model.check(spec).has_value());
  const auto stages = [&](const LayoutSpec& of, std::string_view name) {
    std::string on, held;
    const Model::Holdings holdings(model, of);
    for (uint32_t stage = 0; stage < of.sizes.pp; ++stage) {
      const uint32_t tensor = index_of(model, name);
      if (model.on_stage(tensor, of, stage)) on += std::to_string(stage);
      const auto all = holdings.of({.pp = stage}).value();
      if (std::any_of(all.begin(), all.end(),
                      [&](const auto& one) { return one.tensor == tensor; }))
        held += std::to_string(stage);
    }
    EXPECT_EQ(on, held) << name;
    return on;
  };
  EXPECT_EQ(stages(spec, "model.embed_tokens.weight"), "1");
  EXPECT_EQ(stages(spec, "model.layers.0.input_layernorm.weight"), "0");
  EXPECT_EQ(stages(spec, "model.layers.2.input_layernorm.weight"), "1");
  EXPECT_EQ(stages(spec, "model.norm.weight"), "2");
  LayoutSpec together = spec;
  together.head_at = 1;
  EXPECT_EQ(stages(together, "model.embed_tokens.weight"), "1");
  EXPECT_EQ(stages(together, "lm_head.weight"), "1");
  // The last layer predicts further tokens, say, and has the number behind the others'.
  const LayoutSpec mtp =
      Layout::parse(R"({"tp": 1, "pp": 3, "dp": 1, "stages": "Et*2|t|mL"})").value().spec;
  EXPECT_TRUE(model.check(mtp).has_value());
  EXPECT_EQ(stages(mtp, "model.layers.2.input_layernorm.weight"), "1");
  EXPECT_EQ(stages(mtp, "model.layers.3.input_layernorm.weight"), "2");
}

TEST(Model, ATiedEmbeddingIsOnBothEnds) {
  auto copies = [](std::string_view config) {
    const Model model = synthetic_model(config);
    for (uint32_t i = 0; i < model.tensors().size(); ++i) {
      if (model.tensors()[i].name.find("wte") == std::string::npos &&
          model.tensors()[i].name.find("word_embeddings") == std::string::npos) {
        continue;
      }
      EXPECT_TRUE(model.on_stage(i, sizes({.pp = 2}), 0));
      return model.on_stage(i, sizes({.pp = 2}), 1);
    }
    return false;
  };
  const std::string gpt2 = R"("model_type": "gpt2", "n_embd": 4, "n_layer": 2, "n_head": 2,
                              "vocab_size": 9)";
  EXPECT_TRUE(copies("{" + gpt2 + "}"));
  EXPECT_FALSE(copies("{" + gpt2 + R"(, "tie_word_embeddings": false})"));
  const std::string bert = R"("model_type": "bert", "hidden_size": 4, "num_hidden_layers": 2,
                              "num_attention_heads": 2, "vocab_size": 9)";
  EXPECT_TRUE(copies("{" + bert + "}"));
  EXPECT_FALSE(copies("{" + bert + R"(, "prefix": false})"));  // an encoder without a head
  EXPECT_FALSE(copies("{" + bert + R"(, "tie_word_embeddings": false})"));
}

TEST(Model, ExpertsAreCutOverEp) {
  const Model model = synthetic_model(kMixtral);
  const LayoutSpec spec = sizes({.tp = 2, .ep = 3});
  const std::string at = "model.layers.1.block_sparse_moe.";
  EXPECT_FALSE(part_of_rank(model, at + "experts.3.w1.weight", spec, {.ep = 0}).has_value());
  EXPECT_EQ(part_of_rank(model, at + "experts.3.w1.weight", spec, {.ep = 1})->local_shape,
            (Shape{4, 16}));
  EXPECT_EQ(part_of_rank(model, at + "gate.weight", spec, {.ep = 2})->local_shape, (Shape{6, 16}));
  EXPECT_THAT(check_error(model, sizes({.ep = 4})),
              HasSubstr("the 6 experts are not divisible by ep = 4"));
}

TEST(Model, ScalesAreCutWithTheirWeights) {
  const Model model = synthetic_model(kDeepSeek);
  const LayoutSpec spec = sizes({.tp = 2});
  EXPECT_EQ(check_error(model, spec), "accepted");
  const std::string scales = "model.layers.0.mlp.down_proj.weight_scale_inv";
  EXPECT_TRUE(model.is_parameter(index_of(model, scales)));
  EXPECT_THAT(part_of_rank(model, scales, spec, {.tp = 1})->pieces,
              ElementsAre(Piece{Box{{0, 2}, {2, 2}}, {0, 0}}));
  const auto whole =
      part_of_rank(model, "model.layers.0.self_attn.q_a_proj.weight_scale_inv", spec, {});
  EXPECT_EQ(whole->local_shape, (Shape{1, 2}));
  // Queries have 4 heads of 192 rows, 1.5 blocks each.
  EXPECT_THAT(check_error(model, sizes({.tp = 4})),
              HasSubstr("model.layers.0.self_attn.q_b_proj.weight_scale_inv: its weight is cut at "
                        "[0:192], off the grid of blocks of 128; tp = 2 would do"));
  // Five blocks of outputs, and two in each expert that is stacked.
  const std::string up = "model.layers.0.mlp.up_proj.weight", suffix = "_scale_inv";
  const auto of_rows = [&](uint64_t rows) {
    return bind(RuleSet::builtin("llama").value(),
                {tensor(up, {rows, 128}), tensor(up + suffix, {(rows + 127) / 128, 1})});
  };
  EXPECT_EQ(check_error(of_rows(640), sizes({.tp = 5})), "accepted");
  EXPECT_EQ(check_error(of_rows(640), sizes({.tp = 2})),
            up + suffix +
                ": its weight is cut at [0:320], off the grid of blocks of 128; tp = 5 would do");
  EXPECT_THAT(check_error(of_rows(1536), sizes({.tp = 8})), HasSubstr("tp = 2, 3, 4, 6, 12 would"));
  EXPECT_THAT(check_error(of_rows(200), sizes({.tp = 2})), HasSubstr("; no tp but 1 would do"));
}

TensorInfo words(std::string name, Shape shape) {
  return {"model.safetensors", std::move(name), DType::kI32, shape};
}
constexpr std::string_view kAwq = R"({"model_type": "llama", "num_hidden_layers": 2,
  "num_attention_heads": 8, "num_key_value_heads": 2, "quantization_config": {"group_size": 32}})";

TEST(Model, WhatAQuantisedWeightConsistsOfIsCutInProportion) {
  const std::string down = "model.layers.1.mlp.down_proj.";
  const std::string key = "model.layers.1.self_attn.k_proj.";
  const Model model = bind(RuleSet::builtin("llama").value(),
                           {words(down + "qweight", {192, 8}), words(down + "qzeros", {6, 8}),
                            tensor(down + "scales", {6, 64}), words(key + "qweight", {64, 4}),
                            words(key + "qzeros", {2, 4}), tensor(key + "scales", {2, 32})},
                           kAwq);
  const LayoutSpec spec = sizes({.tp = 2, .pp = 2});
  EXPECT_EQ(check_error(model, spec), "accepted");
  EXPECT_THAT(part_of_rank(model, down + "qweight", spec, {.tp = 1, .pp = 1})->pieces,
              ElementsAre(Piece{Box{{96, 0}, {96, 8}}, {0, 0}}));
  EXPECT_THAT(part_of_rank(model, down + "scales", spec, {.tp = 1, .pp = 1})->pieces,
              ElementsAre(Piece{Box{{3, 0}, {3, 64}}, {0, 0}}));
  EXPECT_FALSE(part_of_rank(model, down + "scales", spec, {.tp = 1, .pp = 0}).has_value());
  EXPECT_THAT(part_of_rank(model, key + "qzeros", spec, {.tp = 1, .pp = 1})->pieces,
              ElementsAre(Piece{Box{{0, 2}, {2, 2}}, {0, 0}}));
  // More ranks than heads share these.
  EXPECT_EQ(part_of_rank(model, key + "qweight", sizes({.tp = 4}), {.tp = 2}),
            part_of_rank(model, key + "qweight", sizes({.tp = 4}), {.tp = 3}));
  EXPECT_EQ(check_error(model, sizes({.tp = 4})),
            down +
                "qzeros: tp = 4 gives a rank 48 of the 192 elements that its weight has on the "
                "axis that is cut, and 32 of them are one group here that cannot be cut; tp = "
                "2, 3, 6 would do");
}

TEST(Model, AQuantisedTensorThatIsNoPartOfItsWeightIsNotGuessed) {
  const std::string down = "model.layers.0.mlp.down_proj.";
  const auto refused = [&](std::vector<TensorInfo> tensors) {
    return check_error(bind(RuleSet::builtin("llama").value(), std::move(tensors), kAwq),
                       sizes({.tp = 2}));
  };
  EXPECT_THAT(refused({tensor(down + "qweight", {64, 8, 2})}), HasSubstr("no rule of family"));
  EXPECT_THAT(refused({tensor(down + "input_scale", {64})}), HasSubstr("no rule of family"));
  EXPECT_THAT(refused({words(down + "qweight", {96, 8}), tensor(down + "scales", {5, 64})}),
              HasSubstr(down + "scales: its axis 0 has 5 elements, which are no words or groups of "
                               "the 96 of its weight"));
  EXPECT_THAT(refused({tensor(down + "weight", {64, 96}), tensor(down + "weight_scale", {64, 5})}),
              HasSubstr("no words or groups"));
  const std::string fused = "model.layers.0.mlp.gate_up_proj.";
  EXPECT_THAT(refused({tensor(fused + "weight", {64, 32}), tensor(fused + "weight_scale", {2})}),
              HasSubstr(fused + "weight_scale: its axis 0 has 2 elements, which are no words or "
                                "groups of the 64 of its weight"));
  // [out, in], as AWQ's "gemv" has it; words under the weight's own name.
  EXPECT_THAT(refused({words(down + "qweight", {64, 12}), words(down + "qzeros", {64, 1}),
                       tensor(down + "scales", {64, 8})}),
              HasSubstr("no rule of family"));
  EXPECT_THAT(refused({words(down + "weight", {96, 8}), tensor(down + "weight_scale", {6, 64})}),
              HasSubstr("no rule of family"));
  // A word of outputs is no scale of all.
  const std::string up = "model.layers.0.mlp.up_proj.";
  EXPECT_THAT(refused({words(up + "qweight", {64, 1}), tensor(up + "scales", {2, 8})}),
              HasSubstr(up + "qweight: tp = 2 gives a rank 4 of the 8 elements that its weight has "
                             "on the axis that is cut, and 8 of them are one packed word here that "
                             "cannot be cut; no tp but 1 would do"));
}

TEST(Model, LayersBehindTheLastAreOnTheLastStage) {
  const Model model = synthetic_model(kDeepSeek);
  EXPECT_EQ(model.layers(), 2u);
  const uint32_t further = index_of(model, "model.layers.2.eh_proj.weight");
  EXPECT_FALSE(model.on_stage(further, sizes({.pp = 2}), 0));
  EXPECT_TRUE(model.on_stage(further, sizes({.pp = 2}), 1));
  LayoutSpec local = sizes({.pp = 2});
  local.naming = Naming::kStage;
  EXPECT_EQ(model.local_name(further, local, 1), "model.layers.1.eh_proj.weight");
}

TEST(Model, OptimizerStateFollowsItsParameter) {
  const Model model =
      bind(RuleSet::builtin("llama").value(),
           {tensor("model.layers.0.self_attn.q_proj.weight", {8, 4}),
            tensor("exp_avg.model.layers.0.self_attn.q_proj.weight", {8, 4}),
            tensor("optimizer.state.model.layers.0.self_attn.q_proj.weight.exp_avg_sq", {8, 4}),
            tensor("exp_avg.layers.0.self_attn.q_proj.weight", {8, 4}),  // without the prefix
            tensor("state.model.layers.0.self_attn.q_proj.weight.step", {}),
            tensor("row_moment.model.layers.0.self_attn.q_proj.weight", {8}),
            tensor("model.layers.0.self_attn.xq_proj.weight", {8, 4}), tensor("step", {1})},
           R"({"num_attention_heads": 4, "num_hidden_layers": 2})");
  EXPECT_TRUE(model.is_parameter(0));
  const LayoutSpec spec = sizes({.tp = 2});
  for (uint32_t i : {1u, 2u, 3u}) {
    EXPECT_FALSE(model.is_parameter(i));
    EXPECT_THAT(model.describe(i), HasSubstr("follows model.layers.0.self_attn.q_proj.weight"));
    EXPECT_FALSE(model.on_stage(i, sizes({.pp = 2}), 1));
  }
  EXPECT_FALSE(model.on_stage(4, sizes({.pp = 2}), 1));
  EXPECT_TRUE(model.on_stage(7, sizes({.pp = 2}), 1));
  const std::string error = check_error(model, spec);
  EXPECT_THAT(error, HasSubstr("row_moment.model.layers.0.self_attn.q_proj.weight, "
                               "model.layers.0.self_attn.xq_proj.weight (2 tensors in all)"));
}

TEST(Model, StateIsKnownByItsNameWhereNoRuleIs) {
  const Model model = bind(RuleSet::none(), {tensor("w", {8}), tensor("other.exp_avg", {4}),
                                             tensor("other.fp32", {4}), tensor("fp32_scale", {4})});
  for (const auto& [name, is_state] : std::map<std::string, bool>{
           {"w", false}, {"other.exp_avg", true}, {"other.fp32", true}, {"fp32_scale", false}}) {
    for (uint32_t i = 0; i < model.tensors().size(); ++i) {
      if (model.tensors()[i].name != name) continue;
      EXPECT_EQ(model.is_optimizer_state(i), is_state) << name;
    }
  }
}

TEST(Model, StateOfOneElementIsWhatItsKindIs) {
  const Model model = bind(RuleSet::builtin("llama").value(),
                           {tensor("model.layers.0.input_layernorm.weight", {1}),
                            tensor("model.layers.0.mlp.up_proj.weight", {4, 1}),
                            tensor("exp_avg.model.layers.0.input_layernorm.weight", {1}),
                            tensor("state.model.layers.0.input_layernorm.weight.step", {1}),
                            tensor("exp_avg.model.layers.0.mlp.up_proj.weight", {4, 1}),
                            tensor("state.model.layers.0.mlp.up_proj.weight.step", {1})});
  LayoutSpec spec = sizes({.dp = 2});
  spec.optimizer = OptimizerCut::kZero1;
  EXPECT_TRUE(model.is_cut_over_dp(2, spec));
  for (uint32_t step : {3u, 5u}) {
    EXPECT_FALSE(model.is_cut_over_dp(step, spec));
    EXPECT_EQ(model.slice(step, spec, {.dp = 1}).value()->pieces.size(), 1u);
  }
  EXPECT_EQ(model.slice(2, spec, {.dp = 1}).value()->pieces.size(), 0u);  // padding
}

TEST(Model, MasterWeightsMayHaveTheParametersName) {
  TensorInfo parameter = tensor("model.layers.0.mlp.down_proj.weight", {4, 6});
  parameter.dtype = DType::kBF16;
  TensorInfo master = tensor(parameter.name, {4, 6});
  master.file = "a-master.safetensors";
  const Model model = bind(RuleSet::builtin("llama").value(), {master, parameter});
  EXPECT_FALSE(model.is_parameter(0));
  EXPECT_TRUE(model.is_parameter(1));
  LayoutSpec spec = sizes({.tp = 2, .dp = 5});
  spec.optimizer = OptimizerCut::kZero1;
  EXPECT_EQ(model.slice(0, spec, {.tp = 1, .dp = 1}).value()->local_shape, (Shape{3}));
  EXPECT_EQ(model.slice(1, spec, {.tp = 1, .dp = 1}).value()->local_shape, (Shape{4, 3}));

  const std::vector<WrittenRank> ranks = ptc::testing::written_ranks(model, spec);
  const auto found = Model::infer(model.rules_ptr(), model.facts(), spec, ranks);
  ASSERT_TRUE(found.has_value()) << found.error().message();
  for (uint32_t i : {0u, 1u}) {
    const TensorInfo& info = found.value().model.tensors()[i];
    EXPECT_EQ(info.shape, (Shape{4, 6})) << info.file;
    EXPECT_EQ(found.value().model.is_parameter(i), info.dtype == DType::kBF16);
  }
}

TEST(Model, NoCutFallsWithinAByte) {
  TensorInfo weight = tensor("model.layers.0.mlp.down_proj.weight", {4, 6});
  weight.dtype = DType::kF4;
  TensorInfo rows = tensor("model.layers.0.mlp.up_proj.weight", {12, 5});
  rows.dtype = DType::kF4;
  const Model model = bind(RuleSet::builtin("llama").value(), {weight, rows});
  EXPECT_EQ(check_error(model, sizes({.tp = 3})), "accepted");
  EXPECT_THAT(check_error(model, sizes({.tp = 2})),
              HasSubstr("model.layers.0.mlp.down_proj.weight: box [0:4, 0:3] of 4-bit elements is "
                        "not cut at whole bytes"));
  const Model odd = bind(RuleSet::builtin("llama").value(), {rows});
  EXPECT_EQ(check_error(odd, sizes({.tp = 6})), "accepted");
  EXPECT_EQ(
      check_error(odd, sizes({.tp = 4})),
      "model.layers.0.mlp.up_proj.weight: a part [3, 5] of [12, 5] elements of 4 bits is not of "
      "whole bytes");
  LayoutSpec fsdp = sizes({.dp = 5});
  fsdp.optimizer = OptimizerCut::kFsdp;
  EXPECT_THAT(check_error(odd, fsdp), HasSubstr("within a byte"));
}

TEST(Model, UncoveredTensorsAreNamed) {
  const Model model = bind(
      RuleSet::none(), {tensor("a", {2}), tensor("b", {2}), tensor("c", {2}), tensor("d", {2})});
  EXPECT_EQ(check_error(model, sizes({.dp = 4, .cp = 2})), "accepted");
  EXPECT_EQ(check_error(model, sizes({.tp = 2})),
            "no rule of family 'none' says how to cut a, b, c, … (4 tensors in all): save a "
            "rules.json with a rule for them, then the layout with \"rules\": \"rules.json\" (ptc "
            "layout JOB set --rules rules.json), or keep tp, pp and ep at 1 and 'optimizer' at "
            "\"replicated\" or \"fsdp\"; by their names, a guess: {\"format\": \"ptc-rules/1\", "
            "\"rules\": [{\"names\":[\"a\",\"b\",\"c\",\"d\"],\"stage\":\"all\",\"description\":"
            "\"guess: whole on each rank; on all stages\"}]}");
  EXPECT_FALSE(model.slice(0, sizes({.pp = 2}), {}).has_value());
  EXPECT_THAT(model.describe(0), HasSubstr("cannot be cut"));
}

/// The guess that a refusal ends with.
std::string guess_in(const std::string& error) {
  const size_t at = error.find("a guess: ");
  return at == error.npos ? error : error.substr(at + 9);
}

TEST(Model, ARefusalSaysTheRuleThatWouldDo) {
  const std::string layer = "model.layers.0.", odd = layer + "odd.up_proj.";
  const std::vector<TensorInfo> tensors = {
      tensor(layer + "mlp.up_proj.weight", {8, 4}), tensor(odd + "weight", {8, 4}),
      tensor("model.layers.1.odd.up_proj.weight", {8, 4}), tensor(odd + "bias", {8}),
      tensor(layer + "odd.table", {3, 3}), tensor(layer + "odd.down_proj.weight", {4, 8}),
      // No weight beside it takes what it would be cut into.
      tensor(layer + "lone.q_proj.weight", {8, 4})};
  const std::string error =
      check_error(bind(RuleSet::builtin("llama").value(), tensors), sizes({.tp = 2}));
  EXPECT_EQ(
      guess_in(error),
      R"({"format": "ptc-rules/1", "extends": "llama", "rules": [{"names":)"
      R"(["model.layers.{layer}.odd.up_proj.weight","model.layers.{layer}.odd.up_proj.bias"],)"
      R"("cut":{"axis":0},"description":"guess: its outputs are cut, as names like these )"
      R"(usually mean"},{"names":["model.layers.{layer}.odd.table"],"description":"guess: )"
      R"(whole on each rank"},{"names":["model.layers.{layer}.odd.down_proj.weight"],"cut":)"
      R"({"axis":1},"description":"guess: its inputs are cut, as names like these usually )"
      R"(mean"},{"names":["model.layers.{layer}.lone.q_proj.weight"],"description":"guess: )"
      R"(whole on each rank; by its outputs it would be cut, and no weight beside it to )"
      R"(match"}]})");
  const Model mended = bind(RuleSet::parse(guess_in(error)).value(), tensors);
  EXPECT_EQ(check_error(mended, sizes({.tp = 2})), "accepted");
  EXPECT_EQ(part_of_rank(mended, odd + "bias", sizes({.tp = 2}), {.tp = 1})->local_shape,
            (Shape{4}));
  EXPECT_EQ(
      part_of_rank(mended, layer + "lone.q_proj.weight", sizes({.tp = 2}), {.tp = 1})->local_shape,
      (Shape{8, 4}));
  // What matches it may have a rule.
  const Model known = bind(
      RuleSet::builtin("llama").value(),
      {tensor(layer + "mlp.down_proj.weight", {4, 8}), tensor(layer + "mlp.w1.weight", {8, 4})});
  EXPECT_THAT(guess_in(check_error(known, sizes({.tp = 2}))), HasSubstr(R"("cut":{"axis":0})"));
  // To rules of the job's own it is to be added.
  const auto own = RuleSet::parse(R"({"format": "ptc-rules/1", "family": "mine", "rules": []})");
  EXPECT_THAT(guess_in(check_error(bind(own.value(), {tensor("odd", {2})}), sizes({.tp = 2}))),
              ::testing::StartsWith("\"rules\": [{\"names\":[\"odd\"]"));
  const Model packed = bind(RuleSet::builtin("llama").value(),
                            {tensor(layer + "self_attn.o_proj.weight", {8, 4}),
                             tensor(layer + "self_attn.o_proj.weight.absmax", {16})});
  EXPECT_THAT(check_error(packed, sizes({.tp = 2})), HasSubstr("part of a quantised weight"));
  std::vector<TensorInfo> many;
  for (int i = 0; i < 50; ++i) many.push_back(tensor(fmt::format("a.tensor_{}", i), {2, 2}));
  EXPECT_THAT(check_error(bind(RuleSet::none(), many), sizes({.tp = 2})),
              HasSubstr("\"ptc rules suggest\" prints a rules.json to begin with"));
}

TEST(Model, OfWhatStagesAndExpertsAre) {
  const LayoutSpec one = LayoutSpec::from_name("tp2-pp2-dp2-ep2").value();
  const auto same = [&](auto&& change) {
    LayoutSpec other = one;
    change(other);
    EXPECT_EQ(same_stages_and_experts(one, other), same_stages_and_experts(other, one));
    return same_stages_and_experts(one, other);
  };
  EXPECT_TRUE(same([](LayoutSpec&) {}));
  EXPECT_TRUE(same([](LayoutSpec& spec) {
    spec.sizes.tp = 4, spec.sizes.dp = 8, spec.sizes.cp = 2, spec.naming = Naming::kStage;
    spec.optimizer = OptimizerCut::kFsdp;
  }));
  EXPECT_FALSE(same([](LayoutSpec& spec) { spec.sizes.pp = 1; }));
  EXPECT_FALSE(same([](LayoutSpec& spec) { spec.sizes.ep = 4; }));
  EXPECT_FALSE(same([](LayoutSpec& spec) { spec.sizes.etp = 1; }));
  EXPECT_FALSE(same([](LayoutSpec& spec) { spec.vpp = 2; }));
  EXPECT_FALSE(same([](LayoutSpec& spec) { spec.stages = {3, 2}; }));
  EXPECT_FALSE(
      same([](LayoutSpec& spec) { spec.rules = LayoutRules(RuleSet::builtin("llama").value()); }));
}

TEST(Model, WhatConfigJsonSaysAndTheTensorsDoNot) {
  const auto fact_error = [](const Model& model, ParallelConfig config) {
    EXPECT_EQ(check_error(model, sizes(config)), "accepted");
    const auto checked = check_facts(model, sizes(config));
    return checked ? "accepted" : checked.error().message();
  };
  const auto llama = RuleSet::builtin("llama").value();
  constexpr std::string_view config = R"({"num_hidden_layers": 8, "num_attention_heads": 4,
      "vocab_size": 256})";
  std::vector<TensorInfo> tensors = {tensor("model.layers.0.mlp.up_proj.weight", {8, 4}),
                                     tensor("model.layers.2.mlp.up_proj.weight", {8, 4})};
  const Model fewer = bind(llama, tensors, config);
  EXPECT_THAT(contradictions(fewer),
              ElementsAre("config.json says 8 layers, and there are tensors of 3"));
  EXPECT_EQ(fact_error(fewer, {.tp = 2}), "accepted");
  EXPECT_EQ(fact_error(fewer, {.pp = 2}),
            "config.json says 8 layers, and there are tensors of 3: pp = 2 would have stages of "
            "layers that are not there; commit it with the right config.json, or save a "
            "rules.json with {\"format\": \"ptc-rules/1\", \"extends\": \"llama\", \"facts\": "
            "{\"layers\": 3}}, then the layout with \"rules\": \"rules.json\" (ptc layout JOB set "
            "--rules rules.json)");
  const auto said =
      RuleSet::parse(R"({"format": "ptc-rules/1", "extends": "llama", "facts": {"layers": 3}})");
  EXPECT_EQ(fact_error(bind(said.value(), tensors, config), {.pp = 2}), "accepted");
  // Layers behind those that are counted predict further tokens; adapters may be of a few.
  tensors.push_back(tensor("model.layers.9.mlp.up_proj.weight", {8, 4}));
  EXPECT_TRUE(contradictions(bind(llama, tensors, config)).empty());
  const std::string lora = "base_model.model.model.layers.0.mlp.up_proj.lora_";
  const Model adapter =
      bind(llama, {tensor(lora + "A.weight", {2, 4}), tensor(lora + "B.weight", {8, 2})}, config);
  EXPECT_TRUE(contradictions(adapter).empty());

  const auto rows = [&](uint64_t count) {
    return contradictions(bind(llama, {tensor("model.embed_tokens.weight", {count, 4})}, config));
  };
  EXPECT_TRUE(rows(300).empty());  // padding
  EXPECT_THAT(rows(200), ElementsAre("config.json says a vocabulary of 256, and "
                                     "model.embed_tokens.weight has 200 rows"));

  const auto experts = [&](uint32_t count) {
    constexpr std::string_view eight =
        R"({"num_hidden_layers": 1, "num_attention_heads": 4, "num_local_experts": 8})";
    std::vector<TensorInfo> made;
    for (uint32_t expert = 0; expert < count; ++expert)
      made.push_back(tensor(
          fmt::format("model.layers.0.block_sparse_moe.experts.{}.w1.weight", expert), {8, 4}));
    return bind(RuleSet::builtin("mixtral").value(), made, eight);
  };
  EXPECT_EQ(fact_error(experts(8), {.ep = 2}), "accepted");
  EXPECT_EQ(fact_error(experts(6), {.tp = 2}), "accepted");
  EXPECT_THAT(fact_error(experts(6), {.ep = 2}),
              AllOf(HasSubstr("config.json says 8 experts, and there are tensors of 6: ep = 2"),
                    HasSubstr("\"facts\": {\"experts\": 6}")));
  EXPECT_THAT(contradictions(experts(12)),
              ElementsAre("config.json says 8 experts, and there are tensors of 12"));
}

TEST(Model, ScalesOfAKeyValueCacheByHead) {
  const std::string at = "model.layers.1.self_attn.";
  const auto model_with = [&](Shape shape, std::string_view heads = "8") {
    return bind(RuleSet::builtin("llama").value(),
                {tensor(at + "k_proj.weight", {192, 4}), tensor(at + "k_proj.k_scale", shape),
                 tensor(at + "v_scale", shape)},
                fmt::format(R"({{"num_hidden_layers": 2, "num_attention_heads": 16,
                                 "num_key_value_heads": {}}})",
                            heads));
  };
  for (const Shape& shape : {Shape{8}, Shape{8, 1, 1}}) {
    const Model model = model_with(shape);
    for (const std::string name : {"k_proj.k_scale", "v_scale"}) {
      const auto rows = [&](uint32_t tp, StateCoords state) {
        const auto part = part_of_rank(model, at + name, sizes({.tp = tp, .pp = 2}), state);
        return part ? part->pieces.at(0).global.to_string() : "not here";
      };
      const std::string rest = shape.size() == 1 ? "]" : ", 0:1, 0:1]";
      EXPECT_EQ(rows(4, {.tp = 1, .pp = 1}), "[2:4" + rest) << name;
      EXPECT_EQ(rows(16, {.tp = 5, .pp = 1}), "[2:3" + rest) << name;  // two ranks share a head
      EXPECT_EQ(rows(4, {.tp = 1, .pp = 0}), "not here") << name;
    }
  }
  // One for all is whole, on its layer's stage.
  for (const Shape& shape : {Shape{}, Shape{1}, Shape{1, 1}}) {
    const Model model = model_with(shape);
    for (const std::string name : {"k_proj.k_scale", "v_scale"}) {
      const LayoutSpec spec = sizes({.tp = 4, .pp = 2});
      EXPECT_EQ(part_of_rank(model, at + name, spec, {.tp = 3, .pp = 1})->local_shape, shape);
      EXPECT_FALSE(part_of_rank(model, at + name, spec, {.tp = 3, .pp = 0}));
    }
  }
  // Another number is no scale of heads.
  EXPECT_THAT(check_error(model_with({24}), sizes({.tp = 2})), HasSubstr("k_proj.k_scale"));
}

TEST(Model, NobodySaysWhetherTheHeadIsTheEmbedding) {
  const auto llama = RuleSet::builtin("llama").value();
  std::vector<TensorInfo> tensors = {tensor("model.embed_tokens.weight", {8, 4}),
                                     tensor("model.layers.0.mlp.up_proj.weight", {8, 4}),
                                     tensor("model.layers.1.mlp.up_proj.weight", {8, 4})};
  const auto facts_error = [&](std::string_view type, std::string_view more, ParallelConfig config,
                               std::shared_ptr<const RuleSet> rules) {
    const std::string text =
        fmt::format(R"({{"model_type": "{}", "num_hidden_layers": 2{}}})", type, more);
    const auto checked =
        check_facts(bind(std::move(rules), tensors, std::string_view(text)), sizes(config));
    return checked ? "accepted" : checked.error().message();
  };
  EXPECT_EQ(facts_error("brand_new", "", {.pp = 2}, llama),
            "config.json does not say whether model.embed_tokens.weight is the head too, and there "
            "is no other: with pp = 2 the last stage would have none if it is; put "
            "\"tie_word_embeddings\": true or false into config.json and commit it again, or save "
            "a rules.json with {\"format\": \"ptc-rules/1\", \"extends\": \"llama\", \"tied\": "
            "true} or false, then the layout with \"rules\": \"rules.json\" (ptc layout JOB set "
            "--rules rules.json)");
  EXPECT_EQ(facts_error("brand_new", "", {.tp = 2}, llama), "accepted");
  EXPECT_EQ(facts_error("llama", "", {.pp = 2}, llama), "accepted");
  for (const char* tied : {"true", "false"}) {
    const std::string more = fmt::format(", \"tie_word_embeddings\": {}", tied);
    EXPECT_EQ(facts_error("brand_new", more, {.pp = 2}, llama), "accepted");
    const auto said = RuleSet::parse(
        fmt::format(R"({{"format": "ptc-rules/1", "extends": "llama", "tied": {}}})", tied));
    EXPECT_EQ(facts_error("brand_new", "", {.pp = 2}, said.value()), "accepted");
  }
  tensors.push_back(tensor("lm_head.weight", {8, 4}));
  EXPECT_EQ(facts_error("brand_new", "", {.pp = 2}, llama), "accepted");
}

TEST(Model, MissingFactsMatterOnlyWhenTheyAreNeeded) {
  const Model model = bind(RuleSet::builtin("llama").value(),
                           {tensor("model.layers.0.self_attn.k_proj.weight", {8, 4})});
  EXPECT_EQ(check_error(model, sizes({.tp = 1, .pp = 1, .ep = 2})), "accepted");
  EXPECT_EQ(check_error(model, sizes({.tp = 2})),
            "model.layers.0.self_attn.k_proj.weight: the number of key-value heads is not known: "
            "put the model's config.json beside its files in the checkpoint (into rank/0, or "
            "beside .metadata), or save a rules.json with "
            "{\"format\": \"ptc-rules/1\", \"extends\": \"llama\", \"facts\": {\"kv_heads\": …}}, "
            "then the layout with \"rules\": \"rules.json\" (ptc layout JOB set --rules "
            "rules.json)");
}

TEST(Model, AFactOfTheJobsOwnRulesIsGivenThere) {
  const auto rules = RuleSet::parse(R"({"format": "ptc-rules/1", "facts": {"parts": ["n_parts"]},
      "rules": [{"names": ["w.{layer}"], "cut": {"axis": 0, "heads": "parts"}}]})");
  const Model model = bind(rules.value(), {tensor("w.0", {8})});
  EXPECT_EQ(check_error(model, sizes({.tp = 2})),
            "w.0: 'parts' is not known: put the model's config.json beside its files in the "
            "checkpoint (into rank/0, or beside .metadata), or "
            "save a rules.json with \"facts\": {\"parts\": …}, then the layout with \"rules\": "
            "\"rules.json\" (ptc layout JOB set --rules rules.json)");
}

TEST(Model, RulesMustFitTheShape) {
  const Model model =
      bind(RuleSet::builtin("llama").value(), {tensor("model.layers.0.mlp.down_proj.weight", {8})});
  EXPECT_EQ(check_error(model, sizes({.tp = 2})),
            "model.layers.0.mlp.down_proj.weight: its rule cuts axis 1, but its shape is [8]");
}

TEST(Model, CopiesOutliveTheOriginal) {
  std::optional<Model> original = synthetic_model(kLlama);
  const Model copy = *original;
  const Model moved = std::move(*original);
  original.reset();
  const LayoutSpec spec = sizes({.tp = 4, .pp = 2});
  EXPECT_EQ(copy.hold(spec, {.tp = 1, .pp = 1}).value().size(),
            moved.hold(spec, {.tp = 1, .pp = 1}).value().size());
}

TEST(Model, ManyTensorsBindQuickly) {
  constexpr std::string_view kConfig = R"({"model_type": "deepseek_v3", "hidden_size": 7168,
      "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536,
      "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
      "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
      "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 129280})";
  std::vector<TensorInfo> tensors = ptc::testing::synthetic_tensors(kConfig);
  const std::vector<TensorInfo> state = ptc::testing::optimizer_tensors(tensors);
  tensors.insert(tensors.end(), state.begin(), state.end());

  const auto start = std::chrono::steady_clock::now();
  auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const Model model = bind(RuleSet::builtin("deepseek_v3").value(), std::move(tensors), kConfig);
  const double bound = seconds();
  const LayoutSpec spec = sizes({.tp = 4, .pp = 4, .ep = 4});
  EXPECT_EQ(check_error(model, spec), "accepted");
  EXPECT_GT(model.hold(spec, {.tp = 1, .pp = 2, .ep = 3}).value().size(), 10000u);
  std::cout << model.tensors().size() << " tensors: bind " << bound << " s, check and hold "
            << seconds() - bound << " s\n";
  EXPECT_LT(seconds(), 90);  // generous: sanitizers without optimisation, busy machines
}

}  // namespace
}  // namespace ptc
