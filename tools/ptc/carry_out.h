// What "ptc autoscale" and "ptc spase run" have in common: jobs of a mount are ended and started as
// somebody decides.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "store/base/error.h"
#include "tools/planner/run/live.h"
#include "tools/ptc/command.h"

namespace ptc::cli {

struct CarryOutOptions {
  std::string file, device, logs, every, adopt;
  std::optional<std::string> price, start_price;
  bool until_done = false, drops = false;
};

/// --until-done, --every, --logs and --adopt; of the others' text something differs.
void add_carry_out_options(CLI::App& command, CarryOutOptions& options);
/// --price, whose text ends with `otherwise`, and --start-price.
struct PriceOptions {
  CLI::Option *change, *start;
};
PriceOptions add_price_options(CLI::App& command, CarryOutOptions& options,
                               const std::string& otherwise);

/// A line with the time before it, on standard output.
void say_now(const std::string& line);

/// Until it is interrupted, or all is done; or what --adopt asks for.
Result<int> carry_out(const Context& context, const CarryOutOptions& options,
                      planner::Decider& decider);

}  // namespace ptc::cli
