#include "reshard/ptc/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/json/object.hpp>
#include <string>

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string layout_error(const std::string& text) {
  const auto layout = Layout::parse(text);
  if (layout) return "accepted";
  EXPECT_EQ(layout.error().code(), Code::kInvalidArgument);
  return layout.error().message();
}

TEST(Layout, ReadsEveryKey) {
  const auto layout = Layout::parse(R"({
    "format": "ptc-layout/1", "tp": 2, "pp": 2, "dp": 1, "ep": 1, "cp": 1,
    "order": "pp-tp-cp-ep-dp", "devices": ["w0:0", "w0:1", "node-1.lan:0", "w1:15"],
    "stages": [3, 1], "naming": "stage", "optimizer": "zero1", "replicas": 1, "keep": 2 })");
  ASSERT_TRUE(layout.has_value()) << layout.error().message();
  const LayoutSpec& spec = layout.value().spec;
  EXPECT_EQ(spec.sizes, (ParallelConfig{.tp = 2, .pp = 2}));
  EXPECT_EQ(spec.order.to_string(), "pp-tp-cp-ep-dp");
  EXPECT_THAT(spec.stages, ElementsAre(3, 1));
  EXPECT_EQ(spec.naming, Naming::kStage);
  EXPECT_EQ(spec.optimizer, OptimizerCut::kZero1);
  EXPECT_THAT(layout.value().devices, ElementsAre("w0:0", "w0:1", "node-1.lan:0", "w1:15"));
  EXPECT_EQ(layout.value().replicas, 1u);
  EXPECT_EQ(layout.value().keep, 2u);
}

TEST(Layout, OnlyThreeSizesAreRequired) {
  const auto layout = Layout::parse(R"({"tp": 4, "pp": 2, "dp": 8})");
  ASSERT_TRUE(layout.has_value());
  EXPECT_EQ(layout.value().spec, (LayoutSpec{.sizes = {.tp = 4, .pp = 2, .dp = 8}}));
  EXPECT_THAT(layout_error(R"({"tp": 4, "pp": 2})"), HasSubstr("'dp' is missing"));
  EXPECT_THAT(layout_error("{}"), HasSubstr("'tp' is missing"));
}

TEST(Layout, TheDefaultTextIsOneRank) {
  const auto layout = Layout::parse(default_layout_text());
  ASSERT_TRUE(layout.has_value()) << layout.error().message();
  EXPECT_EQ(layout.value().spec, LayoutSpec());
}

TEST(Layout, SaysWhereAndWhatIsWrong) {
  const std::string sizes = R"("tp": 2, "pp": 1, "dp": 1)";
  EXPECT_THAT(layout_error("{\n  \"tpp\": 2, \"pp\": 1, \"dp\": 1}"),
              HasSubstr("line 2, column 3: unknown key 'tpp' (did you mean 'tp'?)"));
  EXPECT_THAT(layout_error("{\"tp\": 2, \"pp\": 1,\n  \"dp\": 0}"),
              HasSubstr("line 2, column 9: 'dp' must be a whole number from 1"));
  EXPECT_THAT(layout_error(R"({"tp": 2.5, "pp": 1, "dp": 1})"), HasSubstr("'tp' must be"));
  EXPECT_THAT(layout_error(R"({"tp": "2", "pp": 1, "dp": 1})"), HasSubstr("'tp' must be"));
  EXPECT_THAT(layout_error(R"({"tp": -2, "pp": 1, "dp": 1})"), HasSubstr("'tp' must be"));
  EXPECT_THAT(layout_error(R"({"tp": 1048576, "pp": 1048576, "dp": 1048576})"),
              HasSubstr("more than 1048576 ranks"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "devices": ["w0:0"]})"),
              HasSubstr("'devices' has 1 entries, but tp·pp·dp·ep·cp = 2 ranks"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "devices": ["w0:0", "w0"]})"),
              HasSubstr("\"node:index\""));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "devices": ["w0:0", "../x:1"]})"),
              HasSubstr("\"node:index\""));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "stages": [1, 2]})"), HasSubstr("pp is 1"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "stages": [0]})"), HasSubstr("at least 1"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "order": "tp-pp"})"), HasSubstr("order 'tp-pp'"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "naming": "local"})"), HasSubstr("'naming'"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "optimizer": "zero3"})"), HasSubstr("'optimizer'"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "format": "ptc-layout/2"})"),
              HasSubstr("ptc-layout/1"));
  EXPECT_THAT(layout_error("{" + sizes + R"(, "tp": 2})"), HasSubstr("line 1"));
  EXPECT_THAT(layout_error("[1, 2]"), HasSubstr("a layout is a JSON object"));
  EXPECT_THAT(layout_error("{" + sizes), HasSubstr("line 1"));
  EXPECT_THAT(layout_error(""), HasSubstr("line 1"));
}

TEST(LayoutSpec, NamesAndNamesReadBack) {
  LayoutSpec spec{.sizes = {.tp = 4, .pp = 2, .dp = 2}};
  EXPECT_EQ(spec.name(), "tp4-pp2-dp2");
  EXPECT_EQ(LayoutSpec::from_name("tp4-pp2-dp2").value(), spec);
  spec.sizes.ep = 4;
  spec.sizes.cp = 3;
  EXPECT_EQ(spec.name(), "tp4-pp2-dp2-ep4-cp3");
  EXPECT_EQ(LayoutSpec::from_name("tp4-pp2-dp2-ep4-cp3").value(), spec);
  spec.sizes.ep = 1;
  EXPECT_EQ(LayoutSpec::from_name("tp4-pp2-dp2-cp3").value(), spec);
}

TEST(LayoutSpec, StagesMayHaveSeveralStretchesOfLayers) {
  LayoutSpec spec{.sizes = {.tp = 2, .pp = 2, .ep = 4}, .vpp = 3};
  EXPECT_EQ(spec.name(), "tp2-pp2-dp1-ep4-vpp3");
  EXPECT_EQ(LayoutSpec::from_name("tp2-pp2-dp1-ep4-vpp3").value(), spec);
  EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  EXPECT_THAT(stage_boundaries(spec, 13).value(), ElementsAre(0, 3, 5, 7, 9, 11, 13));
  spec.stages = {1, 2, 1, 2, 1, 2};
  EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  EXPECT_THAT(stage_boundaries(spec, 9).value(), ElementsAre(0, 1, 3, 4, 6, 7, 9));
  EXPECT_THAT(layout_error(R"({"tp":1,"pp":2,"dp":1,"vpp":2,"stages":[4,4]})"),
              HasSubstr("'stages' has 2 entries, but pp·vpp is 4"));
  EXPECT_THAT(layout_error(R"({"tp":1,"pp":1,"dp":1,"vpp":2})"), HasSubstr("pp must be more"));
  EXPECT_THAT(layout_error(R"({"tp":1,"pp":2,"dp":1,"vpp":1048576})"), HasSubstr("more than"));
  EXPECT_THAT(layout_error(R"({"tp":1,"pp":2,"dp":1,"vpp":2,"naming":"stage"})"),
              HasSubstr("no numbers of its own"));
  for (const char* name : {"tp1-pp1-dp1-vpp2", "tp1-pp2-dp1-vpp1", "tp1-pp2-dp1-vpp2-ep2",
                           "tp1-pp2-dp1-vpp1048576", "tp1-pp2-dp1-vpp"})
    EXPECT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
}

TEST(LayoutSpec, OneLayoutHasOneName) {
  for (const char* name :
       {"", "tp1", "tp1-pp1", "tp01-pp1-dp1", "tp1-pp1-dp1-", "tp1-pp1-dp1-ep1", "tp0-pp1-dp1",
        "tp1-pp1-dp1-cp2-ep2", "pp1-tp1-dp1", "tp1-pp1-dp1+00000000", "tp1 -pp1-dp1", "TP1-pp1-dp1",
        "tp1-pp1-dp-1", "tp99999999999-pp1-dp1", "tp1048576-pp1048576-dp1", "tp+1-pp1-dp1"}) {
    EXPECT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
  }
}

TEST(LayoutSpec, OtherFieldsShowAsAHashThatNeverChanges) {
  LayoutSpec spec{.sizes = {.tp = 1, .pp = 2, .dp = 1}};
  spec.stages = {3, 5};
  const std::string stages_name = spec.name();
  EXPECT_EQ(stages_name, "tp1-pp2-dp1+0c73b331");
  spec.stages = {5, 3};
  EXPECT_NE(spec.name(), stages_name);
  spec.stages.clear();
  spec.naming = Naming::kStage;
  EXPECT_NE(spec.name(), "tp1-pp2-dp1");
}

TEST(LayoutSpec, JsonReadsBack) {
  LayoutSpec spec{.sizes = {.tp = 1, .pp = 2, .dp = 3, .ep = 4, .cp = 5}};
  EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  spec.order = RankOrder::parse("pp-dp-ep-cp-tp").value();
  spec.stages = {7, 8};
  spec.naming = Naming::kStage;
  spec.optimizer = OptimizerCut::kFsdp;
  EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  EXPECT_EQ(LayoutSpec().to_json().size(), 3u);
}

TEST(StageBoundaries, AsEvenAsPossibleTheFirstTakeTheRest) {
  const LayoutSpec four{.sizes = {.pp = 4}};
  EXPECT_THAT(stage_boundaries(four, 8).value(), ElementsAre(0, 2, 4, 6, 8));
  EXPECT_THAT(stage_boundaries(four, 126).value(), ElementsAre(0, 32, 64, 95, 126));
  EXPECT_THAT(stage_boundaries(four, 2).value(), ElementsAre(0, 1, 2, 2, 2));
  EXPECT_THAT(stage_boundaries(four, 0).value(), ElementsAre(0, 0, 0, 0, 0));
}

TEST(StageBoundaries, GivenStagesMustAddUp) {
  LayoutSpec spec{.sizes = {.pp = 2}};
  spec.stages = {3, 5};
  EXPECT_THAT(stage_boundaries(spec, 8).value(), ElementsAre(0, 3, 8));
  const auto wrong = stage_boundaries(spec, 9);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().message(), HasSubstr("adds up to 8 layers, but the model has 9"));
  spec.stages = {8};
  EXPECT_FALSE(stage_boundaries(spec, 8).has_value());
}

}  // namespace
}  // namespace ptc
