// What a subcommand of `ptc` is: it adds its options to the parser and leaves behind what to run.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "store/base/error.h"

namespace ptc::cli {

/// Exit codes. 2 means that the command line itself was wrong.
enum ExitCode : int {
  kDone = 0,
  kFailed = 1,
  kUsage = 2,
  kNotChecked = 3,
  kLeft = 4,
  kWarned = 5,
  kTimedOut = 124,
  kInterrupted = 130
};

/// Shared by all subcommands; filled while the command line is parsed.
struct Context {
  std::string mount_option;          // -C
  std::function<Result<int>()> run;  // of the subcommand that was named; returns the exit code
};

/// Adds a subcommand that does `run(context, options)`. Its options are returned to be filled by
/// the parser; they live as long as `app`.
template <class Options, class Run>
std::pair<CLI::App*, Options*> add_command(CLI::App& app, Context& context, const char* name,
                                           const char* description, Run run) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(name, description);
  command->callback([&context, options, run] {
    context.run = [&context, options, run] { return run(context, *options); };
  });
  return {command, options.get()};
}

/// Each adds its subcommand to `app`; `context` outlives the app.
void add_status(CLI::App& app, Context& context);
void add_wait(CLI::App& app, Context& context);
void add_events(CLI::App& app, Context& context);
void add_ls(CLI::App& app, Context& context);
void add_plan(CLI::App& app, Context& context);
void add_layout(CLI::App& app, Context& context);
void add_import(CLI::App& app, Context& context);
void add_export(CLI::App& app, Context& context);
void add_verify(CLI::App& app, Context& context);
void add_rm(CLI::App& app, Context& context);
void add_pin(CLI::App& app, Context& context);
void add_drain(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);
void add_recover(CLI::App& app, Context& context);
void add_rules(CLI::App& app, Context& context);
void add_top(CLI::App& app, Context& context);
void add_profile(CLI::App& app, Context& context);
void add_spase(CLI::App& app, Context& context);
void add_autoscale(CLI::App& app, Context& context);
void add_simulate(CLI::App& app, Context& context);

}  // namespace ptc::cli
