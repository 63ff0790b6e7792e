// ptc ls: jobs, or the checkpoints of one job, a line each.
#include <fmt/core.h>

#include <boost/json/array.hpp>

#include "store/base/size_text.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

Result<int> list_all_jobs(const std::string& mount) {
  size_t hidden = 0;
  PTC_TRY(auto jobs, read_statuses(mount, &hidden));
  say_hidden(hidden);
  if (jobs.empty() && hidden > 0) return kDone;
  if (jobs.empty()) {
    fmt::print("No jobs in {} yet; mkdir {}/NAME makes one.\n", mount, mount);
  } else {
    fmt::print("{}", job_table(jobs).to_string(0, terminal_width(1)));
  }
  return kDone;
}

Result<int> list_checkpoints(const Target& target) {
  PTC_TRY(auto status, read_status(target));
  const Table table = checkpoint_table(status);
  const json::array& unreadable = array_field(status.raw, "unreadable");
  if (!table.empty()) fmt::print("{}", table.to_string(0, terminal_width(1)));
  else if (unreadable.empty()) fmt::print("{} has no checkpoint yet.\n", target.job);
  for (const json::value& value : unreadable) {
    if (!value.is_object()) continue;
    const std::string name = text_field(value.get_object(), "name");
    fmt::print("{} cannot be read: {}\n", printable(name),
               wrapped(text_field(value.get_object(), "why"), 2, terminal_width(1)));
  }
  return kDone;
}

Result<int> run_ls(const Context& context, const std::string& job) {
  if (job.empty()) {
    PTC_TRY(auto mount, find_mount(context.mount_option));
    return list_all_jobs(mount);
  }
  PTC_TRY(auto target, find_job(context.mount_option, job));
  return list_checkpoints(target);
}

}  // namespace

void add_ls(CLI::App& app, Context& context) {
  auto [command, job] = add_command<std::string>(
      app, context, "ls", "List the jobs, or the checkpoints of one", run_ls);
  command->add_option("JOB", *job, "a job, or a path into it");
  command->footer("Examples:\n  ptc ls\n  ptc ls llama");
}

}  // namespace ptc::cli
