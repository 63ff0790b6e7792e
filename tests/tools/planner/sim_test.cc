#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/elastic/placement.h"
#include "tools/planner/sim/files.h"
#include "tools/planner/sim/simulator.h"

namespace ptc::planner {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

/// A model that scales as 1, 1.8, 3.2, 5.6 and with the batch, and one that needs four GPUs.
std::vector<ProfileRow> some_rows() {
  std::vector<ProfileRow> rows;
  const auto add = [&](const std::string& model, uint32_t gpus, uint64_t batch, double seconds) {
    ProfileRow row;
    row.model = model;
    row.batch = batch;
    row.dp = row.gpus = gpus;
    row.iteration_s = seconds;
    rows.push_back(row);
  };
  for (const uint64_t each : {8, 16, 32}) {
    double speed_up = 1;
    for (uint32_t gpus = 1; gpus <= 8; gpus *= 2, speed_up *= 1.8)
      add("small", gpus, each * gpus, gpus * (0.1 + each * 0.01) / speed_up);
    for (uint32_t gpus = 4; gpus <= 8; gpus *= 2) add("large", gpus, each * gpus, 1 + each * 0.02);
  }
  return rows;
}

struct World {
  std::vector<NodeOfCluster> nodes = {{"w0", 4}, {"w1", 8}, {"w2", 2}};
  std::vector<JobToTrain> kinds = {{"s", "small", 1, 8, 128}, {"l", "large", 1, 32, 256}};
  std::vector<ProfileRow> rows = some_rows();
  std::vector<const ProfileRow*> all;
  std::vector<ArrivingJob> jobs;
  SimulationRules rules;

  explicit World(uint64_t seed = 1, double per_hour = 30) {
    for (const ProfileRow& row : rows) all.push_back(&row);
    DrawnWorkload how;
    how.per_hour = per_hour;
    how.hours = 3;
    jobs = draw_jobs(kinds, {100, 80}, 14, how, seed);
    rules.scaling.change_s = rules.scaling.start_s = 30;
    rules.window_s = 3 * 3600;
  }
  Simulated run(const std::string& policy, uint64_t seed = 1) {
    PolicyCurves curves(parse_policy(policy).value(), all, kinds, nodes);
    const auto prices = constant_prices(rules.scaling.change_s, rules.scaling.start_s);
    auto result = simulate(nodes, jobs, curves, *prices, rules, seed);
    EXPECT_TRUE(result.has_value()) << result.error().message();
    return std::move(result).value();
  }
};

/// No GPU has two jobs at a time, a job has what its point says, and segments of a job follow each
/// other.
void expect_possible(const World& world, const Simulated& run) {
  std::map<std::pair<uint32_t, uint32_t>, std::vector<std::pair<double, double>>> of_gpu;
  std::map<uint32_t, double> ended;
  std::map<uint32_t, const Segment*> last;
  for (const Segment& segment : run.segments) {
    ASSERT_LT(segment.start, segment.end);
    uint32_t gpus = 0;
    for (const OnNode& on : segment.on) {
      gpus += static_cast<uint32_t>(on.gpus.size());
      for (const uint32_t gpu : on.gpus) {
        ASSERT_LT(gpu, world.nodes[on.node].gpus);
        of_gpu[{on.node, gpu}].emplace_back(segment.start, segment.end);
      }
    }
    ASSERT_EQ(gpus, segment.point.gpus);
    ASSERT_TRUE(segment.on.size() == 1 || gpus % segment.on.size() == 0);
    ASSERT_GE(segment.start, world.jobs[segment.job].at_s);
    ASSERT_GE(segment.start, ended[segment.job]);
    ended[segment.job] = segment.end;
    if (const Segment* before = std::exchange(last[segment.job], &segment);
        before != nullptr && before->end == segment.start) {
      ASSERT_FALSE(before->point.gpus == segment.point.gpus &&
                   before->point.batch == segment.point.batch &&
                   before->on.front().node == segment.on.front().node)
          << "it stood still for nothing";
    }
  }
  for (auto& [gpu, spans] : of_gpu) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) ASSERT_GE(spans[i].first, spans[i - 1].second);
  }
}

/// What it trained in its segments, each of which begins with standing still, is all that it had
/// to.
void expect_conserved(const World& world, const Simulated& run) {
  std::vector<double> trained(world.jobs.size());
  for (const Segment& segment : run.segments)
    trained[segment.job] +=
        segment.point.samples_per_s *
        std::max(0.0, segment.end - segment.start - world.rules.scaling.change_s);
  for (size_t i = 0; i < trained.size(); ++i) {
    ASSERT_TRUE(run.jobs[i].end.has_value());
    ASSERT_NEAR(trained[i], world.jobs[i].samples + run.jobs[i].lost_samples,
                1e-6 * world.jobs[i].samples);
  }
}

TEST(Simulator, EveryJobIsTrainedToItsEndOnGpusOfItsOwn) {
  for (uint64_t seed = 1; seed <= 12; ++seed)
    for (const char* policy : {"elastic", "elastic-completion", "max-batch", "min-batch",
                               "random-batch", "elastic+accumulation", "asked"}) {
      SCOPED_TRACE(fmt::format("seed {}, {}", seed, policy));
      World world(seed);
      const Simulated run = world.run(policy, seed);
      expect_possible(world, run);
      expect_conserved(world, run);
    }
}

TEST(Simulator, WithNodesThatFailNothingIsLostButWhatIsSaid) {
  double lost = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    World world(seed);
    world.rules.failures_per_day = 24;
    const Simulated run = world.run("elastic", seed);
    expect_possible(world, run);
    expect_conserved(world, run);
    for (const JobOutcome& job : run.jobs) lost += job.lost_samples;
  }
  EXPECT_GT(lost, 0);
}

TEST(Simulator, EqualSeedsGiveEqualBytesAndOthersOthers) {
  const auto bytes = [](uint64_t seed) {
    World world(seed);
    world.rules.failures_per_day = 3;
    const Simulated run = world.run("random-batch", seed);
    return jobs_csv(world.kinds, world.jobs, run) + events_jsonl(world.nodes, world.jobs, run) +
           gantt_of(world.nodes, world.jobs, run) + utilisation_svg(world.nodes, run);
  };
  EXPECT_EQ(bytes(7), bytes(7));
  EXPECT_NE(bytes(7), bytes(8));
}

TEST(Simulator, WhatCostsNothingIsDoneAndWhatCostsAllIsNot) {
  World world(3);
  world.rules.scaling.change_s = 0;
  world.rules.scaling.start_s = 0;
  const Simulated free = world.run("elastic");
  world.rules.scaling.change_s = 1e8;
  const Simulated never = world.run("elastic");
  const auto changes = [](const Simulated& run) {
    uint64_t sum = 0;
    for (const JobOutcome& job : run.jobs) sum += job.changes;
    return sum;
  };
  EXPECT_GT(changes(free), 20u);
  // Only to make room for who comes, which no price forbids.
  EXPECT_LT(changes(never), changes(free));
  const double price_0 = summary_of(world.nodes, world.jobs, free, world.rules).mean_s;
  EXPECT_LT(price_0, summary_of(world.nodes, world.jobs, never, world.rules).mean_s);
}

/// Where GPUs lie scattered who is to have more than there is room for does not begin anew each
/// time.
TEST(Simulator, ChangesThatCostMoreThanTheTimeBetweenDecisionsEnd) {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    World world(seed);
    world.nodes = {{"w0", 3}, {"w1", 3}, {"w2", 4}};
    world.rules.scaling.change_s = world.rules.scaling.start_s = 260;
    const Simulated run = world.run("elastic+unpriced", seed);
    expect_possible(world, run);
    expect_conserved(world, run);
  }
}

TEST(Simulator, WhoHasNoRoomIsDroppedWhereThatIsWanted) {
  World world(1, 200);
  world.rules.drops = true;
  const Simulated run = world.run("elastic");
  const Summary sum = summary_of(world.nodes, world.jobs, run, world.rules);
  EXPECT_GT(sum.dropped, 0u);
  EXPECT_EQ(sum.dropped + sum.done, sum.jobs);
  for (const JobOutcome& job : run.jobs) EXPECT_NE(job.dropped, job.end.has_value());
}

TEST(Simulator, AJobThatFitsNowhereIsNamed) {
  World world;
  world.nodes = {{"w0", 2}};
  PolicyCurves curves(parse_policy("elastic").value(), world.all, world.kinds, world.nodes);
  const auto prices = constant_prices(30, 30);
  const auto run = simulate(world.nodes, {{"big-1", 1, 0, 100}}, curves, *prices, world.rules, 1);
  ASSERT_TRUE(run.has_error());
  EXPECT_THAT(run.error().message(), HasSubstr("'big-1'"));
}

TEST(Simulator, EndsWhereItIsStoppedAndAfterAHundredYears) {
  World world;
  const auto complaint = [&] {
    PolicyCurves curves(parse_policy("asked").value(), world.all, world.kinds, world.nodes);
    const auto run =
        simulate(world.nodes, world.jobs, curves, *constant_prices(0, 0), world.rules, 1);
    return run.has_error() ? run.error().message() : "done";
  };
  world.jobs = {{"s-1", 0, 1e9, 1000}};  // it comes after many ticks
  EXPECT_EQ(complaint(), "done");
  world.jobs.front().samples = 1e18;
  world.rules.every_s = 1e6;
  EXPECT_THAT(complaint(), HasSubstr("after 100 years of simulated time 1 of 1 jobs"));
  std::atomic<bool> stop = true;
  world.rules.stop = &stop;
  EXPECT_EQ(complaint(), "the simulation was stopped");
}

TEST(Policy, ThoseThatThereAreAreNamed) {
  EXPECT_TRUE(parse_policy("max-batch+accumulation").value().accumulates);
  EXPECT_THAT(parse_policy("elastc").error().message(),
              HasSubstr("'elastc' (did you mean 'elastic'?)"));
  for (const auto& [name, what] : known_policies())
    EXPECT_THAT(parse_policy("elastc").error().message(), HasSubstr("'" + name + "'"));
}

TEST(Placement, TakesTheTightestNodeAndWholeOnes) {
  Placement cluster({{"a", 4}, {"b", 8}, {"c", 8}});
  ASSERT_TRUE(cluster.place(1, 3));
  EXPECT_EQ(cluster.of(1)[0].node, 0u);
  ASSERT_TRUE(cluster.place(2, 16));
  EXPECT_THAT(cluster.of(2), SizeIs(2));
  EXPECT_FALSE(cluster.place(3, 2));
  ASSERT_TRUE(cluster.place(3, 1));
  EXPECT_THAT(cluster.of(3)[0].gpus, ElementsAre(3u));
  EXPECT_THAT(cluster.fail(1), ElementsAre(2u));
  EXPECT_EQ(cluster.gpus(), 12u);
  EXPECT_FALSE(cluster.place(2, 16));
  cluster.repair(1);
  EXPECT_TRUE(cluster.place(2, 16));
}

TEST(Workload, ComesAsOftenAsIsSaid) {
  const std::vector<JobToTrain> kinds = {{"a", "m", 1}};
  DrawnWorkload how;
  how.per_hour = 50;
  how.hours = 100;
  const auto jobs = draw_jobs(kinds, {10}, 8, how, 1);
  EXPECT_NEAR(static_cast<double>(jobs.size()), 5000, 300);
  how.arrivals = Arrivals::kBursty;
  const auto bursts = draw_jobs(kinds, {10}, 8, how, 1);
  EXPECT_NEAR(static_cast<double>(bursts.size()), 5000, 300);
  for (const ArrivingJob& job : bursts) ASSERT_LE(std::fmod(job.at_s, 4 * 3600), 3600);
  for (const ArrivingJob& job : jobs) {
    ASSERT_GE(job.samples, 20 * 60 * 10);
    ASSERT_LE(job.samples, 60 * 60 * 10);
  }
}

std::string trace_complaint(const std::string& text) {
  const std::vector<JobToTrain> kinds = {{"a", "bert", 1}, {"b", "gpt2", 1}};
  const auto jobs = read_trace(text, "t.csv", kinds, {10, 20});
  return jobs.has_error() ? jobs.error().message() : "taken";
}

TEST(Trace, IsReadInTheOrderOfTimes) {
  const std::vector<JobToTrain> kinds = {{"a", "bert", 1}, {"b", "gpt2", 1}};
  const auto jobs = read_trace(
      "\xEF\xBB\xBFtime_s,model,minutes,samples,gpus,name\r\n20,gpt2,2,,4,x\r\n10,bert,,500,,\r\n",
      "t.csv", kinds, {10, 20});
  ASSERT_TRUE(jobs.has_value()) << jobs.error().message();
  ASSERT_THAT(jobs.value(), SizeIs(2));
  EXPECT_EQ(jobs.value()[0].name, "a-2");
  EXPECT_EQ(jobs.value()[0].samples, 500);
  EXPECT_EQ(jobs.value()[1].samples, 2400);
  EXPECT_EQ(jobs.value()[1].asked_gpus, 4u);
}

TEST(Trace, SaysWhereWhatIsWrong) {
  EXPECT_THAT(trace_complaint("time_s,model,minutes\n5,brt,1\n"),
              HasSubstr("t.csv: line 2, column 3 (model): no job of the jobs' file has the model "
                        "'brt' (did you mean 'bert'?)"));
  EXPECT_THAT(trace_complaint("time_s,model\n5,bert\n"), HasSubstr("'samples' or 'minutes'"));
  EXPECT_THAT(trace_complaint("time_s,minutes\n5,1\n"), HasSubstr("'job' or 'model'"));
  EXPECT_THAT(trace_complaint("time_s,model,minutes\n-5,bert,1\n"), HasSubstr("line 2, column 1"));
  EXPECT_THAT(trace_complaint("time_s,model,minutes\n5,bert,0\n"), HasSubstr("line 2, column 8"));
  EXPECT_THAT(trace_complaint("time_s,model,samples\n5,bert,\n"), HasSubstr("is missing"));
  EXPECT_THAT(trace_complaint("time_s,model,minutes,name\n5,bert,1,x\n6,bert,1,x\n"),
              HasSubstr("a second job 'x'"));
  EXPECT_THAT(trace_complaint("time_s,model,minutes\n"), HasSubstr("no job comes"));
}

}  // namespace
}  // namespace ptc::planner
