// What changes cost in the simulator, progress that counts goodput, and the policies of others.
#include <gmock/gmock.h>

#include <algorithm>

#include "store/base/json.h"
#include "tools/planner/price/movement.h"
#include "tools/planner/sim/rubick.h"
#include "tools/planner/sim/simulator.h"

namespace ptc::planner {
namespace {

using testing::HasSubstr;

/// One model that scales as 1, 1.8, 3.2, 5.6, 11 on two nodes with 8 GPUs.
struct Scaling {
  std::vector<NodeOfCluster> nodes = {{"w0", 8}, {"w1", 8}};
  std::vector<JobToTrain> kinds = {{"m", "model", 1}};
  std::vector<ProfileRow> rows;
  std::vector<const ProfileRow*> all;
  SimulationRules rules;
  std::map<std::string, Efficiency> efficiency;

  Scaling() {
    double speed_up = 1;
    for (uint32_t gpus = 1; gpus <= 16; gpus *= 2, speed_up *= gpus == 16 ? 1.96 : 1.8) {
      ProfileRow& row = rows.emplace_back();
      row.model = "model";
      row.batch = 64;
      row.dp = row.gpus = gpus;
      row.iteration_s = 64 / (10 * speed_up);
    }
    for (const ProfileRow& row : rows) all.push_back(&row);
    rules.on_events = false;
  }
  PolicyCurves curves(const std::string& policy) {
    return {parse_policy(policy).value(), all, kinds, nodes, &efficiency};
  }
  Simulated run(const std::string& policy, const std::vector<ArrivingJob>& jobs,
                ChangePrices& prices) {
    PolicyCurves of = curves(policy);
    auto result = simulate(nodes, jobs, of, prices, rules, 1);
    EXPECT_TRUE(result.has_value()) << result.error().message();
    return std::move(result).value();
  }
};

LaidOut laid_out(uint32_t tp, uint32_t dp, uint32_t gpus_per_node, uint32_t first_node = 0) {
  LaidOut layout;
  layout.spec.sizes.tp = tp;
  layout.spec.sizes.dp = dp;
  layout.gpus_per_node = gpus_per_node;
  layout.first_node = first_node;
  return layout;
}

TEST(Movement, IsThatOfPtcfsOwnPlan) {
  auto set = RuleSet::none();
  const Model model =
      Model::bind(set, {}, {{"model.safetensors", "w", DType::kF32, {4096, 4096}}}).value();
  constexpr uint64_t kBytes = 64 << 20;
  const auto moved = [&](const LaidOut& from, const LaidOut& to) {
    const Movement plan = movement_of(model, from, to).value();
    EXPECT_EQ(movement_of(double{kBytes}, from, to).moved, plan.moved);
    return plan.moved;
  };
  EXPECT_EQ(moved(laid_out(1, 1, 4), laid_out(1, 4, 4)), 0u) << "its node has it";
  EXPECT_EQ(moved(laid_out(1, 16, 4), laid_out(1, 2, 4)), 0u);
  EXPECT_EQ(moved(laid_out(1, 4, 4), laid_out(1, 4, 4, 1)), kBytes);
  EXPECT_EQ(moved(laid_out(1, 4, 4), laid_out(1, 16, 4)), kBytes) << "they pass it on";
  EXPECT_EQ(moved(laid_out(1, 4, 4), laid_out(1, 36, 4)), kBytes);
  EXPECT_EQ(moved(laid_out(1, 8, 4), laid_out(1, 8, 4, 2)), kBytes) << "two links work at a time";
  EXPECT_TRUE(movement_of(model, laid_out(1, 1, 4), laid_out(2, 1, 4)).has_error());
  EXPECT_EQ(movement_of(256.0, laid_out(4, 1, 4), laid_out(8, 1, 4)).moved, 256u);
  EXPECT_EQ(movement_of(1e19, laid_out(1, 1, 1), laid_out(1, 100, 1, 5)).moved, uint64_t{1} << 63);
}

TEST(ChangePrices, ArePartsOfAStopAPlanAndAStart) {
  Scaling world;
  ChangeCosts costs;
  costs.stop_s = 3, costs.start_s = 7, costs.link = 100;
  const auto prices = planned_prices(world.kinds, {{nullptr, 1000}}, world.nodes, costs);
  PolicyCurves curves = world.curves("elastic");
  const Curve& curve = *curves.of({"m-1", 0}, 0).value();
  ASSERT_TRUE(prices->check(0, curve).has_value());
  const CurvePoint &one = curve.points.front(), &all = curve.points.back();
  EXPECT_EQ(prices->of({0, nullptr, &one, false, false}), 7);
  EXPECT_EQ(prices->of({0, &one, &all, true, true}), 3 + 10 + 7);
  EXPECT_EQ(prices->of({0, &all, &one, true, true}), 3 + 7);
  EXPECT_EQ(prices->of({0, &one, &one, true, false}), 3 + 10 + 7) << "on another node";
  EXPECT_EQ(prices->of({0, &one, &one, false, false}), 10 + 7) << "it had waited";
}

std::string price_complaint(const std::string& text) {
  Scaling world;
  auto prices = measured_prices(text, "p.csv", world.kinds);
  if (prices.has_error()) return prices.error().message();
  PolicyCurves curves = world.curves("elastic");
  const Result<> checked = prices.value()->check(0, *curves.of({"m-1", 0}, 0).value());
  return checked.has_error() ? checked.error().message() : "taken";
}

TEST(ChangePrices, OfATableAreThoseOfTheLineThatSaysMost) {
  Scaling world;
  const std::string text = "seconds,model,from,to\n9,,,\n5,model,,\n2,model,1,2\n1,model,0,4\n";
  const auto prices = measured_prices(text, "p.csv", world.kinds).value();
  CurvePoint one, two, four;
  one.gpus = 1, two.gpus = 2, four.gpus = 4;
  EXPECT_EQ(prices->of({0, &one, &two, true, true}), 2);
  EXPECT_EQ(prices->of({0, &two, &one, true, true}), 5);
  EXPECT_EQ(prices->of({0, &one, &four, false, false}), 1);
  EXPECT_EQ(price_complaint(text), "taken");
  EXPECT_EQ(price_complaint("seconds\n9\n"), "taken");
  EXPECT_THAT(price_complaint("seconds,model\n9,modl\n"),
              HasSubstr("p.csv: no line is of model 'model'"));
  EXPECT_THAT(price_complaint("seconds,model,from,to\n9,model,1,2\n"),
              HasSubstr("p.csv: no line says what model 'model' takes from 0 to 1 GPU,"));
  EXPECT_THAT(price_complaint("model\nm\n"), HasSubstr("there is no column 'seconds'"));
  EXPECT_THAT(price_complaint("seconds\n-1\n"), HasSubstr("p.csv: line 2, column 1 (seconds)"));
  EXPECT_THAT(price_complaint("seconds,from,to\n1,2,\n"), HasSubstr("line 2, column 5 (to)"));
  EXPECT_THAT(price_complaint("seconds\n1\n2\n"), HasSubstr("line 3"));
}

TEST(ChangePrices, NothingStandsStillForNothingAndNothingChangesForAll) {
  Scaling world;
  world.rules.on_events = true;
  const std::vector<ArrivingJob> jobs = {{"m-1", 0, 0, 1e5}, {"m-2", 0, 100, 1e5}};
  const auto changes = [&](double price) {
    const auto prices = constant_prices(price, 0);
    const Simulated run = world.run("elastic", jobs, *prices);
    return run.jobs[0].changes + run.jobs[1].changes;
  };
  EXPECT_GE(changes(0), 2u);
  EXPECT_EQ(changes(1e7), 1u) << "to make room";
  world.rules.first_start_s = 50;
  const auto nothing = constant_prices(0, 0);
  const Simulated run = world.run("asked", {{"m-1", 0, 0, 1000}}, *nothing);
  EXPECT_NEAR(*run.jobs[0].end, 50 + 100, 1e-6);
}

constexpr const char* kGradients =
    "model,batch,epoch,steps,grad_sqr,grad_var\n"
    "model,16,1,10,1,0\nmodel,16,2,30,1,1\nmodel,64,1,10,1,0\nmodel,64,2,32,1,1\n";

TEST(Goodput, IsThroughputByWhatASampleIsWorth) {
  const auto read = read_efficiency(kGradients, "g.csv");
  ASSERT_TRUE(read.has_error()) << "no variance";
  EXPECT_THAT(read.error().message(), HasSubstr("g.csv: line 2, column 17 (grad_var)"));
}

std::string gradients_without(const std::string& wrong, const std::string& right) {
  std::string text = kGradients;
  for (size_t at = 0; (at = text.find(",1,0\n", at)) != std::string::npos;) text[at + 3] = '3';
  if (const size_t at = text.find(wrong); at != std::string::npos)
    text.replace(at, wrong.size(), right);
  return text;
}

TEST(Goodput, CountsEpochByEpoch) {
  Scaling world;
  const auto read = read_efficiency(gradients_without("", ""), "g.csv");
  ASSERT_TRUE(read.has_value()) << read.error().message();
  world.efficiency = read.value();
  const Efficiency& of = world.efficiency.at("model");
  ASSERT_EQ(of.epochs(), 2u);
  EXPECT_EQ(of.ends_at(0), 160);
  EXPECT_EQ(of.ends_at(1), 480);
  // scale 4: (3 + 1) ÷ (3/4 + 1) ÷ 4, and (1 + 1) ÷ (1/4 + 1) ÷ 4
  EXPECT_DOUBLE_EQ(of.of(0, 64), 4 / 7.0);
  EXPECT_DOUBLE_EQ(of.of(1, 64), 0.4);
  EXPECT_DOUBLE_EQ(of.of(1, 16), 1);
  EXPECT_DOUBLE_EQ(of.of(1, 4), 1);
  const auto nothing = constant_prices(0, 0);
  world.rules.on_events = true;
  const Simulated run = world.run("asked", {{"m-1", 0, 0, 480}}, *nothing);
  EXPECT_NEAR(*run.jobs[0].end, 160 / (10 * 4 / 7.0) + 320 / (10 * 0.4), 1e-6);
  EXPECT_EQ(run.jobs[0].changes, 0u);
}

TEST(Goodput, SaysWhereWhatIsWrong) {
  const auto complaint = [](const std::string& wrong, const std::string& right) {
    const auto read = read_efficiency(gradients_without(wrong, right), "g.csv");
    return read.has_error() ? read.error().message() : "taken";
  };
  EXPECT_THAT(complaint("64,1,10", "64,5,10"), HasSubstr("line 4, column 10 (epoch)"));
  EXPECT_THAT(complaint("64,1,10", "16,1,10"), HasSubstr("line 4, column 7 (batch): a second"));
  EXPECT_THAT(complaint("64,2,32", "16,3,32"), HasSubstr("other batches than the first"));
  EXPECT_THAT(complaint("16,2,30", "16,2,9"), HasSubstr("epoch 2 ends before it begins"));
  EXPECT_THAT(complaint("64,2,32,1,1", "64,2,32,1e308,1"),
              HasSubstr("line 5, column 15 (grad_sqr): 1e+308 is too much"));
  EXPECT_THAT(complaint("64,2,32,1,1", "64,2,32,1,1e308"),
              HasSubstr("line 5, column 17 (grad_var): 1e+308 is too much"));
  EXPECT_THAT(complaint("steps", "stps"), HasSubstr("(is it 'stps'? rename it)"));
}

TEST(Growth, IsByWhatAJobHasTrainedWith) {
  Scaling world;
  world.rules.growth = 2;
  const auto nothing = constant_prices(0, 0);
  const Simulated run = world.run("elastic", {{"m-1", 0, 0, 1e5}}, *nothing);
  std::vector<uint32_t> gpus;
  for (const Segment& segment : run.segments) gpus.push_back(segment.point.gpus);
  EXPECT_THAT(gpus, testing::ElementsAre(1, 2, 4, 8, 16));
}

TEST(Growth, OfAnySizeIsNoLessThanOne) {
  Scaling world;
  world.rules.growth = 1e12;
  const auto nothing = constant_prices(0, 0);
  const Simulated run = world.run("elastic", {{"m-1", 0, 0, 1e5}}, *nothing);
  ASSERT_EQ(run.segments.size(), 2u);
  EXPECT_EQ(run.segments[0].point.gpus, 1u);
  EXPECT_EQ(run.segments[1].point.gpus, 16u);
}

TEST(Pollux, SharesAsTheHarmonicMeanHasIt) {
  Scaling world;
  PolicyCurves curves = world.curves("pollux");
  const Curve* curve = curves.of({"m-1", 0}, 0).value();
  ElasticJob job{curve, 1e6, std::nullopt};
  job.age_s = 100;
  ScalingRules rules;
  rules.objective = Objective::kFairness;
  const auto gpus = [&](const std::vector<ElasticJob>& jobs) {
    std::vector<uint32_t> all;
    for (const auto& point : decide(jobs, 16, rules))
      all.push_back(point ? curve->points[*point].gpus : 0);
    return all;
  };
  EXPECT_THAT(gpus({job, job}), testing::ElementsAre(8, 8));
  EXPECT_THAT(gpus({job, job, job, job}), testing::Each(4u));
  ElasticJob has_all = job;
  has_all.now = 4;
  EXPECT_THAT(gpus({has_all, job}), testing::Each(8u)) << "who waits counts more than all";
  rules.change_s = 1000;
  ElasticJob has_half = job;
  has_half.now = 3;
  EXPECT_THAT(gpus({has_half}), testing::ElementsAre(8u)) << "it is too young to change";
}

TEST(Rubick, GivesWhatIsFree) {
  Scaling world;
  PolicyCurves curves = world.curves("rubick");
  const Curve* curve = curves.of({"m-1", 0}, 0).value();
  Curve small = *curve, large = *curve;
  for (CurvePoint& point : large.points) point.technique = "zero-offload";
  Placement cluster(world.nodes);
  std::vector<ElasticJob> jobs = {{&small, 1e6, std::nullopt}, {&large, 1e6, std::nullopt}};
  std::vector<Wish> wishes = {{0, &small, {}, {}}, {1, &large, {}, {}}};
  take_what_is_free(jobs, wishes, cluster);
  EXPECT_EQ(wishes[0].point, 3u) << "the whole of a node";
  EXPECT_EQ(wishes[1].point, 3u) << "the other one";
  cluster.release(0);
  jobs.erase(jobs.begin());
  wishes.erase(wishes.begin());
  jobs[0].now = wishes[0].now = wishes[0].point;
  take_what_is_free(jobs, wishes, cluster);
  EXPECT_EQ(wishes[0].point, 4u) << "all";
}

}  // namespace
}  // namespace ptc::planner
