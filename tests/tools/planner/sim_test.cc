#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#include "store/base/json.h"
#include "tools/planner/elastic/placement.h"
#include "tools/planner/profile/csv.h"
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
  EXPECT_EQ(run.error().message(),
            "job 'big-1': it fits nowhere: 'large' needs 4 GPUs at least, and the largest node has "
            "2 (of 2 in all; beyond a node, whole nodes of that size)");
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

TEST(Policy, JobsThatAgreeShareTheirCurves) {
  World world;
  world.kinds = {{"a", "small", 1, 8, 128}, {"b", "small", 9, 8, 128}, {"c", "small", 1, 8, 64}};
  PolicyCurves curves(parse_policy("max-batch").value(), world.all, world.kinds, world.nodes);
  std::vector<const Curve*> of;
  for (uint32_t kind = 0; kind < 3; ++kind) of.push_back(curves.of({"x", kind}, 1).value());
  EXPECT_EQ(of[0], of[1]);
  EXPECT_EQ(of[0]->points.front().batch, 128u);
  EXPECT_EQ(of[2]->points.front().batch, 64u);
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
  const auto jobs = read_trace(text, "t.csv", kinds, {10, 20}, 8);
  return jobs.has_error() ? jobs.error().message() : "taken";
}

TEST(Trace, IsReadInTheOrderOfTimes) {
  const std::vector<JobToTrain> kinds = {{"a", "bert", 1}, {"b", "gpt2", 1}};
  const auto jobs = read_trace(
      "\xEF\xBB\xBFtime_s,model,minutes,samples,gpus,name\r\n20,gpt2,2,,4,x\r\n10,bert,,500,,\r\n",
      "t.csv", kinds, {10, 20}, 4);
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
  EXPECT_EQ(trace_complaint("time_s,model,minutes,gpus\n5,bert,1,8\n6,bert,1,9\n"),
            "t.csv: line 3, column 10 (gpus): 9 GPUs, and the cluster has 8");
}

/// What jobs.csv and events.jsonl say, read again, and counted without any of the simulator.
struct Recount {
  struct OfJob {
    int arrives = 0, starts = 0, changes = 0, stops = 0, ends = 0, dropped = 0;
    double since = 0, gpus = 0, gpu_s = 0;
  };
  std::map<std::string, OfJob> jobs;
  std::vector<double> took;
  double rows = 0, done_in_window = 0, dropped = 0, csv_gpu_hours = 0, csv_changes = 0;
  double last = 0, gpu_s = 0, changes = 0, failed = 0;
  int waiting = 0, least_waiting = 0;

  void read_jobs(const std::string& text, double window_s) {
    const Csv csv = Csv::parse(text, "jobs.csv").value();
    const auto number = [&](size_t row, const char* title) {
      return csv.number(row, csv.needed(title).value()).value();
    };
    rows = static_cast<double>(csv.rows());
    for (size_t i = 0; i < csv.rows(); ++i) {
      dropped += number(i, "dropped");
      csv_gpu_hours += number(i, "gpu_hours");
      csv_changes += number(i, "changes");
      if (csv.at(i, csv.needed("end_s").value()).empty()) continue;
      done_in_window += number(i, "end_s") <= window_s;
      took.push_back(number(i, "completion_s"));
      EXPECT_NEAR(took.back(), number(i, "end_s") - number(i, "arrival_s"), 0.002);
    }
  }

  void read_events(const std::string& text) {
    std::istringstream lines(text);
    double before = 0;
    for (std::string line; std::getline(lines, line);) {
      const json::value event = json::parse(line);
      const double at = event.at("t_s").to_number<double>();
      const std::string what(event.at("what").as_string());
      EXPECT_GE(at, before) << line;
      before = at;
      if (!event.as_object().contains("job")) {
        failed += what == "fails";
        continue;
      }
      OfJob& job = jobs[std::string(event.at("job").as_string())];
      job.gpu_s += job.gpus * (at - job.since);
      job.since = at;
      if (what == "starts" || what == "changes") job.gpus = event.at("gpus").to_number<double>();
      else job.gpus = 0;
      if (what == "ends" || what == "is dropped") last = std::max(last, at);
      job.arrives += what == "arrives", job.starts += what == "starts";
      job.changes += what == "changes", job.stops += what == "stops";
      job.ends += what == "ends", job.dropped += what == "is dropped";
      waiting +=
          (what == "arrives" || what == "stops") - (what == "starts" || what == "is dropped");
      least_waiting = std::min(least_waiting, waiting);
    }
    for (const auto& [name, job] : jobs) {
      gpu_s += job.gpu_s;
      changes += job.changes + std::max(0, job.starts - 1);
    }
  }

  /// The least time that so large a part of the jobs took no longer than.
  double within(double part) const {
    double least = 1e300;
    for (const double one : took) {
      double no_longer = 0;
      for (const double other : took) no_longer += other <= one;
      if (no_longer >= part * static_cast<double>(took.size())) least = std::min(least, one);
    }
    return least;
  }
  double mean() const {
    return std::accumulate(took.begin(), took.end(), 0.0) / static_cast<double>(took.size());
  }
};

/// The lowest place to which a path of the picture goes down.
double lowest_of(const std::string& svg, const std::string& path) {
  const size_t from = svg.find("<path class=\"" + path + "\"");
  const std::string text = svg.substr(from, svg.find("/>", from) - from);
  double lowest = 0;
  for (size_t at = text.find('V'); at != std::string::npos; at = text.find('V', at + 1))
    lowest = std::max(lowest, std::stod(text.substr(at + 1)));
  return lowest;
}

TEST(Simulator, ItsFiguresAreThoseOfItsFiles) {
  double failed = 0, stopped_with_nodes = 0, dropped = 0;
  for (uint64_t seed = 1; seed <= 6; ++seed)
    for (const char* policy : {"elastic", "elastic-overtaking", "max-batch"})
      for (const bool drops : {false, true}) {
        SCOPED_TRACE(fmt::format("seed {}, {}, drops {}", seed, policy, drops));
        World world(seed, 60);
        world.rules.failures_per_day = seed % 2 == 0 ? 0 : 12;
        world.rules.drops = drops;
        const Simulated run = world.run(policy, seed);
        expect_possible(world, run);
        Recount told;
        told.read_jobs(jobs_csv(world.kinds, world.jobs, run), world.rules.window_s);
        told.read_events(events_jsonl(world.nodes, world.jobs, run));
        ASSERT_EQ(told.jobs.size(), world.jobs.size());
        for (const auto& [name, job] : told.jobs) {
          ASSERT_EQ(job.arrives, 1) << name;
          ASSERT_EQ(job.arrives + job.stops, job.starts + job.dropped) << name;
          ASSERT_EQ(job.starts, job.stops + job.ends) << name;
          ASSERT_EQ(job.ends + job.dropped, 1) << name;
        }
        EXPECT_GE(told.least_waiting, 0);
        EXPECT_EQ(told.waiting, 0);
        const std::string svg = utilisation_svg(world.nodes, run);
        EXPECT_EQ(lowest_of(svg, "waiting"), lowest_of(svg, "used"));  // both at 0 in the end
        const json::object of = summary_json(summary_of(world.nodes, world.jobs, run, world.rules));
        const auto figure = [&](const char* name) { return of.at(name).to_number<double>(); };
        EXPECT_EQ(figure("jobs"), told.rows);
        EXPECT_EQ(figure("done"), static_cast<double>(told.took.size()));
        EXPECT_EQ(figure("done_in_window"), told.done_in_window);
        EXPECT_EQ(figure("dropped"), told.dropped);
        EXPECT_NEAR(figure("mean_completion_s"), told.mean(), 0.002);
        EXPECT_NEAR(figure("median_completion_s"), told.within(0.5), 0.002);
        EXPECT_NEAR(figure("p99_completion_s"), told.within(0.99), 0.002);
        EXPECT_NEAR(figure("makespan_s"), told.last, 0.002);
        EXPECT_EQ(figure("changes"), told.changes);
        EXPECT_EQ(figure("changes"), told.csv_changes);
        EXPECT_NEAR(figure("gpu_hours"), told.gpu_s / 3600, 0.01);
        EXPECT_NEAR(figure("gpu_hours"), told.csv_gpu_hours, 0.01);
        EXPECT_NEAR(figure("utilisation"), told.gpu_s / (14 * told.last), 0.001);
        failed += told.failed;
        dropped += told.dropped;
        if (told.failed > 0)
          for (const auto& [name, job] : told.jobs) stopped_with_nodes += job.stops;
      }
  // It was about something.
  EXPECT_GT(failed, 0);
  EXPECT_GT(stopped_with_nodes, 0);
  EXPECT_GT(dropped, 0);
}

/// Half, all, all in a quarter of the time, and twice what there is room for.
TEST(Workload, ComesAsItsNameSays) {
  const std::vector<JobToTrain> kinds = {{"a", "m", 1}, {"b", "n", 1}};
  const auto jobs = [&](Arrivals arrivals, uint32_t gpus = 10) {
    DrawnWorkload how;
    how.arrivals = arrivals;
    how.hours = 400;
    return draw_jobs(kinds, {10, 20}, gpus, how, 3);
  };
  const auto count = [&](Arrivals arrivals) { return static_cast<double>(jobs(arrivals).size()); };
  // Ten GPUs bear 15 jobs of 40 minutes an hour.
  EXPECT_NEAR(count(Arrivals::kHigh), 15 * 400, 300);
  EXPECT_NEAR(count(Arrivals::kLow) / count(Arrivals::kHigh), 0.5, 0.05);
  EXPECT_NEAR(count(Arrivals::kExtreme) / count(Arrivals::kHigh), 2, 0.1);
  EXPECT_NEAR(count(Arrivals::kBursty) / count(Arrivals::kHigh), 1, 0.1);
  EXPECT_NEAR(static_cast<double>(jobs(Arrivals::kHigh, 20).size()) / count(Arrivals::kHigh), 2,
              0.1);
  const auto in_first_quarters = [&](Arrivals arrivals) {
    double in = 0;
    for (const ArrivingJob& job : jobs(arrivals)) in += std::fmod(job.at_s, 4 * 3600) <= 3600;
    return in / count(arrivals);
  };
  EXPECT_EQ(in_first_quarters(Arrivals::kBursty), 1);
  EXPECT_NEAR(in_first_quarters(Arrivals::kExtreme), 0.25, 0.05);
  const auto drawn = jobs(Arrivals::kHigh);
  const auto of_first = std::count_if(drawn.begin(), drawn.end(),
                                      [](const ArrivingJob& job) { return job.kind == 0; });
  EXPECT_NEAR(static_cast<double>(of_first) / static_cast<double>(drawn.size()), 0.5, 0.05);
}

}  // namespace
}  // namespace ptc::planner
