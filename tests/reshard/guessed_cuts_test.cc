// Guesses at how parameters are cut, against the rules that their families have.
#include "reshard/ptc/guessed_cuts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/serialize.hpp>
#include <string>
#include <vector>

#include "reshard/ptc/suggested_rules.h"
#include "store/base/json.h"
#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

using ptc::testing::synthetic_model;
using ptc::testing::synthetic_tensors;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::string_view kGroupedLlama = R"({"model_type": "llama", "hidden_size": 64,
  "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
  "intermediate_size": 96, "vocab_size": 256})";
constexpr std::string_view kFusedLlama = R"({"model_type": "llama", "hidden_size": 64,
  "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
  "intermediate_size": 80, "vocab_size": 256, "fused": true})";
constexpr std::string_view kStackedExperts = R"({"model_type": "qwen3_moe", "hidden_size": 64,
  "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
  "intermediate_size": 96, "moe_intermediate_size": 24, "vocab_size": 256, "num_experts": 4,
  "stacked_experts": true})";

RuleSet::Facts facts_of(const RuleSet& rules, std::string_view config) {
  auto facts = rules.facts(config);
  EXPECT_TRUE(facts.has_value());
  return facts.value();
}

/// A model whose every cut is guessed.
Model guessed_model(std::string_view config, const json::object& plan = {}) {
  const std::vector<TensorInfo> tensors = synthetic_tensors(config);
  std::vector<TensorKind> kinds;
  for (const TensorInfo& info : tensors) kinds.push_back(kind_of({info.name, info.shape}));
  const CutGuesses guesses({std::string(config), plan}, kinds);
  json::object facts{{"layers", json::array{"num_hidden_layers"}}};
  json::array rules;
  for (const TensorKind& kind : kinds) {
    GuessedRule guess = guesses.of(kind);
    for (const auto& fact : guesses.facts_of(guess.rule)) facts[fact.key()] = fact.value();
    json::object rule{{"names", json::array{json::value(kind.pattern)}}};
    for (const auto& member : guess.rule) rule[member.key()] = member.value();
    rules.push_back(std::move(rule));
  }
  const json::object text{{"format", "ptc-rules/1"}, {"facts", facts}, {"rules", rules}};
  auto parsed = RuleSet::parse(json::serialize(text));
  EXPECT_TRUE(parsed.has_value()) << parsed.error().message();
  auto facts_found = facts_of(*parsed.value(), config);
  return Model::bind(parsed.value(), std::move(facts_found), tensors).value();
}

/// Every rank of the layouts has of each tensor what the family's rules say.
void expect_as_family(const Model& guessed, const Model& family) {
  for (const ParallelConfig& sizes :
       {ParallelConfig{.tp = 2}, ParallelConfig{.tp = 4, .pp = 2}, ParallelConfig{.pp = 2}}) {
    LayoutSpec spec;
    spec.sizes = sizes;
    for (uint32_t index = 0; index < state_count(spec); ++index) {
      const StateCoords state = state_at(spec, index);
      for (uint32_t tensor = 0; tensor < family.tensors().size(); ++tensor) {
        SCOPED_TRACE(
            fmt::format("{} tp {} of {}", family.tensors()[tensor].name, state.tp, sizes.tp));
        const auto expected = family.slice(tensor, spec, state);
        const auto part = guessed.slice(tensor, spec, state);
        ASSERT_TRUE(expected.has_value() && part.has_value());
        ASSERT_EQ(part.value().has_value(), expected.value().has_value());
        if (expected.value()) {
          EXPECT_EQ(*part.value(), *expected.value());
        }
      }
    }
  }
}

TEST(GuessedCuts, ExtentsAndNamesTellALlama) {
  expect_as_family(guessed_model(kGroupedLlama), synthetic_model(kGroupedLlama));
}

TEST(GuessedCuts, ExtentsTellWhatIsFused) {
  expect_as_family(guessed_model(kFusedLlama), synthetic_model(kFusedLlama));
}

TEST(GuessedCuts, ExtentsTellStackedExperts) {
  expect_as_family(guessed_model(kStackedExperts), synthetic_model(kStackedExperts));
}

GuessedRule guess(std::string_view config, NamedShape one, json::object plan = {}) {
  const std::vector<TensorKind> kinds{kind_of(one)};
  return CutGuesses({std::string(config), std::move(plan)}, kinds).of(kinds.front());
}

TEST(GuessedCuts, ThePlanComesFirst) {
  const json::object plan{{"layers.*.mixer.a", "colwise"},
                          {"layers.*.mixer.b", "rowwise"},
                          {"layers.*.mixer.up_proj", "replicated_with_grad_allreduce"},
                          {"layers.*.moe.experts.w13", "packed_colwise"},
                          {"table", "embedding_rowwise"},
                          {"layers.*.moe.experts", "moe_tp_experts"}};
  const auto cut_of = [&](std::string name, Shape shape) {
    const GuessedRule found = guess(R"({"num_experts": 4})", {std::move(name), shape}, plan);
    EXPECT_THAT(found.why, StartsWith("transformers' plan says "));
    return json::serialize(found.rule);
  };
  EXPECT_EQ(cut_of("model.layers.0.mixer.a.weight", {8, 4}), R"({"cut":{"axis":0}})");
  EXPECT_EQ(cut_of("model.layers.0.mixer.b.weight", {8, 4}), R"({"cut":{"axis":1}})");
  EXPECT_EQ(cut_of("model.layers.0.mixer.b.bias", {8}), "{}");
  EXPECT_EQ(cut_of("model.layers.0.mixer.up_proj.weight", {8, 4}), "{}");
  EXPECT_EQ(cut_of("model.layers.3.moe.experts.w13", {4, 8, 4}),
            R"({"cut":{"axis":1,"parts":[{},{}]},"expert_axis":0})");
  EXPECT_EQ(cut_of("model.table.weight", {32, 4}),
            R"({"cut":{"axis":0,"vocab_multiple":128},"stage":"all"})");
  // "mixer.a" is not the end of a name's component.
  EXPECT_EQ(guess("", {"model.layers.0.remixer.a.weight", {8, 4}}, plan).why, "whole on each rank");
}

TEST(GuessedCuts, BracesOfANameAreNoPattern) {
  const SuggestedRules suggested =
      suggested_rules({{"layers.0.{odd.weight", {4, 4}}, {"a}b", {2}}}, ModelHints());
  const auto rules = RuleSet::parse(json::serialize(suggested.text));
  ASSERT_TRUE(rules.has_value()) << rules.error().message();
  for (const char* name : {"layers.0.{odd.weight", "a}b"})
    EXPECT_TRUE(rules.value()->find(name).has_value()) << name;
}

TEST(GuessedCuts, ABiasIsCutAsItsWeight) {
  const std::vector<TensorKind> kinds{
      kind_of({"layers.0.fc1.weight", {8, 4}}), kind_of({"layers.0.fc1.bias", {8}}),
      kind_of({"layers.0.fc2.weight", {4, 8}}), kind_of({"layers.0.fc2.bias", {4}})};
  const CutGuesses guesses(ModelHints(), kinds);
  EXPECT_EQ(json::serialize(guesses.of(kinds[1]).rule), R"({"cut":{"axis":0}})");
  EXPECT_EQ(json::serialize(guesses.of(kinds[3]).rule), "{}");
}

TEST(GuessedCuts, ExtentsThatSayTwoThingsSayNothing) {
  // As many rows as the heads have, and as the inner width.
  constexpr std::string_view config = R"({"hidden_size": 32, "num_attention_heads": 8,
    "head_dim": 8, "intermediate_size": 64})";
  EXPECT_EQ(guess(config, {"layers.0.x.weight", {64, 32}}).why, "whole on each rank");
  const std::vector<TensorKind> kinds{kind_of({"layers.0.x.up_proj.weight", {64, 32}}),
                                      kind_of({"layers.0.x.down_proj.weight", {32, 64}})};
  const CutGuesses guesses({std::string(config), {}}, kinds);
  EXPECT_THAT(guesses.of(kinds[0]).why, HasSubstr("names like"));
}

TEST(GuessedCuts, BlocksOfDiffusersAreLayers) {
  const GuessedRule found = guess("", {"transformer_blocks.3.attn1.norm_q.weight", {8}});
  EXPECT_FALSE(found.rule.contains("stage"));  // that of its layer
}

TEST(GuessedCuts, WhatIsCutHasAWeightThatIsCutToMatch) {
  const auto whys = [](const std::vector<NamedShape>& parameters) {
    std::vector<TensorKind> kinds;
    for (const NamedShape& one : parameters) kinds.push_back(kind_of(one));
    const CutGuesses guesses(ModelHints(), kinds);
    std::vector<std::string> cut;
    for (const TensorKind& kind : kinds) cut.push_back(guesses.of(kind).why.substr(0, 5));
    return cut;
  };
  using ::testing::ElementsAre;
  // BERT's output.dense may be anything.
  EXPECT_THAT(whys({{"layer.0.attention.self.query.weight", {8, 8}},
                    {"layer.0.attention.self.query.bias", {8}},
                    {"layer.0.attention.output.dense.weight", {8, 8}}}),
              ElementsAre("whole", "whole", "whole"));
  EXPECT_THAT(whys({{"layer.0.attention.self.query.weight", {8, 8}},
                    {"layer.0.attention.self.query.bias", {8}},
                    {"layer.0.attention.output.out_proj.weight", {8, 8}}}),
              ElementsAre("its o", "its o", "its i"));
  EXPECT_THAT(whys({{"classifier.out_proj.weight", {8, 8}}, {"layer.0.w2.weight", {8, 8}}}),
              ElementsAre("whole", "whole"));
  EXPECT_THAT(whys({{"layer.0.w1.weight", {8, 8}}, {"layer.0.w2.weight", {8, 8}}}),
              ElementsAre("its o", "its i"));
}

TEST(GuessedCuts, ConfigsThatAreNoneAreNoHelp) {
  for (std::string_view config :
       {"", "[]", "{", R"({"hidden_size": "64", "num_attention_heads": 0, "vocab_size": -1})",
        R"({"hidden_size": 18446744073709551615, "intermediate_size": 1.5})"})
    EXPECT_EQ(guess(config, {"layers.0.x.weight", {64, 64}}).why, "whole on each rank");
}

TEST(GuessedCuts, AnEmbeddingWithoutAHeadIsThatToo) {
  const NamedShape embedding{"brand.embed.weight", {128, 16}}, head{"brand.head.weight", {128, 16}};
  constexpr std::string_view config = R"({"hidden_size": 16, "vocab_size": 128})";
  const json::object tied = suggested_rules({embedding}, {std::string(config), {}}).text;
  EXPECT_EQ(tied.at("tied"), json::value(true));
  EXPECT_EQ(tied.at("rules").at(0).at("tied_head").as_string(), "lm_head.weight");
  EXPECT_FALSE(suggested_rules({embedding, head}, {std::string(config), {}}).text.contains("tied"));
}

TEST(GuessedCuts, NumbersOfAModelWithinAreItsFacts) {
  const NamedShape query{"layers.0.attention.query.weight", {64, 64}};
  constexpr std::string_view config =
      R"({"text_config": {"hidden_size": 64, "num_attention_heads": 8}})";
  const std::vector<TensorKind> kinds{kind_of(query),
                                      kind_of({"layers.0.attention.out_proj.weight", {64, 64}})};
  const CutGuesses guesses({std::string(config), {}}, kinds);
  EXPECT_EQ(json::serialize(guesses.facts_of(guesses.of(kinds[0]).rule)),
            R"({"heads":["text_config.num_attention_heads"]})");
  const SuggestedRules suggested = suggested_rules({query}, {std::string(config), {}});
  EXPECT_TRUE(RuleSet::parse(json::serialize(suggested.text)).has_value());
}

}  // namespace
}  // namespace ptc
