// What a change of layout would move, before there is a job: ptcfs's own plan for a model's
// tensors, or an estimate where only their bytes are known.
#pragma once

#include <cstdint>

#include "reshard/ptc/model.h"
#include "store/base/error.h"
#include "tools/planner/price/prices.h"

namespace ptc::planner {

/// A layout whose ranks fill nodes one after the other.
struct LaidOut {
  LayoutSpec spec;
  uint32_t gpus_per_node = 1;
  uint32_t first_node = 0;

  uint32_t nodes() const;
};

/// Of the plan that ptcfs would carry out: each node that has a state's ranks holds that state
/// once. kInvalidArgument: a layout that cannot be cut so. Cost: as plan_transfers().
Result<Movement> movement_of(const Model& model, const LaidOut& from, const LaidOut& to);

/// Of a state of so many bytes that tp and pp cut evenly: nodes that had nothing of it, and all
/// where the cut changes, get what their ranks hold; an upper bound.
Movement movement_of(double state_bytes, const LaidOut& from, const LaidOut& to);

}  // namespace ptc::planner
