#include "tools/planner/elastic/autoscaler.h"

#include <algorithm>
#include <cmath>

#include "tools/planner/elastic/allocate.h"

namespace ptc::planner {
namespace {

std::vector<Offer> offers_of(const ElasticJob& job, const ScalingRules& rules) {
  const double weight = rules.objective == Objective::kCompletion
                            ? 1 / std::sqrt(job.samples_left / job.curve->of_one_gpu)
                            : 1;
  std::vector<Offer> offers;
  offers.reserve(job.curve->points.size());
  for (uint32_t i = 0; i < job.curve->points.size(); ++i) {
    const CurvePoint& point = job.curve->points[i];
    const double price = !job.price_s.empty() ? job.price_s[i]
                         : job.runs           ? rules.change_s
                                              : rules.start_s;
    const double horizon = std::max(rules.horizon_s, 4 * price);
    double kept = 1;
    if (job.now != i && price > 0)
      kept = std::max(0.0, 1 - price / std::min(job.samples_left / point.samples_per_s, horizon));
    offers.push_back({point.gpus, weight * point.speed_up * kept});
  }
  return offers;
}

}  // namespace

std::vector<std::optional<uint32_t>> decide(std::span<const ElasticJob> jobs, uint32_t gpus,
                                            const ScalingRules& rules) {
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
