#include "tools/planner/profile/fit.h"

#include <gmock/gmock.h>

#include <cmath>
#include <set>
#include <utility>

namespace ptc::planner {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr double kFixed = 0.05, kSample = 0.01;                  // seconds of a replica
constexpr double kStep = 0.002, kRing = 0.03, kOverNodes = 0.2;  // of what replicas sum
constexpr uint32_t kOnANode = 4;

double known_seconds(uint64_t batch, uint32_t gpus) {
  const double r = gpus, n = std::ceil(r / kOnANode);
  return kFixed + kSample * static_cast<double>(batch) / r + kStep * (r - 1) +
         kRing * 2 * (r - 1) / r + kOverNodes * (n - 1) / n;
}

ProfileRow known_row(uint64_t batch, uint32_t gpus) {
  ProfileRow row;
  row.model = "m";
  row.technique = "ddp";
  row.origin = "measured";
  row.batch = batch;
  row.dp = row.gpus = gpus;
  row.gpus_per_node = std::min(gpus, kOnANode);
  row.iteration_s = known_seconds(batch, gpus);
  return row;
}

TEST(Fit, GivesBackWhatRowsWereMadeOf) {
  std::vector<ProfileRow> rows;
  for (const uint64_t batch : {8, 32, 128}) rows.push_back(known_row(batch, 1));
  for (const uint32_t gpus : {2, 4, 8, 16}) rows.push_back(known_row(128, gpus));
  rows.push_back(known_row(256, 2));
  rows.back().iteration_s = std::nullopt;  // out of memory: it was tried
  FitOptions options;
  options.most_gpus = 64;
  const Fit found = fit(rows, options).value();
  ASSERT_EQ(found.ways.size(), 1u);
  EXPECT_EQ(found.ways.front().name, "m ddp tp1-pp1");
  EXPECT_LT(found.ways.front().most_error, 1e-9);
  EXPECT_EQ(found.ways.front().modelled, found.rows.size());
  std::set<uint32_t> counts;
  for (const ProfileRow& row : found.rows) {
    EXPECT_NEAR(*row.iteration_s, known_seconds(row.batch, row.gpus), 1e-9 * *row.iteration_s);
    EXPECT_EQ(row.origin, "modelled");
    EXPECT_EQ(row.gpus_per_node, std::min(row.gpus, kOnANode));
    EXPECT_LE(row.batch / row.dp, 128u);
    EXPECT_FALSE(row.batch == 128 && row.gpus <= 16) << "it was tried";
    counts.insert(row.gpus);
  }
  EXPECT_THAT(counts, testing::ElementsAre(1, 2, 4, 8, 16, 32, 64));
  // Modelled rows are no trials.
  rows.insert(rows.end(), found.rows.begin(), found.rows.end());
  EXPECT_EQ(profiles_csv(fit(rows, options).value().rows), profiles_csv(found.rows));
}

TEST(Fit, TakesWhatSumsTakeFromTheClustersTable) {
  std::string table = "gpus,bytes,seconds,max_gpus_per_node\n";
  constexpr double kBytes = 1e9;
  for (const uint32_t gpus : {2, 4, 8, 16})
    for (const double bytes : {1e6, 1e8, 1e10}) {
      const double r = gpus, n = std::ceil(r / kOnANode);
      table += fmt::format(
          "{},{:.0f},{},{}\n", gpus, bytes,
          kStep * (r - 1) + bytes / kBytes * (kRing * 2 * (r - 1) / r + kOverNodes * (n - 1) / n),
          std::min(gpus, kOnANode));
    }
  FitOptions options;
  options.most_gpus = 32;
  options.gpus_per_node = kOnANode;
  const std::vector<ProfileRow> rows = {known_row(8, 1), known_row(128, 1)};
  EXPECT_THAT(fit(rows, options).value().ways.front().none,
              HasSubstr("no trial has several replicas"));
  auto cluster = parse_communication(table, "sums.csv");
  ASSERT_TRUE(cluster.has_value()) << cluster.error().message();
  options.cluster = cluster.value();
  options.bytes = {{"m", kBytes}};
  const Fit found = fit(rows, options).value();
  EXPECT_GT(found.rows.size(), 10u);
  for (const ProfileRow& row : found.rows)
    EXPECT_NEAR(*row.iteration_s, known_seconds(row.batch, row.gpus), 1e-6 * *row.iteration_s);
}

TEST(Fit, SaysWhatItCannotModel) {
  const Fit found = fit({known_row(8, 1), known_row(8, 2)}, {}).value();
  EXPECT_THAT(found.rows, IsEmpty());
  EXPECT_THAT(found.ways.front().none, HasSubstr("two batches or more"));
  EXPECT_EQ(parse_communication("gpus,bytes,seconds\n1,8,1", "s.csv").error().message(),
            "s.csv: line 2, column 1 (gpus): '1' is no whole number from 2 to 1048576");
  EXPECT_EQ(parse_communication("gpus,bytes,seconds\n2,8,0", "s.csv").error().message(),
            "s.csv: line 2, column 5 (seconds): a sum takes 1e-9 to 1e9 s");
}

TEST(Fit, MakesNoMoreThanAMillionRows) {
  std::vector<ProfileRow> rows;
  constexpr uint64_t kMany = 1024, kBatches = 400;
  const auto add = [&](uint32_t way, uint64_t batch, uint32_t gpus) {
    rows.push_back(known_row(batch * kMany, gpus));
    rows.back().technique = std::to_string(way);
  };
  for (uint64_t batch = 1; batch <= kBatches; ++batch) add(0, batch, 1);
  for (uint32_t way = 0; way < 300; ++way) add(way, 1, 1), add(way, kBatches, 1), add(way, 1, 2);
  FitOptions options;
  options.most_gpus = kMany;
  const auto found = fit(rows, options);
  ASSERT_TRUE(found.has_error());
  EXPECT_THAT(found.error().message(), HasSubstr("more than 1000000 rows"));
}

/// Times that shrink with more replicas than they should: no factor is less than 0.
TEST(Fit, NothingIsFasterThanNoSumAtAll) {
  std::vector<ProfileRow> rows = {known_row(8, 1), known_row(64, 1), known_row(64, 4)};
  rows.back().iteration_s = 0.1;
  FitOptions options;
  options.most_gpus = 8;
  const Fit found = fit(rows, options).value();
  for (const ProfileRow& row : found.rows) EXPECT_GE(*row.iteration_s, kFixed * 0.1) << row.way();
}

/// A row that is missing is not known, and may be modelled; one that was out of memory has been
/// tried.
TEST(Fit, WhatWasOutOfMemoryIsNotModelledAndWhatIsMissingIs) {
  std::vector<ProfileRow> rows;
  for (const uint64_t batch : {8, 32, 128}) rows.push_back(known_row(batch, 1));
  rows.push_back(known_row(32, 2));
  rows.push_back(known_row(128, 4));
  rows.back().iteration_s = std::nullopt;
  std::set<std::pair<uint64_t, uint32_t>> modelled;
  const Fit found = fit(rows, {}).value();
  for (const ProfileRow& row : found.rows) modelled.emplace(row.batch, row.gpus);
  EXPECT_TRUE(modelled.contains({128, 2}));
  EXPECT_TRUE(modelled.contains({32, 4}));
  EXPECT_FALSE(modelled.contains({128, 4}));
}

}  // namespace
}  // namespace ptc::planner
