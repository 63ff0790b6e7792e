// ptc wait: blocks until a job's layout has settled.
#include <fmt/core.h>

#include <cstdio>

#include "tools/cli/numbers.h"
#include "tools/ptc/command.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

struct WaitOptions {
  std::string job;
  double timeout_seconds = 0;
};

Result<int> run_wait(const Context& context, const WaitOptions& options) {
  PTC_TRY(auto target, find_job(context.mount_option, options.job));
  auto settled = wait_until_settled(target, options.timeout_seconds);
  if (!settled && settled.error().code() == Code::kCancelled) {
    fmt::print(stderr, "ptc: {}\n", settled.error().message());
    return kTimedOut;
  }
  PTC_TRY(auto status, std::move(settled));
  if (status.state == "failed") {
    fmt::print(stderr, "ptc: {}\n", settled_text(status));
    return kFailed;
  }
  // Shells do not say that a redirection was refused when the file was closed.
  if (!status.layout_error.empty()) {
    fmt::print(stderr, "ptc: {}: {}. {} stays in force.\n", status.job, status.layout_error,
               status.layout);
    return kFailed;
  }
  fmt::print("{}\n", settled_text(status));
  return kDone;
}

}  // namespace

void add_wait(CLI::App& app, Context& context) {
  auto [command, options] = add_command<WaitOptions>(
      app, context, "wait", "Block until the layout wanted is in force, or has failed", run_wait);
  command->add_option("JOB", options->job, "a job, or a path into it")->required();
  command->add_option("--timeout", options->timeout_seconds, "give up after this many seconds")
      ->type_name("S")
      ->check(number(0.001, kMostSeconds));
  command->footer(
      "Exit status: 0 settled, 1 failed or refused (the reason on standard error),\n124 timed "
      "out.\n"
      "\nExample:\n  ptc layout llama set --tp 8 && ptc wait llama && sbatch restart.sh");
}

}  // namespace ptc::cli
