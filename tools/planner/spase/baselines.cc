#include "tools/planner/spase/baselines.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <queue>
#include <random>
#include <set>
#include <utility>

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

/// GPUs 0 to count − 1 of a node.
OnNode first_of(uint32_t node, uint32_t count) {
  OnNode on{node, std::vector<uint32_t>(count)};
  std::iota(on.gpus.begin(), on.gpus.end(), 0);
  return on;
}

void in_order_of_starts(Schedule& schedule) {
  std::stable_sort(schedule.runs.begin(), schedule.runs.end(),
                   [](const Run& a, const Run& b) { return a.start < b.start; });
}

/// `by`: what each task may take; the runs are of `instance`, in which it has something that is as
/// fast with no more GPUs.
Schedule all_of_a_node(const Instance& instance, const Instance& by) {
  // Nobody else is on its node, whatever it makes of it; of several sizes, one that it fits on.
  const uint32_t largest = by.largest_node();
  std::vector<double> free(by.nodes.size(), 0);
  Schedule schedule;
  for (uint32_t i = 0; i < by.tasks.size(); ++i) {
    std::optional<uint32_t> best;
    const Configuration* taken = nullptr;
    double best_end = 0;
    for (uint32_t node = 0; node < free.size(); ++node) {
      if (best && free[node] > free[*best]) continue;
      const Configuration* widest = nullptr;
      for (const Configuration& one : by.tasks[i].configurations)
        if (one.nodes == 1 && one.gpus <= by.nodes[node].gpus) widest = &one;
      if (widest == nullptr) continue;
      const double end = free[node] + widest->seconds;
      if (best && free[node] == free[*best] && end >= best_end) continue;
      best = node, best_end = end, taken = widest;
    }
    std::vector<uint32_t> nodes;
    double start = 0;
    if (best) {
      nodes = {*best};
      start = free[*best];
    } else {  // several whole nodes: those that are free first
      taken = &by.tasks[i].configurations.back();
      for (uint32_t node = 0; node < free.size(); ++node)
        if (by.nodes[node].gpus == largest) nodes.push_back(node);
      std::stable_sort(nodes.begin(), nodes.end(),
                       [&](uint32_t a, uint32_t b) { return free[a] < free[b]; });
      nodes.resize(taken->nodes);
      start = free[nodes.back()];
    }
    for (const uint32_t node : nodes) free[node] = start + taken->seconds;
    const std::vector<Configuration>& own = instance.tasks[i].configurations;
    uint32_t chosen = 0;
    while (chosen + 1 < own.size() && own[chosen + 1].gpus <= taken->gpus) ++chosen;
    Run run{i, chosen, start, start + own[chosen].seconds, {}};
    std::sort(nodes.begin(), nodes.begin() + own[chosen].nodes);
    for (uint32_t n = 0; n < own[chosen].nodes; ++n)
      run.on.push_back(first_of(nodes[n], own[chosen].gpus / own[chosen].nodes));
    schedule.runs.push_back(std::move(run));
  }
  in_order_of_starts(schedule);
  // As practice has it: until all nodes are free.
  schedule.makespan = *std::max_element(free.begin(), free.end());
  return schedule;
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

  struct Running {
    uint32_t task, configuration;
    std::vector<uint32_t> nodes;  // several: whole ones
  };
  /// Of `left` (parts of each task, 0: done) those that run, with their configurations.
  std::vector<Running> allocate(const std::vector<double>& left) {
    free_.clear();
    by_free_.clear();
    for (uint32_t node = 0; node < instance_.nodes.size(); ++node) {
      free_.push_back(instance_.nodes[node].gpus);
      by_free_.emplace(-int64_t{free_.back()}, node);
    }
    std::vector<Running> running;
    for (uint32_t task = 0; task < left.size(); ++task) {
      if (left[task] <= 0) continue;
      const Configuration& least = instance_.tasks[task].configurations.front();
      if (least.nodes > 1) {
        std::vector<uint32_t> nodes = whole(least.nodes);
        for (const uint32_t node : nodes) take(node, free_[node]);
        if (!nodes.empty()) running.push_back({task, 0, std::move(nodes)});
        continue;
      }
      const uint32_t node = by_free_.begin()->second;  // the first of those that have most
      if (free_[node] < least.gpus) continue;
      take(node, least.gpus);
      running.push_back({task, 0, {node}});
    }
    // A step that finds no room has none later.
    std::priority_queue<std::pair<double, int64_t>> gains;  // of the first that runs, of equal ones
    const auto offer = [&](size_t at) {
      const Running& one = running[at];
      const std::vector<Configuration>& all = instance_.tasks[one.task].configurations;
      if (one.nodes.size() > 1 || one.configuration + 1 >= all.size()) return;
      const Configuration& now = all[one.configuration];
      const Configuration& next = all[one.configuration + 1];
      if (next.nodes > 1 || next.gpus - now.gpus > free_[one.nodes.front()]) return;
      const double gain = left[one.task] * (now.seconds - next.seconds) / (next.gpus - now.gpus);
      if (gain > 0) gains.emplace(gain, -static_cast<int64_t>(at));
    };
    for (size_t at = 0; at < running.size(); ++at) offer(at);
    while (!gains.empty()) {
      const auto at = static_cast<size_t>(-gains.top().second);
      gains.pop();
      Running& one = running[at];
      const std::vector<Configuration>& all = instance_.tasks[one.task].configurations;
      const uint32_t more = all[one.configuration + 1].gpus - all[one.configuration].gpus;
      if (more > free_[one.nodes.front()]) continue;
      take(one.nodes.front(), more);
      ++one.configuration;
      offer(at);
    }
    return running;
  }

 private:
  void take(uint32_t node, uint32_t gpus) {
    by_free_.erase({-int64_t{free_[node]}, node});
    free_[node] -= gpus;
    by_free_.emplace(-int64_t{free_[node]}, node);
  }

  /// Nodes that are free as a whole; none where there are not so many.
  std::vector<uint32_t> whole(uint32_t count) const {
    std::vector<uint32_t> found;
    for (auto at = by_free_.begin(); at != by_free_.end() && found.size() < count; ++at) {
      if (-at->first != largest_) return {};
      found.push_back(at->second);
    }
    return found.size() == count ? found : std::vector<uint32_t>();
  }

  const Instance& instance_;
  const int64_t largest_ = instance_.largest_node();
  std::vector<uint32_t> free_;
  std::set<std::pair<int64_t, uint32_t>> by_free_;  // -GPUs that are free, node
};

/// The schedule is one only where it is not dynamic. None: it was stopped.
std::optional<Schedule> optimus(const Instance& instance, bool dynamic,
                                const std::atomic<bool>* stop) {
  Greedy greedy(instance);
  std::vector<double> left(instance.tasks.size(), 1);
  Schedule schedule;
  double& now = schedule.makespan;
  for (;;) {
    if (stop != nullptr && *stop) return std::nullopt;
    const std::vector<Greedy::Running> running = greedy.allocate(left);
    if (running.empty()) break;
    std::vector<uint32_t> used(instance.nodes.size());
    for (const auto& [task, configuration, nodes] : running) {
      if (dynamic) break;
      const Configuration& what = instance.tasks[task].configurations[configuration];
      Run run{task, configuration, now, now + what.seconds, {}};
      for (const uint32_t node : nodes) {
        OnNode on = first_of(node, what.gpus / what.nodes);
        for (uint32_t& gpu : on.gpus) gpu += used[node];
        used[node] += what.gpus / what.nodes;
        run.on.push_back(std::move(on));
      }
      schedule.runs.push_back(std::move(run));
    }
    double step = 0;
    for (const auto& [task, configuration, nodes] : running) {
      const double needed = left[task] * instance.tasks[task].configurations[configuration].seconds;
      step = step == 0 ? needed : dynamic ? std::min(step, needed) : std::max(step, needed);
    }
    for (const auto& [task, configuration, nodes] : running) {
      const double seconds = instance.tasks[task].configurations[configuration].seconds;
      left[task] = step >= left[task] * seconds * (1 - 1e-12) ? 0 : left[task] - step / seconds;
    }
    now += step;
  }
  in_order_of_starts(schedule);
  return schedule;
}

}  // namespace

Instance as_usual(const Instance& instance) {
  Instance usual = instance;
  for (Task& task : usual.tasks)
    if (!task.usual.empty()) task.configurations = task.usual;
  return usual;
}

std::vector<Choice> simple_choices(const Instance& instance) {
  Choice widest = in_turn(instance);
  for (uint32_t i = 0; i < instance.tasks.size(); ++i)
    widest.configuration[i] = widest_on_a_node(instance.tasks[i].configurations);
  return {std::move(widest), least_of_each(instance)};
}

std::vector<Baseline> baselines(const Instance& instance, uint64_t seed,
                                const std::atomic<bool>* stop) {
  ListScheduler scheduler(instance);
  std::mt19937_64 draw(seed);
  Baseline random{"random", "the mean of three"};
  for (int run = 0; run < 3; ++run) {
    Choice choice = in_turn(instance);
    for (uint32_t i = 0; i < instance.tasks.size(); ++i) {
      choice.configuration[i] =
          static_cast<uint32_t>(draw() % instance.tasks[i].configurations.size());
      std::swap(choice.order[i], choice.order[draw() % (i + 1)]);
    }
    Schedule schedule = scheduler.schedule(choice);
    random.makespan += schedule.makespan / 3;
    if (!random.schedule || schedule.makespan < random.schedule->makespan)
      random.schedule = std::move(schedule);
  }
  std::vector<Baseline> all;
  const auto add = [&](std::string name, std::string what, Schedule schedule) {
    const double makespan = schedule.makespan;
    // Something faster than what its user takes may end before.
    schedule.makespan = 0;
    for (const Run& run : schedule.runs) schedule.makespan = std::max(schedule.makespan, run.end);
    all.push_back({std::move(name), std::move(what), makespan, std::move(schedule)});
  };
  add("current practice", "a node to a task, its user's technique",
      all_of_a_node(instance, as_usual(instance)));
  add("max", "a node to a task, the best technique", all_of_a_node(instance, instance));
  add("min", "the least that fits, what is left is spread",
      scheduler.schedule(least_of_each(instance)));
  all.push_back(std::move(random));
  constexpr double kMostWork = 1e9;
  const auto tasks = static_cast<double>(instance.tasks.size());
  if (tasks * tasks * static_cast<double>(instance.nodes.size()) > kMostWork) return all;
  if (auto waves = optimus(instance, /*dynamic=*/false, stop))
    add("optimus", "greedy, in waves", *std::move(waves));
  if (const auto anew = optimus(instance, /*dynamic=*/true, stop))
    all.push_back({"optimus, dynamic", "greedy, anew whenever a task ends", anew->makespan});
  return all;
}

}  // namespace ptc::planner
