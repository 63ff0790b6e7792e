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

/// Bytes of the one tensor there is, from number `begin` on.
ArraySlot bytes_from(uint64_t begin, uint64_t count) {
  return {0, 0, {{count}, {{Box{{begin}, {count}}, Dims(1)}}}};
}

/// One image of 1000 bytes for each state; the first has a tensor.
StoredState stored(const LayoutSpec& spec) {
  StoredState stored;
  stored.spec = spec;
  std::vector<ImageLayout> layouts;
  for (uint32_t state = 0; state < state_count(spec); ++state) {
    stored.images.push_back({.state = state, .path = "model.safetensors"});
    layouts.push_back({.bytes = 1000});
  }
  layouts[0].arrays.push_back(bytes_from(0, 1000));
  stored.held =
      std::make_shared<const StoredLayouts>(std::move(layouts), std::vector<uint8_t>{8}, "");
  return stored;
}

/// A target of 100 bytes for each state, all from the first image.
ChangePlan change(const StoredState& stored, const LayoutSpec& to, uint32_t node = 0) {
  ChangePlan change;
  change.held = stored.held;
  std::vector<ImageLayout> layouts;
  for (uint32_t state = 0; state < state_count(to); ++state) {
    ImageLayout layout{.node = node, .bytes = 100};
    layout.arrays.push_back(bytes_from(state % 10, 100));
    change.targets.push_back({"model.safetensors", layout, state});
    layouts.push_back(layout);
  }
  change.transfers = plan_transfers(stored.index(), layouts).value();
  return change;
}

std::vector<std::string> labels(const std::vector<PlanPicture::Block>& blocks) {
  std::vector<std::string> labels;
  for (const PlanPicture::Block& block : blocks) labels.push_back(block.label);
  return labels;
}

TEST(PlanReport, RanksThatShareFilesShareABar) {
  const LayoutSpec from = spec(2, 1, 3), to = spec(1, 2, 5);
  const StoredState held = stored(from);
  PlanPicture picture = picture_of(held, to, change(held, to));
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
  const StoredState held = stored(from);
  EXPECT_EQ(picture_of(held, to, change(held, to, 1)).flows.at(0).kind, Kind::kMoved);
}

TEST(PlanReport, ManyStatesArePutTogether) {
  const LayoutSpec from = spec(8, 16, 2), to = spec(8, 100, 1, 2);
  const StoredState held = stored(from);
  PlanPicture picture = picture_of(held, to, change(held, to));
  ASSERT_EQ(picture.sources.size(), 16u);
  EXPECT_EQ(picture.sources[3].label, "stage 3");
  EXPECT_EQ(picture.sources[3].detail, "8 states");
  EXPECT_EQ(picture.sources[3].bytes, 8000u);
  ASSERT_EQ(picture.targets.size(), 50u);
  EXPECT_EQ(picture.targets[1].label, "stages 2–3");
  EXPECT_EQ(picture.targets[1].detail, "32 states");

  const LayoutSpec wide = spec(130, 1, 1);
  const StoredState many = stored(wide);
  picture = picture_of(many, to, change(many, to));
  ASSERT_EQ(picture.sources.size(), 44u);
  EXPECT_EQ(picture.sources.front().label, "states 0–2");
  EXPECT_EQ(picture.sources.back().label, "state 129");
}

}  // namespace
}  // namespace ptc
