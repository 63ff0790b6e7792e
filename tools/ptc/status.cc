// ptc status: what a job is doing, as its status.json says it.
#include <fmt/core.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <chrono>
#include <thread>

#include "store/base/shell_word.h"
#include "store/base/size_text.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_memories.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/leftovers.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

constexpr size_t kIndent = 15;  // "  " and the longest label

void print_line(std::string_view label, std::string_view text) {
  fmt::print("  {:<13}{}\n", label, wrapped(text, kIndent, terminal_width(1)));
}

Colour colour_of(const std::string& state) {
  if (state == "idle") return Colour::kGreen;
  return state == "failed" ? Colour::kRed : Colour::kYellow;
}

std::string error_text(const json::object& error) {
  std::string age = format_age(error.if_contains("time"));
  std::string what = text_field(error, "what");
  if (age.empty()) return what;
  return (age == "just now" ? age : age + " ago") + ": " + what;
}

/// Where something is wrong with it: what it does otherwise is in its own status.json.
void print_data_set(const std::string& directory, const std::string& last_error) {
  const auto read = read_json_file(directory + "/dataset/status.json");
  if (read.has_error()) return;  // there is none, or it is another's
  const std::string error = text_field(read.value(), "error");
  if (!error.empty() && last_error.find(error) == std::string::npos)
    print_line("data set", fmt::format("{}: {}", text_field(read.value(), "state"), error));
  for (const std::string& what : text_list(array_field(read.value(), "read_errors")))
    print_line("data set", "a read failed: " + what);
}

/// What takes room in incoming/, and nobody writes any more.
void print_leftovers(const std::string& mount, const std::string& job) {
  for (const Leftover& one : leftovers_of_job(mount, job)) {
    const std::string incoming = fmt::format("{}/{}/incoming/{}", mount, job, one.name);
    const json::value time = static_cast<int64_t>(one.latest);
    print_line("incoming", printable(fmt::format(
                               "{}: {}{}, not committed; written {} ago. Commit it with mv, or "
                               "rm -r {}",
                               one.name, one.all_seen ? "" : "more than ", format_size(one.bytes),
                               format_age(&time), shell_word(incoming))));
  }
}

void print_status(const JobStatus& status, const std::string& mount) {
  const json::object& raw = status.raw;
  fmt::print("{}: {}\n",
             coloured(shortened(printable(status.job), terminal_width(1) - status.state.size() - 2),
                      Colour::kBold),
             coloured(status.state, colour_of(status.state)));
  print_line("layout", fmt::format("{} (revision {})", status.layout, status.in_force_revision));
  if (status.revision != status.in_force_revision || status.wanted != status.layout)
    print_line("wanted", fmt::format("{} (revision {})", status.wanted, status.revision));
  print_line("checkpoint", status.checkpoint.empty() ? "none yet" : status.checkpoint);

  if (auto progress = progress_of(status)) print_line("progress", progress_text(*progress));
  if (has_object(raw, "last_reshard")) {
    const json::object& last = object_field(raw, "last_reshard");
    print_line("last reshard",
               fmt::format("{}: {} to {}, {} kept, {} written in {}",
                           text_field(last, "checkpoint"), text_field(last, "from"),
                           text_field(last, "to"), format_size(number_field(last, "bytes_kept")),
                           format_size(number_field(last, "bytes_written")),
                           format_duration(real_field(last, "seconds"))));
  }
  if (has_object(raw, "last_error"))
    print_line("last error", error_text(object_field(raw, "last_error")));
  if (!status.layout_error.empty() && status.layout_error != status.last_error)
    print_line("layout error", error_text(object_field(raw, "layout_error")));
  for (const std::string& warning : text_list(array_field(raw, "warnings")))
    print_line("warning", warning);
  print_leftovers(mount, status.job);
  print_data_set(mount + "/" + status.job, status.last_error);
  if (const std::string autoscale = autoscale_text(mount + "/" + status.job); !autoscale.empty())
    print_line("autoscale", printable(autoscale));
  std::string nodes;
  for (const json::value& node : array_field(raw, "nodes")) {
    if (!node.is_object()) continue;
    nodes += (nodes.empty() ? "" : ", ") + node_text(node.get_object());
  }
  if (!nodes.empty()) print_line("nodes", nodes);
  for (const json::value& checkpoint : array_field(raw, "checkpoints")) {
    if (!checkpoint.is_object()) continue;
    if (const auto text = memories_text(checkpoint.get_object()); !text.empty())
      print_line("devices", printable(fmt::format(
                                "{}: {}", text_field(checkpoint.get_object(), "name"), text)));
  }

  const Table table = checkpoint_table(status);
  if (!table.empty()) fmt::print("\n{}", table.to_string(2, terminal_width(1)));
}

/// Nodes are asked while somebody looks: what one that answers has said is there a moment later.
Result<json::object> read_nodes(const std::string& mount) {
  constexpr int kTries = 3;
  constexpr auto kPause = std::chrono::milliseconds(500);
  for (int tries = 1;; ++tries) {
    PTC_TRY(auto report, read_json_file(mount + "/.ptc/nodes.json"));
    const json::array& nodes = array_field(report, "nodes");
    if (tries == kTries || std::none_of(nodes.begin(), nodes.end(), [](const json::value& node) {
          return node.is_object() && is_unheard(node.get_object());
        }))
      return report;
    std::this_thread::sleep_for(kPause);
  }
}

/// All nodes that were ever there, also those that hold nothing of any job; and whether they agree.
void print_nodes(const std::string& mount) {
  const auto report = read_nodes(mount);
  if (report.has_error()) return;
  std::string nodes;
  const json::array& all = array_field(report.value(), "nodes");
  for (const json::value& node : all) {
    if (!node.is_object()) continue;
    nodes += (nodes.empty() ? "" : ", ") + node_text(node.get_object());
  }
  const std::string agreement = agreement_text(report.value());
  if (all.size() > 1) fmt::print("nodes: {}\n", wrapped(nodes, 7, terminal_width(1)));
  if (!agreement.empty()) fmt::print("agreement: {}\n", wrapped(agreement, 11, terminal_width(1)));
  if (all.size() > 1 || !agreement.empty()) fmt::print("\n");
}

/// Below what one job does.
void print_agreement(const std::string& mount) {
  if (const std::string text = agreement_text(mount); !text.empty()) print_line("agreement", text);
}

struct StatusOptions {
  std::string job;
  bool as_json = false;
};

Result<int> run_status(const Context& context, const StatusOptions& options) {
  std::vector<JobStatus> jobs;
  std::string mount;
  if (!options.job.empty()) {
    PTC_TRY(auto target, find_job(context.mount_option, options.job));
    PTC_TRY(auto status, read_status(target));
    jobs.push_back(std::move(status));
    mount = target.mount;
  } else {
    PTC_TRY(mount, find_mount(context.mount_option));
    size_t hidden = 0;
    PTC_TRY(jobs, read_statuses(mount, &hidden));
    say_hidden(hidden);
    if (!options.as_json) print_nodes(mount);
    if (jobs.empty() && hidden == 0 && !options.as_json)
      fmt::print("No jobs in {} yet; mkdir {}/NAME makes one.\n", mount, mount);
  }
  json::array all;
  bool first = true;
  for (const JobStatus& status : jobs) {
    if (options.as_json) {
      all.emplace_back(status.raw);
      continue;
    }
    if (!first) fmt::print("\n");
    first = false;
    print_status(status, mount);
    if (!options.job.empty()) print_agreement(mount);
  }
  if (options.as_json) {
    fmt::print("{}", options.job.empty() ? pretty_json(all) : pretty_json(all.at(0)));
  }
  return kDone;
}

}  // namespace

void add_status(CLI::App& app, Context& context) {
  auto [command, options] = add_command<StatusOptions>(
      app, context, "status", "Show what a job, or every job, is doing", run_status);
  command->add_option("JOB", options->job, "a job, or a path into it; all jobs if left out");
  command->add_flag("--json", options->as_json, "print status.json as it is");
  command->footer("Example:\n  ptc status llama");
}

}  // namespace ptc::cli
