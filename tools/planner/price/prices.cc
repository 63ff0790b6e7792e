#include "tools/planner/price/prices.h"

#include <algorithm>

namespace ptc::planner {
namespace {

constexpr double kWeight = 1.0 / 3;
// It is seen up to half a second late that all is there: so short a time says nothing of so few
// bytes, and of many only that they were not slower.
constexpr double kShortestToMeasure = 2, kFewestToMeasure = 1 << 28;

void correct(double& value, double measured) { value += kWeight * (measured - value); }

}  // namespace

const ChangeCosts& Prices::of_job(const std::string& job) const {
  const auto found = jobs_.find(job);
  return found == jobs_.end() ? first_ : found->second;
}

ChangeCosts& Prices::known(const std::string& job) {
  return jobs_.try_emplace(job, first_).first->second;
}

double Prices::of(const std::string& job, const Movement& movement, bool runs) const {
  const ChangeCosts& costs = of_job(job);
  // Links and memory work at the same time.
  const double moving = std::max(static_cast<double>(movement.moved) / first_.link,
                                 static_cast<double>(movement.local) / first_.memory);
  return (runs ? costs.stop_s : 0) + moving + costs.start_s;
}

void Prices::stopped(const std::string& job, double seconds) {
  correct(known(job).stop_s, std::max(seconds, 0.0));
}

void Prices::started(const std::string& job, double seconds) {
  correct(known(job).start_s, std::max(seconds, 0.0));
}

void Prices::brought(const Movement& movement, double seconds) {
  const auto moved = static_cast<double>(movement.moved),
             local = static_cast<double>(movement.local);
  const bool by_links = moved / first_.link >= local / first_.memory;
  const double bytes = by_links ? moved : local;
  double& rate = by_links ? first_.link : first_.memory;
  // Of the reciprocal: what is predicted is a time.
  double of_a_byte = 1 / rate;
  if (bytes < kFewestToMeasure || (seconds < kShortestToMeasure && seconds / bytes > of_a_byte))
    return;
  correct(of_a_byte, seconds / bytes);
  rate = 1 / of_a_byte;
}

void Prices::restore(const std::string& job, const ChangeCosts& costs) {
  jobs_[job] = costs;
  first_.link = costs.link;
  first_.memory = costs.memory;
}

}  // namespace ptc::planner
