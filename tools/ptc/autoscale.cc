// ptc autoscale: who of many jobs gets how many GPUs now, and with which batch; and carries it out.
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "store/base/json.h"
#include "tools/cli/numbers.h"
#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/run/mounted_job.h"
#include "tools/planner/run/record.h"
#include "tools/planner/sim/policy.h"
#include "tools/planner/spase/gantt.h"
#include "tools/ptc/carry_out.h"
#include "tools/ptc/command.h"
#include "tools/ptc/job_states.h"
#include "tools/ptc/job_status.h"
#include "tools/ptc/mount.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

struct AutoscaleOptions : CarryOutOptions {
  AutoscaleOptions() { every = "60", logs = "autoscale-logs"; }
  std::string policy = "elastic", horizon = "3600";
  bool dry_run = false, as_json = false;
};

constexpr double kUsualPrice = 30;  // where neither a number nor a mount tells

/// What a job has and would get.
struct Line {
  const planner::JobToTrain* job = nullptr;
  std::shared_ptr<const planner::Curve> curve;
  std::optional<uint32_t> now, then;  // points of its curve
  /// Of a change to each; empty: of each this much.
  std::vector<double> prices = {};
  double usual_price = 0;

  double price() const { return !prices.empty() && then ? prices[*then] : usual_price; }
  bool changes() const { return then && then != now; }
  const planner::CurvePoint* before() const { return now ? &curve->points[*now] : nullptr; }
  const planner::CurvePoint* after() const { return then ? &curve->points[*then] : nullptr; }
};

std::vector<planner::ElasticJob> as_told(const std::vector<Line>& lines, bool with_prices) {
  std::vector<planner::ElasticJob> jobs;
  for (const Line& line : lines) {
    planner::ElasticJob& job = jobs.emplace_back();
    job.curve = line.curve.get();
    job.samples_left = line.job->samples;
    job.now = line.now;
    job.runs = line.job->now.has_value();
    if (with_prices) job.price_s = line.prices;
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
         line.changes() ? planner::time_text(line.price()) : "-",
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

/// Jobs that end after their deadlines, even with what they would get.
void print_late(const std::vector<Line>& lines) {
  for (const Line& line : lines) {
    if (!line.job->deadline) continue;
    if (line.after() == nullptr) {
      fmt::print("{} has a deadline, and waits.\n", line.job->name);
      continue;
    }
    const double late = (line.changes() ? line.price() : 0) +
                        line.job->samples / line.after()->samples_per_s -
                        planner::seconds_until(*line.job->deadline);
    if (late > 0)
      fmt::print("{} ends {} after its deadline.\n", line.job->name, planner::time_text(late));
  }
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
                                {"price_s", line.changes() ? line.price() : 0}});
  fmt::print("{}", pretty_json(json::object{{"jobs", std::move(jobs)}}));
}

Result<planner::Policy> policy_of(const AutoscaleOptions& options) {
  PTC_TRY(auto policy, planner::parse_policy(options.policy));
  if (policy.is_simulated_only)
    return invalid_argument("--policy {} is for \"ptc simulate\" alone", options.policy);
  return policy;
}

planner::ScalingRules rules_of(const AutoscaleOptions& options, const planner::Policy& policy) {
  planner::ScalingRules rules;
  rules.objective = policy.objective;
  rules.change_s = options.price ? std::stod(*options.price) : kUsualPrice;
  rules.start_s = options.start_price ? std::stod(*options.start_price) : rules.change_s;
  rules.horizon_s = std::stod(options.horizon);
  return rules;
}

/// What a job cannot have in its mount.
struct Refused {
  planner::CurvePoint point;
  std::string why;
};

/// Names each, and where the profiles have it. kInvalidArgument: nothing is left of the curve.
Result<> tell_refused(const planner::JobsAndProfiles& from, const Line& line,
                      const std::vector<Refused>& refused) {
  const planner::JobToTrain& job = *line.job;
  for (const Refused& one : refused) {
    const auto row =
        std::find_if(from.rows.begin(), from.rows.end(), [&](const planner::ProfileRow& any) {
          return any.model == job.model && any.gpus == one.point.gpus && any.way() == one.point.way;
        });
    const std::string place = row == from.rows.end() ? from.file.name : from.place(*row);
    fmt::print(stderr, "ptc: {}: job {}: {} cannot be had: {}\n", printable(place),
               ptc::quoted(job.name), printable(one.point.way), printable(one.why));
  }
  if (!line.curve->empty()) return ok();
  return from.file.error(
      job, "model",
      fmt::format("nothing can be had of what the profiles have of {}", ptc::quoted(job.model)));
}

/// Jobs as a mount has them, which tells what a change costs.
class InMount {
 public:
  explicit InMount(std::string mount) : mount_(std::move(mount)) {}

  /// What an autoscaler has done with the job, where it has. False: it decides for it no more.
  bool take_up(planner::JobToTrain& job) {
    const std::string directory = mount_ + "/" + job.name;
    const auto record = planner::read_record(directory);
    has_any_ |= ::access(directory.c_str(), F_OK) == 0;
    using State = planner::LiveState;
    const bool is_done =
        record && record->state == State::kDone && !(job.samples > record->samples);
    const bool is_left_alone = record && record->state == State::kByHand && !record->was_removed;
    const bool runs = record && planner::Worker::find(record->worker).has_value();
    if (is_done || is_left_alone) {
      held_ += runs && record->has ? record->has->gpus : 0;
      fmt::print(stderr, "ptc: {}: {}\n", printable(job.name),
                 printable(autoscale_text(directory)));
      return false;
    }
    auto seen = planner::look_at_job(directory);
    if (record && !job.now) {
      if (record->has && runs) job.now = {record->has->gpus, record->has->batch};
      if (seen.has_value())
        job.samples = std::max(1.0, job.samples - static_cast<double>(seen.value().consumed));
    }
    if (record && record->costs) prices_.restore(job.name, *record->costs);
    if (seen.has_value()) seen_.emplace(job.name, std::move(seen).value());
    return true;
  }
  /// Others that an autoscaler has started, and that run. Of a mount that has none of the listed
  /// ones nothing counts: it may be another's.
  void take_up_the_rest(const std::set<std::string>& listed) {
    if (!has_any_) return;
    std::error_code error;
    const std::filesystem::directory_iterator end;
    for (std::filesystem::directory_iterator at(mount_, error); !error && at != end;
         at.increment(error)) {
      const std::string name = at->path().filename().string();
      const bool is_other = !listed.contains(name) && name != ".ptc";
      const auto record = is_other ? planner::read_record(mount_ + "/" + name) : std::nullopt;
      if (!record || !record->has || !planner::Worker::find(record->worker)) continue;
      held_ += record->has->gpus;
      fmt::print(stderr, "ptc: {}: it is not in the file, and runs on {}\n", printable(name),
                 planner::counted(record->has->gpus, "GPU"));
    }
  }
  /// GPUs of jobs that it decides for no more.
  uint32_t held() const { return held_; }
  /// What a change to each point of its curve costs, if it is in the mount. Points that it cannot
  /// have there are left out, and returned.
  std::vector<Refused> tell_prices(Line& line) const {
    const std::string& name = line.job->name;
    const auto seen = seen_.find(name);
    if (seen == seen_.end()) return {};
    const auto ask_mount = [this](const json::object& request) { return ask(mount_, request); };
    std::map<std::pair<std::string, uint32_t>, std::optional<double>> known;  // by layout
    planner::Curve possible{.points = {}, .of_one_gpu = line.curve->of_one_gpu};
    std::vector<double> prices;
    std::vector<Refused> refused;
    for (const planner::CurvePoint& point : line.curve->points) {
      const auto [price, is_new] = known.try_emplace({point.way, point.gpus}, line.usual_price);
      if (is_new) {
        const auto movement = planner::movement_to(ask_mount, name, seen->second, point);
        if (movement.has_value())
          price->second = prices_.of(name, movement.value(), line.job->now.has_value());
        else if (movement.error().code() == Code::kInvalidArgument) {
          price->second.reset();
          refused.push_back({point, movement.error().message()});
        }
      }
      if (!price->second) continue;
      possible.points.push_back(point);
      prices.push_back(*price->second);
    }
    line.curve = std::make_shared<const planner::Curve>(std::move(possible));
    line.prices = std::move(prices);
    return refused;
  }

 private:
  const std::string mount_;
  bool has_any_ = false;
  uint32_t held_ = 0;
  std::map<std::string, planner::MountedJob> seen_;
  planner::Prices prices_;
};

Result<int> show(const Context& context, const AutoscaleOptions& options) {
  PTC_TRY(auto policy, policy_of(options));
  PTC_TRY(auto from, planner::read_jobs_file(options.file));
  std::optional<InMount> in_mount;
  auto mount = find_mount(context.mount_option);
  if (mount.has_value()) in_mount.emplace(std::move(mount).value());
  else if (!context.mount_option.empty()) return std::move(mount).error();
  if (in_mount) {
    std::set<std::string> listed;
    for (const planner::JobToTrain& job : from.file.jobs) listed.insert(job.name);
    std::erase_if(from.file.jobs,
                  [&](planner::JobToTrain& job) { return !in_mount->take_up(job); });
    in_mount->take_up_the_rest(listed);
  }
  if (from.file.jobs.empty()) {
    if (options.as_json) print_json({});
    else fmt::print("No job is left to decide for.\n");
    return kDone;
  }
  from.file.choose_device(options.device);
  PTC_TRY(check_layouts(from));
  for (const std::string& remark : from.remarks) fmt::print(stderr, "ptc: {}\n", printable(remark));
  PTC_TRY(auto rows, planner::rows_of_jobs(from));
  planner::PolicyCurves curves(policy, rows, from.file.jobs, from.file.nodes);
  PTC_TRY(curves.check(from.file));
  planner::ScalingRules rules = rules_of(options, policy);
  const planner::ScalingRules told = rules;
  if (policy.ignores_prices) rules.change_s = rules.start_s = 0;
  std::vector<Line> lines;
  uint32_t gpus = from.file.gpus();
  if (in_mount) gpus -= std::min(gpus, in_mount->held());
  for (uint32_t i = 0; i < from.file.jobs.size(); ++i) {
    const planner::JobToTrain& job = from.file.jobs[i];
    Line& line = lines.emplace_back();
    line.job = &job;
    PTC_TRY(const planner::Curve* curve,
            curves.of({job.name, i, 0, job.samples, job.now ? job.now->gpus : 0}, i));
    line.curve = std::make_shared<const planner::Curve>(*curve);
    line.usual_price = job.now ? told.change_s : told.start_s;
    if (in_mount && !options.price) {
      PTC_TRY(tell_refused(from, line, in_mount->tell_prices(line)));
    }
    if (job.now) line.now = point_of(*line.curve, *job.now);
  }
  std::stable_sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) {
    return planner::is_due_before(*a.job, *b.job);
  });
  const auto decided = planner::decide(as_told(lines, !policy.ignores_prices), gpus, rules);
  for (size_t i = 0; i < lines.size(); ++i) lines[i].then = decided[i];
  if (options.as_json) print_json(lines);
  else print_lines(lines, gpus);
  if (!options.as_json) print_late(lines);
  return kDone;
}

Result<int> run_autoscale(const Context& context, const AutoscaleOptions& options) {
  if (options.dry_run && !options.adopt.empty())
    return invalid_argument("--dry-run changes nothing, and --adopt does: one of them");
  if (options.dry_run && !options.file.empty()) return show(context, options);
  if (options.start_price && !options.price)
    return invalid_argument("--start-price wants --price, too, but with --dry-run");
  PTC_TRY(const auto policy, policy_of(options));
  planner::Autoscaler autoscaler(policy, rules_of(options, policy));
  return carry_out(context, options, autoscaler);
}

}  // namespace

void add_autoscale(CLI::App& app, Context& context) {
  auto [command, options] = add_command<AutoscaleOptions>(
      app, context, "autoscale", "Decide who of many jobs gets how many GPUs, and carry it out",
      run_autoscale);
  command->footer(
      "FILE is as of \"ptc spase\", the jobs in the order in which they came. Each is a\n"
      "job of the mount, and its \"run\" starts it: [\"./train.sh\"], which reads $PTC_JOB\n"
      "and, at SIGTERM, saves its state, commits it and ends. It is given other GPUs\n"
      "when jobs come and end, nodes fail and return, and now and then: it ends, its\n"
      "layout.json and batch are saved, its state is brought there, it starts. FILE may\n"
      "be changed meanwhile. A job whose layout.json somebody else saves is left alone\n"
      "until --adopt. ^C ends the autoscaler; jobs go on, and the next one finds them.\n"
      "\nWith --dry-run nothing is changed. What a job has stands in its \"now\" then:\n"
      "{\"gpus\": 4, \"batch\": 256}; without, it is as the mount says, or it waits.\n"
      "\nExit status: 0 stopped, or all done; 1 a job was given up, or it cannot begin.\n"
      "\nExamples:\n  ptc autoscale jobs.json --dry-run --price 45\n"
      "  ptc autoscale jobs.json --until-done\n  ptc autoscale --adopt llama");
  command->add_option("FILE", options->file, "jobs.json; with --dry-run -: standard input");
  CLI::Option* dry_run = command->add_flag("--dry-run", options->dry_run, "only show it");
  add_carry_out_options(*command, *options);
  command->add_option("--policy", options->policy, "as of \"ptc simulate\"")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_flag("--drop", options->drops, "who finds no room when it comes is given up")
      ->excludes(dry_run);
  add_price_options(*command, *options, " (--dry-run, not in a mount: 30)");
  command
      ->add_option("--horizon", options->horizon, "what a change wins counts for so long at most")
      ->type_name("S")
      ->check(number(1, kMostSeconds))
      ->capture_default_str();
  command->add_option("--device", options->device, "the kind of GPU, as profiles name it")
      ->type_name("NAME");
  command->add_flag("--json", options->as_json, "print it as JSON")->needs(dry_run);
}

}  // namespace ptc::cli
