#include "tools/planner/spase/rehearsal.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

namespace ptc::planner {
namespace {

class Stage {
 public:
  Stage(const Instance& instance, const Schedule& schedule, const std::vector<double>& slowness,
        const RehearsalRules& rules)
      : instance_(instance),
        schedule_(schedule),
        slowness_(slowness),
        rules_(rules),
        usable_(all_gpus(instance)),
        tasks_(instance.tasks.size()),
        has_trained_(instance.tasks.size()) {
    for (uint32_t task = 0; task < tasks_.size(); ++task) tasks_[task].slowness = slowness[task];
  }

  Rehearsal run() {
    constexpr double kNoLook = std::numeric_limits<double>::infinity();
    double looked = 0;
    while (std::any_of(tasks_.begin(), tasks_.end(),
                       [](const TaskNow& task) { return task.left > 0; })) {
      start_what_is_next();
      const double look = rules_.introspects ? looked + rules_.interval_s : kNoLook;
      const bool ended = go_on(look);
      if (!rules_.introspects || (!ended && now_ < look)) continue;
      looked = now_;
      look_again();
    }
    told_.makespan = now_;
    return std::move(told_);
  }

 private:
  void start_what_is_next() {
    for (const Run& run : forecast(instance_, schedule_, tasks_, usable_).runs) {
      TaskNow& task = tasks_[run.task];
      if (task.runs || run.start > 0) continue;
      const double price = task.price_s.empty() ? 0 : task.price_s[run.configuration];
      task.runs = {run.configuration, run.on, price};
      task.price_s.assign(instance_.tasks[run.task].configurations.size(), rules_.price_s);
      told_.pieces.push_back({run.task, run.configuration, now_, now_, run.on});
    }
  }

  /// To `most`, or until a task ends; whether one did.
  bool go_on(double most) {
    double seconds = most - now_;
    for (uint32_t i = 0; i < tasks_.size(); ++i)
      if (tasks_[i].runs) seconds = std::min(seconds, until_end(i));
    now_ += seconds;
    for (Task& task : instance_.tasks)
      if (task.due_s) *task.due_s -= seconds;
    bool ended = false;
    for (uint32_t i = 0; i < tasks_.size(); ++i) {
      TaskNow& task = tasks_[i];
      if (!task.runs) continue;
      const double needed = until_end(i), trains = seconds - task.runs->trains_in_s;
      task.runs->trains_in_s = std::max(0.0, -trains);
      if (trains > 0) has_trained_[i] = true;
      if (needed <= seconds * (1 + 1e-12)) {
        task.left = 0;
        ended = true;
        end_piece(i);
      } else if (trains > 0) {
        task.left -= trains / of_all(i);
      }
    }
    return ended;
  }

  double of_all(uint32_t task) const {
    return instance_.tasks[task].configurations[tasks_[task].runs->configuration].seconds *
           slowness_[task];
  }
  double until_end(uint32_t task) const {
    return tasks_[task].runs->trains_in_s + of_all(task) * tasks_[task].left;
  }

  void end_piece(uint32_t task) {
    for (Run& piece : told_.pieces)
      if (piece.task == task && piece.end == piece.start) piece.end = now_;
    tasks_[task].runs.reset();
  }

  void look_again() {
    std::vector<TaskNow> known = tasks_;
    for (uint32_t i = 0; i < known.size(); ++i)
      if (!has_trained_[i]) known[i].slowness = 1;
    const Introspection found =
        introspect(instance_, schedule_, known, usable_, rules_.introspection);
    ++told_.introspections;
    if (!found.is_new) return;
    ++told_.taken;
    told_.changes += found.changed.size();
    for (const uint32_t task : found.changed) end_piece(task);
    schedule_ = found.schedule;
  }

  Instance instance_;  // its deadlines come nearer
  Schedule schedule_;
  const std::vector<double>& slowness_;
  const RehearsalRules& rules_;
  const UsableGpus usable_;
  std::vector<TaskNow> tasks_;
  std::vector<bool> has_trained_;
  double now_ = 0;
  Rehearsal told_;
};

}  // namespace

Rehearsal rehearse(const Instance& instance, const Schedule& schedule,
                   const std::vector<double>& slowness, const RehearsalRules& rules) {
  return Stage(instance, schedule, slowness, rules).run();
}

std::vector<double> drawn_slowness(size_t tasks, double deviation, uint64_t seed) {
  std::mt19937_64 draw(seed);
  std::vector<double> drawn;
  for (size_t i = 0; i < tasks; ++i) {
    const double unit = static_cast<double>(draw() >> 11) * 0x1p-53;
    drawn.push_back(std::pow(1 + deviation, 2 * unit - 1));
  }
  return drawn;
}

}  // namespace ptc::planner
