// Schedules through a checker of its own, and the solver beside all there is.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "store/base/utf8.h"
#include "tests/tools/planner/spase_checker.h"
#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/gantt.h"
#include "tools/planner/spase/instance.h"
#include "tools/planner/spase/schedule.h"
#include "tools/planner/spase/solver.h"

namespace ptc::planner {
namespace {

using testing::HasSubstr;

TEST(Spase, EverySchedulePassesTheChecker) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 300; ++turn) {
    const Instance instance = drawn.instance(1 + drawn.below(20), 1 + drawn.below(5), 8, 4);
    ListScheduler scheduler(instance);
    const Choice choice = drawn.choice(instance);
    const Schedule schedule = scheduler.schedule(choice);
    ASSERT_EQ(wrong_with(instance, schedule), "");
    ASSERT_EQ(scheduler.makespan(choice), schedule.makespan);
    ASSERT_GE(schedule.makespan, lower_bound_of(instance) * (1 - 1e-9));
    for (const Baseline& other : baselines(instance, 1)) {
      if (other.name == "optimus, dynamic") continue;  // tasks change their configurations there
      ASSERT_GE(other.makespan, lower_bound_of(instance) * (1 - 1e-9)) << other.name;
    }
  }
}

TEST(Spase, FindsTheShortestOfSmallOnes) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 12; ++turn) {
    const Instance instance = drawn.instance(2 + drawn.below(3), 1 + drawn.below(2), 4, 3);
    SolverOptions options;
    options.steps = 60'000;
    const Solution solution = solve(instance, options);
    ASSERT_EQ(wrong_with(instance, solution.schedule), "");
    const double best = shortest(instance);
    ASSERT_LE(solution.lower_bound, best * (1 + 1e-9));
    ASSERT_LE(solution.schedule.makespan, best * (1 + 1e-9));
    ASSERT_GE(solution.schedule.makespan, best * (1 - 1e-9));
  }
}

TEST(Spase, TheShortestIsBetweenTheBoundAndEachBaseline) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 40; ++turn) {
    Instance instance = drawn.instance(1 + drawn.below(4), 1 + drawn.below(2), 4, 3);
    for (Task& task : instance.tasks)
      if (drawn.below(2) == 0) {
        task.usual = {task.configurations[drawn.below(task.configurations.size())]};
        task.usual.front().seconds *= 1 + 0.1 * static_cast<double>(drawn.below(5));
      }
    const double best = shortest(instance);
    ASSERT_LE(lower_bound_of(instance), best * (1 + 1e-9));
    std::set<std::string> names;
    for (const Baseline& other : baselines(instance, drawn.below(100))) {
      names.insert(other.name);
      if (other.name == "optimus, dynamic") continue;  // tasks change their configurations there
      ASSERT_LE(best, other.makespan * (1 + 1e-9)) << other.name;
    }
    ASSERT_THAT(names, testing::ElementsAre("current practice", "max", "min", "optimus",
                                            "optimus, dynamic", "random"));
  }
}

/// However many tasks there are. (How long it takes beyond its time is the machine's, too.)
TEST(Spase, TheSearchEndsWhenItsTimeIsOver) {
  Drawn drawn{std::mt19937_64(7)};
  const Instance instance = drawn.instance(600, 64, 8, 5);
  for (const int most : {1, 200}) {
    SolverOptions options;
    options.time = std::chrono::milliseconds(most);
    const Solution solution = solve(instance, options);
    EXPECT_EQ(wrong_with(instance, solution.schedule), "");
    EXPECT_TRUE(solution.optimal() || solution.seconds >= most / 1000.0) << solution.seconds;
    EXPECT_LT(solution.seconds, 30);
  }
}

TEST(Spase, IsNeverWorseThanWhatItBeginsWith) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 20; ++turn) {
    const Instance instance = drawn.instance(1 + drawn.below(60), 1 + drawn.below(9), 8, 5);
    SolverOptions options;
    options.steps = 3000;
    const Solution solution = solve(instance, options);
    ASSERT_EQ(wrong_with(instance, solution.schedule), "");
    ListScheduler scheduler(instance);
    for (const Choice& choice : simple_choices(instance))
      ASSERT_LE(solution.schedule.makespan, scheduler.makespan(choice));
  }
}

TEST(Spase, IsNeverWorseThanABaselineHoweverLittleTimeThereIs) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 40; ++turn) {
    Instance instance = drawn.instance(1 + drawn.below(60), 1 + drawn.below(9), 8, 5);
    for (Task& task : instance.tasks)  // what its user would take is no better
      if (drawn.below(2) == 0)
        task.usual = {task.configurations[drawn.below(task.configurations.size())]};
    const std::vector<Baseline> others = baselines(instance, 1);
    std::vector<const Schedule*> known;
    for (const Baseline& other : others) {
      if (!other.schedule) continue;
      ASSERT_EQ(wrong_with(instance, *other.schedule), "") << other.name;
      ASSERT_LE(other.schedule->makespan, other.makespan * (1 + 1e-9)) << other.name;
      known.push_back(&*other.schedule);
    }
    ASSERT_EQ(known.size() + 1, others.size());
    std::atomic<bool> stop{true};
    SolverOptions options;
    options.stop = &stop;
    const Solution solution = solve(instance, options, known);
    ASSERT_LE(solution.steps, 3u);
    ASSERT_EQ(wrong_with(instance, solution.schedule), "");
    for (const Baseline& other : others) {
      if (!other.schedule) continue;
      ASSERT_LE(solution.schedule.makespan, other.makespan * (1 + 1e-9)) << other.name;
    }
  }
}

/// 2000 jobs of many profiles: rows are looked at once, and not once for each job.
TEST(SpaseInstance, IsMadeOfManyRowsInLittleTime) {
  JobsAndProfiles from;
  from.file.nodes = {{"w0", 8}, {"w1", 8}};
  for (int i = 0; i < 2000; ++i)
    from.file.jobs.push_back({"j" + std::to_string(i), "m" + std::to_string(i % 20), 1e6});
  for (uint32_t i = 0; i < 200'000; ++i) {
    ProfileRow row;
    row.model = "m" + std::to_string(i % 20);
    row.batch = 8u << (i / 20 % 8);
    row.dp = row.gpus = 1 + i / 160 % 8;
    row.iteration_s = 1 + i % 97;
    from.rows.push_back(row);
  }
  const auto began = std::chrono::steady_clock::now();
  ASSERT_TRUE(make_instance(from).has_value());
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
}

TEST(Spase, TheSameSeedAndStepsAreTheSameAnswer) {
  Drawn drawn{std::mt19937_64(7)};
  const Instance instance = drawn.instance(15, 3, 8, 5);
  SolverOptions options;
  options.steps = 20'000;
  const auto text = [&] {
    const Solution solution = solve(instance, options);
    return pretty_json(schedule_json(instance, solution.schedule, solution.lower_bound));
  };
  const std::string first = text();
  EXPECT_EQ(text(), first);
}

TEST(Spase, OneTaskGetsWhatItIsFastestWith) {
  Instance instance;
  instance.nodes = {{"w0", 8}, {"w1", 8}};
  instance.tasks = {{"big", {{4, 1, 100, 8, "a"}, {8, 1, 60, 8, "b"}, {16, 2, 40, 8, "c"}}, {}}};
  const Solution solution = solve(instance, {});
  EXPECT_EQ(solution.schedule.makespan, 40);
  EXPECT_TRUE(solution.optimal());
  EXPECT_EQ(solution.schedule.runs.front().on.size(), 2u);
  const std::string svg = gantt_svg(instance, solution.schedule, solution.lower_bound);
  EXPECT_THAT(svg, HasSubstr("big: 16 GPUs, c, 0 s to 40 s"));
}

std::string instance_complaint(std::string_view jobs, std::string_view profiles) {
  JobsAndProfiles from;
  from.file = parse_jobs_file(jobs, "jobs.json").value();
  from.rows = parse_profiles(profiles, "p.csv").value();
  const auto instance = make_instance(from);
  return instance.has_error() ? instance.error().message() : "taken";
}

TEST(SpaseInstance, SaysWhyAJobFitsNowhere) {
  const auto job = [](std::string_view of) {
    return fmt::format(
        R"({{"cluster": {{"nodes": [4, 4]}}, "profiles": "p.csv", "jobs": [{{"name": "a", "samples": 8, {}}}]}})",
        of);
  };
  const std::string at_model = "jobs.json: line 1, column 99: job 'a': ";
  const std::string rows =
      "model,batch,gpus,max_gpus_per_node,iteration_s\ngpt2,8,16,8,1\ngpt2,8,8,4,1\nbert,8,1,1,"
      "oom\nwide,8,6,6,1\n";
  EXPECT_EQ(
      instance_complaint(job(R"("model": "net")"),
                         "model,batch,gpus,iteration_s,origin\nnet,8,1,oom,none: it took more than "
                         "60 s\nnet,8,2,oom,none: it took more than 60 s\nnet,8,4,oom,none: no\n"),
      at_model +
          "'net' had no time in any trial: it took more than 60 s (and 1 other reason); "
          "\"ptc profile run --again --within S\" gives it longer");
  EXPECT_EQ(instance_complaint(job(R"("model": "gpt2")"), rows), "taken");  // both nodes
  EXPECT_EQ(instance_complaint(job(R"("model": "gpt")"), rows),
            at_model +
                "no profile has a model 'gpt' (did you mean 'gpt2'?); there are 'bert', 'gpt2', "
                "'wide'");
  EXPECT_EQ(
      instance_complaint(job(R"("model": "gpt2", "batch": 16)"), rows),
      "jobs.json: line 1, column 116: job 'a': no profile of 'gpt2' has a batch of 16; there is 8");
  EXPECT_EQ(instance_complaint(job(R"("model": "bert")"), rows),
            at_model + "'bert' was out of memory in all that its profiles tried");
  EXPECT_EQ(
      instance_complaint(job(R"("model": "wide")"), rows),
      at_model +
          "it fits nowhere: 'wide' needs 6 GPUs at least, and the largest node has 4 (of 8 in "
          "all; beyond a node, whole nodes of that size)");
}

/// Numbers of GPUs and batches that no row has are not known. Nothing is made up for them, and
/// nobody is told that memory was short.
TEST(SpaseInstance, ARowThatIsMissingIsUnknownAndNotOutOfMemory) {
  const std::string jobs =
      R"({"cluster": {"nodes": [4]}, "profiles": "p.csv",
          "jobs": [{"name": "a", "model": "m", "samples": 80}]})";
  const std::string titles = "model,batch,gpus,iteration_s\n";
  EXPECT_THAT(instance_complaint(jobs, titles + "m,8,8,1\n"),
              testing::AllOf(HasSubstr("'m' needs 8 GPUs at least, and the largest node has 4"),
                             testing::Not(HasSubstr("memory"))));
  EXPECT_THAT(instance_complaint(jobs, titles + "m,8,1,oom\nm,8,2,oom\nm,8,8,1\n"),
              testing::Not(HasSubstr("memory")));
  EXPECT_THAT(instance_complaint(jobs, titles + "m,8,1,oom\nm,8,2,oom\n"),
              HasSubstr("was out of memory in all that its profiles tried"));
  JobsAndProfiles from;
  from.file = parse_jobs_file(jobs, "jobs.json").value();
  from.rows = parse_profiles(titles + "m,8,1,1\nm,8,3,0.5\nm,8,4,oom\n", "p.csv").value();
  std::vector<uint32_t> gpus;
  const Instance instance = make_instance(from).value();
  for (const Configuration& one : instance.tasks.front().configurations) gpus.push_back(one.gpus);
  EXPECT_THAT(gpus, testing::ElementsAre(1, 3));
}

TEST(SpaseInstance, WhatWasMeasuredOverNodesIsNotTakenForOne) {
  const std::string said = instance_complaint(
      R"({"cluster": {"nodes": [1024]}, "profiles": "p.csv",
          "jobs": [{"name": "a", "model": "moe", "samples": 8}]})",
      "model,batch,gpus,max_gpus_per_node,iteration_s\nmoe,8,16,8,1\nmoe,8,32,8,1\n");
  EXPECT_EQ(said,
            "jobs.json: line 2, column 43: job 'a': it fits nowhere: 'moe' was measured with 16 "
            "GPUs of which at most 8 were on "
            "one node, and that is not taken for one node (the largest has 1024): how fast it is "
            "there is not known");
}

TEST(SpaseInstance, TakesOneKindOfGpu) {
  const auto jobs = [](std::string_view device) {
    return fmt::format(
        R"({{"cluster": {{"nodes": [4]{}}}, "profiles": "p.csv",
             "jobs": [{{"name": "a", "model": "m", "samples": 80}}]}})",
        device);
  };
  const std::string rows = "model,batch,gpus,device,iteration_s\nm,8,1,A100,1\nm,8,2,H100,0.1\n";
  EXPECT_THAT(instance_complaint(jobs(""), rows),
              testing::AllOf(testing::StartsWith("jobs.json: line 1, column 13: "),
                             HasSubstr("several kinds of GPU, 'A100', 'H100'")));
  EXPECT_THAT(instance_complaint(jobs(R"(, "device": "A10")"), rows),
              testing::AllOf(testing::StartsWith("jobs.json: line 1, column 38: "),
                             HasSubstr("(did you mean 'A100'?)")));
  JobsAndProfiles from;
  from.file = parse_jobs_file(jobs(R"(, "device": "A100")"), "jobs.json").value();
  from.rows = parse_profiles(rows, "p.csv").value();
  const auto instance = make_instance(from);
  ASSERT_TRUE(instance.has_value()) << instance.error().message();
  ASSERT_EQ(instance.value().tasks.front().configurations.size(), 1u);
  EXPECT_EQ(instance.value().tasks.front().configurations.front().seconds, 10);
}

/// A number of GPUs that the nodes cannot give hides none that they can.
TEST(SpaseInstance, HasWhatItsNodesCanGive) {
  JobsAndProfiles from;
  from.file = parse_jobs_file(
                  R"({"cluster": {"nodes": [4, 4]}, "profiles": "p.csv",
                      "jobs": [{"name": "a", "model": "m", "samples": 3600}]})",
                  "jobs.json")
                  .value();
  from.rows =
      parse_profiles("model,batch,gpus,iteration_s\nm,10,1,10\nm,10,6,1\nm,10,8,1.1\n", "p.csv")
          .value();
  const auto instance = make_instance(from);
  ASSERT_TRUE(instance.has_value()) << instance.error().message();
  EXPECT_NEAR(solve(instance.value(), {}).schedule.makespan, 396, 1e-6);
  from.file.jobs.front().technique = "dpp";
  from.rows.front().technique = "ddp";
  EXPECT_EQ(make_instance(from).error().message(),
            "jobs.json: line 2, column 32: job 'a': no profile of 'm' has a technique 'dpp' (did "
            "you mean 'ddp'?); there is 'ddp'");
}

TEST(Spase, WhatTakesSeveralNodesLeavesTheOthersInTheBaselines) {
  Instance instance;
  for (int i = 0; i < 8; ++i) instance.nodes.push_back({"w" + std::to_string(i), 8});
  for (int i = 0; i < 4; ++i) instance.tasks.push_back({"t", {{16, 2, 3600, 8, "pp"}}, {}});
  for (const Baseline& other : baselines(instance, 1))
    EXPECT_EQ(other.makespan, 3600) << other.name;
}

TEST(Spase, ThePictureSaysWhatItLeavesOut) {
  Instance instance;
  instance.nodes = {{"w0", 1024}, {"w1", 1024}, {"left-out", 1024}};
  instance.tasks = {{"t", {{1024, 1, 40, 8, "a"}}, {}}};
  const Solution solution = solve(instance, {});
  const std::string svg = gantt_svg(instance, solution.schedule, solution.lower_bound);
  EXPECT_THAT(svg, HasSubstr("1 more node is not drawn"));
  EXPECT_THAT(svg, testing::Not(HasSubstr("left-out")));
}

TEST(Spase, ThePictureTellsNamesApart) {
  Instance instance;
  for (int i = 0; i < 4; ++i)
    instance.nodes.push_back({fmt::format("dgx-h100-rack1-{:060}-node{}", 0, i), 1});
  const std::string umlauts = "ä\x01" + std::string(40, 'x') + "öööööööööööööööööööööööööööööö<";
  instance.tasks = {{umlauts, {{1, 1, 40, 8, "a"}}, {}}, {"t", {{1, 1, 400, 8, "a"}}, {}}};
  const Solution solution = solve(instance, {});
  const std::string svg = gantt_svg(instance, solution.schedule, solution.lower_bound);
  EXPECT_TRUE(is_utf8(svg));
  EXPECT_THAT(svg, testing::Not(HasSubstr("\x01")));
  for (int i = 0; i < 4; ++i) {
    EXPECT_THAT(svg, HasSubstr("<title>" + instance.nodes[i].name + ": 1 GPU</title>dgx-"));
    EXPECT_THAT(svg, testing::ContainsRegex(fmt::format("…0*-node{}</text>", i)));
  }
  EXPECT_THAT(svg, HasSubstr("<title>ä\uFFFDxxx"));
  EXPECT_THAT(svg, testing::ContainsRegex("ä\uFFFDx*…(ö)*&lt;</text>"));
}

TEST(Spase, TimesOfAnyLengthCanBeRead) {
  EXPECT_EQ(time_text(45), "45 s");
  EXPECT_EQ(time_text(4800), "1 h 20 min");
  EXPECT_EQ(time_text(300000), "3 d 11 h");
  EXPECT_EQ(time_text(1e27), "1.16e+22 d");
}

}  // namespace
}  // namespace ptc::planner
