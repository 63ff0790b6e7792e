#include "tools/planner/elastic/allocate.h"

#include <algorithm>
#include <limits>

namespace ptc::planner {

std::optional<std::vector<uint32_t>> allocate(std::span<const std::vector<Offer>> jobs,
                                              uint32_t gpus) {
  constexpr double kImpossible = -std::numeric_limits<double>::infinity();
  constexpr uint16_t kNone = UINT16_MAX;
  const size_t width = size_t{gpus} + 1;
  // most[k]: the best sum of the jobs so far with k GPUs or fewer; taken[j · width + k]: the offer
  // of job j in it.
  std::vector<double> most(width, 0), next(width);
  std::vector<uint16_t> taken(jobs.size() * width, kNone);
  for (size_t j = 0; j < jobs.size(); ++j) {
    std::fill(next.begin(), next.end(), kImpossible);
    uint16_t* const of_job = &taken[j * width];
    const size_t offers = std::min<size_t>(jobs[j].size(), kNone);
    for (size_t o = 0; o < offers; ++o) {
      const Offer& offer = jobs[j][o];
      for (size_t k = offer.gpus; k < width; ++k) {
        const double sum = most[k - offer.gpus] + offer.value;
        if (sum > next[k]) next[k] = sum, of_job[k] = static_cast<uint16_t>(o);
      }
    }
    most.swap(next);
  }
  if (most[gpus] == kImpossible) return std::nullopt;
  std::vector<uint32_t> chosen(jobs.size());
  size_t left = gpus;
  for (size_t j = jobs.size(); j-- > 0;) {
    chosen[j] = taken[j * width + left];
    left -= jobs[j][chosen[j]].gpus;
  }
  return chosen;
}

}  // namespace ptc::planner
