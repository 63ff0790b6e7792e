// Who gets how many GPUs now: the autoscaler of 2006.13878, with each change at its price. A pure
// function: what it is told is all that it knows, and the simulator and a real cluster ask the same
// one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tools/planner/elastic/curve.h"

namespace ptc::planner {

enum class Objective {
  kThroughput,  // the sum of speed-ups, as in the paper
  kCompletion,  // each over the root of the work that is left: short jobs first, nobody starved
  kOvertaking,  // the same, and nobody has a right to GPUs: who runs may have to wait again
  kFairness,  // Pollux's: the harmonic mean of speed-ups over what each would have of a fair share
};

/// What deciding is told of a job. `curve` outlives the call.
struct ElasticJob {
  const Curve* curve = nullptr;  // not empty
  double samples_left = 0;       // > 0
  std::optional<uint32_t> now;   // the point of its curve that it has
  bool runs =
      now.has_value();  // else it waits; without `now`: what it has is no point of its curve
  std::vector<double> price_s = {};  // of a change to each point; empty: as of the rules
  double age_s = 0;                  // since it came
  uint32_t changes = 0;              // that it has had once it had begun
  uint32_t most_gpus = UINT32_MAX;   // that it may have now
};

struct ScalingRules {
  Objective objective = Objective::kThroughput;
  double change_s = 0;  // for which a job stands still when it is given another point
  double start_s = 0;   // and when it begins
  /// What a change wins counts for so long at most: nobody knows who comes meanwhile. Never taken
  /// as less than four times the price, below which all would stay as it is.
  double horizon_s = 3600;
  /// kOvertaking: who came so long ago counts twice.
  double patience_s = 8 * 3600;
};

/// Of each job its point, or none: it waits. `jobs` stand in the order in which they came. Who has
/// GPUs keeps some; who waits is let in in that order as long as the least that each needs has
/// room, and nobody overtakes but whoever needs more than there are, as nodes are away. A value is
/// discounted by what its change costs: max(0, 1 − price ÷ (what the job still takes, at most the
/// horizon)). kOvertaking and kFairness let nobody in: having no GPUs is one more offer. kFairness
/// discounts as Pollux does, by age and changes so far, and knows no work that is left.
std::vector<std::optional<uint32_t>> decide(std::span<const ElasticJob> jobs, uint32_t gpus,
                                            const ScalingRules& rules);

}  // namespace ptc::planner
