// The plan of bringing one checkpoint into another layout.
#pragma once

#include <vector>

#include "reshard/job/checkpoint.h"
#include "reshard/plan/planner.h"
#include "store/base/error.h"

namespace ptc {

struct ChangePlan {
  std::vector<StateFile> targets;
  TransferPlan transfers;  // one ImagePlan per target
  /// Nothing needs to be written: the specs differ in replicas and the numbering of ranks only.
  bool nothing = false;
};

/// Pure function of the checkpoint, where its bytes lie (`stored`), and the spec wanted.
Result<ChangePlan> plan_change(const Checkpoint& checkpoint, const StoredState& stored,
                               const LayoutSpec& spec);

}  // namespace ptc
