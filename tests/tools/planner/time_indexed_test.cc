// The time-indexed model: what CBC makes of it, where that is there, and what rounding does to it.
#include "tools/planner/spase/time_indexed.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/tools/planner/spase_checker.h"
#include "tools/planner/spase/schedule.h"

namespace ptc::planner {
namespace {

/// All that the model allows, one task after the other. Durations are rounded to the grid: down as
/// in time_indexed.h, or up, where what comes of it is a schedule.
class OnAGrid {
 public:
  OnAGrid(const Instance& instance, double makespan, size_t slots, bool is_up)
      : instance_(instance), slot_(makespan / static_cast<double>(slots)), is_up_(is_up) {
    // Rounded up they may need more.
    slots_ = is_up ? slots + instance.tasks.size() * (slots + 1) : slots;
    most_ = is_up ? 1e300 : makespan * (1 + 1e-9);
    for (const NodeOfCluster& node : instance.nodes) {
      left_.emplace_back(slots_, node.gpus);
      gpus_ += node.gpus;
    }
    place(0, 0, 0);
  }
  double least() const { return least_; }
  const std::vector<Run>& runs() const { return best_; }

 private:
  uint32_t length_of(double seconds) const {
    return static_cast<uint32_t>(is_up_ ? std::ceil(seconds / slot_ * (1 - 1e-9))
                                        : std::floor(seconds / slot_ * (1 + 1e-9)));
  }

  void place(uint32_t task, double end, double area) {
    const double whole = std::max(end, area / gpus_);
    if (whole >= least_) return;
    if (task == instance_.tasks.size()) {
      least_ = whole;
      best_ = runs_;
      return;
    }
    const std::vector<Configuration>& of = instance_.tasks[task].configurations;
    for (uint32_t i = 0; i < of.size(); ++i)
      for (uint32_t node = 0; node < left_.size(); ++node)
        for (uint32_t at = 0; at < slots_; ++at) {
          const double start = at * slot_, ends = start + of[i].seconds;
          if (ends > most_ || ends >= least_) break;
          const uint32_t until = at + length_of(of[i].seconds);
          std::vector<uint32_t>& left = left_[node];
          if (until > slots_ || std::any_of(left.begin() + at, left.begin() + until,
                                            [&](uint32_t one) { return one < of[i].gpus; }))
            continue;
          for (uint32_t slot = at; slot < until; ++slot) left[slot] -= of[i].gpus;
          runs_.push_back({task, i, start, ends, {{node, {}}}});
          place(task + 1, std::max(end, ends), area + of[i].area());
          runs_.pop_back();
          for (uint32_t slot = at; slot < until; ++slot) left[slot] += of[i].gpus;
        }
  }

  const Instance& instance_;
  const double slot_;
  const bool is_up_;
  size_t slots_ = 0;
  double most_ = 0, gpus_ = 0, least_ = 1e299;
  std::vector<std::vector<uint32_t>> left_;  // GPUs, by node and slot
  std::vector<Run> runs_, best_;
};

/// GPUs by number: of those that are free at each start the first ones.
Schedule with_gpus(const Instance& instance, std::vector<Run> runs) {
  Schedule schedule;
  std::stable_sort(runs.begin(), runs.end(),
                   [](const Run& a, const Run& b) { return a.start < b.start; });
  std::vector<std::vector<double>> free;
  for (const NodeOfCluster& node : instance.nodes) free.emplace_back(node.gpus, 0);
  for (Run& run : runs) {
    OnNode& on = run.on.front();
    const Configuration& what = instance.tasks[run.task].configurations[run.configuration];
    const double nearly = run.start + 1e-6 * what.seconds;  // a slot's begin, as numbers have it
    for (uint32_t gpu = 0; gpu < free[on.node].size() && on.gpus.size() < what.gpus; ++gpu) {
      if (free[on.node][gpu] > nearly) continue;
      run.start = std::max(run.start, free[on.node][gpu]);
      on.gpus.push_back(gpu);
    }
    run.end = run.start + what.seconds;
    for (const uint32_t gpu : on.gpus) free[on.node][gpu] = run.end;
    schedule.makespan = std::max(schedule.makespan, run.end);
  }
  schedule.runs = std::move(runs);
  return schedule;
}

Instance of_one_node_each(Instance instance) {
  for (Task& task : instance.tasks) {
    std::erase_if(task.configurations, [](const Configuration& one) { return one.nodes > 1; });
    if (task.configurations.empty()) task.configurations.push_back({1, 1, 7, 8, "ddp"});
  }
  return instance;
}

TEST(TimeIndexed, RoundedDownIsABoundAndRoundedUpASchedule) {
  Drawn drawn{std::mt19937_64(planner_seed())};
  int below = 0;
  for (int turn = 0; turn < 30; ++turn) {
    const Instance instance =
        of_one_node_each(drawn.instance(1 + drawn.below(4), 1 + drawn.below(2), 4, 3));
    const double best = shortest(instance);
    for (const size_t slots : {3, 7, 12}) {
      const OnAGrid down(instance, best, slots, /*is_up=*/false);
      ASSERT_LE(down.least(), best * (1 + 1e-9)) << slots << " slots";
      ASSERT_GE(down.least(), lower_bound_of(instance) * (1 - 1e-9)) << slots << " slots";
      below += down.least() < best * (1 - 1e-9);
      const OnAGrid up(instance, best, slots, /*is_up=*/true);
      ASSERT_GE(up.least(), best * (1 - 1e-9)) << slots << " slots";
      ASSERT_EQ(wrong_with(instance, with_gpus(instance, up.runs())), "");
    }
  }
  EXPECT_GT(below, 0);  // what is rounded down is no schedule
}

/// What CBC says of it is what enumeration does.
TEST(TimeIndexed, CbcFindsItsOptimum) {
  if (!TimeIndexedSearch::is_there()) GTEST_SKIP() << "it was built without CBC";
  constexpr size_t kSlotsOfIt = 40;
  Drawn drawn{std::mt19937_64(planner_seed())};
  for (int turn = 0; turn < 6; ++turn) {
    const Instance instance = of_one_node_each(drawn.instance(1 + drawn.below(3), 1, 3, 2));
    const double best = shortest(instance);
    TimeIndexedSearch search(instance, best, std::chrono::seconds(60));
    std::optional<TimeIndexed> found;
    while (search.goes_on() && !found) {
      found = search.found();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(found);
    const OnAGrid own(instance, best, kSlotsOfIt, /*is_up=*/false);
    EXPECT_NEAR(found->lower_bound, std::min(own.least(), best), 1e-4 * best);
  }
}

TEST(TimeIndexed, IsNeverAboveTheShortest) {
  if (!TimeIndexedSearch::is_there()) GTEST_SKIP() << "it was built without CBC";
  Drawn drawn{std::mt19937_64(planner_seed())};
  int closer = 0;
  for (int turn = 0; turn < 12; ++turn) {
    const Instance instance = drawn.instance(2 + drawn.below(3), 1 + drawn.below(2), 4, 3);
    Choice choice;
    const double best = shortest(instance, &choice);
    for (const double known : {best, 1.3 * best}) {
      TimeIndexedSearch search(instance, known, std::chrono::seconds(60));
      std::optional<TimeIndexed> found;
      while (search.goes_on() && !found) {
        found = search.found();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      ASSERT_TRUE(found);
      EXPECT_LE(found->lower_bound, best * (1 + 1e-9));
      EXPECT_GE(found->lower_bound, lower_bound_of(instance) * (1 - 1e-5) - best / 20);
      closer += found->lower_bound > lower_bound_of(instance) * (1 + 1e-5);
      if (found->choice.order.empty()) continue;
      ListScheduler scheduler(instance);
      EXPECT_EQ(wrong_with(instance, scheduler.schedule(found->choice)), "");
    }
  }
  EXPECT_GT(closer, 0);
}

}  // namespace
}  // namespace ptc::planner
