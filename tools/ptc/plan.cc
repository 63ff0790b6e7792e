// ptc plan: what a change of layout would move, or what the last one moved.
#include <fmt/core.h>

#include <boost/json/array.hpp>
#include <cstdio>

#include "store/base/size_text.h"
#include "tools/cli/numbers.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/layout_edit.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

void print_plan(const json::object& plan) {
  using Align = Table::Align;
  std::string state = text_field(plan, "state");
  std::string checkpoint = text_field(plan, "checkpoint");
  if (state == "done") state += " in " + format_duration(real_field(plan, "seconds"));
  const std::string head = fmt::format("{}{}: {} to {} ({})", text_field(plan, "job"),
                                       checkpoint.empty() ? "" : "/" + checkpoint,
                                       text_field(plan, "from"), text_field(plan, "to"), state);
  fmt::print("{}\n\n", wrapped(head, 0, terminal_width(1)));

  const json::object& bytes = object_field(plan, "bytes");
  uint64_t total = number_field(bytes, "total");
  Table table({{"BYTES"}, {"SIZE", Align::kRight}, {"SHARE", Align::kRight}, {""}});
  auto add = [&](const char* key, const std::string& remark) {
    uint64_t value = number_field(bytes, key);
    std::string share = "-";
    if (total > 0)
      share =
          fmt::format("{:.0f}%", 100.0 * static_cast<double>(value) / static_cast<double>(total));
    table.add({key, format_size(value), share, remark});
  };
  add("total", "the new layout's files");
  add("kept", "stay where they are");
  add("local", "copied within a node");
  add("moved", "between nodes");
  add("minimum", "the least possible between nodes");
  fmt::print("{}", table.to_string(2, terminal_width(1)));

  const json::object& files = object_field(plan, "files");
  fmt::print("\n  files: {} kept, {} written\n", number_field(files, "kept"),
             number_field(files, "written"));
  Table pairs({{"SOURCE"}, {"TARGET"}, {"SIZE", Align::kRight}});
  for (const json::value& value : array_field(plan, "pairs")) {
    if (!value.is_object()) continue;
    const json::object& pair = value.get_object();
    pairs.add({text_field(pair, "source"), text_field(pair, "target"),
               format_size(number_field(pair, "bytes"))});
  }
  if (!pairs.empty()) fmt::print("\n{}", pairs.to_string(2, terminal_width(1)));
}

struct PlanOptions {
  std::string job;
  LayoutEdit edit;
  std::string layout_file;
  bool as_json = false;
};

/// The layout to ask about: the file's, or the one in force with what was given changed.
Result<json::object> layout_asked(const Target& target, const PlanOptions& options) {
  std::vector<std::string> notes;
  json::object layout;
  if (!options.layout_file.empty()) {
    PTC_TRY(layout, layout_of_file_or_name(options.layout_file));
  } else {
    PTC_TRY(layout, read_json_file(target.job_dir() + "/layout.json"));
    PTC_TRY(auto status, read_status(target));
    set_sizes_of_name(layout, status.layout);
  }
  layout = edited_layout(std::move(layout), options.edit, notes);
  for (const std::string& note : notes) fmt::print(stderr, "ptc: {}\n", note);
  return layout;
}

Result<int> run_plan(const Context& context, const PlanOptions& options) {
  PTC_TRY(auto target, find_job(context.mount_option, options.job));
  json::object plan;
  if (options.edit.empty() && options.layout_file.empty()) {
    PTC_TRY(plan, read_json_file(target.job_dir() + "/plan.json"));
    if (plan.empty() && !options.as_json) {
      fmt::print("{} was never resharded. ptc plan {} --tp 2 shows what that would move.\n",
                 target.job, target.job);
      return kDone;
    }
  } else {
    PTC_TRY(auto layout, layout_asked(target, options));
    PTC_TRY(plan, ask(target.mount, {{"do", "plan"}, {"job", target.job}, {"layout", layout}}));
  }
  if (options.as_json) {
    fmt::print("{}", pretty_json(plan));
  } else {
    print_plan(plan);
  }
  return kDone;
}

}  // namespace

void add_plan(CLI::App& app, Context& context) {
  auto [command, options] = add_command<PlanOptions>(
      app, context, "plan", "Show what another layout would move", run_plan);
  command->add_option("JOB", options->job, "a job, or a path into it")->required();
  command->add_option("--layout", options->layout_file, "a layout.json, or a layout's name")
      ->type_name("LAYOUT or FILE")
      ->check(cli::not_empty());
  command->add_flag("--json", options->as_json, "print the plan as JSON");
  add_layout_options(*command, options->edit, true);
  command->footer(
      "Sizes that are not given are those in force. Without any, the plan of the\n"
      "running or last reshard is shown. Nothing is moved.\n"
      "\nExamples:\n  ptc plan llama --tp 8\n  ptc plan llama --tp 2 --pp 4 --stages 7,8,8,9\n"
      "  ptc plan llama --layout tp8-pp1-dp2 --json");
}

}  // namespace ptc::cli
