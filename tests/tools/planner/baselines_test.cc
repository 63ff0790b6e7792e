// What others do with the same tasks, beside what was found by hand.
#include "tools/planner/spase/baselines.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/tools/planner/spase_checker.h"

namespace ptc::planner {
namespace {

using testing::ElementsAre;
using testing::Pair;
using testing::UnorderedElementsAre;

/// GPUs, and seconds with these.
Configuration takes(uint32_t gpus, double seconds) { return {gpus, 1, seconds, 8, "ddp"}; }

std::map<std::string, double> makespans_of(const Instance& instance) {
  std::map<std::string, double> found;
  for (const Baseline& one : baselines(instance, 1)) {
    if (one.schedule) {
      EXPECT_EQ(wrong_with(instance, *one.schedule), "") << one.name;
    }
    if (one.name != "random") found[one.name] = one.makespan;
  }
  return found;
}

/// Four tasks, of which two have a technique of their users' that is slower; c's scales no further
/// than to two GPUs, and d needs two.
std::vector<Task> four_tasks() {
  return {{"a", {takes(1, 60), takes(2, 40), takes(4, 30)}, {takes(1, 80), takes(4, 36)}},
          {"b", {takes(1, 100), takes(2, 55), takes(4, 30)}, {takes(2, 70), takes(4, 44)}},
          {"c", {takes(1, 30), takes(2, 20)}, {}},
          {"d", {takes(2, 24), takes(4, 14)}, {takes(2, 25)}}};
}

TEST(Baselines, AreWhatTheyAreCalledOnANode) {
  const Instance instance{{{"w0", 4}}, four_tasks()};
  const auto found = makespans_of(instance);
  EXPECT_THAT(found, UnorderedElementsAre(
                         // One after the other, as their users would: 36, 44, 20, 25.
                         Pair("current practice", testing::DoubleNear(125, 1e-9)),
                         // The same with the best that there is: 30, 30, 20, 14.
                         Pair("max", testing::DoubleNear(94, 1e-9)),
                         // a, b and c have one each; d waits for two, and ends at 54.
                         Pair("min", testing::DoubleNear(100, 1e-9)),
                         // The fourth goes to b (45 s less, a: 20, c: 10): 60, 55, 30. Then d has
                         // all.
                         Pair("optimus", testing::DoubleNear(74, 1e-9)),
                         // At 30 c ends, d begins on two, and b has one again; at 54 d ends, and
                         // both have two; at 58 a ends, b has all four for what is left: 7.8/55.
                         Pair("optimus, dynamic", testing::DoubleNear(58 + 30 * 7.8 / 55, 1e-9))));
}

/// Of two nodes each task has the one that is free first.
TEST(Baselines, AreWhatTheyAreCalledOnTwoNodes) {
  const Instance instance{{{"w0", 4}, {"w1", 4}}, four_tasks()};
  EXPECT_THAT(makespans_of(instance),
              UnorderedElementsAre(
                  // a 0-36, c 36-56, d 56-81; b 0-44 … d comes when w1 is free at 44: 69.
                  Pair("current practice", testing::DoubleNear(69, 1e-9)),
                  // a, c: 0-30, 30-50; b, d: 0-30, 30-44.
                  Pair("max", testing::DoubleNear(50, 1e-9)),
                  // Least: 1, 1, 1, 2. Three are left: a, b and c have one more; all at once.
                  Pair("min", testing::DoubleNear(55, 1e-9)),
                  // a and c on w0, b and d on w1: b has one GPU more, a two on w0 and c its two.
                  Pair("optimus", testing::DoubleNear(55, 1e-9)),
                  // The same until c ends at 20; then b has all of w1 for what is left: 35/55.
                  Pair("optimus, dynamic", testing::DoubleNear(20 + 30 * 35.0 / 55, 1e-9))));
}

TEST(Baselines, MinSpreadsWhatIsLeft) {
  Instance instance{{{"w0", 6}}, four_tasks()};
  std::swap(instance.tasks[0], instance.tasks[1]);
  // The least of all is five: the sixth is the first one's, b's, and a takes longest.
  for (const Baseline& one : baselines(instance, 1)) {
    if (one.name != "min") continue;
    EXPECT_NEAR(one.makespan, 60, 1e-9);
    std::map<uint32_t, uint32_t> gpus;
    for (const planner::Run& run : one.schedule->runs)
      gpus[run.task] = instance.tasks[run.task].configurations[run.configuration].gpus;
    EXPECT_THAT(gpus, ElementsAre(Pair(0, 2), Pair(1, 1), Pair(2, 1), Pair(3, 2)));
  }
}

/// y gains 25 s by one GPU more, and x 40 s by two, which is less of each.
TEST(Baselines, OptimusGivesWhereAGpuGainsMost) {
  const Instance instance{
      {{"w0", 4}},
      {{"x", {takes(1, 100), takes(3, 60)}, {}}, {"y", {takes(1, 50), takes(2, 25)}, {}}}};
  EXPECT_NEAR(makespans_of(instance).at("optimus"), 100, 1e-9);
}

/// What its user takes for it, and in the order in which tasks are listed.
TEST(Baselines, CurrentPracticeIsTheUsersTechniqueInTurn) {
  Instance instance{{{"w0", 4}}, four_tasks()};
  const auto order = [&] {
    std::vector<std::pair<std::string, double>> found;
    for (const Baseline& one : baselines(instance, 1))
      if (one.name == "current practice")
        for (const planner::Run& run : one.schedule->runs)
          found.emplace_back(instance.tasks[run.task].name, run.start);
    return found;
  };
  EXPECT_THAT(order(), ElementsAre(Pair("a", 0), Pair("b", 36), Pair("c", 80), Pair("d", 100)));
  std::swap(instance.tasks[0], instance.tasks[3]);
  EXPECT_THAT(order(), ElementsAre(Pair("d", 0), Pair("b", 25), Pair("c", 69), Pair("a", 89)));
  for (Task& task : instance.tasks) task.usual.clear();  // without one it is the best technique
  const auto found = makespans_of(instance);
  EXPECT_EQ(found.at("current practice"), found.at("max"));
}

/// Of one task that takes 10 or 40 s the mean of three is 10, 20, 30 or 40.
TEST(Baselines, RandomIsTheMeanOfThree) {
  const Instance instance{{{"w0", 2}}, {{"a", {takes(1, 40), takes(2, 10)}, {}}}};
  std::map<int, int> times;
  constexpr int kSeeds = 800;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed)
    for (const Baseline& one : baselines(instance, seed)) {
      if (one.name != "random") continue;
      ASSERT_NEAR(one.makespan, std::round(one.makespan), 1e-9);
      ++times[static_cast<int>(std::round(one.makespan))];
      EXPECT_EQ(one.schedule->makespan, one.makespan > 39 ? 40 : 10);  // the best of them
    }
  ASSERT_THAT(times, ElementsAre(Pair(10, testing::_), Pair(20, testing::_), Pair(30, testing::_),
                                 Pair(40, testing::_)));
  EXPECT_NEAR(times[20], kSeeds * 3 / 8, kSeeds / 10);
  EXPECT_NEAR(times[40], kSeeds / 8, kSeeds / 15);
}

/// Order and configurations are drawn, both: all that there are come up.
TEST(Baselines, RandomDrawsOrderAndConfigurations) {
  const Instance instance{
      {{"w0", 2}},
      {{"a", {takes(1, 40), takes(2, 10)}, {}}, {"b", {takes(1, 30), takes(2, 20)}, {}}}};
  std::set<std::string> seen;
  for (uint64_t seed = 1; seed <= 200; ++seed)
    for (const Baseline& one : baselines(instance, seed)) {
      if (one.name != "random") continue;
      ASSERT_EQ(wrong_with(instance, *one.schedule), "");
      std::string text;
      for (const planner::Run& run : one.schedule->runs)
        text += fmt::format("{}{} ", instance.tasks[run.task].name, run.configuration);
      seen.insert(text);
    }
  // Those with the most GPUs are the best of three whenever they are among them, in either order.
  EXPECT_TRUE(seen.contains("a1 b1 "));
  EXPECT_TRUE(seen.contains("b1 a1 "));
  EXPECT_GE(seen.size(), 4u);
}

}  // namespace
}  // namespace ptc::planner
