// How many heads a layer has, where layers differ and where config.json does not say it.
#include "reshard/ptc/attention_heads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "reshard/ptc/model.h"
#include "reshard/ptc/model_facts.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

using ptc::testing::written_ranks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The heads of one layer, all of whose queries are alike long.
struct LayerOf {
  uint64_t heads, kv_heads, size, value_size;
  bool gated = false, values = true, fused = false;
};

constexpr uint64_t kHidden = 16;

std::vector<TensorInfo> tensors_of(const std::vector<LayerOf>& layers,
                                   const std::string& prefix = "model.") {
  std::vector<TensorInfo> tensors;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerOf& layer = layers[i];
    const auto add = [&](std::string_view name, Shape shape) {
      tensors.push_back({"model.safetensors",
                         fmt::format("{}layers.{}.self_attn.{}.weight", prefix, i, name),
                         DType::kF32, std::move(shape)});
    };
    const uint64_t rows = layer.heads * layer.size;
    if (layer.fused) {
      add("qkv_proj", {rows + 2 * layer.kv_heads * layer.size, kHidden});
    } else {
      add("q_proj", {layer.gated ? 2 * rows : rows, kHidden});
      add("k_proj", {layer.kv_heads * layer.size, kHidden});
      if (layer.values) add("v_proj", {layer.kv_heads * layer.value_size, kHidden});
    }
    add("o_proj", {kHidden, layer.heads * layer.value_size});
  }
  return tensors;
}

Model model_of(const std::vector<LayerOf>& layers, std::string_view config,
               const std::string& prefix = "model.") {
  std::vector<TensorInfo> tensors = tensors_of(layers, prefix);
  std::vector<std::string> names;
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  const auto rules = RuleSet::choose(model_type_of(config), names);
  EXPECT_NE(rules, nullptr);
  auto model = Model::bind(rules, rules->facts(config).value(), std::move(tensors));
  EXPECT_TRUE(model.has_value()) << model.error().message();
  return std::move(model).value();
}

/// Which heads of `size` rows each rank has of the layer's projection.
std::vector<uint64_t> heads_of_ranks(const Model& model, uint32_t tp, size_t layer,
                                     std::string_view name, uint64_t size) {
  std::vector<uint64_t> heads;
  const std::string wanted = fmt::format("layers.{}.self_attn.{}.weight", layer, name);
  for (uint32_t tensor = 0; tensor < model.tensors().size(); ++tensor) {
    if (!model.tensors()[tensor].name.ends_with(wanted)) continue;
    for (uint32_t rank = 0; rank < tp; ++rank) {
      const auto part = model.slice(tensor, {.sizes = {.tp = tp}}, {.tp = rank});
      EXPECT_TRUE(part.has_value()) << part.error().message();
      if (!part || !part.value() || part.value()->pieces.size() != 1) return {};
      const Box& box = part.value()->pieces.front().global;
      EXPECT_EQ(box.extent[0], size) << wanted;
      heads.push_back(box.offset[0] / size);
    }
  }
  return heads;
}

std::string check_error(const Model& model, uint32_t tp) {
  const auto checked = model.check({.sizes = {.tp = tp}});
  return checked ? "accepted" : checked.error().message();
}

constexpr std::string_view kMimo = R"({"model_type": "mimo_v2_flash", "num_attention_heads": 8,
  "num_key_value_heads": 2, "head_dim": 6, "v_head_dim": 4, "num_hidden_layers": 2,
  "swa_num_key_value_heads": 4, "swa_head_dim": 6, "swa_v_head_dim": 4})";

TEST(AttentionHeads, LayersDifferInThem) {
  const std::vector<LayerOf> layers{{8, 2, 6, 4}, {8, 4, 6, 4}};
  for (const std::string_view config :
       {kMimo, std::string_view(R"({"model_type": "mimo_v2_flash", "num_attention_heads": 8,
          "num_key_value_heads": 2, "head_dim": 6, "v_head_dim": 4})")}) {
    const Model model = model_of(layers, config);
    EXPECT_EQ(check_error(model, 8), "accepted");
    EXPECT_THAT(heads_of_ranks(model, 8, 0, "k_proj", 6), ElementsAre(0, 0, 0, 0, 1, 1, 1, 1));
    EXPECT_THAT(heads_of_ranks(model, 8, 1, "k_proj", 6), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
    EXPECT_THAT(heads_of_ranks(model, 8, 1, "v_proj", 4), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
    EXPECT_THAT(contradictions(model), IsEmpty());
  }
}

TEST(AttentionHeads, KeysThatAreValuesToo) {
  const Model model = model_of({{8, 4, 4, 4}, {8, 2, 8, 8, false, /*values=*/false}},
                               R"({"model_type": "gemma4", "text_config": {
      "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
      "per_layer_config": {"1": {"head_dim": 8, "num_key_value_heads": 2}}}})",
                               "model.language_model.");
  EXPECT_EQ(check_error(model, 8), "accepted");
  EXPECT_THAT(heads_of_ranks(model, 8, 0, "k_proj", 4), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
  EXPECT_THAT(heads_of_ranks(model, 8, 1, "k_proj", 8), ElementsAre(0, 0, 0, 0, 1, 1, 1, 1));
}

TEST(AttentionHeads, ConfigSaysNothingOfKeysAndValues) {
  const std::vector<LayerOf> layers{{8, 4, 4, 4}, {8, 1, 4, 4}, {8, 8, 4, 4}};
  for (const std::string_view config :
       {R"({"model_type": "nemotron-nas", "num_attention_heads": 8, "num_key_value_heads": null})",
        R"({"model_type": "llama", "num_attention_heads": 8})"}) {
    const Model model = model_of(layers, config);
    EXPECT_THAT(heads_of_ranks(model, 8, 0, "v_proj", 4), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
    EXPECT_THAT(heads_of_ranks(model, 8, 1, "v_proj", 4), ElementsAre(0, 0, 0, 0, 0, 0, 0, 0));
    EXPECT_THAT(heads_of_ranks(model, 8, 2, "v_proj", 4), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  }
  const Model groups = model_of({{8, 2, 4, 4}, {12, 2, 4, 4}}, R"({"model_type": "step3p7",
      "text_config": {"num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 4,
      "attention_other_setting": {"num_attention_heads": 12}}})");
  EXPECT_THAT(heads_of_ranks(groups, 4, 0, "k_proj", 4), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(heads_of_ranks(groups, 4, 1, "k_proj", 4), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(heads_of_ranks(groups, 4, 1, "q_proj", 12), ElementsAre(0, 1, 2, 3));
}

TEST(AttentionHeads, FusedAndGated) {
  const Model fused = model_of({{8, 2, 4, 4, false, true, /*fused=*/true}},
                               R"({"model_type": "phi3", "num_attention_heads": 8})");
  const auto part = fused.slice(0, {.sizes = {.tp = 4}}, {.tp = 3});
  ASSERT_TRUE(part.has_value()) << part.error().message();
  EXPECT_THAT(part.value()->pieces, ElementsAre(Piece{Box{{24, 0}, {8, kHidden}}, {0, 0}},
                                                Piece{Box{{36, 0}, {4, kHidden}}, {8, 0}},
                                                Piece{Box{{44, 0}, {4, kHidden}}, {12, 0}}));
  for (const char* config : {R"({"model_type": "qwen3_next", "num_attention_heads": 8,
           "num_key_value_heads": 2, "head_dim": 4})",
                             R"({"model_type": "qwen3_next", "num_attention_heads": 8})"}) {
    const Model gated = model_of({{8, 2, 4, 4, /*gated=*/true}}, config);
    EXPECT_THAT(heads_of_ranks(gated, 4, 0, "k_proj", 4), ElementsAre(0, 0, 1, 1)) << config;
    EXPECT_THAT(heads_of_ranks(gated, 4, 0, "q_proj", 16), ElementsAre(0, 1, 2, 3)) << config;
  }
}

TEST(AttentionHeads, QuantisedWeights) {
  std::vector<TensorInfo> tensors;
  for (const auto& [name, rows] : {std::pair("q", 64), {"k", 16}, {"v", 16}}) {
    const std::string weight = fmt::format("model.layers.0.self_attn.{}_proj.", name);
    const uint64_t outputs = static_cast<uint64_t>(rows);
    tensors.push_back({"m", weight + "qweight", DType::kI32, {64, outputs / 8}});
    tensors.push_back({"m", weight + "qzeros", DType::kI32, {2, outputs / 8}});
    tensors.push_back({"m", weight + "scales", DType::kF16, {2, outputs}});
  }
  const auto rules = RuleSet::builtin("llama").value();
  const auto model =
      Model::bind(rules, rules->facts(R"({"num_attention_heads": 8})").value(), tensors).value();
  const auto part = model.slice(3, {.sizes = {.tp = 4}}, {.tp = 2});  // of k: two heads of 8
  ASSERT_TRUE(part.has_value()) << part.error().message();
  EXPECT_THAT(part.value()->pieces, ElementsAre(Piece{Box{{0, 1}, {64, 1}}, {0, 0}}));
}

/// Two elements in a byte, under the weight's own name: half as many columns as there are inputs.
TEST(AttentionHeads, BytesWithTwoElements) {
  std::vector<TensorInfo> tensors = tensors_of({{8, 2, 4, 4}});
  for (TensorInfo& tensor : tensors) {
    tensor.dtype = DType::kU8;
    tensor.shape[1] /= 2;
  }
  const auto rules = RuleSet::builtin("llama").value();
  for (const std::string_view config :
       {R"({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4})",
        R"({"num_attention_heads": 8})"}) {
    const auto model = Model::bind(rules, rules->facts(config).value(), tensors).value();
    EXPECT_EQ(check_error(model, 4), "accepted");
    EXPECT_THAT(heads_of_ranks(model, 4, 0, "k_proj", 4), ElementsAre(0, 0, 1, 1));
  }
}

TEST(AttentionHeads, WhatContradictsTheTensorsIsRefused) {
  const Model heads = model_of({{8, 2, 4, 4}}, R"({"model_type": "llama", "head_dim": 4,
      "num_attention_heads": 16, "num_key_value_heads": 2})");
  const char* const said =
      "config.json says 16 attention heads of 4 elements, and "
      "model.layers.0.self_attn.q_proj.weight has 32 rows";
  EXPECT_THAT(check_error(heads, 2),
              AllOf(HasSubstr(said), HasSubstr("save a rules.json with {\"format\"")));
  EXPECT_EQ(check_error(heads, 1), "accepted");
  EXPECT_TRUE(heads.check({.sizes = {.dp = 2}}));
  EXPECT_THAT(contradictions(heads), ElementsAre(said));

  const Model kv_heads = model_of({{8, 2, 4, 4}, {8, 2, 4, 4}, {8, 2, 4, 4}},
                                  R"({"model_type": "llama", "num_attention_heads": 8,
      "num_key_value_heads": 4})");
  EXPECT_THAT(check_error(kv_heads, 4),
              HasSubstr("config.json says 4 key-value heads, and by the shape of "
                        "model.layers.0.self_attn.k_proj.weight there are 2"));
  EXPECT_THAT(contradictions(kv_heads), ElementsAre(HasSubstr("(and of 2 more)")));
}

TEST(AttentionHeads, WhatMayBeTwoThingsIsRefused) {
  // Without a size of heads: eight of eight elements, or sixteen of four.
  const Model either = model_of({{8, 2, 8, 8}, {16, 4, 4, 4}}, R"({"model_type": "mimo_v2_flash",
      "num_attention_heads": 8, "num_key_value_heads": 2, "swa_num_attention_heads": 16,
      "swa_num_key_value_heads": 4})");
  EXPECT_THAT(check_error(either, 4), HasSubstr("may be of either"));
  EXPECT_EQ(check_error(either, 1), "accepted");

  // Of an adapter alone nobody knows whose layer it is.
  const auto adapter = [&](std::string_view config, std::string_view projection) {
    const auto rules = RuleSet::builtin("llama").value();
    const std::string name =
        fmt::format("base_model.model.model.layers.1.self_attn.{}.lora_B.weight", projection);
    auto model =
        Model::bind(rules, rules->facts(config).value(), {{"m", name, DType::kF32, {32, 4}}});
    return check_error(model.value(), 4);
  };
  constexpr std::string_view kGemma = R"({"num_attention_heads": 8, "num_key_value_heads": 8,
      "num_global_key_value_heads": 2})";
  EXPECT_THAT(adapter(kGemma, "k_proj"), HasSubstr("some layers have 2 key-value heads"));
  EXPECT_EQ(adapter(kGemma, "q_proj"), "accepted");
  EXPECT_EQ(adapter(R"({"num_attention_heads": 8, "num_key_value_heads": 8})", "k_proj"),
            "accepted");
}

/// Layers that predict further tokens have no number in some names, and PEFT puts a module between.
TEST(AttentionHeads, OfNamesWithoutALayer) {
  std::vector<TensorInfo> tensors = tensors_of({{8, 4, 4, 4}, {8, 4, 4, 4}});
  for (const auto& [name, rows] : {std::pair("q", 32), {"k", 8}, {"v", 8}})
    tensors.push_back({"model.safetensors",
                       fmt::format("mtp_block.0.self_attn.{}_proj.base_layer.weight", name),
                       DType::kF32,
                       {static_cast<uint64_t>(rows), kHidden}});
  tensors.push_back({"model.safetensors",
                     "mtp_block.0.self_attn.o_proj.base_layer.weight",
                     DType::kF32,
                     {kHidden, 32}});
  const auto rules = RuleSet::builtin("llama").value();
  const auto model =
      Model::bind(rules, rules->facts(R"({"num_attention_heads": 8})").value(), tensors).value();
  const auto part = model.slice(9, {.sizes = {.tp = 4}}, {.tp = 1});
  ASSERT_TRUE(part.has_value()) << part.error().message();
  EXPECT_THAT(part.value()->pieces, ElementsAre(Piece{Box{{0, 0}, {4, kHidden}}, {0, 0}}));
}

TEST(AttentionHeads, RanksThatWroteTheirParts) {
  const Model model = model_of({{8, 2, 6, 4}, {8, 4, 6, 4}}, kMimo);
  const auto inferred = [&](uint32_t tp) {
    const LayoutSpec spec{.sizes = {.tp = tp}};
    return Model::infer(model.rules_ptr(), model.facts(), spec, written_ranks(model, spec));
  };
  const auto two = inferred(2);
  ASSERT_TRUE(two.has_value()) << two.error().message();
  for (const TensorInfo& tensor : model.tensors()) {
    const auto& found = two.value().model.tensors();
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [&](const TensorInfo& other) {
      return other.name == tensor.name && other.shape == tensor.shape;
    })) << tensor.name;
  }
  const auto eight = inferred(8);
  ASSERT_FALSE(eight.has_value());
  EXPECT_THAT(eight.error().message(), HasSubstr("nothing says which of its layers have 2"));
}

/// A layer of sixteen heads where config.json says eight: the rows of a rank say nothing against
/// it, those of the whole do. Taken, it could not be read again.
TEST(AttentionHeads, WhatRanksSayTheWholesMustSayToo) {
  const LayoutSpec spec{.sizes = {.tp = 4}};
  const std::string layer = "model.layers.0.self_attn.";
  std::vector<WrittenRank> ranks;
  for (uint64_t rank = 0; rank < 4; ++rank)
    ranks.push_back({rank,
                     spec.coords(rank),
                     {{"m", layer + "q_proj.weight", DType::kF32, {32, kHidden}},
                      {"m", layer + "k_proj.weight", DType::kF32, {8, kHidden}},
                      {"m", layer + "v_proj.weight", DType::kF32, {8, kHidden}},
                      {"m", layer + "o_proj.weight", DType::kF32, {kHidden, 32}}}});
  const auto rules = RuleSet::builtin("llama").value();
  const auto facts = rules->facts(R"({"num_attention_heads": 8, "num_key_value_heads": 2})");
  const auto found = Model::infer(rules, facts.value(), spec, ranks);
  ASSERT_FALSE(found.has_value());
  EXPECT_THAT(found.error().message(), HasSubstr("it has other heads than by the whole"));
}

}  // namespace
}  // namespace ptc
