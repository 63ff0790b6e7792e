// What ranks hold of models of some families, written down literally: the random models of
// model_property_test.cc are cut by the same rules that are in question here.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "reshard/ptc/model_facts.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

using ptc::testing::synthetic_model;

/// A rank's part: the shape of its array, then which boxes of the whole tensor lie in it, and where
/// if not at its beginning. What no box covers is padding.
std::string part(const Model& model, std::string_view name, ParallelConfig sizes,
                 StateCoords state) {
  for (uint32_t i = 0; i < model.tensors().size(); ++i) {
    if (model.tensors()[i].name != name) continue;
    const auto found = model.slice(i, {.sizes = sizes}, state);
    if (!found) return found.error().message();
    if (!found.value()) return "not here";
    std::string text = found.value()->local_shape.to_string() + ":";
    for (const Piece& piece : found.value()->pieces) {
      text += " " + piece.global.to_string();
      if (piece.local_offset != Dims(piece.local_offset.size()))
        text += " at " + piece.local_offset.to_string();
    }
    return text;
  }
  return "no such tensor";
}

TEST(Families, Qwen3WithExperts) {
  const std::string config =
      R"("model_type": "qwen3_moe", "hidden_size": 10, "num_hidden_layers": 3,
      "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "num_experts": 6,
      "moe_intermediate_size": 9, "vocab_size": 301)";
  const Model model = synthetic_model("{" + config + "}");
  auto on = [&](std::string_view name, StateCoords state) {
    return part(model, name, {.tp = 3, .pp = 2, .ep = 2}, state);
  };
  const std::string attention = "model.layers.1.self_attn.", mlp = "model.layers.1.mlp.";
  EXPECT_EQ(on(attention + "q_proj.weight", {.tp = 1}), "[10, 10]: [10:20, 0:10]");
  EXPECT_EQ(on(attention + "k_proj.weight", {.tp = 2}), "[5, 10]: [10:15, 0:10]");
  EXPECT_EQ(on(attention + "o_proj.weight", {.tp = 2, .ep = 1}), "[10, 10]: [0:10, 20:30]");
  EXPECT_EQ(on(attention + "q_norm.weight", {.tp = 2}), "[5]: [0:5]");
  // Six ranks share three key-value heads, two by two.
  EXPECT_EQ(part(model, attention + "v_proj.weight", {.tp = 6}, {.tp = 3}),
            "[5, 10]: [5:10, 0:10]");

  EXPECT_EQ(on(mlp + "gate.weight", {.tp = 2, .ep = 1}), "[6, 10]: [0:6, 0:10]");
  EXPECT_EQ(on(mlp + "experts.2.gate_proj.weight", {.tp = 2, .ep = 0}), "[3, 10]: [6:9, 0:10]");
  EXPECT_EQ(on(mlp + "experts.2.gate_proj.weight", {.tp = 2, .ep = 1}), "not here");
  EXPECT_EQ(on(mlp + "experts.5.up_proj.weight", {.tp = 0, .ep = 1}), "[3, 10]: [0:3, 0:10]");
  EXPECT_EQ(on(mlp + "experts.5.down_proj.weight", {.tp = 1, .ep = 1}), "[10, 3]: [0:10, 3:6]");

  EXPECT_EQ(on("model.layers.2.input_layernorm.weight", {.pp = 0}), "not here");
  EXPECT_EQ(on("model.layers.2.input_layernorm.weight", {.pp = 1}), "[10]: [0:10]");
  EXPECT_EQ(on("model.embed_tokens.weight", {.tp = 2}), "[128, 10]: [256:301, 0:10]");
  EXPECT_EQ(on("lm_head.weight", {.tp = 1, .pp = 1}), "[128, 10]: [128:256, 0:10]");

  const Model stacked = synthetic_model("{" + config + R"(, "stacked_experts": true})");
  EXPECT_EQ(part(stacked, mlp + "experts.gate_up_proj", {.tp = 3, .ep = 2}, {.tp = 2, .ep = 1}),
            "[3, 6, 10]: [3:6, 6:9, 0:10] [3:6, 15:18, 0:10] at [0, 3, 0]");
  EXPECT_EQ(part(stacked, mlp + "experts.down_proj", {.tp = 3, .ep = 2}, {.tp = 1}),
            "[3, 10, 3]: [0:3, 0:10, 3:6]");
}

/// As Megatron-Core's ranks make them, which need a GPU: one of two tp ranks of two key heads of
/// three elements, and four value heads of two.
TEST(Families, MegatronsGatedDeltaNet) {
  const auto rules = RuleSet::builtin("megatron").value();
  const auto facts = rules->facts(R"({"num_layers": 1, "linear_num_key_heads": 2,
      "linear_key_head_dim": 3, "linear_num_value_heads": 4, "linear_value_head_dim": 2})");
  const std::string net = "decoder.layers.0.self_attention.";
  std::vector<TensorInfo> tensors;
  const auto add = [&](std::string_view name, Shape shape) {
    tensors.push_back({.file = "m", .name = net + std::string(name), .shape = std::move(shape)});
  };
  add("in_proj.weight", {36, 4});
  add("conv1d.weight", {20, 1, 4});
  add("A_log", {4});
  add("out_norm.weight", {2});
  add("out_proj.weight", {4, 8});
  add("in_proj.weight.key", {6, 4});
  add("in_proj.weight.alpha", {4, 4});
  add("core_attention.indexer.linear_wq_b.weight", {8, 4});
  const Model model = Model::bind(rules, facts.value(), tensors).value();
  const auto on = [&](std::string_view name) {
    return part(model, net + std::string(name), {.tp = 2}, {.tp = 1});
  };
  EXPECT_EQ(on("in_proj.weight"),
            "[18, 4]: [3:6, 0:4] [9:12, 0:4] at [3, 0] [16:20, 0:4] at [6, 0] "
            "[24:28, 0:4] at [10, 0] [30:32, 0:4] at [14, 0] [34:36, 0:4] at [16, 0]");
  EXPECT_EQ(on("conv1d.weight"),
            "[10, 1, 4]: [3:6, 0:1, 0:4] [9:12, 0:1, 0:4] at [3, 0, 0] "
            "[16:20, 0:1, 0:4] at [6, 0, 0]");
  EXPECT_EQ(on("A_log"), "[2]: [2:4]");
  EXPECT_EQ(on("out_norm.weight"), "[2]: [0:2]");
  EXPECT_EQ(on("out_proj.weight"), "[4, 4]: [0:4, 4:8]");
  EXPECT_EQ(on("in_proj.weight.key"), "[3, 4]: [3:6, 0:4]");
  EXPECT_EQ(on("in_proj.weight.alpha"), "[2, 4]: [2:4, 0:4]");
  EXPECT_EQ(on("core_attention.indexer.linear_wq_b.weight"), "[8, 4]: [0:8, 0:4]");
}

/// What makes its two halves one MLP is no matter of Flux' names: the same weights, twice as long.
TEST(Families, OvisImageIsGated) {
  std::vector<TensorInfo> tensors;
  const auto add = [&](std::string name, Shape shape) {
    tensors.push_back({.file = "m", .name = std::move(name), .shape = std::move(shape)});
  };
  add("context_embedder_norm.weight", {8});
  add("timestep_embedder.linear_1.weight", {8, 8});
  add("transformer_blocks.0.attn.add_q_proj.weight", {8, 8});
  add("transformer_blocks.0.ff.net.0.proj.weight", {16, 8});
  add("single_transformer_blocks.0.proj_mlp.bias", {16});
  std::vector<std::string> names;
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  const auto rules = RuleSet::choose(std::nullopt, names);
  ASSERT_NE(rules, nullptr);
  EXPECT_EQ(rules->family(), "ovis_image");
  const Model model = Model::bind(rules, {}, tensors).value();
  EXPECT_EQ(part(model, names[3], {.tp = 2}, {.tp = 1}),
            "[8, 8]: [4:8, 0:8] [12:16, 0:8] at [4, 0]");
  EXPECT_EQ(part(model, names[4], {.tp = 2}, {.tp = 0}), "[8]: [0:4] [8:12] at [4]");
  EXPECT_EQ(part(model, names[1], {.tp = 2}, {.tp = 1}), "[8, 8]: [0:8, 0:8]");
}

/// One number a layer, which is a buffer: with its layer, and never cut.
TEST(Families, GemmasScalarsOfLayers) {
  for (const char* type : {"gemma4_text", "gemma4_unified_text"}) {
    const auto rules = RuleSet::choose(type, {});
    std::vector<TensorInfo> tensors;
    for (const int layer : {0, 1})
      tensors.push_back({.file = "model.safetensors",
                         .name = fmt::format("model.layers.{}.layer_scalar", layer),
                         .shape = {1}});
    const auto model =
        Model::bind(rules, rules->facts(R"({"num_hidden_layers": 2})").value(), tensors).value();
    for (const uint32_t stage : {0u, 1u}) {
      const StateCoords state{.pp = stage};
      EXPECT_EQ(part(model, tensors[stage].name, {.tp = 2, .pp = 2}, state), "[1]: [0:1]");
      EXPECT_EQ(part(model, tensors[1 - stage].name, {.tp = 2, .pp = 2}, state), "not here");
    }
    LayoutSpec fsdp{.sizes = {.dp = 2}, .optimizer = OptimizerCut::kFsdp};
    EXPECT_FALSE(model.is_cut_over_dp(0, fsdp)) << type;
  }
}

/// Three ways to lie in one weight, told apart by the configuration: a rule's `when`.
TEST(Families, FalconInEachOfItsForms) {
  const std::string name = "transformer.h.0.self_attention.query_key_value.weight";
  const auto on = [&](std::string_view form, uint64_t rows, uint32_t tp, uint32_t rank) {
    const auto rules = RuleSet::builtin("falcon").value();
    const std::string config =
        fmt::format(R"({{"model_type": "falcon", "num_attention_heads": 8, {}}})", form);
    const auto model =
        Model::bind(rules, rules->facts(config).value(),
                    {{.file = "model.safetensors", .name = name, .shape = {rows, 4}}});
    return part(model.value(), name, {.tp = tp}, {.tp = rank});
  };
  // Two groups of four heads of two rows, a key and a value.
  const std::string grouped =
      R"("new_decoder_architecture": true, "multi_query": true, "num_kv_heads": 2)";
  EXPECT_EQ(on(grouped, 24, 2, 1), "[12, 4]: [12:24, 0:4]");
  EXPECT_THAT(on(grouped, 24, 4, 0), ::testing::HasSubstr("tp = 4"));
  // Eight heads, then one key and one value, which all ranks have.
  const std::string one_key = R"("new_decoder_architecture": false, "multi_query": true)";
  EXPECT_EQ(on(one_key, 20, 4, 1),
            "[8, 4]: [4:8, 0:4] [16:18, 0:4] at [4, 0] [18:20, 0:4] at [6, 0]");
  EXPECT_EQ(on(one_key, 20, 8, 7),
            "[6, 4]: [14:16, 0:4] [16:18, 0:4] at [2, 0] [18:20, 0:4] at [4, 0]");
  // Query, key and value of each head.
  const std::string each = R"("new_decoder_architecture": false, "multi_query": false)";
  EXPECT_EQ(on(each, 48, 8, 2), "[6, 4]: [12:18, 0:4]");
  EXPECT_THAT(on(R"("multi_query": true)", 20, 2, 0), ::testing::HasSubstr("grouped"));
}

TEST(Families, GptNeoX) {
  const Model model = synthetic_model(R"({"model_type": "gpt_neox", "hidden_size": 15,
      "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 35, "vocab_size": 257})");
  auto on = [&](std::string_view name, StateCoords state) {
    return part(model, name, {.tp = 5, .pp = 2}, state);
  };
  const std::string at = "gpt_neox.layers.1.";
  // Query, key and value of one head are three times three rows, behind each other.
  EXPECT_EQ(on(at + "attention.query_key_value.weight", {.tp = 3}), "[9, 15]: [27:36, 0:15]");
  EXPECT_EQ(on(at + "attention.query_key_value.bias", {.tp = 4}), "[9]: [36:45]");
  EXPECT_EQ(on(at + "attention.dense.weight", {.tp = 3}), "[15, 3]: [0:15, 9:12]");
  EXPECT_EQ(on(at + "attention.dense.bias", {.tp = 3}), "[15]: [0:15]");
  EXPECT_EQ(on(at + "mlp.dense_h_to_4h.weight", {.tp = 3}), "[7, 15]: [21:28, 0:15]");
  EXPECT_EQ(on(at + "mlp.dense_h_to_4h.bias", {.tp = 1}), "[7]: [7:14]");
  EXPECT_EQ(on(at + "mlp.dense_4h_to_h.weight", {.tp = 4}), "[15, 7]: [0:15, 28:35]");
  EXPECT_EQ(on(at + "mlp.dense_4h_to_h.bias", {.tp = 4}), "[15]: [0:15]");
  EXPECT_EQ(on(at + "post_attention_layernorm.bias", {.pp = 1}), "not here");
  EXPECT_EQ(on("gpt_neox.embed_in.weight", {.tp = 2}), "[128, 15]: [256:257, 0:15]");
  EXPECT_EQ(on("gpt_neox.embed_in.weight", {.tp = 3}), "[128, 15]:");
  EXPECT_EQ(on("gpt_neox.final_layer_norm.weight", {.tp = 3, .pp = 1}), "[15]: [0:15]");
  EXPECT_EQ(on("embed_out.weight", {.tp = 1, .pp = 1}), "[128, 15]: [128:256, 0:15]");
}

TEST(Families, MegatronCore) {
  const std::string config = R"("model_type": "megatron", "hidden_size": 14, "num_layers": 3,
      "num_attention_heads": 6, "num_query_groups": 3, "head_dim": 5, "swiglu": true,
      "intermediate_size": 9, "vocab_size": 200)";
  const Model dense = synthetic_model("{" + config + "}");
  auto on = [&](std::string_view name, StateCoords state) {
    return part(dense, name, {.tp = 3, .pp = 2}, state);
  };
  const std::string at = "decoder.layers.1.";
  // A group of heads is two queries, a key and a value of five rows each.
  EXPECT_EQ(on(at + "self_attention.linear_qkv.weight", {.tp = 1}), "[20, 14]: [20:40, 0:14]");
  EXPECT_EQ(on(at + "self_attention.linear_qkv.bias", {.tp = 2}), "[20]: [40:60]");
  EXPECT_EQ(on(at + "self_attention.linear_qkv.layer_norm_weight", {.tp = 2}), "[14]: [0:14]");
  // Two ranks have half a group each.
  EXPECT_EQ(part(dense, at + "self_attention.linear_qkv.weight", {.tp = 6}, {.tp = 3}),
            "[10, 14]: [30:40, 0:14]");
  EXPECT_EQ(on(at + "self_attention.linear_proj.weight", {.tp = 1}), "[14, 10]: [0:14, 10:20]");
  EXPECT_EQ(on(at + "self_attention.linear_proj.bias", {.tp = 1}), "[14]: [0:14]");
  // Gate and up lie behind each other in the whole, and in each part.
  EXPECT_EQ(on(at + "mlp.linear_fc1.weight", {.tp = 1}),
            "[6, 14]: [3:6, 0:14] [12:15, 0:14] at [3, 0]");
  EXPECT_EQ(on(at + "mlp.linear_fc1.bias", {.tp = 2}), "[6]: [6:9] [15:18] at [3]");
  EXPECT_EQ(on(at + "mlp.linear_fc2.weight", {.tp = 2}), "[14, 3]: [0:14, 6:9]");
  EXPECT_EQ(on("decoder.layers.2.mlp.linear_fc2.bias", {.pp = 1}), "[14]: [0:14]");
  EXPECT_EQ(on("embedding.word_embeddings.weight", {.tp = 1}), "[128, 14]: [128:200, 0:14]");
  EXPECT_EQ(on("output_layer.weight", {.tp = 2, .pp = 1}), "[128, 14]:");
  EXPECT_EQ(on("decoder.final_layernorm.weight", {.pp = 0}), "not here");
  EXPECT_EQ(part(dense, "embedding.word_embeddings.weight", {}, {}), "[256, 14]: [0:200, 0:14]");

  const std::string experts = "{" + config + R"(, "num_moe_experts": 4)";
  const Model local = synthetic_model(experts + "}");
  const std::string mlp = at + "mlp.";
  const ParallelConfig sizes = {.tp = 3, .ep = 2};
  EXPECT_EQ(
      part(local, mlp + "experts.local_experts.2.linear_fc1.weight", sizes, {.tp = 1, .ep = 1}),
      "[6, 14]: [3:6, 0:14] [12:15, 0:14] at [3, 0]");
  EXPECT_EQ(
      part(local, mlp + "experts.local_experts.2.linear_fc2.weight", sizes, {.tp = 1, .ep = 0}),
      "not here");
  EXPECT_EQ(part(local, mlp + "router.weight", sizes, {.tp = 1, .ep = 1}), "[4, 14]: [0:4, 0:14]");
  EXPECT_EQ(part(local, mlp + "shared_experts.linear_fc2.weight", sizes, {.tp = 2, .ep = 1}),
            "[14, 3]: [0:14, 6:9]");
  const Model grouped = synthetic_model(experts + R"(, "stacked_experts": true})");
  EXPECT_EQ(part(grouped, mlp + "experts.linear_fc2.weight3", sizes, {.tp = 1, .ep = 1}),
            "[14, 3]: [0:14, 3:6]");
  EXPECT_EQ(part(grouped, mlp + "experts.linear_fc1.weight3", sizes, {.tp = 1, .ep = 0}),
            "not here");
}

/// A model of these tensors, under rules and facts as Megatron-LM's args say them.
Model megatron_model(const std::vector<std::pair<std::string, Shape>>& tensors,
                     std::string_view facts = "") {
  const auto rules = RuleSet::choose("megatron", {});
  std::vector<TensorInfo> infos;
  for (const auto& [name, shape] : tensors) infos.push_back({"model.pt", name, DType::kF32, shape});
  const std::string config = fmt::format(
      R"({{"model_type": "megatron", "num_layers": 2, "num_attention_heads": 4, "vocab_size": 256{}}})",
      facts);
  auto model = Model::bind(rules, rules->facts(config).value(), infos);
  EXPECT_TRUE(model.has_value());
  return std::move(model).value();
}
std::string why_not(const Model& model, ParallelConfig sizes) {
  const Result<> checked = model.check({.sizes = sizes});
  return checked.has_error() ? checked.error().message() : "";
}

/// Shapes and ranks as Megatron-Core 0.16's own modules have them.
TEST(Families, MegatronsLayersThatPredictFurtherTokens) {
  const std::string at = "mtp.layers.1.", layer = at + "transformer_layer.";
  const std::vector<std::pair<std::string, Shape>> tensors = {
      {"embedding.word_embeddings.weight", {256, 16}},
      {"decoder.layers.0.self_attention.linear_qkv.weight", {32, 16}},
      {"decoder.layers.1.self_attention.linear_qkv.weight", {32, 16}},
      {at + "eh_proj.weight", {16, 32}},
      {at + "enorm.weight", {16}},
      {layer + "self_attention.linear_qkv.weight", {32, 16}},
      {layer + "mlp.linear_fc1.weight", {48, 16}},
      {layer + "mlp.experts.local_experts.1.linear_fc2.weight", {16, 24}},
      {"output_layer.weight", {256, 16}}};
  const std::string facts = R"(, "num_query_groups": 2, "gated_linear_unit": true)";
  const std::string untied = facts + R"(, "tie_word_embeddings": false)";
  const Model model = megatron_model(tensors, untied);
  const auto on = [&](std::string_view name, StateCoords state) {
    return part(model, name, {.tp = 2, .pp = 2, .ep = 2}, state);
  };
  EXPECT_EQ(on(at + "eh_proj.weight", {.tp = 1, .pp = 1}), "[8, 32]: [8:16, 0:32]");
  EXPECT_EQ(on(at + "enorm.weight", {.tp = 1, .pp = 1}), "[16]: [0:16]");
  EXPECT_EQ(on(layer + "self_attention.linear_qkv.weight", {.tp = 1, .pp = 1}),
            "[16, 16]: [16:32, 0:16]");
  EXPECT_EQ(on(layer + "mlp.linear_fc1.weight", {.tp = 1, .pp = 1}),
            "[24, 16]: [12:24, 0:16] [36:48, 0:16] at [12, 0]");
  const std::string expert = layer + "mlp.experts.local_experts.1.linear_fc2.weight";
  EXPECT_EQ(on(expert, {.tp = 1, .pp = 1, .ep = 1}), "[16, 12]: [0:16, 12:24]");
  EXPECT_EQ(on(expert, {.tp = 1, .pp = 1, .ep = 0}), "not here");
  for (size_t i = 3; i < tensors.size(); ++i) EXPECT_EQ(on(tensors[i].first, {}), "not here");
  // These look tokens up, too.
  for (const uint32_t stage : {0u, 1u, 2u})
    EXPECT_EQ(part(model, "embedding.word_embeddings.weight", {.tp = 2, .pp = 3}, {.pp = stage}),
              stage == 1 ? "not here" : "[128, 16]: [0:128, 0:16]");
  const Model without = megatron_model({tensors[0], tensors[1], tensors[2], tensors[8]}, untied);
  EXPECT_EQ(part(without, "embedding.word_embeddings.weight", {.pp = 2}, {.pp = 1}), "not here");
}

TEST(Families, MegatronsBert) {
  const Model model =
      megatron_model({{"embedding.word_embeddings.weight", {256, 16}},
                      {"embedding.tokentype_embeddings.weight", {2, 16}},
                      {"encoder.layers.0.self_attention.linear_qkv.weight", {48, 16}},
                      {"encoder.layers.0.self_attention.linear_qkv.bias", {48}},
                      {"encoder.layers.1.self_attention.linear_proj.weight", {16, 16}},
                      {"encoder.layers.1.mlp.linear_fc1.bias", {24}},
                      {"encoder.layers.1.mlp.linear_fc2.weight", {16, 24}},
                      {"encoder.final_layernorm.bias", {16}},
                      {"lm_head.dense.weight", {16, 16}},
                      {"lm_head.layer_norm.bias", {16}},
                      {"output_layer.bias", {256}},
                      {"binary_head.weight", {2, 16}},
                      {"pooler.dense.weight", {16, 16}}},
                     R"(, "tie_word_embeddings": true, "gated_linear_unit": false)");
  const auto on = [&](std::string_view name, StateCoords state) {
    return part(model, name, {.tp = 2, .pp = 2}, state);
  };
  EXPECT_EQ(why_not(model, {.tp = 2, .pp = 2}), "");
  EXPECT_EQ(on("encoder.layers.0.self_attention.linear_qkv.weight", {.tp = 1}),
            "[24, 16]: [24:48, 0:16]");
  EXPECT_EQ(on("encoder.layers.0.self_attention.linear_qkv.bias", {.tp = 1}), "[24]: [24:48]");
  EXPECT_EQ(on("encoder.layers.1.self_attention.linear_proj.weight", {.tp = 1, .pp = 1}),
            "[16, 8]: [0:16, 8:16]");
  EXPECT_EQ(on("encoder.layers.1.mlp.linear_fc1.bias", {.tp = 1, .pp = 1}), "[12]: [12:24]");
  EXPECT_EQ(on("encoder.layers.1.mlp.linear_fc2.weight", {.tp = 1, .pp = 1}),
            "[16, 12]: [0:16, 12:24]");
  EXPECT_EQ(on("output_layer.bias", {.tp = 1, .pp = 1}), "[128]: [128:256]");
  EXPECT_EQ(on("embedding.word_embeddings.weight", {.tp = 1, .pp = 1}),
            "[128, 16]: [128:256, 0:16]");
  for (const char* name :
       {"encoder.final_layernorm.bias", "lm_head.dense.weight", "lm_head.layer_norm.bias",
        "binary_head.weight", "pooler.dense.weight"}) {
    EXPECT_EQ(on(name, {.tp = 1}), "not here") << name;
    EXPECT_EQ(on(name, {.tp = 1, .pp = 1}), on(name, {.pp = 1})) << name;
  }
}

TEST(Families, MegatronsT5) {
  const Model model =
      megatron_model({{"embedding.word_embeddings.weight", {256, 16}},
                      {"position_embeddings.weight", {12, 16}},
                      {"encoder_relative_pos_emb.relative_attention_bias.weight", {8, 4}},
                      {"encoder.layers.0.self_attention.linear_qkv.weight", {48, 16}},
                      {"decoder.layers.0.cross_attention.linear_q.bias", {16}},
                      {"decoder.layers.0.cross_attention.linear_kv.weight", {32, 16}},
                      {"decoder.layers.0.cross_attention.linear_proj.weight", {16, 16}},
                      {"decoder.layers.0.cross_attention.linear_proj.bias", {16}},
                      {"decoder.layers.0.pre_cross_attn_layernorm.weight", {16}},
                      {"lm_head.output_layer.weight", {256, 16}}});
  const auto on = [&](std::string_view name, StateCoords state) {
    return part(model, name, {.tp = 2}, state);
  };
  const std::string cross = "decoder.layers.0.cross_attention.";
  EXPECT_EQ(why_not(model, {.tp = 4}), "");
  EXPECT_EQ(on(cross + "linear_q.bias", {.tp = 1}), "[8]: [8:16]");
  EXPECT_EQ(on(cross + "linear_kv.weight", {.tp = 1}), "[16, 16]: [16:32, 0:16]");
  EXPECT_EQ(on(cross + "linear_proj.weight", {.tp = 1}), "[16, 8]: [0:16, 8:16]");
  EXPECT_EQ(on(cross + "linear_proj.bias", {.tp = 1}), "[16]: [0:16]");
  EXPECT_EQ(on("encoder_relative_pos_emb.relative_attention_bias.weight", {.tp = 1}),
            "[8, 4]: [0:8, 0:4]");
  EXPECT_EQ(on("lm_head.output_layer.weight", {.tp = 1}), "[128, 16]: [128:256, 0:16]");
  EXPECT_THAT(why_not(model, {.tp = 8}), ::testing::HasSubstr("tp = 8"));
  EXPECT_THAT(why_not(model, {.pp = 2}), ::testing::HasSubstr("cannot be cut under pp = 2"));
}

/// What Transformer Engine's layers have; those of Megatron's own have no latent attention.
TEST(Families, MegatronsLatentAttention) {
  const std::string at = "decoder.layers.0.self_attention.";
  const Model model = megatron_model({{at + "linear_q_down_proj.weight", {8, 16}},
                                      {at + "linear_q_up_proj.layer_norm_weight", {8}},
                                      {at + "linear_q_up_proj.weight", {24, 8}},
                                      {at + "linear_kv_down_proj.weight", {10, 16}},
                                      {at + "linear_kv_up_proj.weight", {32, 8}},
                                      {at + "linear_proj.weight", {16, 16}},
                                      {at + "core_attention.softmax_offset", {4}}});
  const auto on = [&](std::string_view name) {
    return part(model, at + std::string(name), {.tp = 2}, {.tp = 1});
  };
  EXPECT_EQ(on("linear_q_down_proj.weight"), "[8, 16]: [0:8, 0:16]");
  EXPECT_EQ(on("linear_kv_down_proj.weight"), "[10, 16]: [0:10, 0:16]");
  EXPECT_EQ(on("linear_q_up_proj.layer_norm_weight"), "[8]: [0:8]");
  EXPECT_EQ(on("linear_q_up_proj.weight"), "[12, 8]: [12:24, 0:8]");
  EXPECT_EQ(on("linear_kv_up_proj.weight"), "[16, 8]: [16:32, 0:8]");
  EXPECT_EQ(on("linear_proj.weight"), "[16, 8]: [0:16, 8:16]");
  EXPECT_EQ(on("core_attention.softmax_offset"), "[2]: [2:4]");
  EXPECT_THAT(why_not(model, {.tp = 8}), ::testing::HasSubstr("tp = 8"));
}

/// All experts of a rank in two axes: [hidden, experts x width] is [experts, hidden, width] in
/// memory.
TEST(Families, MegatronsGroupedExpertsAreFoldedInFiles) {
  const std::string fc1 = "decoder.layers.1.mlp.experts.weight1";
  const std::string fc2 = "decoder.layers.0.mlp.experts.weight2";
  const std::vector<TensorInfo> in_files = {
      {.file = "model.safetensors", .name = fc1, .shape = {16, 4 * 48}},
      {.file = "model.safetensors", .name = fc2, .shape = {4 * 24, 16}}};
  const auto rules = RuleSet::builtin("megatron").value();
  const auto model_of = [&](std::string_view config, std::vector<TensorInfo> tensors) {
    return Model::bind_as_in_files(rules, rules->facts(config).value(), std::move(tensors));
  };
  const std::string known = R"("num_layers": 2, "num_moe_experts": 4)";
  const Model model = model_of("{" + known + R"(, "swiglu": true})", in_files).value();
  EXPECT_EQ(model.tensors()[0].shape, (Shape{4, 16, 48}));
  EXPECT_EQ(model.tensors()[0].shape_in_files(), in_files[0].shape);
  EXPECT_EQ(model.tensors()[1].shape, (Shape{4, 24, 16}));
  EXPECT_EQ(model.tensors()[1].shape_in_files(), in_files[1].shape);
  EXPECT_EQ(part(model, fc1, {.pp = 2}, {.pp = 1}), "[16, 192]: [0:4, 0:16, 0:48]");
  EXPECT_EQ(part(model, fc1, {.pp = 2}, {.pp = 0}), "not here");
  EXPECT_EQ(part(model, fc1, {.ep = 2}, {.ep = 1}), "[16, 96]: [2:4, 0:16, 0:48]");
  EXPECT_EQ(part(model, fc1, {.tp = 2, .ep = 4}, {.tp = 1, .ep = 2}),
            "[16, 24]: [2:3, 0:16, 12:24] [2:3, 0:16, 36:48] at [0, 0, 12]");
  EXPECT_EQ(part(model, fc2, {.tp = 2, .ep = 4}, {.tp = 1, .ep = 2}),
            "[12, 16]: [2:3, 12:24, 0:16]");
  EXPECT_EQ(part(model, fc2, {.tp = 4, .ep = 2, .etp = 2}, {.tp = 3, .ep = 1, .etp = 1}),
            "[24, 16]: [2:4, 12:24, 0:16]");
  EXPECT_THAT(why_not(model, {.ep = 3}), ::testing::HasSubstr("the 4 experts"));
  EXPECT_THAT(why_not(model, {.tp = 7}), ::testing::HasSubstr("not divisible by tp = 7"));
  // FSDP cuts the rows that files have.
  const LayoutSpec fsdp{.sizes = {.tp = 2, .dp = 3}, .optimizer = OptimizerCut::kFsdp};
  const SubTensor rows = model.slice(0, fsdp, {.tp = 1, .dp = 2}).value().value();
  EXPECT_EQ(rows.local_shape, (Shape{4, 96}));
  EXPECT_EQ(rows.flat, (SubTensor::Flat{{4, 16, 24}, 12 * 96}));

  const Model plain = model_of("{" + known + R"(, "swiglu": false})", in_files).value();
  EXPECT_EQ(part(plain, fc1, {.tp = 2}, {.tp = 1}), "[16, 96]: [0:4, 0:16, 24:48]");

  // Where nobody says how many there are, or another number, they are kept as they are.
  for (const auto& [config, why] :
       {std::pair(R"({"num_layers": 2})", "nobody says how many experts are in axis 1"),
        {R"({"num_layers": 2, "num_moe_experts": 10})", "axis 1 of [16, 192] does not hold 10"}}) {
    const Model unknown = model_of(config, in_files).value();
    EXPECT_EQ(part(unknown, fc1, {.pp = 2}, {.pp = 1}), "[16, 192]: [0:16, 0:192]");
    EXPECT_EQ(why_not(unknown, {.pp = 2, .dp = 2}), "");
    for (const ParallelConfig& sizes : {ParallelConfig{.tp = 2}, ParallelConfig{.ep = 2}})
      EXPECT_THAT(why_not(unknown, sizes),
                  ::testing::AllOf(::testing::HasSubstr(fc1), ::testing::HasSubstr(why)));
  }
  // A router has a row for each expert: it tells of a number that would fit, and is wrong.
  std::vector<TensorInfo> with_router = in_files;
  with_router.push_back({.file = "model.safetensors",
                         .name = "decoder.layers.1.mlp.router.weight",
                         .shape = {8, 16}});
  const Model wrong = model_of("{" + known + "}", with_router).value();
  EXPECT_EQ(wrong.tensors()[0].shape, in_files[0].shape);
  for (const ParallelConfig& sizes : {ParallelConfig{.tp = 2}, ParallelConfig{.ep = 2}})
    EXPECT_THAT(why_not(wrong, sizes), ::testing::HasSubstr("4 experts, and a router has 8 rows"));
  EXPECT_THAT(contradictions(wrong),
              ::testing::ElementsAre("config.json says 4 experts, and there are tensors of 8"));
  // What was committed as four stays four: no rules make others of its bytes.
  RuleSet::Facts eight = model.facts();
  eight.numbers["experts"] = 8;
  const Model mended = Model::bind(rules, eight, model.tensors()).value();
  EXPECT_THAT(why_not(mended, {.tp = 2}), ::testing::HasSubstr("was committed as 4 experts"));

  // Rules that do not know of the axis of experts would cut others.
  const auto own = RuleSet::parse(R"({"format": "ptc-rules/1", "extends": "megatron", "rules": [
      {"names": ["decoder.layers.{layer}.mlp.experts.weight1"], "cut": {"axis": 1}}]})");
  const Model under = Model::bind(own.value(), model.facts(), model.tensors()).value();
  EXPECT_THAT(why_not(under, {.tp = 2}), ::testing::HasSubstr("\"folded_into\""));
  EXPECT_EQ(part(under, fc1, {.pp = 2}, {.pp = 1}), "[16, 192]: [0:4, 0:16, 0:48]");
}

TEST(Families, AdaptersFollowWhatTheyAdapt) {
  const std::string config = R"("model_type": "llama", "hidden_size": 14, "num_hidden_layers": 3,
      "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "intermediate_size": 9,
      "vocab_size": 301, "lora_rank": 4)";
  const Model training = synthetic_model("{" + config + "}");
  auto on = [&](std::string_view name, StateCoords state) {
    return part(training, "base_model.model." + std::string(name), {.tp = 3, .pp = 2}, state);
  };
  const std::string at = "model.layers.1.";
  // Cut by its outputs: A is whole, B and the magnitudes are cut as the weight's rows.
  EXPECT_EQ(on(at + "self_attn.q_proj.base_layer.weight", {.tp = 1}), "[10, 14]: [10:20, 0:14]");
  EXPECT_EQ(on(at + "self_attn.q_proj.lora_A.default.weight", {.tp = 1}), "[4, 14]: [0:4, 0:14]");
  EXPECT_EQ(on(at + "self_attn.q_proj.lora_B.default.weight", {.tp = 1}), "[10, 4]: [10:20, 0:4]");
  EXPECT_EQ(on(at + "self_attn.k_proj.lora_B.default.weight", {.tp = 2}), "[5, 4]: [10:15, 0:4]");
  EXPECT_EQ(on(at + "mlp.up_proj.lora_magnitude_vector.default.weight", {.tp = 2}), "[3]: [6:9]");
  // Cut by its inputs: A is cut as the weight's columns, B and the magnitudes are whole.
  EXPECT_EQ(on(at + "mlp.down_proj.base_layer.weight", {.tp = 2}), "[14, 3]: [0:14, 6:9]");
  EXPECT_EQ(on(at + "mlp.down_proj.lora_A.default.weight", {.tp = 2}), "[4, 3]: [0:4, 6:9]");
  EXPECT_EQ(on(at + "mlp.down_proj.lora_B.default.weight", {.tp = 2}), "[14, 4]: [0:14, 0:4]");
  EXPECT_EQ(on(at + "mlp.down_proj.lora_magnitude_vector.default.weight", {.tp = 2}),
            "[14]: [0:14]");
  // An embedding's inputs are the vocabulary.
  EXPECT_EQ(on("model.embed_tokens.lora_embedding_A.default", {.tp = 2}),
            "[4, 128]: [0:4, 256:301]");
  EXPECT_EQ(on("model.embed_tokens.lora_embedding_B.default", {.tp = 2}), "[14, 4]: [0:14, 0:4]");
  for (const char* head :
       {"lm_head.original_module.weight", "lm_head.modules_to_save.default.weight"}) {
    EXPECT_EQ(on(head, {.tp = 2, .pp = 1}), "[128, 14]: [256:301, 0:14]");
    EXPECT_EQ(on(head, {.tp = 2, .pp = 0}), "not here");
  }
  EXPECT_EQ(on("model.layers.2.self_attn.o_proj.lora_A.default.weight", {.pp = 0}), "not here");

  // As PEFT saves it, without the model.
  const Model alone = synthetic_model("{" + config + R"(, "lora_alone": true})");
  const std::string name = "base_model.model.model.layers.2.self_attn.o_proj.lora_A.weight";
  EXPECT_EQ(part(alone, name, {.tp = 3, .pp = 2}, {.tp = 1, .pp = 1}), "[4, 10]: [0:4, 10:20]");
}

}  // namespace
}  // namespace ptc
