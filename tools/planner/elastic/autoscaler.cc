#include "tools/planner/elastic/autoscaler.h"

#include <algorithm>
#include <cmath>

#include "tools/planner/elastic/allocate.h"

namespace ptc::planner {
namespace {

double weight_of(const ElasticJob& job, const ScalingRules& rules) {
  if (rules.objective == Objective::kThroughput) return 1;
  const double short_first = 1 / std::sqrt(job.samples_left / job.curve->of_one_gpu);
  return rules.objective == Objective::kOvertaking
             ? short_first * (1 + job.age_s / rules.patience_s)
             : short_first;
}

/// Those points that it may have now; at least the first.
std::span<const CurvePoint> points_of(const ElasticJob& job) {
  const std::vector<CurvePoint>& all = job.curve->points;
  size_t count = 1;
  while (count < all.size() && all[count].gpus <= job.most_gpus) ++count;
  return {all.data(), count};
}

std::vector<Offer> offers_of(const ElasticJob& job, const ScalingRules& rules) {
  const double weight = weight_of(job, rules);
  std::vector<Offer> offers;
  const std::span<const CurvePoint> points = points_of(job);
  offers.reserve(points.size() + 1);
  for (uint32_t i = 0; i < points.size(); ++i) {
    const CurvePoint& point = points[i];
    const double price = !job.price_s.empty() ? job.price_s[i]
                         : job.runs           ? rules.change_s
                                              : rules.start_s;
    const double horizon = std::max(rules.horizon_s, 4 * price);
    double kept = 1;
    // Who may overtake and has to start pays that whenever he does.
    const bool is_due = rules.objective == Objective::kOvertaking && !job.runs;
    if (job.now != i && price > 0 && !is_due)
      kept = std::max(0.0, 1 - price / std::min(job.samples_left / point.samples_per_s, horizon));
    offers.push_back({point.gpus, weight * point.speed_up * kept});
  }
  return offers;
}

/// The sum of these is most where the harmonic mean is.
std::vector<Offer> fair_offers_of(const ElasticJob& job, uint32_t fair_gpus,
                                  const ScalingRules& rules) {
  constexpr double kLeastSpeedUp = 1e-3;
  const std::vector<CurvePoint>& all = job.curve->points;
  double fair = all.front().samples_per_s;
  for (const CurvePoint& point : all)
    if (point.gpus <= fair_gpus) fair = point.samples_per_s;
  const double kept = std::max(job.age_s - job.changes * rules.change_s, 0.0) /
                      std::max(job.age_s + rules.change_s, kLeastSpeedUp);
  std::vector<Offer> offers;
  const std::span<const CurvePoint> points = points_of(job);
  for (uint32_t i = 0; i < points.size(); ++i)
    offers.push_back({points[i].gpus, -1 / (points[i].samples_per_s / fair *
                                                (job.now == i || rules.change_s == 0 ? 1 : kept) +
                                            kLeastSpeedUp)});
  offers.push_back({0, -1 / kLeastSpeedUp});
  return offers;
}

/// Where having no GPUs is an offer, the last one of each.
std::vector<std::optional<uint32_t>> decide_for_all(std::span<const ElasticJob> jobs, uint32_t gpus,
                                                    const ScalingRules& rules) {
  std::vector<std::vector<Offer>> offers;
  const auto fair =
      static_cast<uint32_t>((gpus + jobs.size() - 1) / std::max<size_t>(jobs.size(), 1));
  for (const ElasticJob& job : jobs) {
    if (rules.objective == Objective::kFairness) {
      offers.push_back(fair_offers_of(job, fair, rules));
    } else {
      offers.push_back(offers_of(job, rules));
      offers.back().push_back({0, 0});
    }
  }
  std::vector<std::optional<uint32_t>> decided(jobs.size());
  const auto chosen = allocate(offers, gpus);
  for (size_t j = 0; chosen && j < jobs.size(); ++j)
    if ((*chosen)[j] + 1 < offers[j].size()) decided[j] = (*chosen)[j];
  return decided;
}

}  // namespace

std::vector<std::optional<uint32_t>> decide(std::span<const ElasticJob> jobs, uint32_t gpus,
                                            const ScalingRules& rules) {
  if (rules.objective == Objective::kOvertaking || rules.objective == Objective::kFairness)
    return decide_for_all(jobs, gpus, rules);
  std::vector<std::optional<uint32_t>> decided(jobs.size());
  std::vector<std::vector<Offer>> offers;
  std::vector<size_t> admitted;
  uint64_t least = 0;
  const auto admit = [&](size_t j) {
    const uint32_t needs = jobs[j].curve->least();
    if (least + needs > gpus) return false;
    least += needs;
    admitted.push_back(j);
    return true;
  };
  for (size_t j = 0; j < jobs.size(); ++j)
    if (jobs[j].runs) admit(j);  // one that has no room any more, as nodes are gone, waits
  for (size_t j = 0; j < jobs.size(); ++j)
    if (!jobs[j].runs && jobs[j].curve->least() <= gpus && !admit(j)) break;
  std::sort(admitted.begin(), admitted.end());
  for (const size_t j : admitted) offers.push_back(offers_of(jobs[j], rules));
  const auto chosen = allocate(offers, gpus);
  for (size_t i = 0; chosen && i < admitted.size(); ++i) decided[admitted[i]] = (*chosen)[i];
  return decided;
}

}  // namespace ptc::planner
