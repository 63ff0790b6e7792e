#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "tests/store/temp_dir.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/elastic/placement.h"
#include "tools/planner/price/prices.h"
#include "tools/planner/run/mounted_job.h"
#include "tools/planner/run/pace.h"
#include "tools/planner/run/record.h"

namespace ptc::planner {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Prices, AreOfThePartsOfAChange) {
  const Prices prices({2, 3, 100, 400});
  EXPECT_DOUBLE_EQ(prices.of("a", {}, true), 5);
  EXPECT_DOUBLE_EQ(prices.of("a", {}, false), 3);
  EXPECT_DOUBLE_EQ(prices.of("a", {1000, 0}, true), 15);
  EXPECT_DOUBLE_EQ(prices.of("a", {100, 2000}, true), 10);  // at the same time
}

TEST(Prices, AreOfTheBusiestNode) {
  MovementSum<std::string> sum;
  EXPECT_EQ(sum.busiest().moved, 0u);
  for (const char* target : {"b", "c", "d"}) sum.add("a", target, 10);
  sum.add("c", "d", 5);
  sum.add("d", "d", 7);
  sum.add("e", "e", 3);
  sum.add("e", "e", 5);
  EXPECT_EQ(sum.busiest().moved, 30u);
  EXPECT_EQ(sum.busiest().local, 8u);
  sum.add("e", "d", 20);
  EXPECT_EQ(sum.busiest().moved, 35u) << "what it gets";
}

TEST(Prices, FollowWhatIsMeasured) {
  constexpr uint64_t kBytes = 1'000'000'000;
  Prices prices({2, 3, kBytes / 10, kBytes});
  for (int i = 0; i < 30; ++i) {
    prices.stopped("a", 10);
    prices.started("a", 20);
    prices.brought({kBytes, kBytes / 10}, 4);
  }
  EXPECT_NEAR(prices.of("a", {kBytes, 0}, true), 34, 0.1);
  EXPECT_NEAR(prices.of("b", {}, true), 5, 1e-9) << "another job's processes are its own";
  EXPECT_NEAR(prices.of("b", {kBytes, 0}, true), 9, 0.1) << "links are everybody's";
  prices.brought({}, 100);
  prices.brought({1'000'000, 0}, 0.5);  // which is when it was seen that all is there
  prices.brought({0, 1'000'000}, 0.5);
  EXPECT_NEAR(prices.of("b", {kBytes, 0}, true), 9, 0.1);
  EXPECT_NEAR(prices.of("b", {0, kBytes}, true), 6, 0.1);
  prices.brought({0, 10 * kBytes}, 1);  // at least so fast
  EXPECT_LT(prices.of("b", {0, kBytes}, true), 5.9);
}

TEST(Decide, ByThePriceOfEachPoint) {
  Curve curve;
  curve.points = {{1, 1, 8, "one", 1}, {2, 1.6, 8, "two", 1.6}, {4, 2.2, 8, "four", 2.2}};
  curve.of_one_gpu = 1;
  ElasticJob job{&curve, 1000, 0u};
  job.price_s = {0, 10, 10};
  EXPECT_THAT(decide(std::vector{job}, 4, {}), ElementsAre(2u));
  job.price_s = {0, 10, 900};
  EXPECT_THAT(decide(std::vector{job}, 4, {}), ElementsAre(1u));
  job.price_s = {0, 900, 900};
  EXPECT_THAT(decide(std::vector{job}, 4, {}), ElementsAre(0u));
}

TEST(Placement, TakesWhatIsNamed) {
  Placement cluster({{"a", 4}, {"b", 2}});
  EXPECT_TRUE(cluster.take(1, {{0, {1, 2}}}));
  EXPECT_FALSE(cluster.take(2, {{0, {2, 3}}})) << "one of them is another's";
  EXPECT_FALSE(cluster.take(2, {{1, {2}}})) << "there is no such GPU";
  EXPECT_FALSE(cluster.take(2, {{2, {0}}})) << "there is no such node";
  EXPECT_FALSE(cluster.has(2));
  EXPECT_TRUE(cluster.take(1, {{0, {2, 3}}})) << "its own are free for it";
  EXPECT_TRUE(cluster.take(2, {{0, {0, 1}}}));
  EXPECT_FALSE(cluster.place(3, 4));
  cluster.release(1);
  EXPECT_TRUE(cluster.place(3, 2));
}

/// No GPU twice, none that is not there, whatever is wished for; who is not wished for stays.
TEST(Placement, GivesNoGpuToTwo) {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::vector<NodeOfCluster> nodes(1 + random() % 4);
    for (NodeOfCluster& node : nodes) node.gpus = 1u << (random() % 4);
    Curve curve;
    for (uint32_t gpus = 1; gpus <= 8; gpus *= 2) curve.points.push_back({gpus, 1.0 * gpus});
    Placement cluster(nodes);
    std::vector<std::optional<uint32_t>> now(6);
    const bool first_is_apart = random() % 2 == 0 && cluster.take(0, {{0, {0}}});
    for (int round = 0; round < 20; ++round) {
      std::vector<Wish> wishes;
      for (uint32_t job = first_is_apart; job < now.size(); ++job) {
        Wish& wish = wishes.emplace_back(Wish{job, &curve, std::nullopt, now[job]});
        if (random() % 3 != 0) wish.point = random() % curve.points.size();
      }
      cluster.carry_out(wishes);
      for (const Wish& wish : wishes) now[wish.job] = wish.point;
      std::set<std::pair<uint32_t, uint32_t>> used;
      for (uint32_t job = 0; job < now.size(); ++job) {
        size_t count = 0;
        for (const OnNode& on : cluster.of(job))
          for (const uint32_t gpu : on.gpus) {
            ++count;
            ASSERT_LT(gpu, nodes[on.node].gpus);
            ASSERT_TRUE(used.insert({on.node, gpu}).second);
          }
        if (job == 0 && first_is_apart) ASSERT_EQ(count, 1u);
        else ASSERT_EQ(count, now[job] ? curve.points[*now[job]].gpus : 0);
      }
    }
  }
}

TEST(Pace, IsMeasuredAnewWhereRanksGoOnFromACheckpoint) {
  Pace pace;
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(pace.note(i, 100 + 10 * i, 20));
  EXPECT_DOUBLE_EQ(*pace.note(4, 140, 20), 2);
  EXPECT_FALSE(pace.note(5, 100, 20)) << "it is where it was measured from";
  for (int i = 6; i < 9; ++i) EXPECT_FALSE(pace.note(i, 100 + 20 * (i - 5), 20));
  EXPECT_DOUBLE_EQ(*pace.note(9, 180, 20), 1);
  Pace stands;
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(stands.note(i, 100, 20));
  EXPECT_DOUBLE_EQ(*stands.note(1e9, 101, 20), Pace::kMostSlowness);
  EXPECT_DOUBLE_EQ(*stands.note(1e9, uint64_t{1} << 62, 1e-9), 1 / Pace::kMostSlowness);
}

TEST(JobRecord, ComesBackAsItWas) {
  const TempDir scratch;
  EXPECT_FALSE(read_record(scratch.file("")));
  JobRecord record;
  record.state = LiveState::kStops;
  record.has = CurvePoint{4, 12.5, 64, "ddp tp2-pp1-dp2", 0, 2, 1, 2, "ddp"};
  record.devices = {"w0:0", "w0:1", "w1:0", "w1:1"};
  record.layout = json::object{{"tp", 2}, {"devices", {"w0:0"}}};
  record.layout_before = json::object{{"tp", 1}};
  record.worker = {17, "boot 5", "a mark"};
  record.was_asked_to_end = true;
  record.costs = ChangeCosts{1, 2, 3, 4};
  record.changes = 9;
  record.failures = 2;
  record.slowness = 1.5;
  const CurvePoint other{2, 7, 64, "ddp tp2-pp1-dp1", 0, 2, 1, 1, "ddp"}, never{1, 4, 64, "ddp"};
  EXPECT_EQ(record.note_slowness(*record.has, 3), 0);
  EXPECT_EQ(record.note_slowness(other, 1.5), 0);  // it has moved, and is as fast as it should be
  record.remark = "so it is";
  ASSERT_TRUE(write_record(scratch.file(""), record));
  const auto read = read_record(scratch.file(""));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->state, record.state);
  EXPECT_TRUE(read->has && read->has->is_as(*record.has));
  EXPECT_EQ(read->has->tp, 2u);
  EXPECT_EQ(read->has->technique, "ddp");
  EXPECT_EQ(read->devices, record.devices);
  EXPECT_EQ(*read->layout, *record.layout);
  EXPECT_EQ(*read->layout_before, *record.layout_before);
  EXPECT_EQ(read->worker.pid, record.worker.pid);
  EXPECT_EQ(read->worker.started_at, record.worker.started_at);
  EXPECT_EQ(read->worker.mark, record.worker.mark);
  EXPECT_TRUE(read->was_asked_to_end);
  EXPECT_DOUBLE_EQ(read->costs->link, 3);
  EXPECT_EQ(read->changes, 9u);
  EXPECT_EQ(read->failures, 2u);
  EXPECT_EQ(read->slowness, 1.5);
  EXPECT_EQ(read->slowness_of(*record.has), 3) << "the one measured slow stays slow";
  EXPECT_EQ(read->slowness_of(other), 1.5);
  EXPECT_EQ(read->slowness_of(never), 1.5);
  EXPECT_EQ(read->remark, record.remark);
  EXPECT_TRUE(read->is_own);
  ASSERT_EQ(::chmod(scratch.file("autoscale.json").c_str(), 0666), 0);
  EXPECT_FALSE(read_record(scratch.file(""))->is_own) << "anybody could have written it";
  std::filesystem::rename(scratch.file("autoscale.json"), scratch.file("other"));
  std::filesystem::create_symlink("other", scratch.file("autoscale.json"));
  EXPECT_FALSE(read_record(scratch.file("")));
  std::filesystem::remove(scratch.file("autoscale.json"));
  for (const char* odd : {"", "{", "[]", "{}", R"({"format": "ptc-autoscale/1"})",
                          R"({"format": "ptc-autoscale/1", "state": "sings"})"}) {
    std::ofstream(scratch.file("autoscale.json")) << odd;
    EXPECT_FALSE(read_record(scratch.file(""))) << odd;
  }
}

TEST(LayoutOfPoint, KeepsWhatItsUserSetBeside) {
  const CurvePoint point{4, 1, 64, "fsdp tp1-pp2-dp2", 0, 1, 2, 2, "fsdp"};
  const json::object before{{"tp", 4}, {"pp", 1}, {"dp", 1}, {"keep", 3}, {"stages", {4}}};
  const auto layout = layout_of_point(before, point, {"w0:0", "w0:1", "w0:2", "w0:3"});
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout.value(), (json::object{{"tp", 1},
                                          {"pp", 2},
                                          {"dp", 2},
                                          {"keep", 3},
                                          {"optimizer", "fsdp"},
                                          {"devices", {"w0:0", "w0:1", "w0:2", "w0:3"}}}));
  CurvePoint other = point;
  other.technique = "tensor";  // which cannot go on with what FSDP has cut
  EXPECT_EQ(layout_of_point(layout.value(), other, {}).value().at("optimizer"), "replicated");
  other.technique = "somebody's own";
  EXPECT_EQ(layout_of_point(layout.value(), other, {}).value().at("optimizer"), "fsdp");
  const auto with_cp = layout_of_point({{"cp", 2}}, point, {});
  ASSERT_FALSE(with_cp);
  EXPECT_THAT(with_cp.error().message(), HasSubstr("\"cp\": 2"));
}

}  // namespace
}  // namespace ptc::planner
