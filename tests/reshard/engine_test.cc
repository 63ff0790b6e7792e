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

TEST(Engine, TablesThatAreWrong) {
  const std::string begin =
      R"({"format": "ptc-engine/1", "engine": "e", "file": "f", "file_of_stage": "g",
          "remaining_layers": "last")";
  EXPECT_TRUE(Engine::parse(begin + "}").has_value());
  for (const char* more :
       {R"(, "what": 1})", R"(, "joins": 1})", R"(, "joins": [{"to": "a"}]})",
        R"(, "joins": [{"to": "a", "of": ["b.{expert}", "c"]}]})", R"(, "unused": [1]})",
        R"(, "constants": [{"to": "a", "beside": "b"}]})", R"(, "families": [[]]})",
        R"(, "tied": {"head": "a"}})", R"(, "vocabulary_multiple": -1})"})
    EXPECT_TRUE(Engine::parse(begin + more).has_error()) << more;
  for (const char* text : {"", "[]", "{}", R"({"format": "ptc-engine/2"})"})
    EXPECT_TRUE(Engine::parse(text).has_error()) << text;
}

TEST(ServedLayout, OneLayoutHasOneName) {
  for (const char* name : {"vllm-tp1", "vllm-tp8", "vllm-tp2-pp3", "vllm-tp8-ep", "vllm-tp1-dp8-ep",
                           "vllm-tp4-pp2-dp2-ep"}) {
    const auto layout = ServedLayout::from_name(name);
    ASSERT_TRUE(layout) << name;
    EXPECT_EQ(layout->name(), name);
  }
  for (const char* name :
       {"", "vllm", "vllm-", "vllm-tp", "vllm-tp0", "vllm-tp01", "vllm-tp1-pp1", "vllm-tp1-dp2",
        "vllm-tp1-ep", "vllm-tp8-ep-pp2", "vllm-tp8-", "vllmx-tp8", "tp1-pp1-dp1",
        "vllm-tp1048576-pp2", "vllm-tp99999999999999999999"})
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

}  // namespace
}  // namespace ptc
