#include <fmt/format.h>
#include <gmock/gmock.h>

#include <limits>
#include <random>

#include "tools/planner/elastic/allocate.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/profile/analyser.h"

namespace ptc::planner {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

/// The most in sum, by trying all.
double most_by_enumeration(const std::vector<std::vector<Offer>>& jobs, size_t job, uint32_t gpus) {
  if (job == jobs.size()) return 0;
  double most = -std::numeric_limits<double>::infinity();
  for (const Offer& offer : jobs[job])
    if (offer.gpus <= gpus)
      most = std::max(most, offer.value + most_by_enumeration(jobs, job + 1, gpus - offer.gpus));
  return most;
}

std::vector<std::vector<Offer>> some_jobs(std::mt19937& random) {
  std::vector<std::vector<Offer>> jobs(random() % 6);
  for (std::vector<Offer>& offers : jobs) {
    for (uint32_t gpus = 1; gpus <= 8; ++gpus)
      if (random() % 2 == 0) offers.push_back({gpus, static_cast<double>(random() % 1000) / 16});
    if (offers.empty()) offers.push_back({1, 1});
  }
  return jobs;
}

TEST(Allocate, IsWhatEnumerationFindsAndMoreGpusAreNeverWorse) {
  for (uint32_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937 random(seed);
    const auto jobs = some_jobs(random);
    double before = -std::numeric_limits<double>::infinity();
    for (uint32_t gpus = 0; gpus <= 8; ++gpus) {
      const double most = most_by_enumeration(jobs, 0, gpus);
      const auto chosen = allocate(jobs, gpus);
      ASSERT_EQ(chosen.has_value(), std::isfinite(most));
      if (!chosen) continue;
      ASSERT_THAT(*chosen, SizeIs(jobs.size()));
      double sum = 0;
      uint32_t taken = 0;
      for (size_t j = 0; j < jobs.size(); ++j) {
        ASSERT_LT((*chosen)[j], jobs[j].size());
        sum += jobs[j][(*chosen)[j]].value;
        taken += jobs[j][(*chosen)[j]].gpus;
      }
      ASSERT_LE(taken, gpus);
      ASSERT_DOUBLE_EQ(sum, most);
      ASSERT_GE(sum, before);
      before = sum;
    }
  }
}

TEST(Allocate, NoJobsTakeNothingAndOneWithoutAnOfferHasNoAnswer) {
  EXPECT_THAT(*allocate({}, 8), IsEmpty());
  EXPECT_EQ(allocate(std::vector<std::vector<Offer>>{{}}, 8), std::nullopt);
}

Curve curve_of(const std::vector<std::pair<uint32_t, double>>& points) {
  Curve curve;
  for (const auto& [gpus, speed_up] : points)
    curve.points.push_back({gpus, 10 * speed_up, 64, "ddp", speed_up});
  curve.of_one_gpu = 10;
  return curve;
}

TEST(Autoscaler, GivesGpusWhereTheyWinMost) {
  const Curve scales = curve_of({{1, 1}, {2, 2}, {4, 3.9}, {8, 7}});
  const Curve does_not = curve_of({{1, 1}, {2, 1.2}, {4, 1.3}});
  const std::vector<ElasticJob> jobs = {{&scales, 1e6}, {&does_not, 1e6}};
  // 4 for the first leave 4 (1.3) to the second; 8 would leave none, and both came.
  EXPECT_THAT(decide(jobs, 8, {}), ElementsAre(2u, 2u));
  EXPECT_THAT(decide(jobs, 9, {}), ElementsAre(3u, 0u));
}

TEST(Autoscaler, LetsInAsManyInTheirOrderAsHaveRoomAndNobodyOvertakes) {
  const Curve needs_4 = curve_of({{4, 4}}), needs_1 = curve_of({{1, 1}, {2, 2}});
  const std::vector<ElasticJob> jobs = {
      {&needs_4, 1e6}, {&needs_1, 1e6}, {&needs_4, 1e6}, {&needs_1, 1e6}};
  EXPECT_THAT(decide(jobs, 7, {}), ElementsAre(0u, 1u, std::nullopt, std::nullopt));
}

TEST(Autoscaler, WhoHasGpusKeepsSomeAndBeginsOnFewer) {
  const Curve curve = curve_of({{1, 1}, {2, 1.9}, {4, 3.5}});
  const std::vector<ElasticJob> jobs = {{&curve, 1e6, 2u}, {&curve, 1e6}, {&curve, 1e6}};
  for (const auto& point : decide(jobs, 4, {})) EXPECT_TRUE(point.has_value());
  // Nodes are gone: who came last waits.
  const std::vector<ElasticJob> all_run = {{&curve, 1e6, 0u}, {&curve, 1e6, 0u}, {&curve, 1e6, 0u}};
  EXPECT_THAT(decide(all_run, 2, {}), ElementsAre(0u, 0u, std::nullopt));
}

TEST(Autoscaler, WhoHasWhatHisCurveLacksIsNoNewcomer) {
  const Curve curve = curve_of({{1, 1}, {2, 1.9}});
  const std::vector<ElasticJob> jobs = {{&curve, 1e6}, {&curve, 1e6, std::nullopt, true}};
  EXPECT_THAT(decide(jobs, 1, {}), ElementsAre(std::nullopt, 0u));
}

TEST(Autoscaler, AChangeThatCostsMoreThanItWinsIsNotMade) {
  const Curve curve = curve_of({{1, 1}, {2, 1.9}});
  ScalingRules rules;
  EXPECT_THAT(decide(std::vector<ElasticJob>{{&curve, 1000, 0u}}, 2, rules), ElementsAre(1u));
  rules.change_s = 30;  // 1000 samples take 100 s, or 30 + 53
  EXPECT_THAT(decide(std::vector<ElasticJob>{{&curve, 1000, 0u}}, 2, rules), ElementsAre(0u));
  EXPECT_THAT(decide(std::vector<ElasticJob>{{&curve, 10'000, 0u}}, 2, rules), ElementsAre(1u));
  rules.change_s = 1e9;
  EXPECT_THAT(decide(std::vector<ElasticJob>{{&curve, 10'000, 0u}}, 2, rules), ElementsAre(0u));
}

TEST(Autoscaler, PricesAreNeverNearTheHorizon) {
  const Curve curve = curve_of({{1, 1}, {2, 2}});
  ScalingRules rules;
  rules.change_s = 260;
  rules.horizon_s = 1;  // which alone would freeze all
  EXPECT_THAT(decide(std::vector<ElasticJob>{{&curve, 1e6, 0u}}, 2, rules), ElementsAre(1u));
}

TEST(Autoscaler, ForCompletionThatIsFirstWhichHasLittleLeft) {
  const Curve curve = curve_of({{1, 1}, {2, 1.9}});
  const std::vector<ElasticJob> jobs = {{&curve, 1e6}, {&curve, 1e3}};
  ScalingRules rules;
  rules.objective = Objective::kCompletion;
  EXPECT_THAT(decide(jobs, 3, rules), ElementsAre(0u, 1u));
}

TEST(Autoscaler, FourHundredJobsOnFourHundredGpus) {
  std::vector<std::pair<uint32_t, double>> points;
  for (uint32_t gpus = 1; gpus <= 16; ++gpus) points.emplace_back(gpus, std::sqrt(gpus));
  const Curve curve = curve_of(points);
  const std::vector<ElasticJob> jobs(400, {&curve, 1e6});
  const auto decided = decide(jobs, 400, {});
  EXPECT_TRUE(std::all_of(decided.begin(), decided.end(), [](auto point) { return point == 0u; }));
}

ProfileRow row_of(uint32_t dp, uint64_t batch, std::optional<double> seconds) {
  ProfileRow row;
  row.model = "m";
  row.batch = batch;
  row.dp = row.gpus = dp;
  row.iteration_s = seconds;
  return row;
}

TEST(Curve, TakesTheBestBatchOfEachAndCountsByOneGpu) {
  const std::vector<ProfileRow> rows = {row_of(1, 8, 1.0), row_of(1, 16, 1.5), row_of(2, 16, 1.0),
                                        row_of(2, 32, std::nullopt), row_of(16, 64, 0.1)};
  std::vector<const ProfileRow*> all;
  for (const ProfileRow& row : rows) all.push_back(&row);
  const Curve curve = make_curve(all, "m", 1, 1000, {{"w0", 8}});
  ASSERT_THAT(curve.points, SizeIs(2));  // no 16 GPUs here
  EXPECT_DOUBLE_EQ(curve.of_one_gpu, 16 / 1.5);
  EXPECT_EQ(curve.points[0].batch, 16u);
  EXPECT_DOUBLE_EQ(curve.points[1].speed_up, 1.5);
  EXPECT_TRUE(make_curve(all, "m", 1000, 2000, {{"w0", 8}}).empty());
}

TEST(Curve, WhereOneGpuIsTooFewTheBestOfEachGpuCounts) {
  const std::vector<ProfileRow> rows = {row_of(2, 16, 2.0), row_of(4, 16, 0.8)};
  const std::vector<const ProfileRow*> all = {&rows[0], &rows[1]};
  EXPECT_DOUBLE_EQ(make_curve(all, "m", 1, 1000, {{"w0", 8}}).of_one_gpu, 5);
}

TEST(Analyser, BatchesBetweenThoseThatWereTriedLieOnTheLine) {
  const std::vector<ProfileRow> rows = {row_of(2, 16, 1.0), row_of(2, 32, 2.0), row_of(4, 64, 9.0),
                                        row_of(4, 128, std::nullopt)};
  std::vector<const ProfileRow*> all;
  for (const ProfileRow& row : rows) all.push_back(&row);
  const auto made = interpolated(all, {8, 16, 24, 32, 48, 64, 128}, false);
  ASSERT_THAT(made, SizeIs(1));
  EXPECT_EQ(made[0].batch, 24u);
  EXPECT_DOUBLE_EQ(*made[0].iteration_s, 1.5);
  EXPECT_EQ(made[0].origin, "interpolated");
}

TEST(Analyser, WhatHasNoRoomIsAccumulatedInEqualSteps) {
  const std::vector<ProfileRow> rows = {row_of(2, 16, 1.0), row_of(2, 32, 2.0)};
  const auto made = interpolated({&rows[0], &rows[1]}, {48, 64, 80}, true);
  ASSERT_THAT(made, SizeIs(3));
  EXPECT_EQ(made[0].accumulation, 2u);
  EXPECT_DOUBLE_EQ(*made[0].iteration_s, 3);
  EXPECT_DOUBLE_EQ(*made[1].iteration_s, 4);
  EXPECT_EQ(made[2].accumulation, 3u);
  EXPECT_EQ(made[2].way(), "tp1-pp1-dp2, 3 steps");
  const auto again = parse_profiles(profiles_csv(made), "p.csv");
  ASSERT_TRUE(again.has_value()) << again.error().message();
  EXPECT_EQ(again.value()[2].accumulation, 3u);
}

TEST(Analyser, TheLadderEndsWithTheMost) {
  EXPECT_THAT(batch_ladder(12, 192), ElementsAre(12, 24, 48, 96, 192));
  EXPECT_THAT(batch_ladder(3, 20), ElementsAre(3, 6, 12, 20));
  EXPECT_THAT(batch_ladder(5, 5), ElementsAre(5));
}

}  // namespace
}  // namespace ptc::planner
