#include "tools/ptc/carry_out.h"

#include <fmt/chrono.h>
#include <fmt/core.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstdio>
#include <ctime>
#include <utility>

#include "tools/cli/numbers.h"
#include "tools/planner/profile/input.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {

void add_carry_out_options(CLI::App& command, CarryOutOptions& options) {
  command.add_flag("--until-done", options.until_done, "end when all jobs have ended");
  command.add_option("--every", options.every, "decide so often at least")
      ->type_name("S")
      ->check(number(0.1, kMostSeconds))
      ->capture_default_str();
  command.add_option("--logs", options.logs, "a directory for what jobs print")
      ->type_name("DIR")
      ->capture_default_str();
  command.add_option("--adopt", options.adopt, "decide again for a job that is left alone")
      ->type_name("JOB");
}

PriceOptions add_price_options(CLI::App& command, CarryOutOptions& options,
                               const std::string& otherwise) {
  CLI::Option* change =
      command
          .add_option("--price", options.price,
                      "seconds that a change costs a job; else by ptcfs's own plan and what\n"
                      "changes took" +
                          otherwise)
          ->type_name("S")
          ->check(number(0, kMostSeconds));
  CLI::Option* start =
      command.add_option("--start-price", options.start_price, "and its start; else the same")
          ->type_name("S")
          ->check(number(0, kMostSeconds));
  return {change, start};
}

void say_now(const std::string& line) {
  fmt::print("{:%H:%M:%S} {}\n", fmt::localtime(std::time(nullptr)), printable(line));
  std::fflush(stdout);
}

Result<int> carry_out(const Context& context, const CarryOutOptions& options,
                      planner::Decider& decider) {
  if (!options.adopt.empty()) {
    PTC_TRY(auto target, find_job(context.mount_option, options.adopt));
    PTC_TRY(const bool was_left_alone, planner::adopt(target.mount, target.job));
    if (was_left_alone)
      fmt::print("{}: it is decided for again, by the {} that runs, or by the next one\n",
                 target.job, decider.name());
    else fmt::print("{} is not left alone: nothing to do\n", target.job);
    return kDone;
  }
  if (options.file.empty()) return invalid_argument("FILE is missing: jobs.json");
  planner::LiveSettings settings;
  PTC_TRY(settings.mount, find_mount(context.mount_option));
  if (!planner::has_a_place(options.file))
    return invalid_argument("{}: a file is wanted that can be read again when it changes",
                            planner::input_name(options.file));
  settings.file = options.file;
  settings.logs = options.logs;
  settings.device = options.device;
  if (options.price) {
    const double change = std::stod(*options.price);
    settings.prices = {change, options.start_price ? std::stod(*options.start_price) : change};
  }
  settings.every_s = std::stod(options.every);
  settings.until_done = options.until_done;
  settings.drops = options.drops;
  const Interruptions interruptions(Interruptions::kFirst);
  planner::LiveUses uses;
  uses.say = say_now;
  uses.ask = [mount = settings.mount](const json::object& request) {
    return ask(mount, request, std::chrono::seconds(1));  // jobs are not stepped meanwhile
  };
  uses.is_stopped = [] { return interrupted.load(); };
  PTC_TRY(const auto given_up, planner::run_live(std::move(settings), std::move(uses), decider));
  if (given_up.empty()) return kDone;
  fmt::print(stderr, "ptc: given up: {}\n", fmt::join(given_up, ", "));
  return kFailed;
}

}  // namespace ptc::cli
