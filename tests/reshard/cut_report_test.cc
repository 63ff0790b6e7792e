#include "reshard/ptc/cut_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/array.hpp>
#include <boost/json/serialize.hpp>

#include "tests/support/synthetic_model.h"

namespace ptc {
namespace {

namespace json = boost::json;
using ptc::testing::synthetic_model;
using ::testing::HasSubstr;

const json::object* entry(const json::object& report, std::string_view names) {
  for (const json::value& value : report.at("tensors").as_array())
    if (value.at("names").as_string() == names) return &value.as_object();
  ADD_FAILURE() << "no entry " << names << " in " << json::serialize(report);
  return nullptr;
}

constexpr std::string_view kSmallMixtral = R"({"model_type": "mixtral", "hidden_size": 12,
  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
  "intermediate_size": 8, "vocab_size": 256, "num_local_experts": 6})";

TEST(CutReport, WhatIsCutAlikeIsOneEntry) {
  const Model model = synthetic_model(kSmallMixtral, true);
  LayoutSpec spec;
  spec.sizes = {.tp = 4, .pp = 2, .dp = 2, .ep = 3};
  spec.optimizer = OptimizerCut::kZero1;
  const json::object report = cut_report(model, spec, {}).value();
  EXPECT_EQ(report.at("fits"), json::value(true));
  EXPECT_EQ(report.at("facts").at("experts").to_number<int>(), 6);

  const json::object& expert =
      *entry(report, "model.layers.{0-2}.block_sparse_moe.experts.{0-5}.w1.weight");
  EXPECT_EQ(expert.at("count").to_number<int>(), 18);
  EXPECT_EQ(json::serialize(expert.at("ranks")),
            R"([{"first_dp_rank":0,"last_dp_rank":1,"shape":[2,12]}])");
  EXPECT_EQ(expert.at("how").as_string(),
            "tp cuts axis 0, by elements; one of 6 experts; its layer's stage");
  EXPECT_EQ(expert.at("rule").as_string(),
            "layers.{layer}.{block_sparse_moe,mlp}.experts.{expert}.{w1,w3,gate_proj,up_proj}.{"
            "weight,bias}");

  const json::object& moment = *entry(report, "exp_avg.model.layers.{0-2}.self_attn.k_proj.weight");
  EXPECT_THAT(
      std::string(moment.at("how").as_string()),
      HasSubstr("follows model.layers.{}.self_attn.k_proj.weight: tp cuts axis 0, by 2 heads"));
  EXPECT_TRUE(moment.at("rule").is_null());
  EXPECT_EQ(json::serialize(moment.at("ranks")),
            R"([{"first_dp_rank":0,"last_dp_rank":1,"shape":[18]}])");
  EXPECT_EQ(entry(report, "lm_head.weight")->at("count").to_number<int>(), 1);
}

TEST(CutReport, ShortRowsOfFsdpAreSaid) {
  const Model model = synthetic_model(kSmallMixtral);
  LayoutSpec spec;
  spec.sizes = {.dp = 5};
  spec.optimizer = OptimizerCut::kFsdp;
  const json::object report = cut_report(model, spec, {"layers.1.input_layernorm"}).value();
  EXPECT_EQ(report.at("tensors").as_array().size(), 1u);
  EXPECT_EQ(json::serialize(entry(report, "model.layers.1.input_layernorm.weight")->at("ranks")),
            R"([{"first_dp_rank":0,"last_dp_rank":3,"shape":[3]},)"
            R"({"first_dp_rank":4,"last_dp_rank":4,"shape":[0]}])");
}

TEST(CutReport, WhatNoExpertHasIsCutOverExpertRanksToo) {
  const Model model = synthetic_model(kSmallMixtral);
  LayoutSpec spec;
  spec.sizes = {.dp = 2, .ep = 3};
  spec.optimizer = OptimizerCut::kFsdp;
  spec.shard_ep = true;
  const json::object report = cut_report(model, spec, {"layers.1."}).value();
  EXPECT_EQ(json::serialize(entry(report, "model.layers.1.input_layernorm.weight")->at("ranks")),
            R"([{"first_dp_rank":0,"last_dp_rank":5,"shape":[2]}])");
  EXPECT_EQ(
      json::serialize(
          entry(report, "model.layers.1.block_sparse_moe.experts.{0-5}.w1.weight")->at("ranks")),
      R"([{"first_dp_rank":0,"last_dp_rank":1,"shape":[4,12]}])");
}

TEST(CutReport, SaysWhatDoesNotFit) {
  const Model model = synthetic_model(kSmallMixtral);
  LayoutSpec three;
  three.sizes.tp = 3;
  const json::object report = cut_report(model, three, {"o_proj"}).value();
  EXPECT_THAT(std::string(report.at("fits").as_string()), HasSubstr("tp = 3"));
  EXPECT_THAT(
      std::string(
          entry(report, "model.layers.{0-2}.self_attn.o_proj.weight")->at("problem").as_string()),
      HasSubstr("the 4 heads on axis 1"));
  const auto nothing = cut_report(model, {}, {"c_attn", "wte"});
  ASSERT_TRUE(nothing.has_error());
  EXPECT_EQ(nothing.error().message(), "no tensor has 'c_attn' or 'wte' in its name");
}

TEST(CutReport, RulesOfOnesOwnThatHoldForNothingAreNamed) {
  const auto rules = RuleSet::parse(R"({"format": "ptc-rules/1", "extends": "llama", "rules": [
      {"names": ["layers.{layer}.self_attn.qq_proj.weight"], "cut": {"axis": 0}},
      {"names": ["layers.{layer}.mlp.up_proj.weight"]},
      {"names": ["layers.{layer}.mlp.{up,gate}_proj.weight"], "cut": {"axis": 0}},
      {"names": ["layers.{layer}.mlp.*.weight"], "cut": {"axis": 1}},
      {"names": ["layers.{layer}.self_attn.q_proj.weight"], "cut": {"axis": 1}}]})");
  std::vector<TensorInfo> tensors;
  for (const char* name : {"mlp.up_proj.weight", "mlp.down_proj.weight",
                           "self_attn.q_proj.lora_A.weight", "self_attn.q_proj.lora_B.weight"})
    tensors.push_back({.file = "model.safetensors",
                       .name = std::string("model.layers.0.") + name,
                       .shape = {4, 4}});
  const Model model = Model::bind(rules.value(), {}, tensors).value();
  EXPECT_EQ(json::serialize(cut_report(model, {}, {"down"}).value().at("unused_rules")),
            R"([{"names":["layers.{layer}.self_attn.qq_proj.weight"],)"
            R"("why":"no tensor has such a name"},)"
            R"({"names":["layers.{layer}.mlp.{up,gate}_proj.weight"],)"
            R"("why":"a rule before it holds for model.layers.0.mlp.up_proj.weight: )"
            R"(layers.{layer}.mlp.up_proj.weight"}])");
  const Model family = Model::bind(RuleSet::builtin("llama").value(), {}, tensors).value();
  EXPECT_TRUE(cut_report(family, {}, {}).value().at("unused_rules").as_array().empty());
}

TEST(CutReport, SaysWhereConfigJsonIsContradicted) {
  const Model model = synthetic_model(kSmallMixtral);
  RuleSet::Facts facts = model.facts();
  facts.numbers["layers"] = 5;
  const Model other = Model::bind(model.rules_ptr(), facts, model.tensors()).value();
  LayoutSpec spec;
  EXPECT_TRUE(cut_report(model, spec, {}).value().at("contradictions").as_array().empty());
  const json::object report = cut_report(other, spec, {}).value();
  EXPECT_EQ(json::serialize(report.at("contradictions")),
            R"(["config.json says 5 layers, and there are tensors of 3"])");
  EXPECT_EQ(report.at("fits"), json::value(true));
  spec.sizes.pp = 2;
  EXPECT_THAT(std::string(cut_report(other, spec, {}).value().at("fits").as_string()),
              HasSubstr("of 3: pp = 2 would have stages"));
}

}  // namespace
}  // namespace ptc
