// ptc simulate: what policies would make of a cluster's jobs, without a cluster.
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "tools/cli/numbers.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/sim/change_prices.h"
#include "tools/planner/sim/files.h"
#include "tools/planner/sim/goodput.h"
#include "tools/planner/sim/simulator.h"
#include "tools/planner/spase/gantt.h"
#include "tools/ptc/command.h"
#include "tools/ptc/interruptions.h"
#include "tools/ptc/job_states.h"
#include "tools/ptc/output_file.h"
#include "tools/ptc/text.h"

namespace ptc::cli {
namespace {

constexpr size_t kMostTraceBytes = 64 << 20;

struct SimulateOptions {
  std::string file, device, output;
  std::string policies = "elastic,max-batch,min-batch,random-batch";
  std::optional<std::string> trace, start_price, first_start, prices, goodput;
  std::string costs, growth = "0", patience = "28800";
  std::string arrivals = "high", per_hour = "0", hours = "8", minutes = "20-60";
  std::string seeds = "1", seed = "1";
  std::string every = "60", price = "30", horizon = "3600";
  std::string failures = "0", repair = "1800", checkpoint = "600";
  bool only_timer = false, drops = false, as_json = false, priced = false, spreads = false;
};

Result<planner::DrawnWorkload> workload_of(const SimulateOptions& options) {
  planner::DrawnWorkload how;
  how.arrivals = options.arrivals == "low"       ? planner::Arrivals::kLow
                 : options.arrivals == "bursty"  ? planner::Arrivals::kBursty
                 : options.arrivals == "extreme" ? planner::Arrivals::kExtreme
                                                 : planner::Arrivals::kHigh;
  how.per_hour = std::stod(options.per_hour);
  how.hours = std::stod(options.hours);
  const size_t dash = options.minutes.find('-');
  const std::string least = options.minutes.substr(0, dash);
  const std::string most = dash == std::string::npos ? least : options.minutes.substr(dash + 1);
  const CLI::Validator minutes = number(1e-3, 1e6);
  for (const std::string& one : {least, most}) {
    std::string copy = one;
    if (!minutes(copy).empty())
      return invalid_argument("--minutes {}: two numbers of minutes are wanted, as in 20-60",
                              ptc::quoted(options.minutes));
  }
  how.least_minutes = std::stod(least);
  how.most_minutes = std::stod(most);
  if (how.most_minutes < how.least_minutes)
    return invalid_argument("--minutes {}: the second is less than the first", options.minutes);
  return how;
}

/// "stop=5,start=15,link=1e9,memory=4e9"; what is not named stays.
Result<planner::ChangeCosts> costs_of(const std::string& text) {
  planner::ChangeCosts costs;
  const std::map<std::string, double*> known = {{"stop", &costs.stop_s},
                                                {"start", &costs.start_s},
                                                {"link", &costs.link},
                                                {"memory", &costs.memory}};
  std::stringstream list(text);
  for (std::string one; std::getline(list, one, ',');) {
    const size_t equals = one.find('=');
    const auto found = known.find(one.substr(0, equals));
    std::string value = equals == std::string::npos ? "" : one.substr(equals + 1);
    const bool is_rate = found != known.end() && found->second == &costs.link;
    if (found == known.end() || !number(is_rate ? 1 : 0, 1e15)(value).empty())
      return invalid_argument(
          "--costs {}: seconds and bytes a second are wanted, as in "
          "stop=5,start=15,link=1e9,memory=4e9",
          ptc::quoted(one));
    *found->second = std::stod(value);
  }
  if (costs.link < 1 || costs.memory < 1)
    return invalid_argument("--costs {}: a rate is one byte a second at least", ptc::quoted(text));
  return costs;
}

planner::SimulationRules rules_of(const SimulateOptions& options) {
  planner::SimulationRules rules;
  rules.scaling.change_s = std::stod(options.price);
  rules.scaling.start_s = std::stod(options.start_price.value_or(options.price));
  rules.scaling.horizon_s = std::stod(options.horizon);
  rules.scaling.patience_s = std::stod(options.patience);
  if (options.first_start) rules.first_start_s = std::stod(*options.first_start);
  rules.growth = std::stod(options.growth);
  rules.every_s = std::stod(options.every);
  rules.on_events = !options.only_timer;
  rules.drops = options.drops;
  rules.window_s = 3600 * std::stod(options.hours);
  rules.failures_per_day = std::stod(options.failures);
  rules.repair_s = std::stod(options.repair);
  rules.checkpoint_s = std::stod(options.checkpoint);
  return rules;
}

/// Over all seeds: counts in sum, times by job, shares in the mean.
class Total {
 public:
  void add(const planner::Summary& one) {
    const auto done = static_cast<double>(one.done);
    mean_ += one.mean_s * done;
    sum_.jobs += one.jobs, sum_.done += one.done, sum_.done_in_window += one.done_in_window;
    sum_.dropped += one.dropped, sum_.changes += one.changes, sum_.gpu_hours += one.gpu_hours;
    sum_.median_s += one.median_s, sum_.p99_s += one.p99_s, sum_.makespan_s += one.makespan_s;
    sum_.utilisation += one.utilisation;
    ++seeds_;
  }
  planner::Summary mean() const {
    planner::Summary mean = sum_;
    mean.mean_s = sum_.done == 0 ? 0 : mean_ / static_cast<double>(sum_.done);
    for (double* part : {&mean.median_s, &mean.p99_s, &mean.makespan_s, &mean.utilisation})
      *part /= seeds_;
    return mean;
  }

 private:
  planner::Summary sum_;
  double mean_ = 0, seeds_ = 0;
};

class Simulator {
 public:
  explicit Simulator(const SimulateOptions& options) : options_(options) {}

  Result<int> run() {
    PTC_TRY(how_, workload_of(options_));
    PTC_TRY(policies_, policies());
    PTC_TRY(from_, planner::read_jobs_file(options_.file));
    from_.file.choose_device(options_.device);
    PTC_TRY(check_layouts(from_));
    for (const std::string& remark : from_.remarks)
      fmt::print(stderr, "ptc: {}\n", printable(remark));
    rules_ = rules_of(options_);
    rules_.stop = &interrupted;
    if (options_.goodput) {
      PTC_TRY(const std::string text, planner::read_input(*options_.goodput, kMostTraceBytes));
      PTC_TRY(efficiency_, planner::read_efficiency(text, planner::input_name(*options_.goodput)));
    }
    PTC_TRY(prices_, prices());
    PTC_TRY(prepare());
    if (options_.trace) {
      PTC_TRY(const std::string text, planner::read_input(*options_.trace, kMostTraceBytes));
      PTC_TRY(trace_, planner::read_trace(text, planner::input_name(*options_.trace),
                                          from_.file.jobs, of_one_gpu_, gpus_));
    }
    return simulate_all();
  }

 private:
  Result<std::vector<planner::Policy>> policies() const {
    std::vector<planner::Policy> all;
    std::set<std::string> names;
    std::stringstream list(options_.policies);
    for (std::string name; std::getline(list, name, ',');) {
      PTC_TRY(auto policy, planner::parse_policy(name));
      if (!names.insert(name).second)
        return invalid_argument("--policy names {} twice", ptc::quoted(name));
      all.push_back(std::move(policy));
    }
    if (all.empty()) return invalid_argument("--policy names none");
    return all;
  }

  Result<std::unique_ptr<planner::ChangePrices>> prices() const {
    if (options_.prices) {
      PTC_TRY(const std::string text, planner::read_input(*options_.prices, kMostTraceBytes));
      return planner::measured_prices(text, planner::input_name(*options_.prices), from_.file.jobs);
    }
    if (!options_.priced)
      return planner::constant_prices(rules_.scaling.change_s, rules_.scaling.start_s);
    PTC_TRY(const auto costs, costs_of(options_.costs));
    PTC_TRY(auto states, states_of(from_));
    return planner::planned_prices(from_.file.jobs, std::move(states), from_.file.nodes, costs);
  }

  /// Rows, and how fast each kind is on one GPU, with the best batch that was tried.
  Result<> prepare() {
    PTC_TRY(rows_, planner::rows_of_jobs(from_));
    PTC_TRY(const planner::Policy reference, planner::parse_policy("elastic"));
    planner::PolicyCurves curves(reference, rows_, from_.file.jobs, from_.file.nodes, nullptr,
                                 options_.spreads);
    PTC_TRY(curves.check(from_.file));
    for (uint32_t i = 0; i < from_.file.jobs.size(); ++i) {
      PTC_TRY(const planner::Curve* curve, curves.of({from_.file.jobs[i].name, i}, 0));
      if (options_.priced) {
        Result<> planned = prices_->check(i, *curve);
        if (planned.has_error())
          return std::move(planned).error().with_context(
              from_.file.place({"jobs", std::to_string(i), "state"}));
      }
      of_one_gpu_.push_back(curve->of_one_gpu);
    }
    gpus_ = from_.file.gpus();
    return ok();
  }

  std::vector<planner::ArrivingJob> jobs_of(uint64_t seed) const {
    return options_.trace ? trace_
                          : planner::draw_jobs(from_.file.jobs, of_one_gpu_, gpus_, how_, seed);
  }

  Result<int> simulate_all() {
    const Interruptions noted(Interruptions::kFirst);
    const uint64_t first = std::stoull(options_.seed), seeds = std::stoull(options_.seeds);
    json::object all;
    std::vector<std::pair<std::string, planner::Summary>> totals;
    for (const planner::Policy& policy : policies_) {
      planner::PolicyCurves curves(policy, rows_, from_.file.jobs, from_.file.nodes, &efficiency_,
                                   options_.spreads);
      Total total;
      for (uint64_t i = 0; i < seeds; ++i) {
        if (interrupted) return kInterrupted;
        const std::vector<planner::ArrivingJob> jobs = jobs_of(first + i);
        if (jobs.empty())
          return invalid_argument("no job comes within {} hours (--hours, --per-hour)",
                                  options_.hours);
        auto done = planner::simulate(from_.file.nodes, jobs, curves, *prices_, rules_, first + i);
        if (interrupted) return kInterrupted;
        PTC_TRY(const auto run, std::move(done));
        const planner::Summary summary = planner::summary_of(from_.file.nodes, jobs, run, rules_);
        total.add(summary);
        if (!options_.output.empty()) {
          PTC_TRY(write(policy, first + i, jobs, run, summary));
        }
      }
      totals.emplace_back(policy.name, total.mean());
      all[policy.name] = planner::summary_json(totals.back().second);
    }
    if (!options_.output.empty()) {
      PTC_TRY(
          write_file(std::filesystem::path(options_.output) / "summary.json", pretty_json(all)));
    }
    if (options_.as_json) fmt::print("{}", pretty_json(all));
    else print(totals);
    return kDone;
  }

  static Result<> write_file(const std::filesystem::path& path, std::string_view text) {
    PTC_TRY(const OutputFile file, OutputFile::at(path.string(), {}));
    return file.write(text);
  }

  Result<> write(const planner::Policy& policy, uint64_t seed,
                 const std::vector<planner::ArrivingJob>& jobs, const planner::Simulated& run,
                 const planner::Summary& summary) const {
    std::filesystem::path directory = std::filesystem::path(options_.output) / policy.name;
    if (options_.seeds != "1") directory /= fmt::format("seed-{}", seed);
    std::error_code failed;
    std::filesystem::create_directories(directory, failed);
    if (failed) return invalid_argument("{}: {}", directory.string(), failed.message());
    PTC_TRY(write_file(directory / "jobs.csv", planner::jobs_csv(from_.file.jobs, jobs, run)));
    PTC_TRY(
        write_file(directory / "events.jsonl", planner::events_jsonl(from_.file.nodes, jobs, run)));
    PTC_TRY(write_file(directory / "summary.json", pretty_json(planner::summary_json(summary))));
    PTC_TRY(write_file(directory / "gantt.svg", planner::gantt_of(from_.file.nodes, jobs, run)));
    return write_file(directory / "utilisation.svg",
                      planner::utilisation_svg(from_.file.nodes, run));
  }

  void print(const std::vector<std::pair<std::string, planner::Summary>>& totals) const {
    const size_t width = ::isatty(STDOUT_FILENO) ? terminal_width(STDOUT_FILENO) : SIZE_MAX / 2;
    Table table({{"POLICY"},
                 {"MEAN", Table::Align::kRight},
                 {"MEDIAN", Table::Align::kRight, 1},
                 {"P99", Table::Align::kRight, 2},
                 {"FIRST IS", Table::Align::kRight},
                 {"DONE", Table::Align::kRight},
                 {"LATER", Table::Align::kRight, 3},
                 {"DROPPED", Table::Align::kRight, 4},
                 {"CHANGES", Table::Align::kRight, 5},
                 {"ALL DONE", Table::Align::kRight, 6},
                 {"USED", Table::Align::kRight, 7}});
    const double first = totals.front().second.mean_s;
    for (const auto& [name, sum] : totals)
      table.add({name, planner::time_text(sum.mean_s), planner::time_text(sum.median_s),
                 planner::time_text(sum.p99_s),
                 sum.mean_s > 0 ? fmt::format("{:.2f} x", first / sum.mean_s) : "-",
                 std::to_string(sum.done_in_window), std::to_string(sum.done - sum.done_in_window),
                 std::to_string(sum.dropped), std::to_string(sum.changes),
                 planner::time_text(sum.makespan_s),
                 fmt::format("{:.0f} %", 100 * sum.utilisation)});
    const std::vector<std::string> gone = table.narrow(width);
    fmt::print("{}", table.to_string(0, width));
    if (!gone.empty())
      fmt::print("(No room in {} columns for {}; a pipe and --json have all.)\n", width,
                 fmt::join(gone, ", "));
  }

  const SimulateOptions& options_;
  planner::DrawnWorkload how_;
  planner::SimulationRules rules_;
  std::unique_ptr<planner::ChangePrices> prices_;
  std::map<std::string, planner::Efficiency> efficiency_;  // by model
  std::vector<planner::Policy> policies_;
  planner::JobsAndProfiles from_;
  std::vector<const planner::ProfileRow*> rows_;  // of from_
  std::vector<double> of_one_gpu_;                // by kind
  std::vector<planner::ArrivingJob> trace_;
  uint32_t gpus_ = 0;
};

}  // namespace

void add_simulate(CLI::App& app, Context& context) {
  auto [command, options] = add_command<SimulateOptions>(
      app, context, "simulate", "Try policies on a cluster in simulated time",
      [](Context&, const SimulateOptions& given) { return Simulator(given).run(); });
  std::string footer =
      "Jobs come that are like those of FILE (see \"ptc spase\"): each is one of them,\n"
      "drawn evenly, and as long as --minutes says. Policies:\n";
  for (const auto& [name, what] : planner::known_policies())
    footer += fmt::format("  {:<18} {}\n", name, wrapped(what, 21, 80));
  footer +=
      "and each with +accumulation (gradients are accumulated where a batch has no\n"
      "room), or +unpriced (it decides as if changes cost nothing).\n"
      "DONE counts jobs that end within --hours, LATER those that end afterwards.\n"
      "FIRST IS: the first policy's mean, divided by this one's.\n"
      "\nExamples:\n"
      "  ptc simulate jobs.json --arrivals bursty --seeds 5 -o out\n"
      "  ptc simulate jobs.json --trace t.csv --policy elastic,asked --price 260";
  command->footer(footer);
  command->add_option("FILE", options->file, "jobs.json; -: standard input")->required();
  command->add_option("--policy", options->policies, "which, with commas between them")
      ->type_name("NAMES")
      ->capture_default_str();
  CLI::Option* trace =
      command
          ->add_option("--trace", options->trace,
                       "the jobs that come, a table: time_s; job or model, of FILE; samples, or\n"
                       "minutes (on one GPU); name and gpus may be there")
          ->type_name("FILE");
  command->add_option("--arrivals", options->arrivals, "how many come, by what there is room for")
      ->type_name("low|high|bursty|extreme")
      ->check(CLI::IsMember({"low", "high", "bursty", "extreme"}).description(""))
      ->capture_default_str()
      ->excludes(trace);
  command->add_option("--per-hour", options->per_hour, "so many instead, in the mean")
      ->type_name("N")
      ->check(number(0, 1e6))
      ->excludes(trace);
  command->add_option("--minutes", options->minutes, "what a job takes on one GPU")
      ->type_name("LEAST-MOST")
      ->capture_default_str()
      ->excludes(trace);
  command->add_option("--hours", options->hours, "for so long they come")
      ->type_name("H")
      ->check(number(1e-3, 1e5))
      ->capture_default_str();
  const auto seconds = [&](const char* name, auto& target, const char* what, double least) {
    command->add_option(name, target, what)
        ->type_name("S")
        ->check(number(least, kMostSeconds))
        ->capture_default_str();
  };
  CLI::Option* price =
      command->add_option("--price", options->price, "seconds that a change costs a job")
          ->type_name("S")
          ->check(number(0, kMostSeconds))
          ->capture_default_str();
  command->add_option("--start-price", options->start_price, "and its start; else the same")
      ->type_name("S")
      ->check(number(0, kMostSeconds));
  command->add_option("--first-start", options->first_start, "and its first start; else the same")
      ->type_name("S")
      ->check(number(0, kMostSeconds));
  CLI::Option* prices = command
                            ->add_option("--prices", options->prices,
                                         "what changes took, a table: seconds, model; from and to\n"
                                         "(GPUs; from 0: a start) may be there")
                            ->type_name("FILE")
                            ->excludes(price);
  CLI::Option* priced =
      command
          ->add_flag("--priced", options->priced,
                     "by ptcfs's own plan for each job's \"state\" in FILE, and --costs")
          ->excludes(price)
          ->excludes(prices);
  command
      ->add_option("--costs", options->costs,
                   "seconds, and bytes a second between nodes and within:\n"
                   "stop=5,start=15,link=1e9,memory=4e9")
      ->type_name("LIST")
      ->needs(priced);
  command->add_flag("--spread", options->spreads,
                    "also on more nodes than need be, where that was measured");
  command
      ->add_option("--goodput", options->goodput,
                   "count progress as Pollux does, a table: model, batch, epoch,\n"
                   "steps (of the smallest batch), grad_sqr, grad_var")
      ->type_name("FILE");
  command
      ->add_option("--growth", options->growth,
                   "at most so many times the GPUs that a job has trained with,\n"
                   "one at first; 0: any")
      ->type_name("N")
      ->check(number(0, 1e6))
      ->capture_default_str();
  seconds("--horizon", options->horizon, "what a change wins counts for so long at most", 1);
  seconds("--patience", options->patience, "elastic-overtaking: who came so long ago counts twice",
          1);
  seconds("--every", options->every, "decide so often", 1);
  command->add_flag("--only-timer", options->only_timer,
                    "and not also when jobs come and end, nodes fail and return");
  command->add_flag("--drop", options->drops, "jobs without room go, and do not wait");
  command->add_option("--failures", options->failures, "of each node, a day")
      ->type_name("N")
      ->check(number(0, 1e4))
      ->capture_default_str();
  seconds("--repair", options->repair, "until a node returns", 1);
  seconds("--checkpoint", options->checkpoint, "training since the last is lost with a node", 1);
  command->add_option("--seeds", options->seeds, "so many runs, each with jobs of its own")
      ->type_name("N")
      ->check(whole_number(1, 10'000))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "of the first")
      ->type_name("N")
      ->check(whole_number(0, UINT64_MAX / 2))
      ->capture_default_str();
  command->add_option("--device", options->device, "the kind of GPU, as profiles name it")
      ->type_name("NAME");
  command
      ->add_option("-o,--output", options->output,
                   "a directory: of each policy jobs.csv, events.jsonl, summary.json,\n"
                   "gantt.svg, utilisation.svg")
      ->type_name("DIR");
  command->add_flag("--json", options->as_json, "print the summary as JSON");
}

}  // namespace ptc::cli
