// ptc spase rehearse: what becomes of a schedule when jobs take other times than profiles say.
#include <fmt/core.h>

#include <algorithm>
#include <boost/json/object.hpp>
#include <utility>
#include <vector>

#include "store/base/json.h"
#include "tools/cli/numbers.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/gantt.h"
#include "tools/planner/spase/rehearsal.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/job_states.h"
#include "tools/ptc/spase.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct RehearseOptions : SearchOptions {
  std::string file, device, deviation = "0.5", interval = "1000", price = "30";
  std::optional<std::string> threshold;
  bool as_json = false;
};

struct Step {
  std::string name, what;
  planner::Rehearsal told;
};

/// With the times that jobs really take.
planner::Instance in_truth(planner::Instance instance, const std::vector<double>& slowness) {
  for (size_t i = 0; i < instance.tasks.size(); ++i)
    for (auto* of : {&instance.tasks[i].configurations, &instance.tasks[i].usual})
      for (planner::Configuration& one : *of) one.seconds *= slowness[i];
  return instance;
}

planner::Schedule planned(const planner::Instance& instance, const planner::SolverOptions& how) {
  const auto others = planner::baselines(instance, how.seed, how.stop);
  std::vector<const planner::Schedule*> known;
  for (const planner::Baseline& other : others)
    if (other.schedule) known.push_back(&*other.schedule);
  return planner::solve(instance, how, known).schedule;
}

std::vector<Step> rehearsed(const planner::Instance& instance, const RehearseOptions& options) {
  planner::RehearsalRules rules;
  rules.introspects = false;
  rules.interval_s = std::stod(options.interval);
  rules.price_s = std::stod(options.price);
  rules.introspection.solver = solver_options(options);
  if (options.threshold) rules.introspection.threshold_s = std::stod(*options.threshold);
  const auto slowness = planner::drawn_slowness(instance.tasks.size(), std::stod(options.deviation),
                                                rules.introspection.solver.seed);
  const planner::Instance usual = planner::as_usual(instance), truth = in_truth(instance, slowness);
  const planner::SolverOptions& how = rules.introspection.solver;
  std::vector<Step> steps;
  for (const planner::Baseline& other : planner::baselines(truth, how.seed, how.stop))
    if (other.name == "current practice" || other.name == "optimus, dynamic")
      steps.push_back({other.name, other.what, {other.makespan}});
  steps.push_back({"+ allocation", "GPUs and order by a schedule; the technique is the user's",
                   planner::rehearse(usual, planned(usual, how), slowness, rules)});
  const planner::Schedule schedule = planned(instance, how);
  steps.push_back(
      {"+ technique", "and the technique", planner::rehearse(instance, schedule, slowness, rules)});
  rules.introspects = true;
  steps.push_back({"+ introspection", "and looked at again meanwhile",
                   planner::rehearse(instance, schedule, slowness, rules)});
  steps.push_back({"all known before",
                   "a schedule by the times that jobs really take",
                   {planned(truth, how).makespan}});
  return steps;
}

Result<int> run_rehearse(const RehearseOptions& options) {
  PTC_TRY(auto from, planner::read_jobs_file(options.file));
  from.file.choose_device(options.device);
  PTC_TRY(check_layouts(from));
  for (const std::string& remark : from.remarks) fmt::print(stderr, "ptc: {}\n", printable(remark));
  PTC_TRY(const planner::Instance instance, planner::make_instance(from));
  const Interruptions noted(Interruptions::kFirst);
  std::vector<Step> steps;
  {
    const Waiting waiting("rehearsing …");
    steps = rehearsed(instance, options);
  }
  const double practice = steps.front().told.makespan;
  if (options.as_json) {
    json::object all;
    for (const Step& step : steps)
      all[step.name] = json::object{{"makespan_s", step.told.makespan},
                                    {"introspections", step.told.introspections},
                                    {"taken", step.told.taken},
                                    {"changes", step.told.changes}};
    fmt::print("{}", pretty_json(all));
  } else {
    Table table({{"SCHEDULE"},
                 {"TAKES", Table::Align::kRight},
                 {"THAT IS", Table::Align::kRight},
                 {"CHANGES", Table::Align::kRight},
                 {"WHAT IT IS"}});
    for (const Step& step : steps)
      table.add({step.name, planner::time_text(step.told.makespan),
                 fmt::format("{:.2f} x", step.told.makespan / practice),
                 std::to_string(step.told.changes), step.what});
    fmt::print("{}", table.to_string(0, SIZE_MAX / 2));
  }
  if (!interrupted) return kDone;
  fmt::print(stderr, "ptc: interrupted: searches ended early\n");
  return kInterrupted;
}

}  // namespace

void add_spase_rehearse(CLI::App& spase, Context& context) {
  auto [command, options] = add_command<RehearseOptions>(
      spase, context, "rehearse", "Show what becomes of a schedule when profiles are wrong",
      [](const Context&, const RehearseOptions& given) { return run_rehearse(given); });
  command->footer(
      "In simulated time, without a mount. Each job takes so many times what its\n"
      "profile says, which is drawn by --seed, and known once it has trained a while.\n"
      "\nExample:\n  ptc spase rehearse jobs.json --deviation 1 --interval 600 --steps 20000");
  command->add_option("FILE", options->file, "jobs.json; -: standard input")->required();
  command
      ->add_option("--deviation", options->deviation,
                   "a job takes from 1 / (1 + X) to 1 + X times what its profile says")
      ->type_name("X")
      ->check(number(0, 100))
      ->capture_default_str();
  command->add_option("--interval", options->interval, "look again so often, and when a job ends")
      ->type_name("S")
      ->check(number(0.1, kMostSeconds))
      ->capture_default_str();
  add_threshold_option(*command, options->threshold);
  command->add_option("--price", options->price, "seconds that a change costs a job")
      ->type_name("S")
      ->check(number(0, kMostSeconds))
      ->capture_default_str();
  command->add_option("--device", options->device, "the kind of GPU, as profiles name it")
      ->type_name("NAME");
  add_search_options(*command, *options);
  command->add_flag("--json", options->as_json, "print it as JSON");
}

}  // namespace ptc::cli
