// ptc autoscale: who of many jobs would get how many GPUs now, and with which batch.
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <set>

#include "store/base/json.h"
#include "tools/cli/numbers.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/sim/policy.h"
#include "tools/planner/spase/gantt.h"
#include "tools/ptc/command.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct AutoscaleOptions {
  std::string file, device, policy = "elastic";
  std::optional<std::string> start_price;
  std::string price = "30", horizon = "3600";
  bool dry_run = false, as_json = false;
};

/// What a job has and would get.
struct Line {
  const planner::JobToTrain* job = nullptr;
  const planner::Curve* curve = nullptr;
  std::optional<uint32_t> now, then;  // points of its curve
  double price = 0;

  bool changes() const { return then && then != now; }
  const planner::CurvePoint* before() const { return now ? &curve->points[*now] : nullptr; }
  const planner::CurvePoint* after() const { return then ? &curve->points[*then] : nullptr; }
};

std::vector<planner::ElasticJob> as_told(const std::vector<Line>& lines) {
  std::vector<planner::ElasticJob> jobs;
  for (const Line& line : lines) {
    planner::ElasticJob& job = jobs.emplace_back();
    job.curve = line.curve;
    job.samples_left = line.job->samples;
    job.now = line.now;
    job.runs = line.job->now.has_value();
  }
  return jobs;
}

/// The point that is what the job has, if its curve has that.
std::optional<uint32_t> point_of(const planner::Curve& curve, const planner::JobToTrain::Now& now) {
  for (uint32_t i = 0; i < curve.points.size(); ++i)
    if (curve.points[i].gpus == now.gpus && (now.batch == 0 || curve.points[i].batch == now.batch))
      return i;
  return std::nullopt;
}

std::string from_to(const std::string& from, const std::string& to) {
  return from == to ? from : fmt::format("{} -> {}", from, to);
}

void print_lines(const std::vector<Line>& lines, uint32_t gpus) {
  const size_t width = ::isatty(STDOUT_FILENO) ? terminal_width(STDOUT_FILENO) : SIZE_MAX / 2;
  Table table({{"JOB"},
               {"GPUS", Table::Align::kRight},
               {"BATCH", Table::Align::kRight},
               {"GAIN", Table::Align::kRight, 1},
               {"PRICE", Table::Align::kRight, 2},
               {"LEFT", Table::Align::kRight, 3},
               {"HOW"}});
  uint32_t taken = 0, changed = 0, waiting = 0;
  for (const Line& line : lines) {
    const auto& had = line.job->now;
    const planner::CurvePoint* after = line.after();
    if (after != nullptr) taken += after->gpus;
    changed += line.changes();
    waiting += after == nullptr;
    table.add(
        {line.job->name,
         from_to(had ? std::to_string(had->gpus) : "-",
                 after != nullptr ? std::to_string(after->gpus) : "-"),
         from_to(had && had->batch != 0     ? std::to_string(had->batch)
                 : line.before() != nullptr ? std::to_string(line.before()->batch)
                                            : "-",
                 after != nullptr ? std::to_string(after->batch) : "-"),
         line.changes() && line.before() != nullptr
             ? fmt::format("{:.2f} x", after->samples_per_s / line.before()->samples_per_s)
             : "-",
         line.changes() ? planner::time_text(line.price) : "-",
         after != nullptr ? planner::time_text(line.job->samples / after->samples_per_s) : "waits",
         after != nullptr ? after->way : "-"});
  }
  const std::vector<std::string> gone = table.narrow(width);
  fmt::print("{}", table.to_string(0, width));
  if (!gone.empty())
    fmt::print("(No room in {} columns for {}; a pipe and --json have all.)\n", width,
               fmt::join(gone, ", "));
  fmt::print("\n{} of {} in use; {}, {}.\n", taken, planner::counted(gpus, "GPU"),
             changed == 0
                 ? std::string("nothing changes")
                 : planner::counted(changed, "job") + (changed == 1 ? " changes" : " change"),
             waiting == 0 ? std::string("nobody waits")
                          : planner::counted(waiting, "job") + (waiting == 1 ? " waits" : " wait"));
}

json::value point_json(const planner::CurvePoint* point) {
  if (point == nullptr) return nullptr;
  return json::object{{"gpus", point->gpus},
                      {"batch", point->batch},
                      {"way", point->way},
                      {"samples_per_s", point->samples_per_s}};
}

void print_json(const std::vector<Line>& lines) {
  json::array jobs;
  for (const Line& line : lines)
    jobs.push_back(json::object{{"name", line.job->name},
                                {"now", point_json(line.before())},
                                {"then", point_json(line.after())},
                                {"changes", line.changes()},
                                {"price_s", line.changes() ? line.price : 0}});
  fmt::print("{}", pretty_json(json::object{{"jobs", std::move(jobs)}}));
}

Result<int> run_autoscale(const AutoscaleOptions& options) {
  if (!options.dry_run)
    return invalid_argument(
        "so far it only shows what it would do: --dry-run (a layout is then saved with \"ptc "
        "layout JOB set\")");
  PTC_TRY(auto policy, planner::parse_policy(options.policy));
  PTC_TRY(auto from, planner::read_jobs_file(options.file));
  if (!options.device.empty()) from.file.device = options.device;
  for (const std::string& remark : from.remarks) fmt::print(stderr, "ptc: {}\n", printable(remark));
  const std::string name = planner::input_name(options.file);
  PTC_TRY(auto rows, planner::rows_of_jobs(from));
  planner::PolicyCurves curves(policy, rows, from.file.jobs, from.file.nodes);
  planner::ScalingRules rules;
  rules.objective = policy.objective;
  rules.change_s = std::stod(options.price);
  rules.start_s = std::stod(options.start_price.value_or(options.price));
  rules.horizon_s = std::stod(options.horizon);
  const planner::ScalingRules told = rules;
  if (policy.ignores_prices) rules.change_s = rules.start_s = 0;
  std::vector<Line> lines;
  uint32_t gpus = 0;
  for (const planner::NodeOfCluster& node : from.file.nodes) gpus += node.gpus;
  for (uint32_t i = 0; i < from.file.jobs.size(); ++i) {
    const planner::JobToTrain& job = from.file.jobs[i];
    Line& line = lines.emplace_back();
    line.job = &job;
    Result<const planner::Curve*> curve =
        curves.of({job.name, i, 0, job.samples, job.now ? job.now->gpus : 0}, i);
    if (curve.has_error()) return std::move(curve).error().with_context(name);
    line.curve = curve.value();
    if (job.now) line.now = point_of(*line.curve, *job.now);
    line.price = job.now ? told.change_s : told.start_s;
  }
  const auto decided = planner::decide(as_told(lines), gpus, rules);
  for (size_t i = 0; i < lines.size(); ++i) lines[i].then = decided[i];
  if (options.as_json) print_json(lines);
  else print_lines(lines, gpus);
  return kDone;
}

}  // namespace

void add_autoscale(CLI::App& app, Context& context) {
  auto [command, options] = add_command<AutoscaleOptions>(
      app, context, "autoscale", "Decide who of many jobs gets how many GPUs now",
      [](Context&, const AutoscaleOptions& given) { return run_autoscale(given); });
  command->footer(
      "FILE is as of \"ptc spase\", the jobs in the order in which they came. What a job\n"
      "has stands in its \"now\": {\"gpus\": 4, \"batch\": 256}; without, it waits. Printed\n"
      "is what each has and would get, how much faster it would be, what the change\n"
      "costs, and how long it then takes to its end.\n"
      "\nExample: ptc autoscale jobs.json --dry-run --price 45");
  command->add_option("FILE", options->file, "jobs.json; -: standard input")->required();
  command->add_flag("--dry-run", options->dry_run, "only show it");
  command->add_option("--policy", options->policy, "as of \"ptc simulate\"")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--price", options->price, "seconds that a change costs a job")
      ->type_name("S")
      ->check(number(0, kMostSeconds))
      ->capture_default_str();
  command->add_option("--start-price", options->start_price, "and its start; else the same")
      ->type_name("S")
      ->check(number(0, kMostSeconds));
  command
      ->add_option("--horizon", options->horizon, "what a change wins counts for so long at most")
      ->type_name("S")
      ->check(number(1, kMostSeconds))
      ->capture_default_str();
  command->add_option("--device", options->device, "the kind of GPU, as profiles name it")
      ->type_name("NAME");
  command->add_flag("--json", options->as_json, "print it as JSON");
}

}  // namespace ptc::cli
