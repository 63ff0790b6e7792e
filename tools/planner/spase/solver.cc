#include "tools/planner/spase/solver.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/time_indexed.h"

namespace ptc::planner {
namespace {

using Clock = std::chrono::steady_clock;

// What is judged besides the makespan. Of few tasks, until when the GPUs are taken, in the mean. Of
// many, whose makespan few changes reach, ends of GPUs by their 32nd powers, in which all count,
// and then by their 256th, in which the last ones do.
constexpr size_t kFew = 50;
constexpr double kOfMean = 0.1, kOfMakespan = 0.1;
constexpr int kCoarse = 5, kFine = 8;   // doublings
constexpr int kTimes = 24;              // that tasks are to end within, to begin with
constexpr int kOfTime = 90;             // of a hundred parts, for the model beside it
constexpr double kAlike = 3e-6;         // what the model's bound may be below what it stands for
constexpr uint64_t kLooksAtModel = 64;  // whether time is over, between those whether it has ended

class Search {
 public:
  Search(const Instance& instance, const SolverOptions& options,
         const std::vector<const Schedule*>& known)
      : instance_(instance),
        options_(options),
        known_(known),
        scheduler_(instance),
        draw_(options.seed),
        bound_(lower_bound_of(instance)),
        end_(began_ + options.time),
        looks_each_(std::clamp<uint64_t>(
            1'000'000 / (instance.tasks.size() * instance.nodes.size()), 1, 64)) {}

  Solution run() {
    std::vector<Start> starts;
    const auto start_with = [&](Choice choice) {
      if (Choice by_deadline = choice; put_in_order_of_deadlines(by_deadline)) {
        const double cost = try_out(by_deadline);
        starts.push_back({cost, std::move(by_deadline)});
      }
      const double cost = try_out(choice);
      starts.push_back({cost, std::move(choice)});
    };
    // However little time there is, it is no worse than these.
    std::vector<Choice> simple = simple_choices(instance_);
    for (const Choice& choice : simple) start_with(choice);
    const Schedule* shortest = nullptr;
    for (const Schedule* one : known_)
      if (shortest == nullptr || cost_of(instance_, *one) < cost_of(instance_, *shortest))
        shortest = one;
    if (shortest != nullptr) start_with(choice_of(*shortest, instance_.tasks.size()));
    for (int i = 0; i < kTimes && !is_over(); ++i)
      for (Choice& choice : within(bound_ * std::pow(1.06, i - 4), simple.front()))
        start_with(std::move(choice));
    std::stable_sort(starts.begin(), starts.end(),
                     [](const Start& a, const Start& b) { return a.makespan < b.makespan; });
    best_ = starts.front();
    if (options_.steps == 0 && !done())
      model_.emplace(instance_, scheduler_.makespan(best_.choice),
                     std::chrono::duration_cast<std::chrono::milliseconds>((end_ - Clock::now()) *
                                                                           kOfTime / 100));
    // Short legs from the best starts, then longer ones from what is best, shaken a little.
    const uint64_t tasks = instance_.tasks.size();
    uint64_t leg = std::clamp<uint64_t>(1500 * tasks, 4000, 60'000);
    // In parts of the makespan: of few tasks each change is a large part of all.
    const auto count = static_cast<double>(tasks);
    const double hot = has_few() ? std::max(0.05, 0.8 / count) : 20 * std::pow(count, -2.4);
    for (size_t round = 0; !done(); ++round) {
      if (const auto choice = std::exchange(of_model_, std::nullopt)) {
        const double makespan = try_out(*choice);
        if (makespan < best_.makespan) best_ = {makespan, *choice};
        anneal(*choice, leg, hot / 5);
        continue;
      }
      const bool is_first = round < std::min<size_t>(4, starts.size());
      const Choice& from = is_first ? starts[round].choice : best_.choice;
      anneal(from, leg, is_first || round % 4 == 3 ? hot : hot / 5);
      if (round % 8 == 7) leg = std::min<uint64_t>(2 * leg, 4'000'000);
    }
    Solution solution;
    solution.schedule = scheduler_.schedule(best_.choice);
    // A choice places what takes several nodes anew, and may be longer than what it comes from.
    if (shortest != nullptr &&
        cost_of(instance_, *shortest) < cost_of(instance_, solution.schedule))
      solution.schedule = *shortest;
    const std::vector<double> late = lateness_of(instance_, solution.schedule);
    solution.late = std::accumulate(late.begin(), late.end(), 0.0);
    solution.lower_bound = bound_;
    solution.bound_by = bound_by_;
    solution.steps = steps_;
    solution.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
    return solution;
  }

 private:
  struct Start {
    double makespan = 0;
    Choice choice;
  };

  uint64_t below(uint64_t n) { return draw_() % n; }
  double unit() { return static_cast<double>(draw_() >> 11) * 0x1p-53; }

  bool done() {
    look_at_model();
    return best_.makespan <= bound_ * (1 + 1e-9) || is_over() ||
           (options_.steps != 0 && steps_ >= options_.steps);
  }
  /// Its bound holds from now on; its choice is tried in the next round.
  void look_at_model() {
    if (!model_ || !model_->goes_on() || ++looks_ % kLooksAtModel != 0) return;
    auto found = model_->found();
    if (!found) return;
    if (found->lower_bound > bound_) {
      bound_ =
          found->lower_bound < best_.makespan * (1 - kAlike) ? found->lower_bound : best_.makespan;
      bound_by_ = "the time-indexed model";
    }
    if (!found->choice.order.empty()) of_model_ = std::move(found->choice);
  }
  bool is_over() const {
    if (options_.stop != nullptr && options_.stop->load(std::memory_order_relaxed)) return true;
    return options_.steps == 0 && Clock::now() >= end_;
  }

  /// False: nobody has one.
  bool put_in_order_of_deadlines(Choice& choice) const {
    const auto due = [&](uint32_t task) {
      return instance_.tasks[task].due_s.value_or(std::numeric_limits<double>::infinity());
    };
    if (std::all_of(choice.order.begin(), choice.order.end(),
                    [&](uint32_t task) { return std::isinf(due(task)); }))
      return false;
    std::stable_sort(choice.order.begin(), choice.order.end(),
                     [&](uint32_t a, uint32_t b) { return due(a) < due(b); });
    return true;
  }

  /// What it costs: the makespan, as long as nobody is late.
  double try_out(const Choice& choice) {
    ++steps_;
    return scheduler_.cost(choice, &last_);
  }

  /// Of each task the cheapest configuration that ends within a time, the longest first; and those
  /// with the most GPUs first.
  std::vector<Choice> within(double most, Choice choice) const {
    for (uint32_t task = 0; task < instance_.tasks.size(); ++task) {
      const std::vector<Configuration>& of = instance_.tasks[task].configurations;
      uint32_t& chosen = choice.configuration[task];
      chosen = static_cast<uint32_t>(of.size() - 1);
      for (uint32_t one = 0; one < of.size(); ++one)
        if (of[one].seconds <= most &&
            (of[chosen].seconds > most || of[one].area() < of[chosen].area()))
          chosen = one;
    }
    const auto what = [&](uint32_t task) -> const Configuration& {
      return instance_.tasks[task].configurations[choice.configuration[task]];
    };
    std::vector<Choice> both;
    std::stable_sort(choice.order.begin(), choice.order.end(),
                     [&](uint32_t a, uint32_t b) { return what(a).seconds > what(b).seconds; });
    both.push_back(choice);
    std::stable_sort(choice.order.begin(), choice.order.end(),
                     [&](uint32_t a, uint32_t b) { return what(a).gpus > what(b).gpus; });
    both.push_back(std::move(choice));
    return both;
  }

  double cost(double makespan) const {
    if (has_few()) return makespan + kOfMean * scheduler_.smooth_end(makespan, 0);
    return kOfMakespan * makespan + (1 - kOfMakespan) * scheduler_.smooth_end(makespan, doublings_);
  }
  bool has_few() const { return instance_.tasks.size() <= kFew; }

  void anneal(const Choice& from, uint64_t steps, double heat) {
    Choice now = from;
    uint32_t last = now.order.front();
    last_ = last;
    double makespan = try_out(now);
    last = last_;
    doublings_ = kCoarse;
    double current = cost(makespan);
    double temperature = heat * makespan;
    const double cold = std::min(2e-5, heat / 20);
    const double cooling = std::pow(cold / heat, 1.0 / static_cast<double>(steps));
    for (uint64_t step = 0; step < steps; ++step, temperature *= cooling) {
      if (step % looks_each_ == 0 && done()) return;
      if (step == steps / 2 && !has_few()) {
        doublings_ = kFine;
        makespan = try_out(now);
        current = cost(makespan);
      }
      change(now, last);
      last_ = last;
      makespan = try_out(now);
      const double next = cost(makespan);
      if (next <= current || unit() < std::exp((current - next) / temperature)) {
        current = next;
        last = last_;
        if (makespan < best_.makespan) best_ = {makespan, now};
        continue;
      }
      undo(now);
    }
  }

  /// One small change of `choice`, which undo() takes back.
  void change(Choice& choice, uint32_t last) {
    const uint64_t tasks = choice.order.size();
    const uint64_t kind = below(100);
    const uint32_t task = below(4) == 0 ? last : static_cast<uint32_t>(below(tasks));
    const std::vector<Configuration>& of = instance_.tasks[task].configurations;
    if (kind < 40 && of.size() > 1) {
      uint32_t& chosen = choice.configuration[task];
      undo_ = {Undo::kConfiguration, task, chosen, choice.node[task]};
      if (below(4) == 0) chosen = static_cast<uint32_t>(below(of.size()));
      else if (chosen == 0 || (chosen + 1 < of.size() && below(2) == 0)) ++chosen;
      else --chosen;
      const uint32_t node = choice.node[task];
      if (node != Choice::kAnyNode &&
          (of[chosen].nodes > 1 || instance_.nodes[node].gpus < of[chosen].gpus))
        choice.node[task] = Choice::kAnyNode;
    } else if (kind < 48 && instance_.nodes.size() > 1) {
      const Configuration& what = of[choice.configuration[task]];
      undo_ = {Undo::kNode, task, choice.node[task], 0};
      const auto node = static_cast<uint32_t>(below(instance_.nodes.size()));
      const bool is_any = what.nodes > 1 || instance_.nodes[node].gpus < what.gpus || below(2) == 0;
      choice.node[task] = is_any ? Choice::kAnyNode : node;
    } else if (kind < 58) {
      // What ends last, earlier.
      const auto found = std::find(choice.order.begin(), choice.order.end(), last);
      const auto a = static_cast<uint32_t>(found - choice.order.begin());
      const auto b = static_cast<uint32_t>(below(a + 1));
      move(choice, a, b);
      undo_ = {Undo::kMove, a, b, 0};
    } else if (kind < 78) {
      const auto a = static_cast<uint32_t>(below(tasks)), b = static_cast<uint32_t>(below(tasks));
      std::swap(choice.order[a], choice.order[b]);
      undo_ = {Undo::kSwap, a, b, 0};
    } else {
      const auto a = static_cast<uint32_t>(below(tasks)), b = static_cast<uint32_t>(below(tasks));
      move(choice, a, b);
      undo_ = {Undo::kMove, a, b, 0};
    }
  }

  void undo(Choice& choice) const {
    switch (undo_.kind) {
      case Undo::kConfiguration:
        choice.configuration[undo_.a] = undo_.b;
        choice.node[undo_.a] = undo_.c;
        break;
      case Undo::kNode:
        choice.node[undo_.a] = undo_.b;
        break;
      case Undo::kSwap:
        std::swap(choice.order[undo_.a], choice.order[undo_.b]);
        break;
      case Undo::kMove:
        move(choice, undo_.b, undo_.a);
        break;
    }
  }

  static void move(Choice& choice, uint32_t from, uint32_t to) {
    const auto begin = choice.order.begin();
    if (from < to) std::rotate(begin + from, begin + from + 1, begin + to + 1);
    else std::rotate(begin + to, begin + from, begin + from + 1);
  }

  struct Undo {
    enum Kind { kConfiguration, kNode, kSwap, kMove } kind = kSwap;
    uint32_t a = 0, b = 0, c = 0;
  };

  const Instance& instance_;
  const SolverOptions options_;
  const std::vector<const Schedule*>& known_;
  ListScheduler scheduler_;
  std::mt19937_64 draw_;
  double bound_;
  std::string bound_by_ = "areas and the longest task";
  const Clock::time_point began_ = Clock::now();
  const Clock::time_point end_;
  const uint64_t looks_each_;  // whether it is over: so many steps
  uint64_t steps_ = 0;
  int doublings_ = kCoarse;
  uint32_t last_ = 0;  // the task that ended last in the last try
  Start best_;
  Undo undo_;
  uint64_t looks_ = 0;
  std::optional<TimeIndexedSearch> model_;
  std::optional<Choice> of_model_;
};

}  // namespace

Solution solve(const Instance& instance, const SolverOptions& options,
               const std::vector<const Schedule*>& known) {
  return Search(instance, options, known).run();
}

}  // namespace ptc::planner
