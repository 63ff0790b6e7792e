#include "tools/planner/spase/introspection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ptc::planner {
namespace {

constexpr double kEndless = std::numeric_limits<double>::infinity();
constexpr double kShorter = 1 - 1e-9;  // not by rounding alone

double price_of(const TaskNow& now, uint32_t configuration) {
  return now.price_s.empty() ? 0 : now.price_s[configuration];
}

/// What is no number is not known.
double slowness_of(const TaskNow& now, uint32_t configuration) {
  const double slowness = now.slowness_of.empty() ? now.slowness : now.slowness_of[configuration];
  return std::isfinite(slowness) && slowness > 0 ? slowness : 1;
}

/// Seconds of what is left of it.
double rest_of(const Task& task, const TaskNow& now, uint32_t configuration) {
  return task.configurations[configuration].seconds * now.left * slowness_of(now, configuration);
}

bool runs_there(const TaskNow& now, uint32_t configuration, const std::vector<OnNode>& on) {
  return now.runs && now.runs->configuration == configuration && now.runs->on == on;
}

bool are_usable(const std::vector<OnNode>& places, const UsableGpus& usable) {
  return std::all_of(places.begin(), places.end(), [&](const OnNode& on) {
    return on.node < usable.size() && std::includes(usable[on.node].begin(), usable[on.node].end(),
                                                    on.gpus.begin(), on.gpus.end());
  });
}

/// What is left, as an instance of its own: tasks that are not over, and GPUs that they may have.
class Rest {
 public:
  Rest(const Instance& of, std::span<const TaskNow> now, const UsableGpus& usable,
       bool may_be_changed)
      : of_(of), now_(now), usable_(usable), place_(of.tasks.size(), kNone) {
    for (uint32_t node = 0; node < of.nodes.size(); ++node) {
      const auto gpus = static_cast<uint32_t>(usable[node].size());
      instance_.nodes.push_back({of.nodes[node].name, gpus});
      largest_ = std::max(largest_, gpus);
      whole_ += gpus == of.largest_node();
    }
    for (uint32_t task = 0; task < of.tasks.size(); ++task)
      if (now[task].left > 0) add(task, may_be_changed);
  }

  const Instance& instance() const { return instance_; }
  const std::vector<uint32_t>& no_room() const { return no_room_; }

  /// None: it is not among what is offered.
  std::optional<Schedule> inside(const Schedule& schedule) const {
    Schedule inner = schedule;
    for (Run& run : inner.runs) {
      const uint32_t task = place_[run.task];
      const std::vector<uint32_t>& meant = configurations_[task];
      const bool goes_on = runs_there(now_[run.task], run.configuration, run.on);
      const auto found = std::find(meant.begin() + (has_pinned(task) && !goes_on ? 1 : 0),
                                   meant.end(), run.configuration);
      if (found == meant.end()) return std::nullopt;
      run.configuration = static_cast<uint32_t>(found - meant.begin());
      run.task = task;
      for (OnNode& on : run.on) on = numbered_here(on);
    }
    return inner;
  }

  Schedule outside(const Schedule& inner) const {
    Schedule schedule = inner;
    for (Run& run : schedule.runs) {
      run.configuration = configurations_[run.task][run.configuration];
      run.task = tasks_[run.task];
      for (OnNode& on : run.on)
        for (uint32_t& gpu : on.gpus) gpu = usable_[on.node][gpu];
    }
    return schedule;
  }

  /// By what it has now: whether that is kept.
  bool is_changed(uint32_t task, const Choice& choice) const {
    return now_[tasks_[task]].runs && !(has_pinned(task) && choice.configuration[task] == 0);
  }
  double cost(uint32_t task, const Choice& choice) const {
    return price_of(now_[tasks_[task]], configurations_[task][choice.configuration[task]]);
  }
  bool has_pinned(uint32_t task) const {
    return !instance_.tasks[task].configurations.front().pinned.empty();
  }
  uint32_t task(uint32_t inner) const { return tasks_[inner]; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  OnNode numbered_here(const OnNode& on) const {
    OnNode here{on.node, {}};
    const std::vector<uint32_t>& all = usable_[on.node];
    for (const uint32_t gpu : on.gpus)
      here.gpus.push_back(
          static_cast<uint32_t>(std::lower_bound(all.begin(), all.end(), gpu) - all.begin()));
    return here;
  }

  bool has_room(const Configuration& what) const {
    return what.nodes > 1 ? what.nodes <= whole_ : what.gpus <= largest_;
  }

  void add(uint32_t number, bool may_be_changed) {
    const TaskNow& now = now_[number];
    Task task{of_.tasks[number].name, {}, {}, of_.tasks[number].due_s};
    std::vector<uint32_t> meant;
    const auto offer = [&](uint32_t configuration, double seconds, std::vector<OnNode> pinned) {
      if (!std::isfinite(seconds)) return;
      Configuration what = of_.tasks[number].configurations[configuration];
      what.seconds = seconds;
      what.pinned = std::move(pinned);
      task.configurations.push_back(std::move(what));
      meant.push_back(configuration);
    };
    const bool goes_on = now.runs && are_usable(now.runs->on, usable_);
    if (goes_on) {
      std::vector<OnNode> here;
      for (const OnNode& on : now.runs->on) here.push_back(numbered_here(on));
      const uint32_t has = now.runs->configuration;
      offer(has, now.runs->trains_in_s + rest_of(of_.tasks[number], now, has), std::move(here));
    }
    for (uint32_t i = 0; i < of_.tasks[number].configurations.size(); ++i)
      if ((!goes_on || may_be_changed) && has_room(of_.tasks[number].configurations[i]))
        offer(i, price_of(now, i) + rest_of(of_.tasks[number], now, i), {});
    if (meant.empty())  // at no price that is known: it has room all the same
      for (uint32_t i = 0; i < of_.tasks[number].configurations.size(); ++i)
        if (has_room(of_.tasks[number].configurations[i]))
          offer(i, rest_of(of_.tasks[number], now, i), {});
    if (meant.empty()) {
      no_room_.push_back(number);
      return;
    }
    place_[number] = static_cast<uint32_t>(tasks_.size());
    tasks_.push_back(number);
    instance_.tasks.push_back(std::move(task));
    configurations_.push_back(std::move(meant));
  }

  const Instance& of_;
  const std::span<const TaskNow> now_;
  const UsableGpus& usable_;
  uint32_t largest_ = 0, whole_ = 0;  // GPUs of a node; nodes of the largest size, all of them
  Instance instance_;
  std::vector<uint32_t> place_;                        // in instance_, by task
  std::vector<uint32_t> tasks_;                        // and back
  std::vector<std::vector<uint32_t>> configurations_;  // of each of these, what is meant
  std::vector<uint32_t> no_room_;
};

/// Of one that changes who runs.
struct Changed {
  Schedule schedule;  // of the rest
  std::vector<uint32_t> tasks;
  double cost = 0;
};

/// Changes are taken back that win no more than they cost.
Changed what_pays(const Rest& rest, const Schedule& found) {
  const auto tasks = static_cast<uint32_t>(rest.instance().tasks.size());
  ListScheduler scheduler(rest.instance());
  Choice choice = choice_of(found, tasks);
  double cost = scheduler.cost(choice);
  bool is_as_found = true;
  for (bool again = true; again;) {
    again = false;
    for (uint32_t task = 0; task < tasks; ++task) {
      if (!rest.is_changed(task, choice) || !rest.has_pinned(task)) continue;
      Choice kept = choice;
      kept.configuration[task] = 0;
      const double without = scheduler.cost(kept);
      if (without > cost + rest.cost(task, choice)) continue;
      choice = std::move(kept);
      cost = without;
      again = true;
      is_as_found = false;
    }
  }
  Changed changed;
  changed.schedule = is_as_found ? found : scheduler.schedule(choice);
  for (uint32_t task = 0; task < tasks; ++task) {
    if (!rest.is_changed(task, choice)) continue;
    changed.tasks.push_back(rest.task(task));
    changed.cost += rest.cost(task, choice);
  }
  return changed;
}

}  // namespace

UsableGpus all_gpus(const Instance& instance) {
  UsableGpus all;
  for (const NodeOfCluster& node : instance.nodes) {
    all.emplace_back(node.gpus);
    std::iota(all.back().begin(), all.back().end(), 0);
  }
  return all;
}

Schedule forecast(const Instance& instance, const Schedule& schedule, std::span<const TaskNow> now,
                  const UsableGpus& usable) {
  std::vector<std::vector<double>> free;  // by node and GPU: until when it is taken
  for (const NodeOfCluster& node : instance.nodes) free.emplace_back(node.gpus, 0);
  std::vector<bool> is_planned(instance.tasks.size());
  Schedule ahead;
  const auto add = [&](const Run& planned, bool goes_on) {
    const TaskNow& task = now[planned.task];
    Run run = planned;
    run.start = 0;
    for (const OnNode& on : run.on)
      for (const uint32_t gpu : on.gpus) run.start = std::max(run.start, free[on.node][gpu]);
    run.end = run.start + (goes_on ? task.runs->trains_in_s : price_of(task, run.configuration)) +
              rest_of(instance.tasks[run.task], task, run.configuration);
    if (!are_usable(run.on, usable)) run.end = kEndless;
    for (const OnNode& on : run.on)
      for (const uint32_t gpu : on.gpus) free[on.node][gpu] = run.end;
    ahead.makespan = std::max(ahead.makespan, run.end);
    is_planned[run.task] = true;
    ahead.runs.push_back(std::move(run));
  };
  for (const bool goes_on : {true, false})
    for (const Run& run : schedule.runs)
      if (now[run.task].left > 0 && runs_there(now[run.task], run.configuration, run.on) == goes_on)
        add(run, goes_on);
  for (uint32_t task = 0; task < instance.tasks.size(); ++task)
    if (now[task].left > 0 && !is_planned[task]) ahead.makespan = kEndless;
  std::stable_sort(ahead.runs.begin(), ahead.runs.end(),
                   [](const Run& a, const Run& b) { return a.start < b.start; });
  return ahead;
}

Introspection introspect(const Instance& instance, const Schedule& schedule,
                         std::span<const TaskNow> now, const UsableGpus& usable,
                         const IntrospectionRules& rules) {
  const Rest kept(instance, now, usable, false), all(instance, now, usable, true);
  Introspection found;
  found.no_room = all.no_room();
  std::vector<TaskNow> with_room(now.begin(), now.end());
  for (const uint32_t task : found.no_room) with_room[task].left = 0;
  found.schedule = forecast(instance, schedule, with_room, usable);
  found.before = found.schedule.makespan;
  if (all.instance().tasks.empty()) {
    found.schedule = {};
    return found;
  }
  found.lower_bound = lower_bound_of(all.instance());
  const auto search = [&](const Rest& rest) {
    std::optional<Schedule> known;
    if (std::isfinite(found.schedule.makespan)) known = rest.inside(found.schedule);
    return known ? solve(rest.instance(), rules.solver, {&*known})
                 : solve(rest.instance(), rules.solver);
  };
  const auto take = [&](Schedule next) {
    found.schedule = std::move(next);
    found.is_new = true;
  };
  // Nobody who runs is changed: that costs nothing.
  Schedule next = kept.outside(search(kept).schedule);
  const auto cost = [&](const Schedule& one) { return cost_of(instance, one); };
  if (cost(next) < kShorter * cost(found.schedule)) take(std::move(next));
  const bool somebody_runs = std::any_of(
      now.begin(), now.end(), [](const TaskNow& task) { return task.left > 0 && task.runs; });
  if (!somebody_runs) return found;
  Changed changed = what_pays(all, search(all).schedule);
  const double needed = changed.tasks.empty() ? 0 : rules.threshold_s.value_or(changed.cost);
  Schedule other = all.outside(changed.schedule);
  if (!(cost(other) + needed < kShorter * cost(found.schedule))) return found;
  take(std::move(other));
  found.changed = std::move(changed.tasks);
  return found;
}

}  // namespace ptc::planner
