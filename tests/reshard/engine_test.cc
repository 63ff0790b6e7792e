// Engines' tables, and the names of their layouts. What workers keep:
// tests/clients/test_serving.py.
#include "reshard/serve/engine.h"

#include <gmock/gmock.h>

#include <numeric>
#include <string>

#include "reshard/serve/served_layout.h"

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(NameTail, MatchesTheEndOfAName) {
  const NameTail tail = NameTail::parse("experts.{expert}.up_proj.{x}").value();
  const auto match = tail.match("model.layers.0.mlp.experts.12.up_proj.weight");
  ASSERT_TRUE(match);
  EXPECT_EQ(match->expert, 12u);
  EXPECT_EQ(match->x, "weight");
  EXPECT_EQ(NameTail::parse("w13.{x}").value().put("model.layers.0.mlp.experts.12.up_proj.weight",
                                                   *match),
            "model.layers.0.mlp.w13.weight");
  for (const char* name : {"", ".", "up_proj.weight", "experts.1x.up_proj.weight",
                           "experts.01.up_proj.weight", "xexperts.1.up_proj.weight",
                           "experts.1.up_proj.weight.", "experts.99999999999.up_proj.weight"})
    EXPECT_FALSE(tail.match(name)) << name;
  EXPECT_TRUE(tail.match("experts.1.up_proj.weight"));
}

TEST(NameTail, RefusesWhatIsNoName) {
  for (const char* text : {"", ".", "a..b", "a.", "{y}", "a*.b", "{x", "a.{expert}x"})
    EXPECT_TRUE(NameTail::parse(text).has_error()) << text;
}

TEST(Engine, ThoseThatAreBuiltIn) {
  ASSERT_NE(Engine::find("vllm"), nullptr);
  EXPECT_EQ(Engine::find("vllm")->version(), "0.32");
  EXPECT_NE(Engine::find("vllm")->family("llama"), nullptr);
  EXPECT_EQ(Engine::find("vllm")->family("no such"), nullptr);
  EXPECT_EQ(Engine::find("nollm"), nullptr);
  EXPECT_EQ(Engine::find("vllm")->file_name(3, 0, 1), "model-rank-3-part-0.safetensors");
  EXPECT_EQ(Engine::find("vllm")->file_name(3, 1, 2), "model-pp-1-tp-3-part-0.safetensors");
}

TEST(Engine, VocabularyAndStages) {
  const Engine& engine = *Engine::find("vllm");
  EXPECT_EQ(engine.padded_vocabulary(1, 1).value(), 64u);
  EXPECT_EQ(engine.padded_vocabulary(128'256, 8).value(), 128'256u);
  EXPECT_EQ(engine.padded_vocabulary(50'257, 8).value(), 50'304u);
  EXPECT_THAT(engine.padded_vocabulary(64, 5).error().message(),
              HasSubstr("to 64, which tp = 5 does not divide"));
  EXPECT_THAT(engine.stages(7, 2), ElementsAre(4, 3));
  EXPECT_THAT(engine.stages(9, 4), ElementsAre(2, 2, 3, 2));
  for (uint32_t layers = 0; layers < 40; ++layers)
    for (uint32_t pp = 1; pp < 9; ++pp) {
      const std::vector<uint32_t> stages = engine.stages(layers, pp);
      EXPECT_EQ(std::accumulate(stages.begin(), stages.end(), 0u), layers);
    }
}

TEST(Engine, SglangPadsAVocabularyFurtherWhereTpDoesNotDivideIt) {
  const Engine& engine = *Engine::find("sglang");
  EXPECT_EQ(engine.padded_vocabulary(50'257, 8).value(), 50'304u);
  EXPECT_EQ(engine.padded_vocabulary(50'257, 6).value(), 50'304u);
  EXPECT_EQ(engine.padded_vocabulary(50'257, 5).value(), 50'560u);
  EXPECT_THAT(engine.stages(7, 2), ElementsAre(3, 4));
  EXPECT_THAT(engine.stages(9, 4), ElementsAre(2, 2, 2, 3));
  EXPECT_EQ(engine.file_name(3, 1, 2), "model-rank-3-part-0.safetensors");
  EXPECT_NE(engine.fp8_blocks(), nullptr);
  EXPECT_EQ(Engine::find("vllm")->fp8_blocks(), nullptr);
  EXPECT_THAT(engine.attention_types(), ElementsAre("qwen2_moe", "qwen3", "qwen3_moe"));
}

TEST(Engine, TablesThatAreWrong) {
  const std::string begin =
      R"({"format": "ptc-engine/1", "engine": "e", "file": "f", "file_of_stage": "g",
          "remaining_layers": "last")";
  EXPECT_TRUE(Engine::parse(begin + "}").has_value());
  for (const char* more :
       {R"(, "what": 1})", R"(, "joins": 1})", R"(, "joins": [{"to": "a"}]})",
        R"(, "joins": [{"to": "a", "of": ["b.{expert}", "c"]}]})", R"(, "unused": [1]})",
        R"(, "constants": [{"to": "a", "beside": "b"}]})", R"(, "families": [[]]})",
        R"(, "tied": {"head": "a"}})", R"(, "vocabulary_multiple": -1})", R"(, "sizes": "beside"})",
        R"(, "experts_of_neighbours": 1})", R"(, "fp8_blocks": []})",
        R"(, "fp8_blocks": {"joins": []}})", R"(, "families": [{"tied": "always"}]})",
        R"(, "families": [{"attention": ["a..b"]}]})", R"(, "vocabulary_times_tp": "yes"})"})
    EXPECT_TRUE(Engine::parse(begin + more).has_error()) << more;
  for (const char* text : {"", "[]", "{}", R"({"format": "ptc-engine/2"})"})
    EXPECT_TRUE(Engine::parse(text).has_error()) << text;
}

TEST(ServedLayout, OneLayoutHasOneName) {
  for (const char* name : {"vllm-tp1", "vllm-tp8", "vllm-tp2-pp3", "vllm-tp8-ep", "vllm-tp1-dp8-ep",
                           "vllm-tp4-pp2-dp2-ep", "sglang-tp1", "sglang-tp8-pp2-dp4-ep8",
                           "sglang-tp8-dp8", "sglang-tp6-ep3"}) {
    const auto layout = ServedLayout::from_name(name);
    ASSERT_TRUE(layout) << name;
    EXPECT_EQ(layout->name(), name);
  }
  for (const char* name : {"",
                           "vllm",
                           "vllm-",
                           "vllm-tp",
                           "vllm-tp0",
                           "vllm-tp01",
                           "vllm-tp1-pp1",
                           "vllm-tp1-dp2",
                           "vllm-tp1-ep",
                           "vllm-tp8-ep-pp2",
                           "vllm-tp8-",
                           "vllmx-tp8",
                           "tp1-pp1-dp1",
                           "vllm-tp1048576-pp2",
                           "vllm-tp99999999999999999999",
                           "sglang-tp8-ep",
                           "sglang-tp8-ep3",
                           "sglang-tp8-dp16",
                           "sglang-tp8-ep1",
                           "sglang-tp8-ep8-dp8",
                           "sglang-tp8x"})
    EXPECT_FALSE(ServedLayout::from_name(name)) << name;
}

TEST(ServedLayout, WorkersAreStates) {
  const ServedLayout layout = *ServedLayout::from_name("vllm-tp2-pp3-dp2-ep");
  ASSERT_EQ(layout.workers(), 12u);
  const LayoutSpec spec = layout.spec(7);
  EXPECT_EQ(spec.sizes.ep, 4u);
  EXPECT_EQ(spec.sizes.expert_tp(), 1u);
  EXPECT_THAT(spec.stages, ElementsAre(2, 3, 2));
  const StateCoords state = layout.state(9);  // dp 1, stage 1, tp 1
  EXPECT_EQ(state.tp, 1u);
  EXPECT_EQ(state.pp, 1u);
  EXPECT_EQ(state.ep, 3u);
  EXPECT_FALSE(layout.in_one_directory());
}

TEST(ServedLayout, GroupsOfAttentionAndOfExpertsShareTp) {
  const ServedLayout layout = *ServedLayout::from_name("sglang-tp8-pp2-dp2-ep4");
  ASSERT_EQ(layout.workers(), 16u);
  EXPECT_EQ(layout.attention_tp(), 4u);
  EXPECT_FALSE(layout.in_one_directory());
  const LayoutSpec spec = layout.spec(7);
  EXPECT_EQ(spec.sizes.tp, 8u);
  EXPECT_EQ(spec.sizes.ep, 4u);
  EXPECT_EQ(spec.sizes.expert_tp(), 2u);
  const StateCoords state = layout.state(13);  // stage 1, rank 5
  EXPECT_EQ(state.tp, 5u);
  EXPECT_EQ(state.pp, 1u);
  EXPECT_EQ(state.ep, 2u);
  EXPECT_EQ(state.etp, 1u);
  const ServedState group = layout.attention(7, 13);
  EXPECT_EQ(group.spec.sizes.tp, 4u);
  EXPECT_EQ(group.spec.sizes.ep, 1u);
  EXPECT_EQ(group.state.tp, 1u);
  EXPECT_EQ(group.state.pp, 1u);
}

TEST(ServedLayout, WhyThereIsNoSuchName) {
  for (const auto& [name, why] : {
           std::pair("nollm-tp2", "does not begin with the name of an engine"),
           std::pair("sglang-tp6-dp4", "are no 4 groups of as many; dp = 1, 2, 3, 6 would do"),
           std::pair("vllm-tp2-dp2", "-dp only with -ep"),
           std::pair("vllm-tp2-pp1", "is vllm-tp2, since a size of 1 is left out"),
       })
    EXPECT_THAT(ServedLayout::parse(name).error().message(), HasSubstr(why)) << name;
  EXPECT_TRUE(ServedLayout::is_name("sglang-"));
  EXPECT_FALSE(ServedLayout::is_name("sglang"));
  EXPECT_FALSE(ServedLayout::is_name("tp1-pp1-dp1"));
}

}  // namespace
}  // namespace ptc
