// The optimiser of "Effective Elastic Scaling of Deep Learning Workloads" (Saxena et al.,
// 2006.13878): how many GPUs each of many jobs gets, so that what they make of them is most in sum.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ptc::planner {

/// What a job would make of a number of GPUs.
struct Offer {
  uint32_t gpus = 0;  // 0: what it is worth to give it none
  double value = 0;   // finite; of all jobs in one unit
};

/// Of each job one offer, by index, whose GPUs are at most `gpus` in sum and whose values are the
/// most in sum; of several such the one that leaves more GPUs free to the last jobs. None: not even
/// the smallest offers have room, or a job has none. By dynamic programming over jobs and GPUs;
/// exact. Cost: O(GPUs × offers of all jobs), and 2 bytes × GPUs × jobs.
std::optional<std::vector<uint32_t>> allocate(std::span<const std::vector<Offer>> jobs,
                                              uint32_t gpus);

}  // namespace ptc::planner
