#include "tools/planner/sim/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "store/base/json.h"
#include "tools/planner/profile/csv.h"
#include "tools/planner/profile/input.h"
#include "tools/planner/sim/random.h"

namespace ptc::planner {
namespace {

constexpr double kBurstEvery_s = 4 * 3600, kBurst_s = kBurstEvery_s / 4;
constexpr double kMostSeconds = 1e9, kMostSamples = 1e18;
constexpr size_t kMostArrivals = 1'000'000;

double share_of(Arrivals arrivals) {
  switch (arrivals) {
    case Arrivals::kLow:
      return 0.5;
    case Arrivals::kHigh:
    case Arrivals::kBursty:
      return 1;
    case Arrivals::kExtreme:
      return 2;
  }
  return 1;
}

/// Seconds of the clock when bursts have lasted for so many in all.
double in_bursts(double seconds) {
  const double whole = std::floor(seconds / kBurst_s);
  return whole * kBurstEvery_s + (seconds - whole * kBurst_s);
}

class TraceReader {
 public:
  TraceReader(const Csv& csv, const std::vector<JobToTrain>& kinds,
              const std::vector<double>& of_one_gpu, uint32_t gpus)
      : csv_(csv), kinds_(kinds), of_one_gpu_(of_one_gpu), gpus_(gpus) {
    for (uint32_t i = 0; i < kinds.size(); ++i) {
      by_name_.emplace(kinds[i].name, i);
      by_model_.emplace(kinds[i].model, i);
    }
  }

  Result<std::vector<ArrivingJob>> read() {
    PTC_TRY(const size_t time, csv_.needed("time_s"));
    const auto job = csv_.column("job"), model = csv_.column("model"), name = csv_.column("name");
    const auto samples = csv_.column("samples"), minutes = csv_.column("minutes");
    const auto gpus = csv_.column("gpus");
    if (!job && !model)
      return invalid_argument("{}: line 1: a column 'job' or 'model' says what comes", csv_.name());
    if (!samples && !minutes)
      return invalid_argument("{}: line 1: a column 'samples' or 'minutes' says how much it is",
                              csv_.name());
    std::vector<ArrivingJob> jobs;
    std::set<std::string> names;
    for (size_t i = 0; i < csv_.rows(); ++i) {
      ArrivingJob one;
      PTC_TRY(one.at_s, between(i, time, 0, kMostSeconds));
      PTC_TRY(one.kind, job && !csv_.at(i, *job).empty() ? kind(i, *job, by_name_, "job")
                        : model                          ? kind(i, *model, by_model_, "model")
                                                         : kind(i, *job, by_name_, "job"));
      if (samples && !csv_.at(i, *samples).empty()) {
        PTC_TRY(one.samples, between(i, *samples, 1, kMostSamples));
      } else if (minutes) {
        PTC_TRY(const double on_one, between(i, *minutes, 1e-3, kMostSeconds / 60));
        one.samples = on_one * 60 * of_one_gpu_[one.kind];
      } else {
        return csv_.error(i, *samples, "how many samples it is to train on is missing");
      }
      if (gpus && !csv_.at(i, *gpus).empty()) {
        PTC_TRY(const uint64_t asked, csv_.whole(i, *gpus, 1, kMostGpus));
        if (asked > gpus_)
          return csv_.error(
              i, *gpus, fmt::format("{}, and the cluster has {}", counted(asked, "GPU"), gpus_));
        one.asked_gpus = static_cast<uint32_t>(asked);
      }
      one.name = name ? csv_.at(i, *name) : "";
      if (one.name.empty()) one.name = fmt::format("{}-{}", kinds_[one.kind].name, i + 1);
      if (!names.insert(one.name).second)
        return csv_.error(i, name.value_or(time), "a second job " + ptc::quoted(one.name));
      jobs.push_back(std::move(one));
    }
    if (jobs.empty()) return invalid_argument("{}: no job comes", csv_.name());
    std::stable_sort(jobs.begin(), jobs.end(),
                     [](const ArrivingJob& a, const ArrivingJob& b) { return a.at_s < b.at_s; });
    return jobs;
  }

 private:
  using Kinds = std::map<std::string, uint32_t>;

  Result<double> between(size_t row, size_t column, double least, double most) const {
    PTC_TRY(const double value, csv_.number(row, column));
    if (value < least || value > most)
      return csv_.error(row, column, fmt::format("{} is not from {} to {}", value, least, most));
    return value;
  }
  Result<uint32_t> kind(size_t row, size_t column, const Kinds& known, const char* what) const {
    const std::string& word = csv_.at(row, column);
    const auto found = known.find(word);
    if (found != known.end()) return found->second;
    std::set<std::string> names;
    for (const auto& one : known) names.insert(one.first);
    return csv_.error(row, column,
                      fmt::format("no job of the jobs' file has the {} {}{}", what,
                                  ptc::quoted(word), what_there_is(word, names)));
  }

  const Csv& csv_;
  const std::vector<JobToTrain>& kinds_;
  const std::vector<double>& of_one_gpu_;
  const uint32_t gpus_;  // of the cluster
  Kinds by_name_, by_model_;
};

}  // namespace

std::vector<ArrivingJob> draw_jobs(const std::vector<JobToTrain>& kinds,
                                   const std::vector<double>& of_one_gpu, uint32_t gpus,
                                   const DrawnWorkload& how, uint64_t seed) {
  Random random(seed);
  const double mean_hours = (how.least_minutes + how.most_minutes) / 120;
  const double per_hour =
      how.per_hour > 0 ? how.per_hour : share_of(how.arrivals) * gpus / mean_hours;
  const bool in_quarters = how.arrivals == Arrivals::kBursty;
  const double per_s = per_hour / 3600 * (in_quarters ? kBurstEvery_s / kBurst_s : 1);
  std::vector<ArrivingJob> jobs;
  double clock = 0;
  while (jobs.size() < kMostArrivals) {
    clock += random.wait(per_s);
    const double at = in_quarters ? in_bursts(clock) : clock;
    if (at > how.hours * 3600) break;
    ArrivingJob job;
    job.kind = static_cast<uint32_t>(random.below(kinds.size()));
    job.at_s = at;
    job.samples = std::max(
        1.0, random.between(how.least_minutes, how.most_minutes) * 60 * of_one_gpu[job.kind]);
    job.name = fmt::format("{}-{}", kinds[job.kind].name, jobs.size() + 1);
    jobs.push_back(std::move(job));
  }
  return jobs;
}

Result<std::vector<ArrivingJob>> read_trace(std::string_view text, const std::string& name,
                                            const std::vector<JobToTrain>& kinds,
                                            const std::vector<double>& of_one_gpu, uint32_t gpus) {
  PTC_TRY(const Csv csv, Csv::parse(text, name));
  return TraceReader(csv, kinds, of_one_gpu, gpus).read();
}

}  // namespace ptc::planner
