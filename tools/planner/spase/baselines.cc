#include "tools/planner/spase/baselines.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>

namespace ptc::planner {
namespace {

Choice in_turn(const Instance& instance) {
  Choice choice;
  choice.order.resize(instance.tasks.size());
  std::iota(choice.order.begin(), choice.order.end(), 0);
  choice.configuration.assign(instance.tasks.size(), 0);
  choice.node.assign(instance.tasks.size(), Choice::kAnyNode);
  return choice;
}

/// A task's last configuration on at most one node; where it has none, its first.
uint32_t widest_on_a_node(const std::vector<Configuration>& configurations) {
  uint32_t widest = 0;
  for (uint32_t i = 0; i < configurations.size(); ++i)
    if (configurations[i].nodes == 1) widest = i;
  return widest;
}

/// Where a task has what is usual, it has nothing else.
Instance as_usual(const Instance& instance) {
  Instance usual = instance;
  for (Task& task : usual.tasks)
    if (!task.usual.empty()) task.configurations = task.usual;
  return usual;
}

double all_of_a_node(const Instance& instance) {
  // Nobody else is on its node, whatever it makes of it; of several sizes, one that it fits on.
  std::vector<double> free(instance.nodes.size(), 0);
  double makespan = 0;
  for (const Task& task : instance.tasks) {
    std::optional<size_t> best;
    double best_end = 0;
    for (size_t node = 0; node < free.size(); ++node) {
      const Configuration* widest = nullptr;
      for (const Configuration& one : task.configurations)
        if (one.nodes == 1 && one.gpus <= instance.nodes[node].gpus) widest = &one;
      if (widest == nullptr) continue;
      const double end = free[node] + widest->seconds;
      if (best && (free[node] > free[*best] || (free[node] == free[*best] && end >= best_end)))
        continue;
      best = node, best_end = end;
    }
    if (best) {
      free[*best] = best_end;
    } else {  // several whole nodes: those that are free first
      const Configuration& widest = task.configurations.back();
      std::vector<size_t> whole;
      for (size_t node = 0; node < free.size(); ++node)
        if (instance.nodes[node].gpus == instance.largest_node()) whole.push_back(node);
      std::stable_sort(whole.begin(), whole.end(),
                       [&](size_t a, size_t b) { return free[a] < free[b]; });
      best_end = free[whole[widest.nodes - 1]] + widest.seconds;
      for (uint32_t i = 0; i < widest.nodes; ++i) free[whole[i]] = best_end;
    }
    makespan = std::max(makespan, best_end);
  }
  return makespan;
}

Choice least_of_each(const Instance& instance) {
  Choice choice = in_turn(instance);
  uint64_t used = 0;
  for (const Task& task : instance.tasks) used += task.configurations.front().gpus;
  // What is left is spread, one configuration more to each in turn.
  for (bool more = true; more;) {
    more = false;
    for (uint32_t i = 0; i < instance.tasks.size(); ++i) {
      const std::vector<Configuration>& configurations = instance.tasks[i].configurations;
      uint32_t& now = choice.configuration[i];
      if (now + 1 >= configurations.size() || configurations[now + 1].nodes > 1) continue;
      const uint64_t added = configurations[now + 1].gpus - configurations[now].gpus;
      if (used + added > instance.gpus()) continue;
      used += added;
      ++now;
      more = true;
    }
  }
  return choice;
}

/// Optimus's greedy: who gets how many now.
class Greedy {
 public:
  explicit Greedy(const Instance& instance) : instance_(instance) {}

  /// Of `left` (parts of each task, 0: done) those that run, with their configurations.
  std::vector<std::pair<uint32_t, uint32_t>> allocate(const std::vector<double>& left) {
    free_.clear();
    for (const NodeOfCluster& node : instance_.nodes) free_.push_back(node.gpus);
    struct Running {
      uint32_t task, configuration;
      std::optional<size_t> node;
    };
    std::vector<Running> running;
    for (uint32_t task = 0; task < left.size(); ++task) {
      if (left[task] <= 0) continue;
      const Configuration& least = instance_.tasks[task].configurations.front();
      if (least.nodes > 1) {
        if (!take_whole(least.nodes)) continue;
        running.push_back({task, 0, std::nullopt});
        continue;
      }
      const size_t node = std::max_element(free_.begin(), free_.end()) - free_.begin();
      if (free_[node] < least.gpus) continue;
      free_[node] -= least.gpus;
      running.push_back({task, 0, node});
    }
    for (;;) {
      Running* best = nullptr;
      double most = 0;
      for (Running& one : running) {
        const std::vector<Configuration>& all = instance_.tasks[one.task].configurations;
        if (!one.node || one.configuration + 1 >= all.size()) continue;
        const Configuration& now = all[one.configuration];
        const Configuration& next = all[one.configuration + 1];
        if (next.nodes > 1 || next.gpus - now.gpus > free_[*one.node]) continue;
        const double gain = left[one.task] * (now.seconds - next.seconds) / (next.gpus - now.gpus);
        if (gain > most) best = &one, most = gain;
      }
      if (best == nullptr) break;
      const std::vector<Configuration>& all = instance_.tasks[best->task].configurations;
      free_[*best->node] -= all[best->configuration + 1].gpus - all[best->configuration].gpus;
      ++best->configuration;
    }
    std::vector<std::pair<uint32_t, uint32_t>> allocated;
    for (const Running& one : running) allocated.emplace_back(one.task, one.configuration);
    return allocated;
  }

 private:
  bool take_whole(uint32_t count) {
    const uint32_t largest = instance_.largest_node();
    if (std::count(free_.begin(), free_.end(), largest) < static_cast<ptrdiff_t>(count))
      return false;
    for (uint32_t& free : free_)
      if (free == largest && count > 0) free = 0, --count;
    return true;
  }

  const Instance& instance_;
  std::vector<uint32_t> free_;
};

double optimus(const Instance& instance, bool dynamic) {
  Greedy greedy(instance);
  std::vector<double> left(instance.tasks.size(), 1);
  double now = 0;
  for (;;) {
    const auto running = greedy.allocate(left);
    if (running.empty()) return now;
    double step = 0;
    for (const auto& [task, configuration] : running) {
      const double needed = left[task] * instance.tasks[task].configurations[configuration].seconds;
      step = step == 0 ? needed : dynamic ? std::min(step, needed) : std::max(step, needed);
    }
    for (const auto& [task, configuration] : running) {
      const double seconds = instance.tasks[task].configurations[configuration].seconds;
      left[task] = step >= left[task] * seconds * (1 - 1e-12) ? 0 : left[task] - step / seconds;
    }
    now += step;
  }
}

}  // namespace

std::vector<Choice> simple_choices(const Instance& instance) {
  Choice widest = in_turn(instance);
  for (uint32_t i = 0; i < instance.tasks.size(); ++i)
    widest.configuration[i] = widest_on_a_node(instance.tasks[i].configurations);
  return {std::move(widest), least_of_each(instance)};
}

std::vector<Baseline> baselines(const Instance& instance, uint64_t seed) {
  ListScheduler scheduler(instance);
  std::mt19937_64 draw(seed);
  double random = 0;
  for (int run = 0; run < 3; ++run) {
    Choice choice = in_turn(instance);
    for (uint32_t i = 0; i < instance.tasks.size(); ++i) {
      choice.configuration[i] =
          static_cast<uint32_t>(draw() % instance.tasks[i].configurations.size());
      std::swap(choice.order[i], choice.order[draw() % (i + 1)]);
    }
    random += scheduler.makespan(choice) / 3;
  }
  std::vector<Baseline> all = {
      {"current practice", "a node to a task, its user's technique",
       all_of_a_node(as_usual(instance))},
      {"max", "a node to a task, the best technique", all_of_a_node(instance)},
      {"min", "the least that fits, what is left is spread",
       scheduler.makespan(least_of_each(instance))},
      {"random", "the mean of three", random}};
  constexpr double kMostWork = 1e9;
  const auto tasks = static_cast<double>(instance.tasks.size());
  if (tasks * tasks * static_cast<double>(instance.nodes.size()) > kMostWork) return all;
  all.push_back({"optimus", "greedy, in waves", optimus(instance, /*dynamic=*/false)});
  all.push_back({"optimus, dynamic", "greedy, anew whenever a task ends",
                 optimus(instance, /*dynamic=*/true)});
  return all;
}

}  // namespace ptc::planner
