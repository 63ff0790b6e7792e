// A checker of schedules that knows nothing of how they are made, instances that are drawn, and the
// shortest schedule of small ones.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/instance.h"
#include "tools/planner/spase/schedule.h"

namespace ptc::planner {

inline uint64_t planner_seed() {
  const char* said = std::getenv("PTC_SEED");
  const uint64_t value = said != nullptr ? std::stoull(said) : std::random_device()();
  std::printf("PTC_SEED=%llu\n", static_cast<unsigned long long>(value));
  return value;
}

/// What is wrong with the schedule; empty: nothing. Knows nothing of how it was made.
inline std::string wrong_with(const Instance& instance, const Schedule& schedule) {
  std::vector<int> times(instance.tasks.size());
  double makespan = 0;
  struct Use {
    uint32_t node, gpu;
    double start, end;
  };
  std::vector<Use> uses;
  for (const Run& run : schedule.runs) {
    ++times[run.task];
    const Configuration& what = instance.tasks[run.task].configurations[run.configuration];
    if (std::abs(run.end - run.start - what.seconds) > 1e-9 * run.end)
      return "a run takes another time";
    if (run.start < 0) return "a run begins before all";
    makespan = std::max(makespan, run.end);
    if (run.on.size() != what.nodes) return "a run is on another number of nodes";
    uint32_t gpus = 0;
    for (const OnNode& on : run.on) {
      gpus += on.gpus.size();
      if (what.nodes > 1 && on.gpus.size() != instance.nodes[on.node].gpus)
        return "a run over nodes has a part of one";
      for (const uint32_t gpu : on.gpus) {
        if (gpu >= instance.nodes[on.node].gpus) return "no such GPU";
        uses.push_back({on.node, gpu, run.start, run.end});
      }
    }
    if (gpus != what.gpus) return "a run has another number of GPUs";
  }
  for (const int count : times)
    if (count != 1) return "a task runs not once";
  if (makespan != schedule.makespan) return "it says another makespan";
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
    return std::tie(a.node, a.gpu, a.start) < std::tie(b.node, b.gpu, b.start);
  });
  for (size_t i = 1; i < uses.size(); ++i)
    if (uses[i].node == uses[i - 1].node && uses[i].gpu == uses[i - 1].gpu &&
        uses[i].start < uses[i - 1].end)
      return "two runs on a GPU at once";
  return "";
}

struct Drawn {
  std::mt19937_64 draw;
  uint64_t below(uint64_t n) { return draw() % n; }

  Instance instance(size_t tasks, size_t nodes, uint32_t most_gpus, size_t most_configurations) {
    Instance made;
    for (size_t i = 0; i < nodes; ++i)
      made.nodes.push_back({"w" + std::to_string(i), static_cast<uint32_t>(1 + below(most_gpus))});
    const uint32_t largest = made.largest_node();
    const auto alike =
        std::count_if(made.nodes.begin(), made.nodes.end(),
                      [&](const NodeOfCluster& node) { return node.gpus == largest; });
    for (size_t i = 0; i < tasks; ++i) {
      Task task;
      task.name = "t" + std::to_string(i);
      const double work = 1 + static_cast<double>(below(100));
      double seconds = 1e9;
      for (uint32_t gpus = 1; gpus <= largest && task.configurations.size() < most_configurations;
           ++gpus) {
        if (below(3) == 0) continue;
        const double next = work / gpus * (1 + 0.05 * static_cast<double>(below(10)));
        if (next >= seconds) continue;
        seconds = next;
        task.configurations.push_back({gpus, 1, seconds, 8, "ddp"});
      }
      if (alike > 1 && below(4) == 0)
        task.configurations.push_back({2 * largest, 2, std::min(seconds, work) * 0.6, 8, "pp"});
      if (task.configurations.empty()) task.configurations.push_back({1, 1, work, 8, "ddp"});
      made.tasks.push_back(std::move(task));
    }
    return made;
  }

  Choice choice(const Instance& instance) {
    Choice made = simple_choices(instance).front();
    for (uint32_t i = 0; i < instance.tasks.size(); ++i) {
      made.configuration[i] = static_cast<uint32_t>(below(instance.tasks[i].configurations.size()));
      std::swap(made.order[i], made.order[below(i + 1)]);
    }
    return made;
  }
};

/// The shortest there is: all configurations, orders and nodes. `found`: which it is.
inline double shortest(const Instance& instance, Choice* found = nullptr) {
  ListScheduler scheduler(instance);
  Choice choice = simple_choices(instance).front();
  double best = 1e300;
  const auto each_node = [&](const auto& self, size_t task) -> void {
    if (task == instance.tasks.size()) {
      const double makespan = scheduler.makespan(choice);
      if (makespan < best && found != nullptr) *found = choice;
      best = std::min(best, makespan);
      return;
    }
    const Configuration& what = instance.tasks[task].configurations[choice.configuration[task]];
    if (what.nodes > 1) {
      choice.node[task] = Choice::kAnyNode;
      return self(self, task + 1);
    }
    for (uint32_t node = 0; node < instance.nodes.size(); ++node) {
      if (instance.nodes[node].gpus < what.gpus) continue;
      choice.node[task] = node;
      self(self, task + 1);
    }
  };
  const auto each_configuration = [&](const auto& self, size_t task) -> void {
    if (task < instance.tasks.size()) {
      for (uint32_t i = 0; i < instance.tasks[task].configurations.size(); ++i) {
        choice.configuration[task] = i;
        self(self, task + 1);
      }
      return;
    }
    std::sort(choice.order.begin(), choice.order.end());
    do {
      each_node(each_node, 0);
    } while (std::next_permutation(choice.order.begin(), choice.order.end()));
  };
  each_configuration(each_configuration, 0);
  return best;
}

}  // namespace ptc::planner
