// ptc spase: which layout each of many jobs gets, on which GPUs, and in which order.
#include "tools/ptc/spase.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <boost/json/object.hpp>
#include <cmath>
#include <cstdio>
#include <optional>

#include "tools/planner/profile/input.h"
#include "tools/planner/spase/baselines.h"
#include "tools/planner/spase/gantt.h"
#include "tools/planner/spase/literal_model.h"
#include "tools/planner/spase/solver.h"
#include "tools/ptc/command.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/job_states.h"
#include "tools/ptc/output_file.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct PlanOptions : SearchOptions {
  std::string file, device;
  std::optional<std::string> svg, model;
  bool as_json = false;
};

void print_plan(const planner::Instance& instance, const planner::Solution& solution,
                const std::vector<planner::Baseline>& others, std::FILE* out) {
  const int fd = ::fileno(out);
  const size_t width = ::isatty(fd) ? terminal_width(fd) : SIZE_MAX / 2;
  print_schedule(instance, solution.schedule, width, out);
  const double makespan = solution.schedule.makespan;
  // Rounded up, so that it holds.
  const double gap = std::ceil(1000 * (1 - solution.lower_bound / makespan)) / 10;
  const std::string told = fmt::format(
      "{} until all are done; {} is the least that there can be, by {}{}. {} tried in {:.1f} s.",
      planner::time_text(makespan), planner::time_text(solution.lower_bound), solution.bound_by,
      solution.optimal()  ? std::string(": this is the shortest")
      : solution.late > 0 ? std::string(" (somebody is late, and that comes first)")
                          : fmt::format(" (at most {:.1f} % less)", gap),
      planner::counted(solution.steps, "schedule"), solution.seconds);
  fmt::print(out, "\n{}\n\n", wrapped(told, 0, width));
  Table beside({{"INSTEAD"},
                {"TAKES", Table::Align::kRight},
                {"THIS IS", Table::Align::kRight},
                {"WHAT IT DOES"}});
  for (const planner::Baseline& other : others)
    beside.add({other.name, planner::time_text(other.makespan),
                fmt::format("{:.2f} x", makespan / other.makespan), other.what});
  fmt::print(out, "{}", beside.to_string(0, width));
}

Result<int> run_plan(const PlanOptions& options) {
  PTC_TRY(auto from, planner::read_jobs_file(options.file));
  from.file.choose_device(options.device);
  PTC_TRY(check_layouts(from));
  for (const std::string& remark : from.remarks) fmt::print(stderr, "ptc: {}\n", printable(remark));
  std::optional<OutputFile> picture;
  if (options.svg) {
    PTC_TRY(picture, OutputFile::at(*options.svg, from.read));
  }
  const bool is_only_picture = picture && picture->is_standard_output();
  if (is_only_picture && options.as_json)
    return invalid_argument("--json and --svg {} both write to standard output", *options.svg);
  std::optional<OutputFile> model;
  if (options.model) {
    PTC_TRY(model, OutputFile::at(*options.model, from.read));
    if (model->is_standard_output())
      return invalid_argument("--write-model {}: the plan is on standard output", *options.model);
  }
  const Interruptions noted(Interruptions::kFirst);
  std::vector<planner::Baseline> others;
  std::optional<planner::Instance> instance;
  const planner::SolverOptions how = solver_options(options);
  {
    const Waiting waiting("computing what others would take …");
    PTC_TRY(instance, planner::make_instance(from));
    if (model) {
      PTC_TRY(const std::string text, planner::literal_model(*instance));
      PTC_TRY(model->write(text));
    }
    others = planner::baselines(*instance, how.seed, how.stop);
  }
  std::vector<const planner::Schedule*> known;
  for (const planner::Baseline& other : others)
    if (other.schedule) known.push_back(&*other.schedule);
  const planner::Solution solution = [&] {
    const Waiting waiting(
        how.steps != 0
            ? fmt::format("trying {} schedules (Ctrl-C: what is best so far) …", how.steps)
            : fmt::format("looking for a short schedule for {} s (Ctrl-C: what is best so far) …",
                          options.time));
    return planner::solve(*instance, how, known);
  }();
  const bool was_interrupted = interrupted;
  if (picture) {
    PTC_TRY(picture->write(planner::gantt_svg(*instance, solution.schedule, solution.lower_bound)));
  }
  if (options.as_json) {
    json::object all = planner::schedule_json(*instance, solution.schedule, solution.lower_bound);
    all["lower_bound_by"] = solution.bound_by;
    json::object& instead = all["instead_s"].emplace_object();
    for (const planner::Baseline& other : others) instead[other.name] = other.makespan;
    fmt::print("{}", pretty_json(all));
  } else {
    print_plan(*instance, solution, others, is_only_picture ? stderr : stdout);
  }
  if (was_interrupted) fmt::print(stderr, "ptc: interrupted: this is the best so far\n");
  return was_interrupted ? kInterrupted : kDone;
}

}  // namespace

void add_spase(CLI::App& app, Context& context) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand(
      "spase", "Decide layout, GPUs and order of many jobs, so that all are done soon");
  command->footer(
      "The jobs' file names the cluster, profiles (see \"ptc profile\"), and the jobs:\n"
      "  {\"cluster\": {\"nodes\": {\"w0\": 8, \"w1\": 8}}, \"profiles\": \"profiles.csv\",\n"
      "   \"jobs\": [{\"name\": \"a\", \"model\": \"gpt2\", \"samples\": 1e6, \"batch\": 256},\n"
      "            {\"name\": \"b\", \"model\": \"bert\", \"samples\": 5e6,\n"
      "             \"batch\": [64, 1024], \"technique\": \"ddp\"}]}\n"
      "Where \"batch\" is left out, the plan chooses it among those of the profiles.\n"
      "A job may have a \"deadline\": \"2030-06-01T18:00+02:00\".\n"
      "\nExamples:\n  ptc spase plan jobs.json --svg plan.svg\n"
      "  ptc spase plan jobs.json --steps 200000 --seed 7 --json");
  command->require_subcommand(1);
  CLI::App* plan = command->add_subcommand("plan", "Print a schedule, and what others would take");
  plan->add_option("FILE", options->file, "jobs.json; -: standard input")->required();
  plan->add_option("--svg", options->svg,
                   "draw it there, a line a GPU; -: to standard output, and the table to standard "
                   "error")
      ->type_name("FILE");
  plan->add_option("--write-model", options->model,
                   "write the mixed-integer program there too, in CPLEX's LP format, for other "
                   "solvers")
      ->type_name("FILE");
  plan->add_option("--device", options->device,
                   "the kind of the nodes' GPUs, as profiles name it; else as FILE says, or the "
                   "only one that they name")
      ->type_name("NAME");
  add_search_options(*plan, *options);
  plan->add_flag("--json", options->as_json, "print the schedule as JSON");
  plan->footer(
      "Exit status: 0 there is one, 1 a job fits nowhere, or a file is wrong, 130\n"
      "interrupted: what was best so far is printed.");
  plan->fallthrough();
  plan->callback([&context, options] {
    context.run = [options]() -> Result<int> { return run_plan(*options); };
  });
  add_spase_run(*command, context);
  add_spase_rehearse(*command, context);
}

}  // namespace ptc::cli
