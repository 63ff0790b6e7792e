// ptc events: what has happened to a job, or to all jobs, as this node knows it.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <chrono>
#include <map>
#include <thread>

#include "store/base/file.h"
#include "store/base/size_text.h"
#include "store/base/wall_time.h"
#include "tools/ptc/command.h"
#include "tools/ptc/event_time.h"
#include "tools/ptc/fields.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostEventBytes = 64 << 20;
constexpr auto kLookAgain = std::chrono::milliseconds(500);

struct EventsOptions {
  std::string where;
  bool follow = false, as_json = false;
  std::string since;
};

struct Event {
  std::string job, time;
  uint64_t number = 0;
  json::object object;
};

/// What one `ptc events` has shown.
class Shown {
 public:
  explicit Shown(std::string since) : since_(std::move(since)) {}

  /// Of a job's file what is new and not too old; lines that are none are passed over.
  std::vector<Event> more_of(const std::string& job, std::string_view text) {
    std::vector<Event> events;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      if (auto value = parse_json(text.substr(begin, end - begin));
          value && value.value().is_object()) {
        json::object object = std::move(value).value().get_object();
        std::string time = text_field(object, "time");
        const uint64_t number = number_field(object, "seq");
        events.push_back({job, std::move(time), number, std::move(object)});
      }
      begin = end + 1;
    }
    uint64_t& last = last_[job];
    // Another job of that name: its numbers begin anew.
    if (!events.empty() && events.back().number < last) last = 0;
    const uint64_t seen = last;
    for (const Event& event : events) last = std::max(last, event.number);
    std::erase_if(events, [&](const Event& event) {
      return event.number <= seen || event.time < since_;  // both in UTC, of the same form
    });
    return events;
  }

 private:
  const std::string since_;
  std::map<std::string, uint64_t> last_;
};

std::string bytes_text(const json::object& event, std::string_view key) {
  return format_size(number_field(event, key));
}

/// What is said behind the event's name.
std::string about(const json::object& event) {
  const std::string kind = text_field(event, "event");
  std::string text = text_field(event, "checkpoint");
  const auto add = [&text](const std::string& what) {
    if (!what.empty()) text += (text.empty() ? "" : ", ") + what;
  };
  if (kind == "commit")
    add(fmt::format("{} tensors, {}, {}", number_field(event, "tensors"),
                    bytes_text(event, "bytes"), text_field(event, "layout")));
  else if (kind == "reshard_began" || kind == "reshard_ended")
    add(fmt::format("{} to {}, {} kept, {} written, {} of it from other nodes",
                    text_field(event, "from"), text_field(event, "to"),
                    bytes_text(event, "bytes_kept"), bytes_text(event, "bytes_written"),
                    bytes_text(event, "bytes_moved")));
  else if (kind == "layout_saved" || kind == "in_force" || kind == "daemon_started")
    add(fmt::format("{} (revision {})", text_field(event, "layout"),
                    number_field(event, "revision")));
  else if (kind == "lost" || kind == "found_again")
    add(fmt::format("{} tensors are lost", number_field(event, "tensors_lost")));
  else if (kind == "damage")
    add(fmt::format("{} pieces have no right copy", number_field(event, "without_a_right_copy")));
  else if (kind == "layout_refused") add("status.json said why");
  if (kind == "reshard_ended") add(format_duration(real_field(event, "seconds")));
  std::string nodes;
  for (const std::string& node : text_list(array_field(event, "nodes")))
    nodes += (nodes.empty() ? "" : " ") + node;
  if (const uint64_t more = number_field(event, "more_nodes"); more > 0)
    nodes += fmt::format(" and {} more", more);
  add(nodes);
  add(text_field(event, "why"));
  return text;
}

std::string words_of(std::string kind) {
  std::replace(kind.begin(), kind.end(), '_', ' ');
  return kind;
}

void print_event(Event event, bool as_json, bool of_all) {
  if (as_json) {
    event.object["job"] = event.job;
    fmt::print("{}\n", json::serialize(event.object));
    return;
  }
  const std::string what = about(event.object);
  say_line("{} {}{} {}{}{}", event.time, text_field(event.object, "node"),
           of_all ? " " + event.job + ":" : "", words_of(text_field(event.object, "event")),
           what.empty() ? "" : ": ", what);
}

/// Of this job, or of all; kNotFound: the job is not there any more.
Result<std::vector<Event>> look(const Target& target, Shown* shown) {
  std::vector<std::string> jobs{target.job};
  if (target.job.empty()) {
    PTC_TRY(jobs, list_jobs(target.mount));
  }
  std::vector<Event> events;
  for (const std::string& job : jobs) {
    const auto text = read_text_file(
        AT_FDCWD, fmt::format("{}/{}/.events.jsonl", target.mount, job), kMostEventBytes);
    if (text.has_error()) {
      if (!target.job.empty()) return text.error();
      continue;  // it was removed meanwhile, or is another's
    }
    for (Event& event : shown->more_of(job, text.value())) events.push_back(std::move(event));
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const Event& a, const Event& b) { return a.time < b.time; });
  return events;
}

bool is_mount(const std::string& path) {
  struct stat found = {};
  return ::stat((path + "/.ptc/version").c_str(), &found) == 0;
}

Result<Target> events_wanted(const Context& context, const std::string& where) {
  if (!where.empty() && !is_mount(where)) return find_job(context.mount_option, where);
  std::string mount = where;
  if (mount.empty()) {
    PTC_TRY(mount, find_mount(context.mount_option));
  }
  return Target{mount, "", ""};
}

Result<int> run_events(const Context& context, const EventsOptions& options) {
  std::string since;
  if (!options.since.empty()) {
    auto from = parse_event_time(options.since, now_ns());
    if (from.has_error()) {
      fmt::print(stderr, "ptc: --since {}\n", from.error().message());
      return kUsage;
    }
    since = time_text(from.value());
  }
  PTC_TRY(const Target target, events_wanted(context, options.where));
  Shown shown(since);
  for (;;) {
    PTC_TRY(auto events, look(target, &shown));
    for (Event& event : events) print_event(std::move(event), options.as_json, target.job.empty());
    std::fflush(stdout);
    if (!options.follow) return kDone;
    std::this_thread::sleep_for(kLookAgain);
  }
}

}  // namespace

void add_events(CLI::App& app, Context& context) {
  auto [command, options] = add_command<EventsOptions>(
      app, context, "events", "Show what has happened to a job, or to all", run_events);
  command->add_option("JOB", options->where,
                      "a job, or a path into it; all jobs if left out, or if it is a mount point");
  command->add_flag("--follow", options->follow, "go on with what happens from now on");
  command->add_flag("--json", options->as_json, "print JSON, an object a line");
  command->add_option("--since", options->since, "only what happened from then on")
      ->type_name("TIME");
  command->footer(
      "Times are in UTC. TIME is an age (90s, 15m, 2h, 7d), a date, or a time as\n"
      "2026-01-31T12:00:00 is, with Z or +01:00 for a zone. Each node has a list of\n"
      "its own, of the last 1000 events of each job: commits, layouts, reshards,\n"
      "losses, repairs, nodes that came or went, and starts of its daemon.\n"
      "\nExamples:\n  ptc events llama --since 1d\n  ptc events --follow --json");
}

}  // namespace ptc::cli
