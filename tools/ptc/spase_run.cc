// ptc spase run: carries a schedule out in a mount, and looks at it again as jobs get on.
#include <fmt/core.h>
#include <unistd.h>

#include <cmath>
#include <optional>
#include <utility>

#include "tools/cli/numbers.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/run/decider.h"
#include "tools/planner/spase/gantt.h"
#include "tools/ptc/carry_out.h"
#include "tools/ptc/output_file.h"
#include "tools/ptc/spase.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct SpaseRunOptions : CarryOutOptions {
  SpaseRunOptions() { every = "1000", logs = "spase-logs", search.time = "1"; }
  SearchOptions search;
  std::optional<std::string> threshold, svg;
};

std::string headline(const planner::Introspection& found, const std::string& why) {
  const std::string in = planner::time_text(found.schedule.makespan);
  if (!found.is_new)
    return fmt::format("looked again, because {}: the schedule holds, all is done in {}", why, in);
  const std::string instead =
      std::isfinite(found.before) ? " instead of " + planner::time_text(found.before) : "";
  const size_t changed = found.changed.size();
  return fmt::format(
      "a schedule, because {}: all is done in {}{}{}", why, in, instead,
      changed == 0
          ? ""
          : fmt::format(", and {} that {} {}", planner::counted(changed, "job"),
                        changed == 1 ? "runs" : "run", changed == 1 ? "changes" : "change"));
}

void show(const planner::Instance& instance, const planner::Introspection& found,
          const std::string& why, const std::optional<OutputFile>& picture) {
  if (found.schedule.runs.empty()) return;
  say_now(headline(found, why));
  if (found.is_new) {
    const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
    print_schedule(instance, found.schedule,
                   is_terminal ? terminal_width(STDOUT_FILENO) : SIZE_MAX / 2, stdout);
    std::fflush(stdout);
  }
  if (!picture) return;
  const auto written =
      picture->write(planner::gantt_svg(instance, found.schedule, found.lower_bound));
  if (written.has_error()) say_now(std::string(written.error().message()));
}

Result<int> run_spase(const Context& context, const SpaseRunOptions& options) {
  std::optional<OutputFile> picture;
  if (options.svg) {
    PTC_TRY(picture, OutputFile::at(*options.svg, {options.file}));
  }
  planner::IntrospectionRules rules{solver_options(options.search)};
  if (options.threshold) rules.threshold_s = std::stod(*options.threshold);
  planner::Scheduler scheduler(
      rules, [&](const planner::Instance& instance, const planner::Introspection& found,
                 const std::string& why) { show(instance, found, why, picture); });
  return carry_out(context, options, scheduler);
}

}  // namespace

void add_spase_run(CLI::App& spase, Context& context) {
  auto [command, options] = add_command<SpaseRunOptions>(
      spase, context, "run", "Carry a schedule out in a mount, and improve it meanwhile",
      run_spase);
  command->footer(
      "Each job of FILE is one of the mount, with \"run\" as of \"ptc autoscale\". Jobs\n"
      "begin in the schedule's order, on its GPUs, when those before them there have\n"
      "ended. The schedule is made anew, of what is left, when a job ends, comes, fails\n"
      "or is slower than its profile says, when a node fails or returns, and now and\n"
      "then. Who runs is changed only if all are done earlier by more than that costs.\n"
      "Otherwise as \"ptc autoscale\": FILE may be changed meanwhile, ^C ends it and jobs\n"
      "go on, and the next one finds them. One of both is at work in a mount.\n"
      "\nExit status: 0 stopped, or all done; 1 a job was given up, or it cannot begin.\n"
      "\nExamples:\n  ptc spase run jobs.json --until-done --svg now.svg\n"
      "  ptc spase run --adopt llama");
  command->add_option("FILE", options->file, "jobs.json");
  add_carry_out_options(*command, *options);
  const PriceOptions prices = add_price_options(*command, *options, "");
  prices.start->needs(prices.change);
  add_threshold_option(*command, options->threshold);
  command->add_option("--svg", options->svg, "draw what is left there, whenever it is looked at")
      ->type_name("FILE");
  command->add_option("--device", options->device, "the kind of GPU, as profiles name it")
      ->type_name("NAME");
  add_search_options(*command, options->search);
}

}  // namespace ptc::cli
