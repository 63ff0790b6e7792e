// ptc drain: empties a node of the cluster, so that it can be stopped without any loss.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "store/base/size_text.h"
#include "tools/ptc/command.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"

namespace ptc::cli {
namespace {

struct DrainOptions {
  std::string node;
  bool cancel = false, no_wait = false, as_json = false;
};

struct Left {
  bool drained = false;  // or being so
  uint64_t bytes = 0;
};
Result<Left> left_on(const std::string& mount, const std::string& node) {
  PTC_TRY(auto nodes, read_json_file(mount + "/.ptc/nodes.json"));
  for (const json::value& one : array_field(nodes, "nodes"))
    if (one.is_object() && text_field(one.get_object(), "name") == node)
      return Left{has_object(one.get_object(), "drain"),
                  number_field(object_field(one.get_object(), "drain"), "bytes_left")};
  return Left{};
}

/// Of jobs that have something there still, and cannot move it.
struct Stuck {
  uint64_t bytes = 0;
  std::string why;  // of the first
};
Result<Stuck> stuck_on(const std::string& mount, const std::string& node) {
  PTC_TRY(auto names, list_jobs(mount));
  Stuck stuck;
  for (std::string& name : names) {
    auto status = read_status({mount, std::move(name), ""});
    if (!status || status.value().state != "failed") continue;
    for (const json::value& one : array_field(status.value().raw, "nodes")) {
      if (!one.is_object() || text_field(one.get_object(), "name") != node) continue;
      const uint64_t left = number_field(object_field(one.get_object(), "drain"), "bytes_left");
      if (left > 0 && stuck.why.empty())
        stuck.why = fmt::format("job {}: {}", status.value().job, status.value().last_error);
      stuck.bytes += left;
    }
  }
  return stuck;
}

/// It is so whether or not the node is stopped.
void tell_lost(const json::object& answer) {
  for (const json::value& value : array_field(answer, "lost")) {
    if (!value.is_object()) continue;
    const json::object& one = value.get_object();
    const std::string job = text_field(one, "job"), checkpoint = text_field(one, "checkpoint");
    fmt::print(stderr,
               "ptc: job {}: {}; no drain moves these: start the node that had them, or remove the "
               "checkpoint (ptc rm {}/{})\n",
               job, text_field(one, "why"), job, checkpoint);
  }
}

Result<> wait_until_empty(const std::string& mount, const std::string& node, uint64_t total) {
  constexpr auto kPause = std::chrono::milliseconds(100);
  Progress bar("draining " + node, total);
  for (;;) {
    PTC_TRY(auto left, left_on(mount, node));
    if (!left.drained)
      return make_error(Code::kCancelled, "node {} was taken into service again meanwhile", node);
    if (left.bytes == 0) return ok();
    total = std::max(total, left.bytes);
    bar.set(total - left.bytes, total);
    // All others come first.
    PTC_TRY(const auto stuck, stuck_on(mount, node));
    if (stuck.bytes >= left.bytes) {
      bar.finish();
      return make_error(Code::kUnavailable, "{} are left on node {}: {}", format_size(left.bytes),
                        node, stuck.why);
    }
    std::this_thread::sleep_for(kPause);
  }
}

Result<int> run_drain(const Context& context, const DrainOptions& options) {
  PTC_TRY(auto mount, find_mount(context.mount_option));
  const std::string& node = options.node;
  const json::object request{{"do", "drain"}, {"node", node}, {"cancel", options.cancel}};
  PTC_TRY(auto answer, ask(mount, request));
  if (!options.as_json) tell_lost(answer);
  const uint64_t bytes = number_field(answer, "bytes_left");
  if (!options.cancel && !options.no_wait && bytes > 0) {
    PTC_TRY(wait_until_empty(mount, node, bytes));
    PTC_TRY(answer, ask(mount, request));
  }
  const auto not_asked = text_list(array_field(answer, "not_asked"));
  const auto uncommitted = text_list(array_field(answer, "uncommitted"));
  if (options.as_json) {
    answer["node"] = node;
    fmt::print("{}", pretty_json(answer));
    if (!not_asked.empty()) return kFailed;
    return number_field(answer, "bytes_left") > 0 || uncommitted.empty() ? kDone : kLeft;
  }
  if (options.cancel) {
    fmt::print("{} is in service again\n", node);
    return kDone;
  }
  if (const uint64_t left = number_field(answer, "bytes_left"); left > 0) {
    fmt::print("{} is being drained: {} left\n", node, format_size(left));
    return kDone;
  }
  if (!uncommitted.empty()) {
    // A daemon that was started before this was installed counts nothing.
    const uint64_t names =
        std::max<uint64_t>(number_field(answer, "uncommitted_names"), uncommitted.size());
    fmt::print("{} is drained, but {} that {} not committed stay{} there, and go{} with it:\n",
               node,
               names == 1 ? "1 file or directory" : fmt::format("{} files and directories", names),
               names == 1 ? "is" : "are", names == 1 ? "s" : "", names == 1 ? "es" : "");
    for (const std::string& what : uncommitted) fmt::print("  {}\n", what);
  }
  if (!not_asked.empty()) {
    fmt::print(stderr,
               "ptc: {} is drained, but could not be asked what is not committed there, and goes "
               "with it:\n",
               node);
    for (const std::string& what : not_asked) fmt::print(stderr, "  {}\n", what);
    return kFailed;
  }
  if (!uncommitted.empty()) return kLeft;
  fmt::print("{} is drained: it can be stopped\n", node);
  return kDone;
}

}  // namespace

void add_drain(CLI::App& app, Context& context) {
  auto [command, options] = add_command<DrainOptions>(
      app, context, "drain", "Empty a node, so that it can be stopped without any loss", run_drain);
  command->add_option("NODE", options->node, "a node of the cluster, as .ptc/nodes.json lists them")
      ->required();
  command->add_flag("--cancel", options->cancel, "take it into service again");
  command->add_flag("--no-wait", options->no_wait, "do not wait until it is empty");
  command->add_flag("--json", options->as_json, "print the outcome as JSON");
  command->footer(
      "What the node holds is moved to others, and nothing new is placed on it. That\n"
      "goes on when this command is interrupted, and survives restarts. A node that was\n"
      "stopped stays drained until it is taken into service again.\n"
      "\nExit status: 0 drained, or being so (--no-wait), 1 failed, 4 drained, but for\n"
      "what is in no checkpoint: it is named, and goes with the node.\n"
      "\nExample:\n  ptc drain w1 && ssh w1 reboot    # and later: ptc drain w1 --cancel");
}

}  // namespace ptc::cli
