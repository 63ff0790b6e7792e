#include "tools/planner/spase/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace ptc::planner {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

/// What a second of lateness weighs: more than all tasks one after another take, however they are
/// configured.
double weight_of_lateness(const Instance& instance) {
  constexpr double kLeast = 1000;
  double all = 0;
  for (const Task& task : instance.tasks) {
    double longest = 0;
    for (const Configuration& one : task.configurations) longest = std::max(longest, one.seconds);
    all += longest;
  }
  return std::max(kLeast, all);
}

}  // namespace

ListScheduler::ListScheduler(const Instance& instance)
    : instance_(instance),
      nodes_(instance.nodes.size()),
      most_(instance.largest_node()),
      has_pinned_(std::any_of(instance.tasks.begin(), instance.tasks.end(),
                              [](const Task& task) {
                                return std::any_of(
                                    task.configurations.begin(), task.configurations.end(),
                                    [](const Configuration& one) { return !one.pinned.empty(); });
                              })),
      has_deadlines_(std::any_of(instance.tasks.begin(), instance.tasks.end(),
                                 [](const Task& task) { return task.due_s.has_value(); })),
      of_lateness_(weight_of_lateness(instance)) {
  // The smaller ones first: of two that a task could start on, the wide ones are left free.
  by_size_.resize(nodes_);
  std::iota(by_size_.begin(), by_size_.end(), 0);
  std::stable_sort(by_size_.begin(), by_size_.end(), [&](uint32_t a, uint32_t b) {
    return instance.nodes[a].gpus < instance.nodes[b].gpus;
  });
  place_of_.resize(nodes_);
  for (uint32_t i = 0; i < nodes_; ++i) {
    place_of_[by_size_[i]] = i;
    sizes_.push_back(instance.nodes[by_size_[i]].gpus);
    if (sizes_.back() == most_) whole_.push_back(i);
  }
  free_.resize(nodes_ * most_);
}

void ListScheduler::begin(const Choice& choice) {
  for (uint32_t k = 0; k < most_; ++k)
    for (uint32_t i = 0; i < nodes_; ++i) free(i, k) = k < sizes_[i] ? 0 : kNever;
  if (has_pinned_) begin_with_pinned(choice);
}

void ListScheduler::begin_with_pinned(const Choice& choice) {
  pinned_.resize(nodes_);
  for (auto& of_node : pinned_) of_node.clear();
  for (uint32_t task = 0; task < instance_.tasks.size(); ++task) {
    const Configuration& what = instance_.tasks[task].configurations[choice.configuration[task]];
    for (const OnNode& on : what.pinned)
      for (const uint32_t gpu : on.gpus)
        pinned_[place_of_[on.node]].emplace_back(what.seconds, gpu);
  }
  for (uint32_t i = 0; i < nodes_; ++i) {
    std::vector<std::pair<double, uint32_t>>& until = pinned_[i];
    if (until.empty()) continue;
    std::sort(until.begin(), until.end());
    const size_t idle = sizes_[i] - until.size();
    for (size_t k = 0; k < until.size(); ++k)
      free(i, static_cast<uint32_t>(idle + k)) = until[k].first;
    if (numbers_.empty()) continue;
    const auto is_idle = [&](uint32_t gpu) {
      return std::none_of(until.begin(), until.end(),
                          [&](const auto& one) { return one.second == gpu; });
    };
    std::stable_partition(numbers_[i].begin(), numbers_[i].end(), is_idle);
    for (size_t k = 0; k < until.size(); ++k) numbers_[i][idle + k] = until[k].second;
  }
}

double ListScheduler::place_whole(const Configuration& what, Run* run) {
  const auto free_at = [&](uint32_t node) { return free(node, most_ - 1); };
  std::partial_sort(whole_.begin(), whole_.begin() + what.nodes, whole_.end(),
                    [&](uint32_t a, uint32_t b) {
                      return free_at(a) != free_at(b) ? free_at(a) < free_at(b) : a < b;
                    });
  const double start = free_at(whole_[what.nodes - 1]), end = start + what.seconds;
  for (uint32_t i = 0; i < what.nodes; ++i) {
    for (uint32_t k = 0; k < most_; ++k) free(whole_[i], k) = end;
    if (run != nullptr) run->on.push_back({by_size_[whole_[i]], numbers_[whole_[i]]});
  }
  if (run != nullptr) run->start = start, run->end = end;
  return end;
}

double ListScheduler::place(const Choice& choice, uint32_t task, Run* run) {
  const Configuration& what = instance_.tasks[task].configurations[choice.configuration[task]];
  if (!what.pinned.empty()) {
    if (run != nullptr) run->end = what.seconds, run->on = what.pinned;
    return what.seconds;
  }
  if (what.nodes > 1) return place_whole(what, run);
  const uint32_t gpus = what.gpus;
  uint32_t node = 0;
  if (choice.node[task] != Choice::kAnyNode) {
    node = place_of_[choice.node[task]];
  } else {
    const double* starts = &free(0, gpus - 1);
    for (uint32_t i = 1; i < nodes_; ++i)
      if (starts[i] < starts[node]) node = i;
  }
  const double start = free(node, gpus - 1), end = start + what.seconds;
  // Of those that are free by then, the last ones: the others may serve who can start before.
  uint32_t upper = gpus;
  while (upper < sizes_[node] && free(node, upper) <= start) ++upper;
  uint32_t behind = upper;
  for (; behind < sizes_[node] && free(node, behind) <= end; ++behind)
    free(node, behind - gpus) = free(node, behind);
  for (uint32_t k = behind - gpus; k < behind; ++k) free(node, k) = end;
  if (run != nullptr) {
    const auto number = numbers_[node].begin();
    run->start = start, run->end = end;
    run->on.push_back({by_size_[node], {number + (upper - gpus), number + upper}});
    std::rotate(number + (upper - gpus), number + upper, number + behind);
  }
  return end;
}

double ListScheduler::makespan(const Choice& choice, uint32_t* last) {
  numbers_.clear();
  begin(choice);
  double all = 0;
  late_ = 0;
  for (const uint32_t task : choice.order) {
    const double end = place(choice, task, nullptr);
    if (has_deadlines_ && instance_.tasks[task].due_s)
      late_ += std::max(0.0, end - *instance_.tasks[task].due_s);
    if (end <= all) continue;
    all = end;
    if (last != nullptr) *last = task;
  }
  return all;
}

double ListScheduler::cost(const Choice& choice, uint32_t* last) {
  const double seconds = makespan(choice, last);
  return late_ == 0 ? seconds : seconds + of_lateness_ * late_;
}

double ListScheduler::smooth_end(double makespan, int doublings) const {
  double sum = 0;
  for (const double free : free_) {
    double power = free == kNever ? 0 : free / makespan;
    for (int i = 0; i < doublings; ++i) power *= power;
    sum += power;
  }
  return makespan * std::pow(sum / instance_.gpus(), std::ldexp(1, -doublings));
}

Schedule ListScheduler::schedule(const Choice& choice) {
  numbers_.clear();
  for (const uint32_t size : sizes_) {
    numbers_.emplace_back(size);
    std::iota(numbers_.back().begin(), numbers_.back().end(), 0);
  }
  begin(choice);
  Schedule schedule;
  for (const uint32_t task : choice.order) {
    Run run{task, choice.configuration[task], 0, 0, {}};
    schedule.makespan = std::max(schedule.makespan, place(choice, task, &run));
    for (OnNode& on : run.on) std::sort(on.gpus.begin(), on.gpus.end());
    std::sort(run.on.begin(), run.on.end(),
              [](const OnNode& a, const OnNode& b) { return a.node < b.node; });
    schedule.runs.push_back(std::move(run));
  }
  std::stable_sort(schedule.runs.begin(), schedule.runs.end(),
                   [](const Run& a, const Run& b) { return a.start < b.start; });
  return schedule;
}

std::vector<double> lateness_of(const Instance& instance, const Schedule& schedule) {
  std::vector<double> late;
  for (const Run& run : schedule.runs) {
    const std::optional<double>& due = instance.tasks[run.task].due_s;
    late.push_back(due ? std::max(0.0, run.end - *due) : 0);
  }
  return late;
}

double cost_of(const Instance& instance, const Schedule& schedule) {
  const std::vector<double> each = lateness_of(instance, schedule);
  const double late = std::accumulate(each.begin(), each.end(), 0.0);
  return late == 0 ? schedule.makespan : schedule.makespan + weight_of_lateness(instance) * late;
}

Choice choice_of(const Schedule& schedule, size_t tasks) {
  Choice choice;
  choice.configuration.resize(tasks);
  choice.node.assign(tasks, Choice::kAnyNode);
  for (const Run& run : schedule.runs) {
    choice.order.push_back(run.task);
    choice.configuration[run.task] = run.configuration;
    if (run.on.size() == 1) choice.node[run.task] = run.on.front().node;
  }
  return choice;
}

double lower_bound_of(const Instance& instance) {
  const double gpus = instance.gpus();
  // With more time each task has no fewer choices: what is possible by some time is so later.
  const auto is_possible = [&](double seconds) {
    double area = 0;
    for (const Task& task : instance.tasks) {
      double least = -1;
      for (const Configuration& one : task.configurations)
        if (one.seconds <= seconds && (least < 0 || one.area() < least)) least = one.area();
      if (least < 0) return false;
      area += least;
    }
    return area <= seconds * gpus;
  };
  double low = 0, high = 0;
  for (const Task& task : instance.tasks) {
    double least = kNever, most = 0;
    for (const Configuration& one : task.configurations) {
      least = std::min(least, one.seconds);
      most = std::max(most, one.seconds);
    }
    low = std::max(low, least);
    high += most;
  }
  // `high`: one after the other, each as long as it can take.
  for (const Task& task : instance.tasks)
    for (const Configuration& one : task.configurations) high = std::max(high, one.area());
  if (is_possible(low)) return low;
  for (int i = 0; i < 100 && high - low > 1e-12 * high; ++i) {
    const double middle = (low + high) / 2;
    (is_possible(middle) ? high : low) = middle;
  }
  return low;
}

}  // namespace ptc::planner
