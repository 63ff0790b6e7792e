// ptc: the command line. All but `recover` it does through files of the mount.
#include <fmt/core.h>

#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string_view>
#include <system_error>

#include "tools/cli/manual_style.h"
#include "tools/ptc/command.h"
#include "tools/ptc/values.h"

#ifndef PTC_VERSION
#define PTC_VERSION "unknown"
#endif

namespace {

constexpr const char* kFooter =
    "JOB is the name of a job or a path into the mount; JOB/CHECKPOINT names a\n"
    "checkpoint. The mount is the one given with -C, else PTC_MOUNT, else the one\n"
    "around the current directory, else the only one that you may enter, else\n"
    "/mnt/ptc.\n"
    "\n"
    "Examples:\n"
    "  ptc import llama ~/models/Llama-3.1-8B    copy a model in and commit it\n"
    "  ptc plan llama --tp 2 --pp 2              what would that move?\n"
    "  ptc layout llama set --tp 2 --pp 2        ask for it\n"
    "  ptc wait llama                            until it is in force\n"
    "  ptc verify llama                          read it all and compare checksums\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 wrong usage, 3 not all could be checked\n"
    "(verify), 4 drained, but for what is in no checkpoint (drain), 5 nothing fails,\n"
    "but there are warnings (doctor), 124 timed out (wait), 130 interrupted (spase:\n"
    "the best so far is printed).\n"
    "\"ptc COMMAND --help\" tells more, and so does ptc(1). Everything also works with\n"
    "cp, mv, cat, an editor and rm.";

int usage_error(std::string_view message, std::string_view command) {
  fmt::print(stderr, "ptc: {}\n{} --help tells what there is.\n", message, command);
  return ptc::cli::kUsage;
}

int no_output(int reason) {
  fmt::print(stderr, "ptc: writing to standard output: {}\n",
             reason != 0 ? std::strerror(reason) : "it failed");
  return ptc::cli::kFailed;
}

/// What was printed has been written when nothing went wrong.
int with_all_written(int code) {
  const bool failed = std::ferror(stdout) != 0;
  errno = 0;
  if (std::fflush(stdout) == 0 && !failed) return code;
  return no_output(errno);
}

int run(int argc, char** argv) {
  using namespace ptc::cli;
  CLI::App app("Elastic checkpoints of training jobs, in a ptcfs mount.", "ptc");
  set_manual_style(app);
  Context context;
  app.add_option("-C,--mount", context.mount_option, "the mount, or a directory in it")
      ->type_name("DIR");
  app.set_version_flag("--version", "ptc " PTC_VERSION, "print the version and exit");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();
  add_status(app, context);
  add_top(app, context);
  add_ls(app, context);
  add_wait(app, context);
  add_events(app, context);
  add_plan(app, context);
  add_layout(app, context);
  add_rules(app, context);
  add_import(app, context);
  add_export(app, context);
  add_verify(app, context);
  add_pin(app, context);
  add_rm(app, context);
  add_drain(app, context);
  add_doctor(app, context);
  add_recover(app, context);
  add_profile(app, context);
  add_spase(app, context);
  add_autoscale(app, context);
  add_simulate(app, context);
  for (CLI::App* command : app.get_subcommands({})) command->fallthrough();
  if (answer_completion(app, argc, argv, values_in_mount)) return kDone;

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) {
      std::ostringstream told;
      const int code = app.exit(error, told, told);
      fmt::print("{}", told.str());
      return code;
    }
    return usage_error(usage_complaint(app, error), command_named(app));
  }
  auto code = context.run();
  if (code) return code.value();
  fmt::print(stderr, "ptc: {}\n", code.error().message());
  return kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  std::setlocale(LC_CTYPE, "");
  // A reader that goes away (ptc status | head) ends the program quietly.
  std::signal(SIGPIPE, SIG_DFL);
  try {
    return with_all_written(run(argc, argv));
  } catch (const std::system_error& error) {
    if (std::ferror(stdout) != 0) return no_output(error.code().value());
    fmt::print(stderr, "ptc: {}\n", error.what());
    return ptc::cli::kFailed;
  } catch (const std::exception& error) {
    fmt::print(stderr, "ptc: {}\n", error.what());
    return ptc::cli::kFailed;
  }
}
