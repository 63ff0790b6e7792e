// The plan of bringing one checkpoint into another layout, or its files onto other nodes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/move/placement.h"
#include "reshard/plan/planner.h"
#include "store/base/error.h"

namespace ptc {

/// How a checkpoint shall be stored.
struct WantedState {
  LayoutSpec spec;
  Placement placement;  // without ranks: all on the one node there is
  uint32_t replicas = 0;
  std::vector<std::string>
      alive;  // nodes that shall hold something, by name; others may still be sources
  bool nothing_leaves = false;  // what lies on others stays there beside the copies
};

struct ChangePlan {
  std::shared_ptr<const StoredLayouts> held;  // what `transfers` is made of
  std::vector<StateFile> targets;
  TransferPlan transfers;  // one ImagePlan per target
  /// By which what is made is summed up, and copies beside it. They follow from the targets and
  /// from all that is stored, within reach or not.
  CommonCuts cuts;
  std::vector<std::string> nodes;  // ImageLayout::node of sources and targets counts in it
  /// A file without tensors that another node shall have too.
  struct OtherCopy {
    uint32_t source_image;
    uint32_t node;
  };
  std::vector<OtherCopy> copies;
  /// Stored images of nodes that shall hold nothing: they go once the rest is there.
  std::vector<uint32_t> leaving;
  /// Where nothing else is to do: images that are one copy too many (superfluous.h).
  std::vector<uint32_t> superfluous;
  /// The states are what they were: the images that are within reach stay, in whatever form, and
  /// `targets` are those that come to them.
  bool same_states = false;
  /// Nothing needs to be written, and nothing goes but what is superfluous.
  bool nothing() const {
    return same_states && targets.empty() && copies.empty() && leaving.empty();
  }
};

/// Pure function of the checkpoint, where its bytes lie (`stored`), and what is wanted.
Result<std::shared_ptr<const ChangePlan>> plan_change(const Checkpoint& checkpoint,
                                                      const StoredState& stored,
                                                      const WantedState& wanted);

}  // namespace ptc
