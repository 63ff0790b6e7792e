// Rubick's policy (Zhang et al., 2408.08586; Morphling's artefact), from what its published program
// does, to be compared with. Told measured profiles where that fits a model of them, and no work
// that is left.
#pragma once

#include <span>

#include "tools/planner/elastic/autoscaler.h"
#include "tools/planner/elastic/placement.h"

namespace ptc::planner {

/// Gives each job GPUs, in `cluster` and in its wish. Those that one GPU more speeds up least come
/// first. A job that a node holds stays on its node, or takes the freest, and there the fewest GPUs
/// that are as fast as all that are free. One that a node holds only with its state offloaded takes
/// the most that have room and are no fewer than it has; with 32 or more it gives them up for
/// others first, seven times. Nobody else gives up what he has. `jobs` and `wishes` agree by index.
void take_what_is_free(std::span<const ElasticJob> jobs, std::span<Wish> wishes,
                       Placement& cluster);

}  // namespace ptc::planner
