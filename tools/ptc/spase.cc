// ptc spase: which layout each of many jobs gets, on which GPUs, and in which order.
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <boost/json/object.hpp>
#include <chrono>

#include "store/base/file.h"
#include "tools/cli/numbers.h"
#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/gantt.h"
#include "tools/planner/spase/solver.h"
#include "tools/ptc/command.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct SpaseOptions {
  std::string file, svg;
  std::string time = "2", steps = "0", seed = "1";
  bool as_json = false;
};

std::string places(const planner::Instance& instance, const planner::Run& run) {
  std::string text;
  for (const planner::OnNode& on : run.on) {
    if (!text.empty()) text += " ";
    text += instance.nodes[on.node].name + ":";
    for (size_t i = 0; i < on.gpus.size();) {
      size_t end = i + 1;
      while (end < on.gpus.size() && on.gpus[end] == on.gpus[end - 1] + 1) ++end;
      if (i > 0) text += ",";
      text += std::to_string(on.gpus[i]);
      if (end - i > 1) text += fmt::format("-{}", on.gpus[end - 1]);
      i = end;
    }
  }
  return text;
}

void print_plan(const planner::Instance& instance, const planner::Solution& solution,
                const std::vector<planner::Baseline>& others) {
  const size_t width = ::isatty(1) ? terminal_width(1) : SIZE_MAX / 2;
  Table table({{"TASK"},
               {"GPUS", Table::Align::kRight},
               {"FROM", Table::Align::kRight},
               {"TO", Table::Align::kRight},
               {"BATCH", Table::Align::kRight},
               {"HOW"},
               {"WHERE"}});
  for (const planner::Run& run : solution.schedule.runs) {
    const planner::Task& task = instance.tasks[run.task];
    const planner::Configuration& what = task.configurations[run.configuration];
    table.add({printable(task.name), std::to_string(what.gpus), planner::time_text(run.start),
               planner::time_text(run.end), std::to_string(what.batch), printable(what.way),
               printable(places(instance, run))});
  }
  fmt::print("{}\n", table.to_string(0, width));
  const double makespan = solution.schedule.makespan;
  const double gap = 100 * (makespan / solution.lower_bound - 1);
  fmt::print("{} until all are done; {} is the least that there can be{}.\n",
             planner::time_text(makespan), planner::time_text(solution.lower_bound),
             solution.optimal() ? std::string(": this is the shortest")
                                : fmt::format(" (at most {:.1f} % less)", gap));
  fmt::print("{} schedules tried in {:.1f} s.\n\n", solution.steps, solution.seconds);
  Table beside({{"INSTEAD"},
                {"TAKES", Table::Align::kRight},
                {"THIS IS", Table::Align::kRight},
                {"WHAT IT DOES"}});
  for (const planner::Baseline& other : others)
    beside.add({other.name, planner::time_text(other.makespan),
                fmt::format("{:.2f} x", makespan / other.makespan), other.what});
  fmt::print("{}", beside.to_string(0, width));
}

Result<int> run_plan(const SpaseOptions& options) {
  PTC_TRY(const auto from, planner::read_jobs_file(options.file));
  Result<planner::Instance> made = planner::make_instance(from);
  if (made.has_error()) return std::move(made).error().with_context(options.file);
  const planner::Instance& instance = made.value();
  planner::SolverOptions how;
  how.seed = std::stoull(options.seed);
  how.steps = std::stoull(options.steps);
  how.time = std::chrono::milliseconds(static_cast<int64_t>(1000 * std::stod(options.time)));
  const planner::Solution solution = planner::solve(instance, how);
  if (!options.svg.empty()) {
    PTC_TRY(write_file_atomically(
        AT_FDCWD, options.svg,
        planner::gantt_svg(instance, solution.schedule, solution.lower_bound)));
  }
  const auto others = planner::baselines(instance, how.seed);
  if (options.as_json) {
    json::object all = planner::schedule_json(instance, solution.schedule, solution.lower_bound);
    json::object& instead = all["instead_s"].emplace_object();
    for (const planner::Baseline& other : others) instead[other.name] = other.makespan;
    fmt::print("{}", pretty_json(all));
  } else {
    print_plan(instance, solution, others);
  }
  return kDone;
}

}  // namespace

void add_spase(CLI::App& app, Context& context) {
  auto options = std::make_shared<SpaseOptions>();
  CLI::App* command = app.add_subcommand(
      "spase", "Decide layout, GPUs and order of many jobs, so that all are done soon");
  command->footer(
      "The jobs' file names the cluster, profiles (see \"ptc profile\"), and the jobs:\n"
      "  {\"cluster\": {\"nodes\": {\"w0\": 8, \"w1\": 8}}, \"profiles\": \"profiles.csv\",\n"
      "   \"jobs\": [{\"name\": \"a\", \"model\": \"gpt2\", \"samples\": 1e6, \"batch\": 256},\n"
      "            {\"name\": \"b\", \"model\": \"bert\", \"samples\": 5e6,\n"
      "             \"batch\": [64, 1024], \"technique\": \"ddp\"}]}\n"
      "\nExamples:\n  ptc spase plan jobs.json --svg plan.svg\n"
      "  ptc spase plan jobs.json --steps 200000 --seed 7 --json");
  command->require_subcommand(1);
  CLI::App* plan = command->add_subcommand("plan", "Print a schedule, and what others would take");
  plan->add_option("FILE", options->file, "jobs.json")->required();
  plan->add_option("--svg", options->svg, "draw it there, a line a GPU")->type_name("FILE");
  plan->add_option("--time", options->time, "seconds to look for a shorter one")
      ->type_name("S")
      ->check(number(0.001, 1e6))
      ->capture_default_str();
  plan->add_option("--steps", options->steps,
                   "schedules to try instead (at least some 50): the same answer each time")
      ->type_name("N")
      ->check(whole_number(0, uint64_t{1} << 50))
      ->capture_default_str();
  plan->add_option("--seed", options->seed, "of what is drawn")
      ->type_name("N")
      ->check(whole_number(0, UINT64_MAX))
      ->capture_default_str();
  plan->add_flag("--json", options->as_json, "print the schedule as JSON");
  plan->footer("Exit status: 0 there is one, 1 a job fits nowhere, or a file is wrong.");
  plan->fallthrough();
  command->callback([&context, options] {
    context.run = [options]() -> Result<int> { return run_plan(*options); };
  });
}

}  // namespace ptc::cli
