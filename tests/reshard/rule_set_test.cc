#include "reshard/ptc/rule_set.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <vector>

namespace ptc {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

std::shared_ptr<const RuleSet> parse(std::string_view text) {
  auto rules = RuleSet::parse(text);
  EXPECT_TRUE(rules.has_value()) << rules.error().message();
  return rules ? rules.value() : nullptr;
}
std::string parse_error(std::string_view text) {
  const auto rules = RuleSet::parse_new(text);
  if (rules) return "accepted";
  EXPECT_EQ(rules.error().code(), Code::kInvalidArgument);
  return rules.error().message();
}
/// The error of a set with one rule.
std::string rule_error(std::string_view rule) {
  return parse_error(R"({"format": "ptc-rules/1", "facts": {"heads": ["n_head"]}, "rules": [)" +
                     std::string(rule) + "]}");
}

TEST(BuiltinRules, AllParse) {
  EXPECT_THAT(RuleSet::builtin_families(), IsSupersetOf({"bert", "deepseek_v3", "gpt2", "llama",
                                                         "megatron", "mixtral", "peft", "t5"}));
  std::map<std::string, std::string> family_of;  // by model type
  for (const std::string& family : RuleSet::builtin_families()) {
    const auto rules = RuleSet::builtin(family);
    ASSERT_TRUE(rules.has_value()) << rules.error().message();
    EXPECT_EQ(rules.value()->family(), family);
    const auto again = RuleSet::parse(rules.value()->text());
    ASSERT_TRUE(again.has_value()) << again.error().message();
    EXPECT_EQ(again.value()->rules().size(), rules.value()->rules().size());
    EXPECT_EQ(again.value()->family(), family);
    for (const std::string& type : rules.value()->model_types())
      EXPECT_TRUE(family_of.emplace(type, family).second)
          << type << " is of " << family_of[type] << " and of " << family;
  }
}

TEST(BuiltinRules, AnUnknownFamilyNamesTheNearest) {
  const auto rules = RuleSet::builtin("lama");
  ASSERT_FALSE(rules.has_value());
  EXPECT_EQ(rules.error().code(), Code::kNotFound);
  EXPECT_THAT(rules.error().message(), HasSubstr("did you mean 'llama'?"));
}

TEST(RuleSet, FindsRulesWithAndWithoutPrefix) {
  const auto bert = RuleSet::builtin("bert").value();
  for (const char* prefix : {"", "bert."}) {
    const std::string name = prefix + std::string("encoder.layer.11.attention.self.query.weight");
    const auto match = bert->find(name);
    ASSERT_TRUE(match.has_value());
    EXPECT_EQ(match->name.layer, 11u);
    EXPECT_EQ(name.substr(match->name.layer_begin, match->name.layer_end - match->name.layer_begin),
              "11");
    EXPECT_EQ(match->rule->cut->axis, 0u);
  }
  EXPECT_FALSE(bert->find("exp_avg.bert.pooler.dense.weight").has_value());
}

TEST(RuleFinder, AgreesWithFind) {
  const auto mixtral = RuleSet::builtin("mixtral").value();
  RuleFinder finder(*mixtral);
  for (int round = 0; round < 2; ++round) {
    for (const char* name :
         {"model.layers.3.block_sparse_moe.experts.7.w1.weight",
          "model.layers.#.input_layernorm.weight",
          "model.layers.3.block_sparse_moe.experts.7.w2.weight",
          "model.layers.4.block_sparse_moe.experts.70.w1.weight",
          "model.layers.4.input_layernorm.weight", "model.layers.04.input_layernorm.weight",
          "layers.5.input_layernorm.weight", "model.layers.x.input_layernorm.weight",
          "lm_head.weight", "unknown", "model.layers.4.unknown.weight"}) {
      const auto slow = mixtral->find(name);
      const auto fast = finder.find(name);
      ASSERT_EQ(slow.has_value(), fast.has_value()) << name;
      if (!slow) continue;
      EXPECT_EQ(slow->rule, fast->rule) << name;
      EXPECT_EQ(slow->name.layer, fast->name.layer) << name;
      EXPECT_EQ(slow->name.expert, fast->name.expert) << name;
      EXPECT_EQ(slow->prefix_length, fast->prefix_length) << name;
    }
  }
}

TEST(RuleFinder, PatternsMayNameNumbers) {
  const auto rules = parse(R"({"format": "ptc-rules/1", "rules": [
    {"names": ["mlp.0.weight"], "stage": "first", "cut": {"axis": 0}},
    {"names": ["mlp.*.weight"], "stage": "last"}]})");
  RuleFinder finder(*rules);
  EXPECT_EQ(finder.find("mlp.1.weight")->rule->stage, StagePlace::kLast);
  EXPECT_EQ(finder.find("mlp.0.weight")->rule->stage, StagePlace::kFirst);
  EXPECT_EQ(finder.find("mlp.2.weight")->rule->stage, StagePlace::kLast);
}

TEST(RuleFinder, AgreesWithFindWhateverPatternsHaveOfNumbers) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto some = [&](const std::vector<std::string>& pieces, int least, int most) {
    std::string text;
    for (int left = least + static_cast<int>(random() % (most - least + 1)); left > 0; --left)
      text += pieces[random() % pieces.size()];
    return text;
  };
  int with_numbers = 0, matched = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string rules;
    for (int left = 1 + static_cast<int>(random() % 3); left > 0; --left) {
      const std::string pattern = some({"a", "b", "0", "1", "12", ".", ".", ".", "*", "**", "{a,1}",
                                        "{1.a,b}", "{a,b1}", "{,1}", "{0,2}", "{a.,b}", "{expert}"},
                                       1, 6);
      rules += fmt::format(R"({}{{"names": ["{}"], "stage": "{}"}})", rules.empty() ? "" : ", ",
                           pattern, left % 2 == 0 ? "first" : "last");
    }
    const auto set = RuleSet::parse(
        R"({"format": "ptc-rules/1", "prefixes": ["", "a."], "rules": [)" + rules + "]}");
    if (!set) continue;  // {expert} twice, or three stars
    RuleFinder finder(*set.value());
    for (int name = 0; name < 60; ++name) {
      const std::string tensor = some({"a", "b", "0", "1", "2", "12", ".", ".", "."}, 1, 6);
      const auto slow = set.value()->find(tensor);
      const auto fast = finder.find(tensor);
      ASSERT_EQ(slow.has_value(), fast.has_value()) << rules << ": " << tensor;
      with_numbers += tensor.find_first_of("012") != std::string::npos;
      if (!slow) continue;
      ++matched;
      ASSERT_EQ(slow->rule, fast->rule) << rules << ": " << tensor;
      ASSERT_EQ(slow->name.expert, fast->name.expert) << rules << ": " << tensor;
    }
  }
  EXPECT_GT(with_numbers, 10'000);
  EXPECT_GT(matched, 1'000);
}

TEST(RuleSet, ChosenByModelType) {
  for (const auto& [type, family] :
       std::vector<std::pair<const char*, const char*>>{{"llama", "llama"},
                                                        {"mistral", "llama"},
                                                        {"qwen2", "llama"},
                                                        {"qwen3", "llama"},
                                                        {"mixtral", "mixtral"},
                                                        {"qwen3_moe", "mixtral"},
                                                        {"gpt2", "gpt2"},
                                                        {"gpt_neox", "gpt_neox"},
                                                        {"bert", "bert"},
                                                        {"deepseek_v3", "deepseek_v3"}}) {
    const auto rules = RuleSet::choose(type, {});
    ASSERT_NE(rules, nullptr) << type;
    EXPECT_EQ(rules->family(), family);
  }
}

TEST(RuleSet, AModelOfUnknownTypeIsOfAFamilyThatKnowsAllOfItsNames) {
  auto chosen = [](std::vector<std::string> names) {
    for (std::string& name : names) name = "model.layers.0." + name;
    const auto rules = RuleSet::choose("brand_new", names);
    return rules ? rules->family() : "";
  };
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "mlp.up_proj.weight"}), "llama");
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight"}), "mixtral");
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "self_attn.kv_b_proj.weight"}), "deepseek_v3");
  // One name is not known, or stands for several orders.
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "mlp.sideways_proj.weight"}), "");
  EXPECT_EQ(chosen({"self_attn.qkv_proj.weight", "mlp.up_proj.weight"}), "");
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "mlp.experts.gate_up_proj"}), "");
  EXPECT_EQ(chosen({}), "");
  // Layers that predict further tokens have the names of the others.
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "eh_proj.weight", "shared_head.norm.weight"}),
            "llama");
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "mlp.experts.0.up_proj.weight", "enorm.weight"}),
            "mixtral");
  EXPECT_EQ(chosen({"self_attn.q_proj.weight", "self_attn.kv_b_proj.weight", "enorm.weight"}),
            "deepseek_v3");
  // State of an optimizer has parameters' names within.
  const std::string parameter = "model.layers.0.mlp.up_proj.weight";
  const std::vector<std::string> state = {parameter, "exp_avg." + parameter,
                                          "state." + parameter + ".step"};
  EXPECT_EQ(RuleSet::choose("brand_new", state)->family(), "llama");
  EXPECT_EQ(RuleSet::choose("brand_new", {parameter, "state.0.exp_avg"}), nullptr);
}

TEST(RuleSet, RulesOfLayersHoldForThoseThatPredictFurtherTokens) {
  const auto mixtral = RuleSet::builtin("mixtral").value();
  for (const auto& rules : {mixtral, parse(mixtral->text())}) {
    RuleFinder finder(*rules);
    for (const std::string rest :
         {"self_attn.k_proj.weight", "mlp.experts.7.down_proj.weight", "mlp.up_proj.qweight",
          "mlp.experts.gate_up_proj", "eh_proj.weight"}) {
      const auto layer = rules->find("model.layers.3." + rest);
      ASSERT_TRUE(layer) << rest;
      for (const std::string before :
           {"mtp.layers.0.", "model.mtp.layers.12.", "model.mtp_block.0.", "model.mtp_layers.1."}) {
        const auto found = finder.find(before + rest);
        ASSERT_TRUE(found) << before + rest;
        EXPECT_EQ(found->rule->stage, StagePlace::kMtp);
        EXPECT_FALSE(found->name.layer);
        EXPECT_EQ(found->name.expert, layer->name.expert);
        EXPECT_EQ(found->rule->cut.has_value(), layer->rule->cut.has_value());
        EXPECT_EQ(found->rule->expert_axis, layer->rule->expert_axis);
        EXPECT_EQ(found->part_of, layer->part_of);
        // It is the same rule to people.
        EXPECT_EQ(rules->written_rule(*found->rule), rules->written_rule(*layer->rule));
      }
    }
    const std::string lora = "mlp.up_proj.lora_B.weight";
    const auto adapter = rules->find("base_model.model.mtp.layers.0." + lora);
    ASSERT_TRUE(adapter);
    EXPECT_EQ(adapter->rule->stage, StagePlace::kMtp);
    EXPECT_EQ(rules->written_rule(*adapter->rule),
              rules->written_rule(*rules->find("model.layers.0.mlp.up_proj.weight")->rule));
    EXPECT_FALSE(rules->find("mtp.layers.0.mlp.sideways_proj.weight"));
  }
  // A job's own rules hold there, too, and those of other families are under other names.
  const auto own = parse(R"({"format": "ptc-rules/1", "extends": "llama", "mtp_layers": ["draft"],
      "rules": [{"names": ["layers.{layer}.mlp.up_proj.weight"], "cut": {"axis": 1}}]})");
  EXPECT_EQ(own->find("draft.mlp.up_proj.weight")->rule->cut->axis, 1u);
  EXPECT_FALSE(own->find("mtp.layers.0.mlp.up_proj.weight"));
  const auto v4 = RuleSet::builtin("deepseek_v4").value();
  EXPECT_EQ(v4->find("mtp.0.attn.wo_b.weight")->rule->cut->axis, 1u);
  EXPECT_THAT(parse_error(R"({"format": "ptc-rules/1", "mtp_layers": ["mtp.{layer}"]})"),
              HasSubstr("not numbered with the layers"));
  EXPECT_THAT(parse_error(R"({"format": "ptc-rules/1", "mtp_layers": "mtp"})"),
              HasSubstr("must be a list"));
}

TEST(RuleSet, FactsMayLieWithinTheConfig) {
  const auto llama = RuleSet::builtin("llama").value();
  const auto facts = llama->facts(R"({"model_type": "qwen2_5_vl", "text_config":
      {"num_attention_heads": 8, "tie_word_embeddings": true}, "vision_config": 5})");
  ASSERT_TRUE(facts);
  EXPECT_EQ(facts.value().numbers.at("heads"), 8u);
  EXPECT_FALSE(facts.value().numbers.contains("kv_heads"));  // the tensors say it
  EXPECT_EQ(facts.value().tied, true);
  // What is tied where it does not say.
  EXPECT_EQ(llama->facts(R"({"model_type": "gemma"})").value().tied, true);
  EXPECT_EQ(llama->facts(R"({"model_type": "gemma", "tie_word_embeddings": false})").value().tied,
            false);
  EXPECT_EQ(llama->facts(R"({"model_type": "llama"})").value().tied, false);
  // Of a type that only its names made a Llama it is not known, unless something says it.
  EXPECT_EQ(llama->facts(R"({"model_type": "brand_new"})").value().tied, std::nullopt);
  EXPECT_EQ(
      llama->facts(R"({"model_type": "brand_new", "tie_word_embeddings": false})").value().tied,
      false);
  const auto said = parse(R"({"format": "ptc-rules/1", "extends": "llama", "tied": false})");
  EXPECT_EQ(said->facts(R"({"model_type": "brand_new"})").value().tied, false);
  EXPECT_EQ(llama->facts(R"({"model_type": "hunyuan_vl"})").value().tied, true);
  EXPECT_EQ(RuleSet::choose("gemma3n", {})->facts(R"({"model_type": "gemma3n"})").value().tied,
            true);
  EXPECT_EQ(RuleSet::choose("lfm2_moe", {})->facts(R"({"model_type": "lfm2_moe"})").value().tied,
            true);
}

TEST(RuleSet, AnAdapterIsOfAFamilyThatItsNamesTell) {
  auto chosen = [](const std::vector<std::string>& modules) {
    std::vector<std::string> names;
    for (const std::string& module : modules)
      for (const char* side : {"lora_A", "lora_B"})
        names.push_back("base_model.model.model.layers.3." + module + "." + side + ".weight");
    return RuleSet::choose(std::nullopt, names)->family();
  };
  for (const std::vector<std::string>& modules : std::vector<std::vector<std::string>>{
           {"self_attn.q_proj"},
           {"self_attn.o_proj"},
           {"self_attn.q_proj", "self_attn.v_proj"},
           {"self_attn.q_proj", "self_attn.o_proj"},
           {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
           {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}})
    EXPECT_EQ(chosen(modules), "llama");
  EXPECT_EQ(chosen({"self_attn.q_proj", "self_attn.kv_b_proj"}), "deepseek_v3");
  EXPECT_EQ(chosen({"self_attn.kv_a_proj_with_mqa"}), "deepseek_v3");
}

TEST(RuleSet, WrappersOfPyTorchAreNoPartOfAName) {
  const auto rules = RuleSet::builtin("llama").value();
  for (const std::string before : {"module.", "_orig_mod.", "module._orig_mod.module."})
    for (const std::string name :
         {"model.layers.17.self_attn.q_proj.weight", "model._orig_mod.layers.17.mlp.up_proj.weight",
          "model.layers.17._orig_mod.mlp._orig_mod.down_proj.weight",
          "base_model.model._orig_mod.model.layers.17.mlp.up_proj.lora_A.weight"}) {
      const std::string whole = before + name;
      RuleFinder finder(*rules);
      for (int again = 0; again < 2; ++again) {
        const auto match = finder.find(whole);
        ASSERT_TRUE(match) << whole;
        EXPECT_EQ(match->name.layer, 17u);
        EXPECT_EQ(
            whole.substr(match->name.layer_begin, match->name.layer_end - match->name.layer_begin),
            "17")
            << whole;
      }
    }
  EXPECT_FALSE(rules->find("model.layers.17.module.mlp.up_proj.weight"));
  EXPECT_FALSE(rules->find("modules.model.layers.17.mlp.up_proj.weight"));
  using Names = std::vector<std::string>;
  EXPECT_EQ(rules->without_wrappers({"module.a.w", "module._orig_mod.b._orig_mod.w"}),
            (Names{"a.w", "b.w"}));
  EXPECT_EQ(rules->without_wrappers({"module.a.w", "b.w"}), (Names{"module.a.w", "b.w"}));
  const Names same{"a._orig_mod.w", "a.w"};
  EXPECT_EQ(rules->without_wrappers(same), same);
  // What was committed before there were wrappers is read as it was.
  const auto old =
      RuleSet::parse(R"({"format": "ptc-rules/1", "rules": [{"names": ["layers.{layer}.w"]}]})");
  ASSERT_TRUE(old);
  EXPECT_FALSE(old.value()->find("module.layers.1.w"));
}

TEST(RuleSet, ChosenByNames) {
  auto chosen = [](const std::vector<std::string>& names) {
    const auto rules = RuleSet::choose(std::nullopt, names);
    return rules ? rules->family() : "";
  };
  const std::string layer = "model.layers.0.";
  EXPECT_EQ(chosen({"model.embed_tokens.weight", layer + "self_attn.q_proj.weight",
                    layer + "self_attn.k_proj.weight", layer + "mlp.gate_proj.weight",
                    layer + "input_layernorm.weight"}),
            "llama");
  EXPECT_EQ(chosen({layer + "self_attn.k_proj.weight", layer + "mlp.gate.weight",
                    layer + "mlp.experts.0.gate_proj.weight"}),
            "mixtral");
  EXPECT_EQ(chosen({layer + "self_attn.kv_b_proj.weight", layer + "mlp.gate.weight"}),
            "deepseek_v3");
  EXPECT_EQ(chosen({"wte.weight", "h.0.attn.c_attn.weight"}), "gpt2");
  EXPECT_EQ(chosen({"encoder.layer.0.attention.self.query.weight"}), "bert");
  EXPECT_EQ(chosen({"gpt_neox.layers.0.attention.dense.weight"}), "gpt_neox");
  EXPECT_EQ(chosen({"decoder.layers.0.self_attention.linear_qkv.weight"}), "megatron");
  EXPECT_EQ(chosen({"norm.weight", "fc.weight"}), "");
  EXPECT_EQ(chosen({}), "");
}

TEST(RuleSet, FactsComeFromTheConfig) {
  const auto llama = RuleSet::builtin("llama").value();
  const auto facts = llama->facts(R"({"num_attention_heads": 32, "num_key_value_heads": null,
      "num_hidden_layers": 2, "vocab_size": "many", "tie_word_embeddings": true})");
  ASSERT_TRUE(facts.has_value());
  EXPECT_EQ(facts.value().numbers,
            (std::map<std::string, uint64_t, std::less<>>{{"heads", 32}, {"layers", 2}}));
  EXPECT_EQ(facts.value().tied, true);
  EXPECT_EQ(llama->facts("").value().tied, false);
  EXPECT_TRUE(llama->facts("").value().numbers.empty());
  const auto wrong = llama->facts("{\"a\": }");
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().message(), HasSubstr("config.json: line 1"));
  EXPECT_FALSE(llama->facts("[]").has_value());
}

TEST(RuleSet, FactsOfLayersAreOfTheFirstThatHasThem) {
  const auto llama = RuleSet::builtin("llama").value();
  const auto numbers = llama
                           ->facts(R"({"text_config": {"per_layer_config": {
      "3": {"sliding_window": 8}, "5": {"head_dim": 512, "num_key_value_heads": 2}, "7": 9}}})")
                           .value()
                           .numbers;
  EXPECT_EQ(numbers.at("layer_head_dim"), 512u);
  EXPECT_EQ(numbers.at("layer_kv_heads"), 2u);
  EXPECT_FALSE(numbers.contains("layer_heads"));
  // A size that stands beside no number of heads is of something else, as of a sound's positions.
  const auto sizes = [&](std::string_view config) { return llama->facts(config).value().numbers; };
  EXPECT_FALSE(
      sizes(R"({"head_dim": 64, "text_config": {"num_attention_heads": 4}})").contains("head_dim"));
  EXPECT_EQ(sizes(R"({"head_dim": 64, "num_attention_heads": 4})").at("head_dim"), 64u);
}

/// Types differ in whose they ask. Tied without need costs a copy, untied without need the head.
TEST(RuleSet, TiedIfTheModelOrItsTextModelSaysSo) {
  const auto llama = RuleSet::builtin("llama").value();
  const auto tied = [&](std::string_view config) { return llama->facts(config).value().tied; };
  EXPECT_EQ(tied(R"({"model_type": "llava", "tie_word_embeddings": false,
                     "text_config": {"tie_word_embeddings": true}})"),
            true);
  EXPECT_EQ(tied(R"({"model_type": "llava", "tie_word_embeddings": true,
                     "text_config": {"tie_word_embeddings": false}})"),
            true);
  EXPECT_EQ(tied(R"({"model_type": "gemma3", "text_config": {"tie_word_embeddings": false}})"),
            false);
  EXPECT_EQ(tied(R"({"model_type": "gemma3"})"), true);
}

TEST(RuleSet, AJobsRulesExtendAFamily) {
  const auto rules = parse(R"({"format": "ptc-rules/1", "extends": "llama",
    "facts": {"kv_heads": 8, "groups": 4}, "tied": true, "prefixes": ["my."],
    "rules": [{"names": ["layers.{layer}.self_attn.q_proj.weight"],
               "cut": {"axis": 0, "heads": "groups"}},
              {"names": ["value_head.weight"], "stage": "last"}]})");
  ASSERT_NE(rules, nullptr);
  EXPECT_EQ(rules->family(), "llama");
  const auto facts = rules->facts(R"({"num_attention_heads": 32, "num_key_value_heads": 2})");
  EXPECT_EQ(facts.value().numbers.at("kv_heads"), 8u);
  EXPECT_EQ(facts.value().numbers.at("heads"), 32u);
  EXPECT_EQ(facts.value().tied, true);

  for (const auto& set : {rules, parse(rules->text())}) {
    const auto overridden = set->find("my.layers.3.self_attn.q_proj.weight");
    ASSERT_TRUE(overridden.has_value());
    EXPECT_EQ(std::get<std::string>(*overridden->rule->cut->parts[0].heads), "groups");
    EXPECT_TRUE(set->find("my.value_head.weight").has_value());
    EXPECT_TRUE(set->find("my.layers.3.self_attn.k_proj.weight").has_value());
    EXPECT_FALSE(set->find("language_model.layers.3.self_attn.k_proj.weight").has_value());
    EXPECT_EQ(set->facts("").value().numbers.at("kv_heads"), 8u);
  }
  EXPECT_EQ(rules->text().find("extends"), std::string::npos);
}

TEST(RuleSet, FactsAloneAreEnough) {
  const auto rules =
      parse(R"({"format": "ptc-rules/1", "extends": "gpt2", "facts": {"heads": 12}})");
  EXPECT_EQ(rules->facts("").value().numbers.at("heads"), 12u);
  EXPECT_EQ(rules->rules().size(), RuleSet::builtin("gpt2").value()->rules().size());
}

TEST(RuleSet, NoneHasNoRules) {
  EXPECT_EQ(RuleSet::none()->family(), "none");
  EXPECT_FALSE(RuleSet::none()->find("x").has_value());
  EXPECT_EQ(parse(RuleSet::none()->text())->family(), "none");
}

TEST(RuleSet, SaysWhereAndWhatIsWrong) {
  EXPECT_THAT(parse_error("{\"format\": \"ptc-rules/1\",\n \"ruless\": []}"),
              AllOf(HasSubstr("line 2, column 2: unknown key 'ruless' (did you mean 'rules'?)")));
  EXPECT_THAT(parse_error("{}"), HasSubstr("'format' must be"));
  EXPECT_THAT(parse_error("7"), HasSubstr("a rule set is a JSON object"));
  EXPECT_THAT(parse_error(R"({"format": "ptc-rules/1", "extends": "lama"})"),
              HasSubstr("did you mean 'llama'?"));
  EXPECT_THAT(rule_error("{\n\"names\": [\"a.{layer}\"],\n  \"cut\": {\"axsi\": 0}}"),
              HasSubstr("line 3, column 11: unknown key 'axsi' (did you mean 'axis'?)"));
  EXPECT_THAT(rule_error(R"({"names": ["a.b"]})"), HasSubstr("'a.b' has no {layer}"));
  EXPECT_THAT(rule_error(R"({"names": []})"), HasSubstr("needs 'names'"));
  EXPECT_THAT(rule_error(R"({"names": ["a}"], "stage": "all"})"), HasSubstr("without its '{'"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "middle"})"), HasSubstr("'stage' must be"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all",
                             "cut": {"axis": 0, "heads": "hedas"}})"),
              HasSubstr("unknown fact 'hedas' (did you mean 'heads'?)"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "cut": {"axis": 0, "heads": 0}})"),
              HasSubstr("from 1"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "cut": {}})"),
              HasSubstr("'cut' needs 'axis'"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "cut": {"axis": 9}})"),
              HasSubstr("from 0 to 7"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "cut": {"axis": 0, "share": true}})"),
              HasSubstr("'share' needs 'heads'"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "cut": {"axis": 0, "split": true}})"),
              HasSubstr("'split' needs 'heads'"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all",
                             "cut": {"axis": 0, "heads": 2, "share": true, "split": true}})"),
              HasSubstr("'share' and 'split' exclude each other"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all",
                             "cut": {"axis": 0, "heads": 2, "parts": [{}]}})"),
              HasSubstr("exclude each other"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "expert_axis": 0,
                             "cut": {"axis": 0}})"),
              HasSubstr("must differ"));
  for (const char* axis : {"", R"("expert_axis": 1, )"})
    EXPECT_THAT(
        rule_error(fmt::format(R"({{"names": ["a"], "stage": "all", {}"folded_into": 1}})", axis)),
        HasSubstr("'folded_into' needs \"expert_axis\": 0"));
  for (const char* into : {"7", "-1", "true"})
    EXPECT_THAT(rule_error(fmt::format(R"({{"names": ["a"], "stage": "all", "expert_axis": 0,
                                            "folded_into": {}}})",
                                       into)),
                HasSubstr("'folded_into' must be"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "tied_when": "b"})"),
              HasSubstr("needs 'tied_head'"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "last", "with_mtp": true})"),
              HasSubstr("'with_mtp' is of what is on the \"first\" stage"));
  for (const char* sizes : {R"("tp")", R"(["dp"])"})
    EXPECT_THAT(
        rule_error(fmt::format(R"({{"names": ["a"], "stage": "all", "not_with": {}}})", sizes)),
        HasSubstr("not_with"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "experts_along": 1,
                             "cut": {"axis": 1}})"),
              HasSubstr("'experts_along' is of an axis that nothing cuts"));
  EXPECT_THAT(rule_error(R"({"names": ["a"], "stage": "all", "attention": "q"})"),
              HasSubstr("'attention' must be \"queries\", \"keys\""));
  EXPECT_THAT(parse_error(R"({"format": "ptc-rules/1", "extends": "llama",
                              "facts": {"kv_head": 8}})"),
              HasSubstr("no rule uses the fact 'kv_head' (did you mean 'kv_heads'?)"));
  EXPECT_THAT(parse_error(R"({"format": "ptc-rules/1", "facts": {"heads": "n_head"}})"),
              HasSubstr("'heads' must be a whole number, or a list"));
}

TEST(RuleSet, IsNoLargerThanItCanBeUsed) {
  auto many = [](std::string begin, const std::string& text, size_t times, const std::string& end) {
    while (times-- > 0) begin += text + ",";
    begin.pop_back();
    return begin + end;
  };
  const std::string begin = R"({"format": "ptc-rules/1", )";
  EXPECT_THAT(parse_error(many(begin + "\"prefixes\": [", "\"a\"", 65, "]}")),
              HasSubstr("at most 64 prefixes"));
  EXPECT_THAT(parse_error(many(begin + "\"rules\": [", R"({"names": ["{layer}"]})", 4097, "]}")),
              HasSubstr("4097 name patterns; at most 4096"));
  // What follows from it is counted before it is made: ten million patterns would be gigabytes.
  const std::string layers = many(begin + "\"mtp_layers\": [", "\"a\"", 4000, R"(], "rules": [)");
  EXPECT_THAT(parse_error(many(layers, R"({"names": ["layers.{layer}.w"]})", 4000, "]}")),
              HasSubstr("more than 4096 further name patterns"));
  EXPECT_THAT(parse_error(many(begin + R"("extends": "llama", "rules": [)",
                               R"({"names": ["layers.{layer}.w"]})", 1000, "]}")),
              HasSubstr("with those that mtp_layers and adapters add; at most 4096"));
  // These are held against every tensor.
  EXPECT_THAT(parse_error(many(begin + "\"rules\": [",
                               R"({"names": ["{layer}"], "tied_head": "a"})", 65, "]}")),
              HasSubstr("65 rules have 'tied_head'; at most 64"));
  EXPECT_THAT(parse_error(many(begin + "\"known_by\": [", "\"a\"", 65, "]}")),
              HasSubstr("at most 64 names"));
  EXPECT_THAT(parse_error(many(begin + R"("facts": {"a": [)", R"("x.*.a")", 33, "]}}")),
              HasSubstr("33 keys have a '*'; at most 32"));
  EXPECT_THAT(
      rule_error(many(R"({"names": ["{layer}"], "cut": {"axis": 0, "heads": ")", "2", 200, "\"}}")),
      HasSubstr("at most 256 characters"));
  // What a checkpoint keeps of it must be readable again.
  EXPECT_THAT(
      parse_error(many(begin + R"("extends": "llama", "model_types": [)", "\"a\"", 200'000, "]}")),
      HasSubstr("the rule set has"));
}

/// Checkpoints and jobs keep such, from when nothing refused them.
TEST(RuleSet, WhatWasTakenBeforeIsReadAgain) {
  std::string rules, names;
  for (int i = 0; i < 70; ++i) {
    rules += fmt::format(R"({{"names": ["w{}.{{layer}}"], "tied_head": "a"}},)", i);
    names += fmt::format("\"n{}\",", i);
  }
  rules.pop_back(), names.pop_back();
  for (const std::string& text :
       {fmt::format(R"({{"format": "ptc-rules/1", "rules": [{}]}})", rules),
        fmt::format(R"({{"format": "ptc-rules/1", "known_by": [{}]}})", names),
        std::string(R"({"format": "ptc-rules/1", "extends": "llama", "facts": {"kv_head": 8}})")}) {
    EXPECT_TRUE(RuleSet::parse(text).has_value());
    EXPECT_FALSE(RuleSet::parse_new(text).has_value());
  }
}

TEST(ModelType, OfAConfig) {
  EXPECT_EQ(model_type_of(R"({"model_type": "qwen2"})"), "qwen2");
  EXPECT_EQ(model_type_of(R"({"model_type": 3})"), std::nullopt);
  EXPECT_EQ(model_type_of("{"), std::nullopt);
  EXPECT_EQ(model_type_of(""), std::nullopt);
}

TEST(RuleSet, EachSetCanBeExtended) {
  for (const std::string& family : RuleSet::builtin_families()) {
    const auto own = RuleSet::parse_new(
        fmt::format(R"({{"format": "ptc-rules/1", "extends": "{}", "rules": []}})", family));
    EXPECT_TRUE(own.has_value()) << family << ": " << own.error().message();
  }
}

}  // namespace
}  // namespace ptc
