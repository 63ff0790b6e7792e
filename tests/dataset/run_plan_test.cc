#include "dataset/plan/run_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/base/json.h"

namespace ptc {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

RunPlan begun(const OrderSpec& order, uint64_t samples, uint64_t dp) {
  return RunPlan::begin(order, samples, 0xabc, dp, 1).value();
}
std::vector<std::vector<uint64_t>> ranks_of(const RunPlan& plan, uint64_t epoch, uint64_t index) {
  const Generation generation = plan.generation(plan.last());
  std::vector<std::vector<uint64_t>> ranks;
  for (uint64_t rank = 0; rank < plan.last().dp; ++rank) {
    ranks.push_back(generation.local_positions(generation.step(epoch, index), rank));
  }
  return ranks;
}
template <class T>
std::string why(const Result<T>& result) {
  return result ? "accepted" : result.error().message();
}
using V = std::vector<uint64_t>;

TEST(RunPlan, TheExampleOfItsDescription) {
  OrderSpec order{.batch = 6, .epochs = 2};
  RunPlan plan = begun(order, 20, 3);
  EXPECT_THAT(ranks_of(plan, 0, 0), ElementsAre(V{0, 1}, V{2, 3}, V{4, 5}));
  order.batch = 8;
  const RunPlan::Changed changed = plan.change(order, 2, 6).value();
  EXPECT_EQ(changed.consumed, 6u);
  EXPECT_EQ(changed.plan.segments().size(), 2u);
  EXPECT_EQ(changed.plan.last().generation, 2u);
  EXPECT_THAT(ranks_of(changed.plan, 0, 0), ElementsAre(V{6, 7, 8, 9}, V{10, 11, 12, 13}));
  EXPECT_THAT(ranks_of(changed.plan, 0, 1), ElementsAre(V{14, 15, 16, 17}, V{18, 19, 20, 21}));
  EXPECT_EQ(changed.plan.generation(changed.plan.last()).steps(0), 2u);
  EXPECT_EQ(changed.plan.generation(changed.plan.last()).steps(1), 3u);  // 22, 30, and 38 and 39
}

TEST(RunPlan, TheSameAgainChangesNothing) {
  const OrderSpec order{.batch = 6};
  const RunPlan plan = begun(order, 20, 3);
  for (uint64_t consumed : {0, 6, 7, 20})
    EXPECT_EQ(plan.change(order, 3, consumed).value().plan, plan);
}

TEST(RunPlan, BeforeAnythingIsConsumedAllMayChange) {
  const RunPlan plan = begun({.batch = 6}, 20, 3);
  const RunPlan other = plan.change({.seed = 7, .batch = 4, .epochs = 5}, 2, 0).value().plan;
  EXPECT_EQ(other.run().seed, 7u);
  EXPECT_EQ(other.segments().size(), 1u);
  EXPECT_EQ(other.last().generation, 2u);
  EXPECT_THAT(why(plan.change({.seed = 7, .batch = 6}, 3, 6)),
              HasSubstr("neither can change any more"));
  EXPECT_THAT(why(plan.change({.batch = 6, .shuffle = {.kind = ShuffleKind::kNone}}, 3, 6)),
              HasSubstr("shuffle global: neither can change"));
}

TEST(RunPlan, AMissedBoundaryNamesTheNearest) {
  const RunPlan plan = begun({.batch = 6, .epochs = 2}, 20, 3);
  EXPECT_THAT(why(plan.change({.batch = 6, .epochs = 2}, 2, 8)),
              HasSubstr("8 consumed samples are not whole steps of batch 6 from 0 on: the nearest "
                        "ends of steps are 6 "
                        "and 12"));
  EXPECT_THAT(why(plan.change({.batch = 6, .epochs = 2}, 2, 38)),
              HasSubstr("36 and 40"));  // the end
  const RunPlan by_epoch = begun({.batch = 6, .tail = Tail::kShort, .epochs = 2}, 20, 3);
  EXPECT_THAT(why(by_epoch.change({.batch = 6, .epochs = 2}, 2, 19)), HasSubstr("18 and 20"));
  EXPECT_EQ(why(by_epoch.change({.batch = 6, .epochs = 2}, 2, 20)), "accepted");
  EXPECT_THAT(why(by_epoch.change({.batch = 6, .epochs = 2}, 2, 21)), HasSubstr("20 and 26"));
}

TEST(RunPlan, RoundedDownSaysWhatIsRepeated) {
  const RunPlan plan = begun({.batch = 6, .epochs = 2}, 20, 3);
  const auto changed = plan.change({.batch = 6, .epochs = 2, .round_down = true}, 2, 10).value();
  EXPECT_EQ(changed.consumed, 6u);
  EXPECT_EQ(changed.plan.last().from, 6u);
  EXPECT_EQ(changed.plan.last().repeats, 4u);
  EXPECT_THAT(changed.plan.to_plan_json(6),
              HasSubstr("\"repeated\": {\n        \"from\": 6,\n        \"to\": 10"));
}

TEST(RunPlan, AChangeAtTheSamePositionReplaces) {
  const RunPlan plan = begun({.batch = 6, .epochs = 2}, 20, 3);
  RunPlan changed = plan.change({.batch = 6, .epochs = 2}, 2, 6).value().plan;
  changed = changed.change({.batch = 6, .epochs = 2}, 1, 6).value().plan;
  EXPECT_EQ(changed.segments().size(), 2u);
  EXPECT_EQ(changed.last().generation, 3u);
  EXPECT_EQ(changed.find(2), nullptr);
  EXPECT_EQ(changed.find(1)->batch, 6u);
}

TEST(RunPlan, ARollbackTakesLaterSegmentsAway) {
  RunPlan plan = begun({.batch = 6, .epochs = 2}, 20, 3);
  plan = plan.change({.batch = 6, .epochs = 2}, 2, 6).value().plan;
  plan = plan.change({.batch = 4, .epochs = 2}, 2, 18).value().plan;
  // dp is still 2, the batch 4:
  const RunPlan back = plan.roll_back({.batch = 4, .epochs = 2}, 2, 12).value().plan;
  EXPECT_EQ(back.segments().size(), 3u);
  EXPECT_EQ(back.last().from, 12u);
  EXPECT_EQ(back.last().generation, 4u);
  EXPECT_EQ(back.last().batch, 4u);
  // To where the second segment began, whose order is the one wanted: it is that again.
  const RunPlan further = plan.roll_back({.batch = 6, .epochs = 2}, 2, 6).value().plan;
  EXPECT_EQ(further.segments().size(), 2u);
  EXPECT_EQ(further.last().generation, 2u);
  EXPECT_THAT(why(plan.roll_back({.batch = 4, .epochs = 2}, 2, 8)), HasSubstr("6 and 12"));
  EXPECT_EQ(plan.roll_back({.seed = 9, .batch = 4}, 2, 0).value().plan.last().generation, 4u);
}

TEST(RunPlan, FewerEpochsThanConsumed) {
  const RunPlan plan = begun({.batch = 5, .epochs = 3}, 20, 1);
  EXPECT_THAT(why(plan.change({.batch = 5, .epochs = 1}, 1, 25)),
              HasSubstr("1 epoch of 20 samples are less than"));
  const RunPlan ended = plan.change({.batch = 5, .epochs = 2}, 1, 40).value().plan;
  EXPECT_EQ(ended.end(), 40u);
  EXPECT_FALSE(ended.generation(ended.last()).step_at(40));
}

TEST(RunPlan, ListsWhatWasDroppedAndPadded) {
  const OrderSpec drop{
      .batch = 6, .tail = Tail::kDrop, .shuffle = {.kind = ShuffleKind::kNone}, .epochs = 2};
  const RunPlan plan = begun(drop, 20, 3);
  auto value = parse_json(plan.to_plan_json(18)).value().as_object();
  EXPECT_EQ(value["dropped"], (json::array{json::object{{"epoch", 0}, {"ids", {18, 19}}}}));
  EXPECT_EQ(value["next"], (json::object{{"generation", 1}, {"epoch", 1}, {"batch", 0}}));
  // A smaller batch from there on leaves nothing out.
  OrderSpec smaller = drop;
  smaller.batch = 2;
  value = parse_json(plan.change(smaller, 2, 18).value().plan.to_plan_json(18)).value().as_object();
  EXPECT_FALSE(value.contains("dropped"));
  OrderSpec pad = drop;
  pad.tail = Tail::kPad;
  value = parse_json(begun(pad, 20, 3).to_plan_json(26)).value().as_object();
  EXPECT_EQ(value["padded"], (json::array{json::object{{"epoch", 0}, {"ids", {0, 1, 2, 3}}},
                                          json::object{{"epoch", 1}, {"ids", {0, 1, 2, 3}}}}));
}

TEST(RunPlan, ListsAMillionIdsAtMost) {
  const OrderSpec drop{
      .batch = 600'001, .tail = Tail::kDrop, .shuffle = {.kind = ShuffleKind::kNone}, .epochs = 3};
  const auto value =
      parse_json(begun(drop, 1'200'000, 1).to_plan_json(3'600'000), {.max_bytes = 64 << 20})
          .value();
  EXPECT_EQ(value.at("dropped").as_array().size(), 1u);
  EXPECT_EQ(value.at("ids_left_out"), 2 * 599'999);
}

TEST(RunPlan, AsLargeAsCanBeCounted) {
  const OrderSpec order{.batch = kMaxBatch, .epochs = 4};
  const RunPlan plan = begun(order, kMaxSamples / 4, 1 << 20);
  const Generation generation = plan.generation(plan.last());
  const uint64_t epoch = 3, last = generation.steps(epoch) - 1;
  const Step step = generation.step(epoch, last);
  EXPECT_EQ(step.end(), kMaxSamples / 4 * 4);
  EXPECT_EQ(generation.local_samples_before(4, 5), kMaxSamples / 4 * 4 >> 20);
  EXPECT_EQ(generation.rank_ids(5, (kMaxSamples / 4 * 4 >> 20) - 1, 10).size(), 1u);
}

TEST(RunPlan, SurvivesAsText) {
  OrderSpec order{
      .seed = UINT64_MAX, .batch = 12, .shuffle = {.kind = ShuffleKind::kBlock, .block = 9}};
  RunPlan plan = begun(order, 100, 3);
  order.batch = 13;
  order.tail = Tail::kPad;
  order.uneven = order.round_down = true;
  plan = plan.change(order, 2, 29).value().plan;
  EXPECT_EQ(RunPlan::from_text(plan.to_text()).value(), plan);
}

TEST(RunPlan, RefusesDamagedText) {
  const std::string good = begun({.batch = 6}, 20, 3).to_text();
  auto with = [&](std::string_view from, std::string_view to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return why(RunPlan::from_text(text));
  };
  EXPECT_EQ(why(RunPlan::from_text(good)), "accepted");
  EXPECT_THAT(with("feistel8-1", "feistel9-1"),
              HasSubstr("begun by another version of ptcfs ('ptc-run/1', order 'feistel9-1')"));
  EXPECT_THAT(with("\"from\":0", "\"from\":6"), HasSubstr("order of segments"));
  EXPECT_THAT(with("\"next\":2", "\"next\":1"), HasSubstr("order of segments"));
  EXPECT_THAT(with("\"dp\":3", "\"dp\":30"), HasSubstr("less than a sample"));
  EXPECT_THAT(with("\"samples\":20", "\"samples\":0"), HasSubstr("samples"));
  EXPECT_THAT(with("carry", "curry"), HasSubstr("tail"));
  EXPECT_THAT(with("\"segments\":[", "\"segments\":[7,"), HasSubstr("segments"));
  EXPECT_THAT(why(RunPlan::from_text("{}")), HasSubstr("another version"));
}

}  // namespace
}  // namespace ptc
