// What of a plan gets a bar in its picture.
#include "reshard/move/plan_report.h"

#include <gmock/gmock.h>

namespace ptc {
namespace {

using ::testing::ElementsAre;
using Kind = PlanPicture::Kind;

LayoutSpec spec(uint32_t tp, uint32_t pp, uint32_t dp, uint32_t ep = 1) {
  LayoutSpec spec;
  spec.sizes = {.tp = tp, .pp = pp, .dp = dp, .ep = ep};
  return spec;
}

/// One image of 1000 bytes for each state.
StoredState stored(const LayoutSpec& spec) {
  StoredState stored;
  stored.spec = spec;
  std::vector<ImageLayout> layouts;
  for (uint32_t state = 0; state < state_count(spec); ++state) {
    stored.images.push_back({.state = state, .path = "model.safetensors"});
    layouts.push_back({.bytes = 1000});
  }
  stored.held =
      std::make_shared<const StoredLayouts>(std::move(layouts), std::vector<uint8_t>(), "");
  return stored;
}

/// A target of 100 bytes for each state, all from the first image.
ChangePlan change(const LayoutSpec& to) {
  ChangePlan change;
  for (uint32_t state = 0; state < state_count(to); ++state) {
    change.targets.push_back({"model.safetensors", {.bytes = 100}, state});
    ImagePlan plan;
    plan.transfers.push_back({0, {.run_bytes = 100}});
    change.transfers.images.push_back(plan);
  }
  return change;
}

std::vector<std::string> labels(const std::vector<PlanPicture::Block>& blocks) {
  std::vector<std::string> labels;
  for (const PlanPicture::Block& block : blocks) labels.push_back(block.label);
  return labels;
}

TEST(PlanReport, RanksThatShareFilesShareABar) {
  const LayoutSpec from = spec(2, 1, 3), to = spec(1, 2, 5);
  PlanPicture picture = picture_of(stored(from), to, change(to));
  EXPECT_THAT(labels(picture.sources), ElementsAre("ranks 0, 2, 4", "ranks 1, 3, 5"));
  EXPECT_THAT(labels(picture.targets), ElementsAre("ranks 0, 1 … 4", "ranks 5, 6 … 9"));
  EXPECT_EQ(picture.sources[1].detail, "tp 1");
  EXPECT_EQ(picture.targets[1].detail, "pp 1");
  EXPECT_EQ(picture.sources[0].bytes, 1000u);
  ASSERT_EQ(picture.flows.size(), 2u);
  EXPECT_EQ(picture.flows[1].target, 1u);
  EXPECT_EQ(picture.flows[1].bytes, 100u);
  EXPECT_EQ(picture.flows[1].kind, Kind::kLocal);
}

TEST(PlanReport, WhatStaysFlowsStraightOn) {
  const LayoutSpec from = spec(2, 2, 1), to = spec(2, 2, 4);
  ChangePlan nothing;
  nothing.same_states = true;
  PlanPicture picture = picture_of(stored(from), to, nothing);
  ASSERT_EQ(picture.flows.size(), 4u);
  for (const PlanPicture::Flow& flow : picture.flows) {
    EXPECT_EQ(flow.source, flow.target);
    EXPECT_EQ(flow.kind, Kind::kKept);
    EXPECT_EQ(flow.bytes, 1000u);
  }
}

TEST(PlanReport, BytesOfAnotherNodeAreMoved) {
  const LayoutSpec from = spec(1, 1, 1), to = spec(1, 1, 1);
  ChangePlan plan = change(to);
  plan.targets[0].layout.node = 1;
  EXPECT_EQ(picture_of(stored(from), to, plan).flows.at(0).kind, Kind::kMoved);
}

TEST(PlanReport, ManyStatesArePutTogether) {
  const LayoutSpec from = spec(8, 16, 2), to = spec(8, 100, 1, 2);
  PlanPicture picture = picture_of(stored(from), to, change(to));
  ASSERT_EQ(picture.sources.size(), 16u);
  EXPECT_EQ(picture.sources[3].label, "stage 3");
  EXPECT_EQ(picture.sources[3].detail, "8 states");
  EXPECT_EQ(picture.sources[3].bytes, 8000u);
  ASSERT_EQ(picture.targets.size(), 50u);
  EXPECT_EQ(picture.targets[1].label, "stages 2–3");
  EXPECT_EQ(picture.targets[1].detail, "32 states");

  const LayoutSpec wide = spec(130, 1, 1);
  picture = picture_of(stored(wide), to, change(to));
  ASSERT_EQ(picture.sources.size(), 44u);
  EXPECT_EQ(picture.sources.front().label, "states 0–2");
  EXPECT_EQ(picture.sources.back().label, "state 129");
}

}  // namespace
}  // namespace ptc
