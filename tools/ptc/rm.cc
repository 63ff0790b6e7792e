// ptc rm: removes a checkpoint or a job.
#include <fmt/core.h>

#include <boost/json/array.hpp>
#include <cstdio>

#include "store/base/size_text.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct RmOptions {
  std::string target;
  bool force = false;
  bool yes = false;
};

/// "checkpoint llama/base (2.1 GiB)", "job llama with 3 checkpoints (6.3 GiB)".
Result<std::string> description(Target target) {
  PTC_TRY(auto status, read_status(target));
  if (!target.checkpoint.empty()) {
    if (why_unreadable(status, target.checkpoint))
      return fmt::format("checkpoint {} (cannot be read)", target.name());
    PTC_TRY(target, with_checkpoint(std::move(target)));
  }
  uint64_t bytes = 0, count = 0;
  for (const json::value& value : array_field(status.raw, "checkpoints")) {
    if (!value.is_object()) continue;
    if (!target.checkpoint.empty() && text_field(value.get_object(), "name") != target.checkpoint)
      continue;
    bytes += number_field(value.get_object(), "bytes");
    ++count;
  }
  if (!target.checkpoint.empty())
    return fmt::format("checkpoint {} ({})", target.name(), format_size(bytes));
  if (const size_t unreadable = array_field(status.raw, "unreadable").size(); unreadable > 0)
    return fmt::format("job {} with {} checkpoint{} ({}) and {} that cannot be read", target.job,
                       count, count == 1 ? "" : "s", format_size(bytes), unreadable);
  if (count == 0) return fmt::format("job {} (no checkpoints)", target.job);
  return fmt::format("job {} with {} checkpoint{} ({})", target.job, count, count == 1 ? "" : "s",
                     format_size(bytes));
}

bool confirmed(const std::string& what) {
  fmt::print(stderr, "Remove {}? [y/N] ", what);
  std::fflush(stderr);
  int first = std::getchar();
  for (int c = first; c != '\n' && c != EOF;) c = std::getchar();
  return first == 'y' || first == 'Y';
}

Result<int> run_rm(const Context& context, const RmOptions& options) {
  PTC_TRY(auto target, find_target(context.mount_option, options.target));
  PTC_TRY(auto what, description(target));
  if (!options.yes && is_live_terminal(0) && !confirmed(what)) {
    fmt::print(stderr, "ptc: nothing removed\n");
    return kFailed;
  }
  json::object request{{"do", "remove"}, {"job", target.job}, {"force", options.force}};
  if (!target.checkpoint.empty()) request["checkpoint"] = target.checkpoint;
  auto removed = ask(target.mount, request);
  if (!removed && removed.error().code() == Code::kBusy && target.checkpoint.empty() &&
      !options.force)
    return make_error(Code::kBusy, "{}; ptc rm --force {} removes it with all that it holds",
                      removed.error().message(), target.job);
  PTC_TRY(std::move(removed));
  fmt::print("removed {}\n", what);
  return kDone;
}

}  // namespace

void add_rm(CLI::App& app, Context& context) {
  auto [command, options] =
      add_command<RmOptions>(app, context, "rm", "Remove a checkpoint or a job", run_rm);
  command->add_option("JOB[/CHECKPOINT]", options->target, "what to remove")->required();
  command->add_flag("-f,--force", options->force, "also a job that still holds something");
  command->add_flag("-y,--yes", options->yes, "do not ask (it asks on a terminal only)");
  command->footer("Examples:\n  ptc rm llama/step100\n  ptc rm llama --force --yes");
}

}  // namespace ptc::cli
