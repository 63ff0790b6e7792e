#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <chrono>
#include <vector>

#include "tools/cli/numbers.h"
#include "tools/planner/spase/gantt.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/spase.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

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

}  // namespace

void add_search_options(CLI::App& command, SearchOptions& options) {
  CLI::Option* time =
      command.add_option("--time", options.time, "seconds to look for a shorter one")
          ->type_name("S")
          ->check(number(0.001, 1e6))
          ->capture_default_str();
  command
      .add_option("--steps", options.steps,
                  "schedules to try instead (at least some 50): the same answer each time")
      ->type_name("N")
      ->check(whole_number(0, uint64_t{1} << 50))
      ->excludes(time);
  command.add_option("--seed", options.seed, "of what is drawn")
      ->type_name("N")
      ->check(whole_number(0, UINT64_MAX))
      ->capture_default_str();
}

void add_threshold_option(CLI::App& command, std::optional<std::string>& threshold) {
  command
      .add_option("--threshold", threshold,
                  "how much earlier all must be done, where who runs is changed; else\n"
                  "what the changes cost")
      ->type_name("S")
      ->check(number(0, kMostSeconds));
}

planner::SolverOptions solver_options(const SearchOptions& options) {
  planner::SolverOptions how;
  how.seed = std::stoull(options.seed);
  how.steps = std::stoull(options.steps);
  how.time = std::chrono::milliseconds(static_cast<int64_t>(1000 * std::stod(options.time)));
  how.stop = &interrupted;
  return how;
}

void print_schedule(const planner::Instance& instance, const planner::Schedule& schedule,
                    size_t width, std::FILE* out) {
  constexpr size_t kLeastOfPlaces = 14;
  Table table({{"TASK"},
               {"GPUS", Table::Align::kRight, 3},
               {"FROM", Table::Align::kRight, 2},
               {"TO", Table::Align::kRight, 4},
               {"BATCH", Table::Align::kRight, 5},
               {"HOW"},
               {"WHERE", Table::Align::kLeft, 1, kLeastOfPlaces}});
  for (const planner::Run& run : schedule.runs) {
    const planner::Task& task = instance.tasks[run.task];
    const planner::Configuration& what = task.configurations[run.configuration];
    table.add({task.name, std::to_string(what.gpus), planner::time_text(run.start),
               planner::time_text(run.end), std::to_string(what.batch), what.way,
               places(instance, run)});
  }
  const std::vector<std::string> gone = table.narrow(width);
  fmt::print(out, "{}", table.to_string(0, width));
  if (!gone.empty())
    fmt::print(
        out, "{}\n",
        wrapped(fmt::format("(No room in {} columns for {}; a pipe, a file and --json have all.)",
                            width, fmt::join(gone, ", ")),
                0, width));
  const std::vector<double> late = planner::lateness_of(instance, schedule);
  for (size_t i = 0; i < late.size(); ++i)
    if (late[i] > 0)
      fmt::print(out, "{} ends {} after its deadline.\n",
                 instance.tasks[schedule.runs[i].task].name, planner::time_text(late[i]));
}

Waiting::Waiting(const std::string& what) : is_live_(is_live_terminal(STDERR_FILENO)) {
  if (is_live_) fmt::print(stderr, "{}", shortened(what, terminal_width(STDERR_FILENO) - 1));
}

Waiting::~Waiting() {
  if (is_live_) fmt::print(stderr, "\r\033[K");
}

}  // namespace ptc::cli
