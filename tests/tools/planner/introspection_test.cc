// What is decided anew while a schedule is carried out, and what becomes of it in simulated time.
#include "tools/planner/spase/introspection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>

#include "tests/tools/planner/spase_checker.h"
#include "tools/planner/spase/rehearsal.h"
#include "tools/planner/spase/solver.h"

namespace ptc::planner {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

SolverOptions few_steps(uint64_t seed = 1) { return {.seed = seed, .steps = 3000}; }

/// Of one that is carried out, some time after its start, by tasks that are as slow as drawn.
struct Midway {
  Instance instance;
  Schedule schedule;
  std::vector<TaskNow> now;
  UsableGpus usable;
};

Midway midway(Drawn& drawn, double most_slowness) {
  Midway made;
  made.instance = drawn.instance(2 + drawn.below(8), 1 + drawn.below(3), 8, 4);
  made.schedule = solve(made.instance, few_steps()).schedule;
  made.usable = all_gpus(made.instance);
  made.now.resize(made.instance.tasks.size());
  const double time = made.schedule.makespan * 0.01 * static_cast<double>(drawn.below(100));
  for (const Run& run : made.schedule.runs) {
    TaskNow& task = made.now[run.task];
    task.price_s.assign(made.instance.tasks[run.task].configurations.size(),
                        0.1 * static_cast<double>(drawn.below(50)));
    if (run.start > time) continue;
    if (run.end <= time) {
      task.left = 0;
      continue;
    }
    task.runs = {run.configuration, run.on, 0};
    task.slowness = 1 + (most_slowness - 1) * 0.1 * static_cast<double>(drawn.below(11));
    task.left = std::max(0.01, 1 - (time - run.start) / (run.end - run.start) / task.slowness);
  }
  return made;
}

/// The same tasks and what each run of the schedule takes of them, for the checker.
std::string wrong_with_rest(const Midway& at, const Introspection& found) {
  Instance rest;
  rest.nodes = at.instance.nodes;
  Schedule schedule = found.schedule;
  for (Run& run : schedule.runs) {
    const TaskNow& now = at.now[run.task];
    if (now.left <= 0) return "a task runs that is over";
    Configuration what = at.instance.tasks[run.task].configurations[run.configuration];
    const bool goes_on = run.start == 0 && now.runs &&
                         now.runs->configuration == run.configuration && now.runs->on == run.on;
    what.seconds = what.seconds * now.left * now.slowness + (goes_on ? 0 : now.price_s.front());
    const bool is_said =
        std::find(found.changed.begin(), found.changed.end(), run.task) != found.changed.end();
    if (is_said != (now.runs && !goes_on)) return "who is changed is not as it is said";
    run.task = static_cast<uint32_t>(rest.tasks.size());
    run.configuration = 0;
    rest.tasks.push_back({"t", {what}, {}});
  }
  const auto left =
      std::count_if(at.now.begin(), at.now.end(), [](const TaskNow& now) { return now.left > 0; });
  if (static_cast<size_t>(left) != rest.tasks.size()) return "a task is in no run";
  return wrong_with(rest, schedule);
}

TEST(Introspection, ForecastsWhatWasPlannedWhereTimesAreAsPlanned) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int round = 0; round < 200; ++round) {
    const Instance instance = drawn.instance(1 + drawn.below(9), 1 + drawn.below(3), 8, 4);
    const Schedule schedule = solve(instance, few_steps()).schedule;
    const std::vector<TaskNow> now(instance.tasks.size());
    const Schedule ahead = forecast(instance, schedule, now, all_gpus(instance));
    EXPECT_NEAR(ahead.makespan, schedule.makespan, 1e-9 * schedule.makespan);
    EXPECT_EQ(wrong_with(instance, ahead), "");
  }
}

TEST(Introspection, IsASoundScheduleThatIsNeverLaterThanTheForecast) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int round = 0; round < 200; ++round) {
    const Midway at = midway(drawn, 3);
    const auto found =
        introspect(at.instance, at.schedule, at.now, at.usable, {few_steps(drawn.below(9))});
    EXPECT_EQ(wrong_with_rest(at, found), "");
    EXPECT_LE(found.schedule.makespan, found.before);
    EXPECT_EQ(found.before, forecast(at.instance, at.schedule, at.now, at.usable).makespan);
    EXPECT_TRUE(found.no_room.empty());
    double cost = 0;
    for (const uint32_t task : found.changed) cost += at.now[task].price_s.front();
    if (!found.changed.empty()) {
      EXPECT_LT(found.schedule.makespan + cost, found.before);
    }
  }
}

TEST(Introspection, ChangesNobodyAtAnInfinitePrice) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int round = 0; round < 100; ++round) {
    Midway at = midway(drawn, 3);
    for (TaskNow& task : at.now)
      if (task.runs) std::fill(task.price_s.begin(), task.price_s.end(), kInfinite);
    const auto found = introspect(at.instance, at.schedule, at.now, at.usable, {few_steps()});
    EXPECT_TRUE(found.changed.empty());
    EXPECT_EQ(wrong_with_rest(at, found), "");
    EXPECT_LE(found.schedule.makespan, found.before);
  }
}

TEST(Introspection, WhatIsNoNumberIsNotALackOfRoom) {
  const Instance instance{{{"w0", 2}}, {{"a", {{1, 1, 10, 8, "x"}, {2, 1, 6, 8, "y"}}, {}}}};
  for (const double odd : {kInfinite, std::nan(""), 0.0, -1.0}) {
    std::vector<TaskNow> now(1);
    now[0].slowness = odd;
    EXPECT_TRUE(introspect(instance, {}, now, all_gpus(instance), {few_steps()}).no_room.empty());
    now[0] = {};
    now[0].price_s.assign(2, odd);
    const auto found = introspect(instance, {}, now, all_gpus(instance), {few_steps()});
    EXPECT_TRUE(found.no_room.empty());
    EXPECT_EQ(found.schedule.runs.size(), 1u);
  }
}

TEST(Introspection, DoesNotGoBackToWhatWasSlow) {
  const Instance instance{{{"w0", 1}}, {{"a", {{1, 1, 10, 8, "x"}, {1, 1, 12, 8, "y"}}, {}}}};
  std::vector<TaskNow> now(1);
  now[0].runs = {1, {{0, {0}}}, 0};
  const Schedule schedule =
      introspect(instance, {}, now, all_gpus(instance), {few_steps()}).schedule;
  EXPECT_EQ(schedule.runs.front().configuration, 0u) << "it is faster by its profile";
  now[0].slowness_of = {3, 1};
  const auto found = introspect(instance, {}, now, all_gpus(instance), {few_steps()});
  EXPECT_TRUE(found.changed.empty());
  EXPECT_EQ(found.schedule.runs.front().configuration, 1u);
}

TEST(Introspection, ChangesNobodyForLessThanTheThreshold) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int round = 0; round < 100; ++round) {
    const Midway at = midway(drawn, 3);
    const auto found = introspect(at.instance, at.schedule, at.now, at.usable, {few_steps(), 1e9});
    EXPECT_TRUE(found.changed.empty());
  }
}

TEST(Introspection, GivesWhoIsSlowMoreAndTakesItFromNobodyInVain) {
  // Both were to take 100 s on two GPUs each; one is twice as slow, and the other one nearly done.
  Instance instance;
  instance.nodes = {{"w0", 4}};
  for (const char* name : {"slow", "fast"})
    instance.tasks.push_back(
        {name, {{1, 1, 200, 8, ""}, {2, 1, 100, 8, ""}, {4, 1, 50, 8, ""}}, {}});
  const Schedule schedule{{{0, 1, 0, 100, {{0, {0, 1}}}}, {1, 1, 0, 100, {{0, {2, 3}}}}}, 100};
  std::vector<TaskNow> now(2);
  now[0] = {0.75, 2, TaskNow::Place{1, {{0, {0, 1}}}}, {10, 10, 10}};
  now[1] = {0.10, 1, TaskNow::Place{1, {{0, {2, 3}}}}, {10, 10, 10}};
  const auto look = [&] {
    return introspect(instance, schedule, now, all_gpus(instance), {few_steps()});
  };
  const Introspection found = look();
  EXPECT_EQ(found.before, 150);
  EXPECT_EQ(found.changed, std::vector<uint32_t>{0});
  EXPECT_EQ(found.schedule.makespan, 10 + 10 + 75);  // once the other one has ended
  now[0].price_s = {40, 40, 40};
  EXPECT_TRUE(look().changed.empty());  // 125 s, which is 25 s earlier, and costs 40
}

TEST(Introspection, TakesUpWhoComesAndLeavesOutWhatIsAway) {
  Instance instance;
  instance.nodes = {{"w0", 2}, {"w1", 2}};
  for (const char* name : {"a", "b", "new"})
    instance.tasks.push_back({name, {{2, 1, 100, 8, ""}}, {}});
  instance.tasks.push_back({"wide", {{4, 2, 100, 8, ""}}, {}});
  const Schedule schedule{{{0, 0, 0, 100, {{0, {0, 1}}}}, {1, 0, 0, 100, {{1, {0, 1}}}}}, 100};
  std::vector<TaskNow> now(4);
  now[0] = {0.5, 1, TaskNow::Place{0, {{0, {0, 1}}}}, {}};
  now[1] = {0.5, 1, std::nullopt, {}};  // its node has failed
  const auto found = introspect(instance, schedule, now, {{0, 1}, {}}, {few_steps()});
  EXPECT_EQ(found.before, kInfinite);
  EXPECT_TRUE(found.is_new);
  EXPECT_TRUE(found.changed.empty());
  EXPECT_EQ(found.no_room, std::vector<uint32_t>{3});
  EXPECT_EQ(found.schedule.makespan, 50 + 50 + 100);
  for (const auto& run : found.schedule.runs) EXPECT_EQ(run.on.front().node, 0u);
}

TEST(Spase, WhoHasADeadlineIsInTimeIfAnybodyCanBe) {
  Instance instance;
  instance.nodes = {{"w0", 2}};
  for (const char* name : {"a", "b", "c", "d"})
    instance.tasks.push_back({name, {{1, 1, 100, 8, ""}, {2, 1, 60, 8, ""}}, {}});
  EXPECT_EQ(solve(instance, few_steps()).schedule.makespan, 200);
  instance.tasks[2].due_s = 60;  // on both GPUs, at once; so all takes longer
  instance.tasks[3].due_s = 119;
  const Schedule schedule = solve(instance, few_steps()).schedule;
  EXPECT_EQ(wrong_with(instance, schedule), "");
  const std::vector<double> late = lateness_of(instance, schedule);
  for (size_t i = 0; i < late.size(); ++i) EXPECT_EQ(late[i], schedule.runs[i].task == 3 ? 1 : 0);
  EXPECT_EQ(schedule.makespan, 220);
  EXPECT_EQ(cost_of(instance, schedule), 220 + 1000);
}

TEST(Spase, ToBeInTimeWeighsMoreThanAnyMakespan) {
  Instance instance;
  instance.nodes = {{"w0", 2}};
  instance.tasks.push_back({"a", {{1, 1, 500'100, 8, ""}, {2, 1, 500'000, 8, ""}}, {}});
  instance.tasks.push_back({"b", {{1, 1, 6e7, 8, ""}}, {}});
  EXPECT_TRUE(solve(instance, few_steps()).optimal());
  instance.tasks[0].due_s = 500'050;
  const Solution in_time = solve(instance, few_steps());
  EXPECT_EQ(in_time.late, 0);
  EXPECT_EQ(in_time.schedule.makespan, 6e7 + 500'000);
  instance.tasks[0].due_s = 499'000;
  const Solution late = solve(instance, few_steps());
  EXPECT_EQ(late.late, 1000);
  EXPECT_FALSE(late.optimal());
}

TEST(Introspection, ChangesWhoRunsForSomebodysDeadline) {
  Instance instance;
  instance.nodes = {{"w0", 2}};
  for (const char* name : {"runs", "due"})
    instance.tasks.push_back({name, {{2, 1, 100, 8, ""}}, {}});
  const Schedule schedule{{{0, 0, 0, 100, {{0, {0, 1}}}}, {1, 0, 100, 200, {{0, {0, 1}}}}}, 200};
  std::vector<TaskNow> now(2);
  now[0] = {0.9, 1, TaskNow::Place{0, {{0, {0, 1}}}}, {10}};
  const auto look = [&] {
    return introspect(instance, schedule, now, all_gpus(instance), {few_steps()});
  };
  EXPECT_TRUE(look().changed.empty());
  instance.tasks[1].due_s = 110;
  EXPECT_EQ(look().changed, std::vector<uint32_t>{0});
  EXPECT_EQ(look().schedule.makespan, 100 + 10 + 90);
}

TEST(Introspection, OfPartsOfNodesGivesNoOtherGpus) {
  Instance instance;
  instance.nodes = {{"w0", 4}};
  for (const char* name : {"a", "b", "c"})
    instance.tasks.push_back({name, {{1, 1, 100, 8, ""}, {2, 1, 50, 8, ""}}, {}});
  std::vector<TaskNow> now(3);
  now[1] = {0.5, 1, TaskNow::Place{0, {{0, {3}}}}, {5, 5}};
  const auto found = introspect(instance, {}, now, {{1, 3}}, {few_steps()});
  EXPECT_EQ(found.schedule.runs.size(), 3u);
  for (const auto& run : found.schedule.runs)
    for (const uint32_t gpu : run.on.front().gpus) EXPECT_TRUE(gpu == 1 || gpu == 3);
  EXPECT_EQ(found.schedule.makespan, 5 + 25 + 50 + 50);  // all on both, one after the other
}

TEST(Introspection, TheSameSeedAndStepsAreTheSameAnswer) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int round = 0; round < 20; ++round) {
    const Midway at = midway(drawn, 3);
    const auto one = introspect(at.instance, at.schedule, at.now, at.usable, {few_steps(7)}),
               two = introspect(at.instance, at.schedule, at.now, at.usable, {few_steps(7)});
    ASSERT_EQ(one.schedule.runs.size(), two.schedule.runs.size());
    for (size_t i = 0; i < one.schedule.runs.size(); ++i) {
      EXPECT_EQ(one.schedule.runs[i].task, two.schedule.runs[i].task);
      EXPECT_EQ(one.schedule.runs[i].on, two.schedule.runs[i].on);
    }
    EXPECT_EQ(one.changed, two.changed);
  }
}

/// Pieces of tasks that are changed: nobody shares a GPU, and no task is in two places.
std::string wrong_with_pieces(const std::vector<Run>& pieces, double makespan) {
  std::vector<std::tuple<uint64_t, double, double>> uses;
  for (const Run& piece : pieces) {
    if (piece.end < piece.start || piece.end > makespan) return "a piece lies outside";
    uses.emplace_back(uint64_t{1} << 40 | piece.task, piece.start, piece.end);
    for (const OnNode& on : piece.on)
      for (const uint32_t gpu : on.gpus)
        uses.emplace_back(uint64_t{on.node} << 16 | gpu, piece.start, piece.end);
  }
  std::sort(uses.begin(), uses.end());
  for (size_t i = 1; i < uses.size(); ++i)
    if (std::get<0>(uses[i]) == std::get<0>(uses[i - 1]) &&
        std::get<1>(uses[i]) < std::get<2>(uses[i - 1]))
      return "two pieces at once";
  return "";
}

TEST(Rehearsal, WithPerfectProfilesIsNeverLongerThanThePlan) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int round = 0; round < 60; ++round) {
    const Instance instance = drawn.instance(1 + drawn.below(9), 1 + drawn.below(3), 8, 4);
    const Schedule schedule = solve(instance, few_steps()).schedule;
    RehearsalRules rules{.interval_s = schedule.makespan / 5,
                         .price_s = static_cast<double>(drawn.below(10)),
                         .introspection = {few_steps()}};
    const std::vector<double> as_profiled(instance.tasks.size(), 1);
    const Rehearsal with = rehearse(instance, schedule, as_profiled, rules);
    EXPECT_LE(with.makespan, schedule.makespan * (1 + 1e-9));
    EXPECT_EQ(wrong_with_pieces(with.pieces, with.makespan), "");
    rules.introspects = false;
    EXPECT_NEAR(rehearse(instance, schedule, as_profiled, rules).makespan, schedule.makespan,
                1e-9 * schedule.makespan);
  }
}

TEST(Rehearsal, OfTasksThatAreSlowerOrFasterIsSoundAndEndsThem) {
  const uint64_t seed = planner_seed();
  Drawn drawn{std::mt19937_64(seed)};
  double with = 0, without = 0;
  for (int round = 0; round < 60; ++round) {
    const Instance instance = drawn.instance(2 + drawn.below(9), 1 + drawn.below(3), 8, 4);
    const Schedule schedule = solve(instance, few_steps()).schedule;
    RehearsalRules rules{.interval_s = schedule.makespan / 5,
                         .price_s = schedule.makespan / 100,
                         .introspection = {few_steps()}};
    const auto slowness = drawn_slowness(instance.tasks.size(), 1, seed + round);
    const Rehearsal told = rehearse(instance, schedule, slowness, rules);
    EXPECT_EQ(wrong_with_pieces(told.pieces, told.makespan), "");
    std::vector<double> done(instance.tasks.size());
    for (const auto& piece : told.pieces)
      done[piece.task] += (piece.end - piece.start) / slowness[piece.task] /
                          instance.tasks[piece.task].configurations[piece.configuration].seconds;
    for (const double part : done) EXPECT_GE(part, 1 - 1e-9);  // more: the prices of its changes
    for (const double part : done) EXPECT_TRUE(told.changes > 0 || part <= 1 + 1e-9);
    rules.introspects = false;
    with += told.makespan / schedule.makespan;
    without += rehearse(instance, schedule, slowness, rules).makespan / schedule.makespan;
  }
  EXPECT_LT(with, without);  // in the mean: what is drawn yet to come may be worse for it
}

}  // namespace
}  // namespace ptc::planner
