#include "reshard/ptc/layout.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "reshard/ptc/model.h"
#include "reshard/ptc/rule_set.h"

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
    "stages": [3, 1], "naming": "stage", "optimizer": "zero1", "replicas": 1, "keep": 2,
    "memory": "device" })");
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
  EXPECT_TRUE(layout.value().in_devices);
}

TEST(Layout, MemoryIsTheHostsOrADevices) {
  const auto parse = [](const std::string& memory) {
    return Layout::parse(R"({"tp": 1, "pp": 1, "dp": 1, "memory": )" + memory + "}");
  };
  EXPECT_FALSE(Layout::parse(R"({"tp": 1, "pp": 1, "dp": 1})").value().in_devices);
  EXPECT_FALSE(parse("\"host\"").value().in_devices);
  EXPECT_TRUE(parse("\"device\"").value().in_devices);
  EXPECT_EQ(parse("\"device\"").value().spec, parse("\"host\"").value().spec);
  for (const char* bad : {"\"gpu\"", "\"cuda:0\"", "\"\"", "1", "true", "null"})
    EXPECT_THAT(parse(bad).error().message(), testing::HasSubstr("'memory'")) << bad;
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
  EXPECT_THAT(layout_error("{" + sizes + R"(, "stages": [-1]})"), HasSubstr("whole number"));
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

std::string stages_of(const std::string& stages, const std::string& sizes) {
  const auto layout = Layout::parse("{" + sizes + ", \"stages\": " + stages + "}");
  if (!layout) return layout.error().message();
  return boost::json::serialize(layout.value().spec.to_json().at("stages"));
}

TEST(LayoutSpec, SaysByNameWhatBelongsToNoLayer) {
  const std::string two = R"("tp": 1, "pp": 2, "dp": 1)", four = R"("tp": 1, "pp": 4, "dp": 1)";
  EXPECT_EQ(stages_of("[3, 5]", two), "[3,5]");
  EXPECT_EQ(stages_of(R"([["embedding", 3], [5, "head"]])", two),
            "[3,5]");  // where they are anyhow
  EXPECT_EQ(stages_of(R"([["embedding"], 3, [5], ["head"]])", four), "[0,3,5,0]");
  EXPECT_EQ(stages_of(R"([3, [1, "embedding"], ["head", 4], []])", four),
            R"([3,["embedding",1],[4,"head"],0])");
  EXPECT_EQ(stages_of(R"([3, 3, 2, ["mtp", "head"]])", four), R"([3,3,2,["mtp"]])");
  EXPECT_EQ(stages_of(R"("Et*3|(t*2t|)*2mL")", four), R"([3,3,3,["mtp"]])");
  EXPECT_EQ(stages_of(R"("Et, t*2 | ttt|m|L")", four), R"([3,3,["mtp"],0])");
  EXPECT_EQ(stages_of(R"("E|(t|)*6L")", R"("tp": 1, "pp": 2, "dp": 1, "vpp": 4)"),
            "[0,1,1,1,1,1,1,0]");
  const auto named = [&](const std::string& stages) {
    return Layout::parse("{" + four + ", \"stages\": " + stages + "}").value().spec;
  };
  const LayoutSpec plain = named("[3, 3, 2, 0]"), head = named(R"([3, 3, [2, "head"], 0])");
  EXPECT_EQ(plain.name(), named(R"("Et*3|t*3|t*2|L")").name());
  EXPECT_NE(plain.name(), head.name());
  EXPECT_EQ(head.head_stage(), 2u);
  EXPECT_EQ(LayoutSpec::from_json(head.to_json()).value(), head);
  const LayoutSpec mtp = named(R"([3, 3, 2, ["mtp", "mtp", "head"]])");
  EXPECT_EQ(LayoutSpec::from_json(mtp.to_json()).value(), mtp);
  EXPECT_EQ(mtp.mtp_layers, 2u);
  // Their numbers may be those behind the layers'.
  EXPECT_THAT(stage_boundaries(mtp, 8).value(), ElementsAre(0, 3, 6, 8, 8));
  EXPECT_THAT(stage_boundaries(mtp, 10).value(), ElementsAre(0, 3, 6, 8, 10));
  EXPECT_FALSE(stage_boundaries(mtp, 9).has_value());
  EXPECT_FALSE(stage_boundaries(named(R"([3, ["mtp", 3], 2, 0])"), 9).has_value());
  LayoutSpec forgotten = mtp;
  forgotten.forget_stages();
  EXPECT_EQ(forgotten, (LayoutSpec{.sizes = {.pp = 4}}));
}

TEST(LayoutSpec, WhatIsWrongWithStagesIsSaid) {
  const std::string two = R"("tp": 1, "pp": 2, "dp": 1)";
  for (const auto& [stages, why] : std::vector<std::pair<std::string, std::string>>{
           {R"([["embedding", 3], ["embedding", 5]])", "has the embedding twice"},
           {R"([["head", "head"], 5])", "has the head twice"},
           {R"([["mtp", 3], [5, "mtp"]])", "\"mtp\" on two stages"},
           {R"([[3, 4], 5])", "must be a whole number, or a list"},
           {R"([["tail"], 5])", "must be a whole number, or a list"},
           {R"([[[3]], 5])", "must be a whole number, or a list"},
           {R"("Et*3|t*4|t*3L")", "has 3 entries, but pp is 2"},
           {R"("Ettx|tL")", "at character 4: expected E, t, m, L"},
           {R"("E(tt|tL")", "at character 8: ')' is missing"},
           {R"("Et)|tL")", "at character 3: ')' closes nothing"},
           {R"("Et*|tL")", "'*' wants a number"},
           {R"("Et*0|tL")", "'*' wants a number"},
           {R"("Et*99999999999|tL")", "'*' wants a number"},
           {R"("(((((((((((((((((t)))))))))))))))))|L")", "too many parentheses"},
           {R"("((t*1000000)*1000000)*1000000|L")", "too many layers"},
           {R"("((t|)*1000000)*1000000")", "more than 1048576 stages"},
           {R"("E|L|E")", "has 3 entries"},
           {R"(7)", "must be a list"}})
    EXPECT_THAT(stages_of(stages, two), HasSubstr(why)) << stages;
}

TEST(LayoutSpec, MayHaveRulesOfItsOwn) {
  LayoutSpec spec{.sizes = {.tp = 2, .pp = 2}, .naming = Naming::kStage};
  const LayoutSpec plain = spec;
  spec.rules = LayoutRules(RuleSet::builtin("gpt2").value());
  EXPECT_EQ(spec.name(), "tp2-pp2-dp1-naming_stage-rules_" + spec.rules.id());
  EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  EXPECT_NE(spec, plain);
  LayoutSpec other = spec;
  other.rules = LayoutRules(RuleSet::builtin("llama").value());
  EXPECT_NE(spec, other);
  other.rules = LayoutRules(RuleSet::parse(spec.rules.text()).value());
  EXPECT_EQ(spec, other);
  EXPECT_EQ(LayoutSpec::rules_in_name(spec.name()), spec.rules.id());
  EXPECT_FALSE(LayoutSpec::from_name(spec.name()).has_value()) << "it does not say all";
  spec.stages = {1, 3};
  EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  EXPECT_THAT(spec.name(), HasSubstr(spec.rules.id() + "+"));
  EXPECT_EQ(LayoutSpec::rules_in_name(spec.name()), "");
  EXPECT_THAT(layout_error(R"({"tp":1,"pp":1,"dp":1,"rules":"0A1B2C3D"})"), HasSubstr("'rules'"));
  EXPECT_THAT(layout_error(R"({"tp":1,"pp":1,"dp":1,"rules":7})"), HasSubstr("'rules'"));
  EXPECT_EQ(Layout::parse(R"({"tp":1,"pp":1,"dp":1,"rules":"0a1b2c3d"})").value().rules,
            "0a1b2c3d");
}

TEST(LayoutSpec, StateMayBeCutAmongNeighboursAlone) {
  const std::string sizes = R"({"tp":2,"pp":1,"dp":12)";
  for (const auto& [cut, name] :
       {std::pair("fsdp", OptimizerCut::kFsdp), std::pair("zero1", OptimizerCut::kZero1)}) {
    const auto layout =
        Layout::parse(fmt::format(R"({},"optimizer":"{}","dp_shard":4}})", sizes, cut));
    ASSERT_TRUE(layout.has_value()) << layout.error().message();
    const LayoutSpec& spec = layout.value().spec;
    EXPECT_EQ(spec.optimizer, name);
    EXPECT_EQ(spec.dp_shard, 4u);
    EXPECT_EQ(spec.dp_parts(), 4u);
    EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
    EXPECT_EQ(state_count(spec), 8u);
    for (uint64_t rank = 0; rank < 24; ++rank)
      EXPECT_EQ(state_of(spec, spec.coords(rank)).dp, rank / 2 % 4) << rank;
  }
  // All of them: one name for one layout.
  EXPECT_EQ(Layout::parse(sizes + R"(,"optimizer":"fsdp","dp_shard":12})").value().spec,
            Layout::parse(sizes + R"(,"optimizer":"fsdp"})").value().spec);
  EXPECT_THAT(layout_error(sizes + R"(,"optimizer":"fsdp","dp_shard":5})"),
              HasSubstr("does not divide dp = 12"));
  EXPECT_THAT(layout_error(sizes + R"(,"optimizer":"fsdp","dp_shard":0})"),
              HasSubstr("whole number from 1"));
  EXPECT_THAT(layout_error(sizes + R"(,"dp_shard":4})"), HasSubstr("'optimizer' cuts none"));
}

TEST(LayoutSpec, StateMayBeCutOverContextParallelRanksToo) {
  const auto dp_of = [](const LayoutSpec& spec) {
    std::vector<uint32_t> parts;
    for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank)
      parts.push_back(state_of(spec, spec.coords(rank)).dp);
    return parts;
  };
  const std::string sizes = R"({"tp":2,"pp":1,"dp":2,"cp":2)";
  for (const auto& [cut, name] : {std::pair("fsdp", "tp2-pp1-dp2-cp2-fsdp-over_cp"),
                                  {"zero1", "tp2-pp1-dp2-cp2-zero1-over_cp"}})
    for (const char* over : {R"(["cp"])", R"(["dp","cp"])"}) {
      const auto layout =
          Layout::parse(fmt::format(R"({},"optimizer":"{}","shard_over":{}}})", sizes, cut, over));
      ASSERT_TRUE(layout.has_value()) << layout.error().message();
      const LayoutSpec& spec = layout.value().spec;
      EXPECT_EQ(spec.name(), name);
      EXPECT_EQ(LayoutSpec::from_name(name).value(), spec);
      EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
      EXPECT_EQ(spec.dp_parts(), 4u);
      EXPECT_EQ(state_count(spec), 8u);
      EXPECT_EQ(dp_of(spec), (std::vector<uint32_t>{0, 0, 1, 1, 2, 2, 3, 3}));
    }
  // By global ranks, whichever of the two is faster; with neighbours, the context is in each.
  const auto read = [](std::string_view name) { return LayoutSpec::from_name(name).value(); };
  EXPECT_EQ(dp_of(read("tp1-pp1-dp3-cp2-fsdp-over_cp-order_tp_dp_cp_ep_pp")),
            (std::vector<uint32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(dp_of(read("tp1-pp1-dp2-ep2-cp2-zero1-over_cp")),
            (std::vector<uint32_t>{0, 1, 0, 1, 2, 3, 2, 3}));
  EXPECT_EQ(dp_of(read("tp1-pp1-dp4-cp2-shard2-fsdp-over_cp")),
            (std::vector<uint32_t>{0, 1, 2, 3, 0, 1, 2, 3}));
  EXPECT_EQ(rank_of(read("tp1-pp1-dp4-cp2-shard2-fsdp-over_cp"), {.dp = 3}), 3u);
  // Where it changes nothing, it is not there.
  for (const char* over :
       {R"("cp":1,"shard_over":["cp"])", R"("shard_over":["dp"])", R"("shard_over":[])"})
    EXPECT_EQ(Layout::parse(fmt::format(R"({{"tp":1,"pp":1,"dp":2,"optimizer":"fsdp",{}}})", over))
                  .value()
                  .spec.name(),
              "tp1-pp1-dp2-fsdp");
  for (const auto& [more, why] : {
           std::pair(R"("shard_over":["cp"])", "'optimizer' cuts none"),
           {R"("optimizer":"fsdp","shard_over":"cp")", "must be a list"},
           {R"("optimizer":"fsdp","shard_over":["tp"])", "'shard_over' may have"},
           {R"("optimizer":"fsdp","shard_over":[1])", "'shard_over' may have"},
           {R"("optimizer":"fsdp","dp_shard":1,"order":"tp-dp-cp-ep-pp","shard_over":["cp"])",
            "cp must stand before dp in 'order', which is \"tp-dp-cp-ep-pp\""},
       })
    EXPECT_THAT(layout_error(fmt::format("{},{}}}", sizes, more)), HasSubstr(why));
  for (const char* name :
       {"tp1-pp1-dp2-cp2-over_cp", "tp1-pp1-dp2-fsdp-over_cp", "tp1-pp1-dp2-cp2-over_cp-fsdp",
        "tp1-pp1-dp2-cp2-fsdp-over_dp", "tp1-pp1-dp2-cp2-fsdp-over_", "tp1-pp1-dp2-cp2-fsdp-over",
        "tp1-pp1-dp2-cp2-fsdp-over_cp-over_cp", "tp1-pp1-dp2-cp2-fsdp-over_cp_cp",
        "tp1-pp1-dp2-cp2-fsdp-over_ep", "tp1-pp1-dp2-ep2-cp2-fsdp-over_ep_cp",
        "tp1-pp1-dp2-ep2-fsdp-over_cp_ep", "tp2-pp1-dp2-ep2-etp1-fsdp-over_ep",
        "tp4-pp1-dp2-ep2-etp1-fsdp-over_ep"})
    EXPECT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
}

TEST(LayoutSpec, StateThatEpDoesNotCutMayBeCutOverItsRanks) {
  const auto read = [](std::string_view name) { return LayoutSpec::from_name(name).value(); };
  for (const auto& [name, experts, dense] : {
           std::tuple("tp2-pp1-dp2-ep4-zero1-over_ep", 2u, 8u),
           {"tp2-pp1-dp2-ep4-cp3-fsdp-over_cp_ep", 6u, 24u},
           {"tp2-pp1-dp2-ep4-cp3-fsdp-over_ep", 2u, 8u},
           {"tp1-pp1-dp4-ep2-shard2-fsdp-over_ep", 2u, 4u},
           {"tp2-pp1-dp3-ep4-etp1-zero1-over_ep", 3u, 6u},
           {"tp1-pp1-dp3-ep2-etp2-zero1-over_ep", 3u, 12u},
       }) {
    const LayoutSpec spec = read(name);
    EXPECT_EQ(spec.name(), name);
    EXPECT_EQ(spec.dp_parts(), experts) << name;
    EXPECT_EQ(spec.dense_parts(), dense) << name;
    EXPECT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec);
  }
  const std::string sizes = R"({"tp":2,"pp":1,"dp":2,"ep":2,"optimizer":"zero1","shard_over":)";
  EXPECT_EQ(Layout::parse(sizes + R"(["ep","dp"]})").value().spec.name(),
            "tp2-pp1-dp2-ep2-zero1-over_ep");
  EXPECT_EQ(Layout::parse(sizes + R"(["ep","cp"]})").value().spec.name(),
            "tp2-pp1-dp2-ep2-zero1-over_ep");
  EXPECT_EQ(Layout::parse(sizes + R"(["ep"],"etp":1})").value().spec.name(),
            "tp2-pp1-dp2-ep2-etp1-zero1")
      << "each rank of ep has another part of a tp group's";
  EXPECT_THAT(layout_error(sizes + R"(["ep"],"dp_shard":1,"order":"tp-dp-ep-cp-pp"})"),
              HasSubstr("ep must stand before dp"));
}

TEST(LayoutSpec, ExpertsMayBeCutByTheirOwnTp) {
  const auto spec_of = [](const std::string& text) {
    const auto layout = Layout::parse(text);
    EXPECT_TRUE(layout.has_value()) << layout.error().message();
    return layout.has_value() ? layout.value().spec : LayoutSpec();
  };
  // Eight ranks of Megatron-Core's: whole experts, and all else in quarters.
  const LayoutSpec whole = spec_of(R"({"tp":4,"pp":1,"dp":1,"ep":8,"etp":1})");
  EXPECT_EQ(whole.name(), "tp4-pp1-dp1-ep8-etp1");
  EXPECT_EQ(whole.sizes.world_size(), 8u);
  EXPECT_EQ(state_count(whole), 8u);
  EXPECT_EQ(whole.coords(5), (RankCoords{.tp = 1, .ep = 5}));
  // Experts in halves, and all else whole.
  const LayoutSpec halves = spec_of(R"({"tp":1,"pp":2,"dp":2,"ep":2,"etp":2})");
  EXPECT_EQ(halves.sizes.world_size(), 16u);
  EXPECT_EQ(state_count(halves), 8u);
  EXPECT_EQ(halves.coords(13), (RankCoords{.pp = 1, .dp = 1, .etp = 1}));
  EXPECT_EQ(halves.coords(15), (RankCoords{.pp = 1, .dp = 1, .ep = 1, .etp = 1}));
  // Fewer expert ranks than tp has: their replicas are different ranks of tp.
  const LayoutSpec few = spec_of(R"({"tp":4,"pp":1,"dp":4,"ep":2,"etp":1})");
  EXPECT_EQ(state_count(few), 4u);
  EXPECT_EQ(few.coords(7), (RankCoords{.tp = 3, .dp = 1, .ep = 1}));
  EXPECT_FALSE(few.order.rank_at(few.sizes, {.tp = 1, .ep = 0}).has_value());
  EXPECT_FALSE(few.order.rank_at(few.sizes, {.tp = 3, .dp = 2, .ep = 1}).has_value());
  EXPECT_EQ(spec_of(R"({"tp":4,"pp":1,"dp":1,"etp":4})"), spec_of(R"({"tp":4,"pp":1,"dp":1})"));
  for (const auto& [text, why] : {
           std::pair(R"("dp":3,"ep":2,"etp":1)", "etp·ep·dp·cp = 6 ranks, which tp = 4 does not"),
           {R"("dp":2,"cp":2,"etp":1)", "which tp·cp = 8 does not"},
           {R"("dp":4,"etp":1,"order":"pp-tp-cp-ep-dp")", "'order' must be"},
           {R"("dp":4,"etp":2,"optimizer":"zero1")",
            "where tp divides etp·ep: 4 does not divide 2"},
           {R"("dp":4,"etp":0)", "whole number from 1"},
       })
    EXPECT_THAT(layout_error(fmt::format(R"({{"tp":4,"pp":1,{}}})", text)), HasSubstr(why));
  for (const char* name : {"tp4-pp1-dp1-etp4", "tp4-pp1-dp3-ep2-etp1", "tp4-pp1-dp4-etp2-ep2",
                           "tp4-pp1-dp4-etp2-zero1", "tp4-pp1-dp4-etp0"})
    EXPECT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
}

TEST(LayoutSpec, NamesSayAllButLists) {
  const std::string sizes = R"({"tp":2,"pp":2,"dp":8)";
  for (const auto& [more, name] : {
           std::pair(R"("optimizer":"fsdp")", "tp2-pp2-dp8-fsdp"),
           {R"("optimizer":"zero1")", "tp2-pp2-dp8-zero1"},
           {R"("optimizer":"fsdp","dp_shard":8)", "tp2-pp2-dp8-fsdp"},
           {R"("optimizer":"fsdp","dp_shard":4)", "tp2-pp2-dp8-shard4-fsdp"},
           {R"("optimizer":"zero1","dp_shard":1,"ep":3,"cp":5)",
            "tp2-pp2-dp8-ep3-cp5-shard1-zero1"},
           {R"("naming":"stage")", "tp2-pp2-dp8-naming_stage"},
           {R"("order":"pp-tp-cp-ep-dp","vpp":2)", "tp2-pp2-dp8-vpp2-order_pp_tp_cp_ep_dp"},
           {R"("order":"tp-cp-ep-dp-pp")", "tp2-pp2-dp8"},
           {R"("optimizer":"fsdp","naming":"stage","order":"dp-tp-cp-ep-pp")",
            "tp2-pp2-dp8-fsdp-naming_stage-order_dp_tp_cp_ep_pp"},
       }) {
    const auto layout = Layout::parse(fmt::format("{},{}}}", sizes, more));
    ASSERT_TRUE(layout.has_value()) << layout.error().message();
    EXPECT_EQ(layout.value().spec.name(), name);
    EXPECT_EQ(LayoutSpec::from_name(name).value(), layout.value().spec);
  }
  const auto listed = Layout::parse(sizes + R"(,"optimizer":"fsdp","stages":[3,5]})");
  EXPECT_EQ(listed.value().spec.name(), "tp2-pp2-dp8-fsdp+0c73b331");
}

/// Any that layout.json can say.
LayoutSpec random_spec(std::mt19937_64& random) {
  const auto any = [&](auto... values) {
    return std::array{values...}[random() % sizeof...(values)];
  };
  LayoutSpec spec;
  for (uint32_t* size :
       {&spec.sizes.tp, &spec.sizes.pp, &spec.sizes.dp, &spec.sizes.ep, &spec.sizes.cp})
    *size = any(1u, 1u, 2u, 3u, 8u, 12u);
  if (random() % 2 == 0) spec.sizes.etp = any(0u, 1u, 2u, 3u, 4u);
  if (spec.sizes.etp == spec.sizes.tp) spec.sizes.etp = 0;
  if (random() % 2 == 0) spec.naming = Naming::kStage;
  else if (spec.sizes.pp > 1) spec.vpp = any(1u, 2u, 10u);
  spec.optimizer = any(OptimizerCut::kReplicated, OptimizerCut::kZero1, OptimizerCut::kFsdp);
  const uint32_t shard = any(0u, 1u, 2u, 4u);
  if (spec.dp_parts() > 1 && shard < spec.sizes.dp && (shard == 0 || spec.sizes.dp % shard == 0))
    spec.dp_shard = shard;
  if (spec.optimizer != OptimizerCut::kReplicated) {
    spec.shard_cp = spec.sizes.cp > 1 && random() % 2 == 0;
    spec.shard_ep = spec.ep_copies() > 1 && random() % 2 == 0;
  }
  if (spec.sizes.etp == 0 && random() % 2 == 0) {
    std::vector<std::string> dims = {"tp", "cp", "ep", "dp", "pp"};
    std::shuffle(dims.begin(), dims.end(), random);
    spec.order = RankOrder::parse(fmt::format("{}", fmt::join(dims, "-"))).value();
  }
  return spec;
}

/// The parts of a name in another order, one left out, one twice, one with another number.
std::string changed(std::string name, std::mt19937_64& random) {
  std::vector<std::string> parts;
  std::istringstream text(name);
  for (std::string part; std::getline(text, part, '-');) parts.push_back(part);
  const size_t at = random() % parts.size();
  switch (random() % 4) {
    case 0:
      std::shuffle(parts.begin(), parts.end(), random);
      break;
    case 1:
      parts.erase(parts.begin() + static_cast<ptrdiff_t>(at));
      break;
    case 2:
      parts.push_back(parts[at]);
      break;
    default:
      parts[at] += std::string(1, "0123456789_+-"[random() % 13]);
  }
  return fmt::format("{}", fmt::join(parts, "-"));
}

TEST(LayoutSpec, AnyLayoutIsReadBackOfItsName) {
  const char* given = std::getenv("PTC_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::cout << "PTC_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  std::map<std::string, LayoutSpec> known;
  int with_etp = 0, with_cp = 0, with_ep = 0;
  for (int i = 0; i < 20000; ++i) {
    const LayoutSpec spec = random_spec(random);
    const std::string name = spec.name();
    if (LayoutSpec::from_json(spec.to_json()).has_error()) {  // ranks do not divide, or are apart
      ASSERT_TRUE(spec.sizes.etp != 0 || ((spec.shard_cp || spec.shard_ep) && spec.dp_shard != 0))
          << name;
      ASSERT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
      continue;
    }
    with_etp += spec.sizes.etp != 0;
    with_cp += spec.shard_cp;
    with_ep += spec.shard_ep;
    ASSERT_EQ(name.find('+'), name.npos);
    const auto again = LayoutSpec::from_name(name);
    ASSERT_TRUE(again.has_value()) << again.error().message();
    ASSERT_EQ(again.value(), spec) << name;
    ASSERT_EQ(LayoutSpec::from_json(spec.to_json()).value(), spec) << name;
    ASSERT_EQ(known.try_emplace(name, spec).first->second, spec) << name;
    // Whatever else is read as a layout is the name of that one.
    const std::string other = changed(name, random);
    if (const auto read = LayoutSpec::from_name(other)) {
      ASSERT_EQ(read.value().name(), other);
    }
  }
  EXPECT_GT(with_etp, 100);
  EXPECT_GT(with_cp, 100);
  EXPECT_GT(with_ep, 100);
}

TEST(LayoutSpec, OneLayoutHasOneName) {
  for (const char* name :
       {"", "tp1", "tp1-pp1", "tp01-pp1-dp1", "tp1-pp1-dp1-", "tp1-pp1-dp1-ep1", "tp0-pp1-dp1",
        "tp1-pp1-dp1-cp2-ep2", "pp1-tp1-dp1", "tp1-pp1-dp1+00000000", "tp1 -pp1-dp1", "TP1-pp1-dp1",
        "tp1-pp1-dp-1", "tp99999999999-pp1-dp1", "tp1048576-pp1048576-dp1", "tp+1-pp1-dp1"}) {
    EXPECT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
  }
  std::istringstream others(
      "fsdp-shard4 shard4 shard8-fsdp shard3-fsdp shard0-fsdp shard01-fsdp zero1-fsdp fsdp-fsdp "
      "fsdp1 zero replicated FSDP fsdp- fsdp-ep2 naming_global naming_ naming_stage-fsdp "
      "vpp2-naming_stage order order_ order_tp_cp_ep_dp_pp order_pp-tp-cp-ep-dp "
      "order_pp_tp_cp_ep_dp_ order_pp_tp_cp_ep order_pp_tp_cp_ep_dp-fsdp fsdp+00000000");
  for (std::string part; others >> part;) {
    const std::string name = "tp1-pp2-dp8-" + part;
    EXPECT_FALSE(LayoutSpec::from_name(name).has_value()) << name;
  }
}

TEST(LayoutSpec, StagesShowAsAHashThatNeverChanges) {
  LayoutSpec spec{.sizes = {.tp = 1, .pp = 2, .dp = 1}};
  spec.stages = {3, 5};
  const std::string stages_name = spec.name();
  EXPECT_EQ(stages_name, "tp1-pp2-dp1+0c73b331");
  spec.stages = {5, 3};
  EXPECT_NE(spec.name(), stages_name);
  spec.stages.clear();
  EXPECT_EQ(spec.name(), "tp1-pp2-dp1");
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
  spec.stages = {0, 8};
  EXPECT_THAT(stage_boundaries(spec, 8).value(), ElementsAre(0, 0, 8));
  const auto wrong = stage_boundaries(spec, 9);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().message(), HasSubstr("adds up to 8 layers, but the model has 9"));
  spec.stages = {8};
  EXPECT_FALSE(stage_boundaries(spec, 8).has_value());
}

}  // namespace
}  // namespace ptc
