// The planner: which bytes go where. Pure functions of what images hold and what images are wanted.
//
// For every array of a target image, each of its pieces (a box of the global tensor) is covered by
// boxes that source images hold: the box is intersected with what a source has, and what is left of
// it is looked for further on. Every target byte is written exactly once; bytes that no source is
// asked for are padding. Boxes that the target's own node holds come first, then those that came to
// it for another target, so that no byte is moved to a node twice; of the holders of one box the
// one that was asked for the fewest bytes so far, so that the load spreads over all of them.
//
// A plan is the choice of holders for all targets (plan/choices.h), which every node makes alike;
// what is copied where in a target follows from it, for who asks.
//
// Cost: O(n log n) in the boxes held and wanted by files that differ, and their overlaps; for each
// copy of a file on another node, one choice a box.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "reshard/plan/choices.h"
#include "reshard/plan/relay.h"
#include "reshard/plan/shared_vector.h"
#include "reshard/plan/source_index.h"
#include "store/base/error.h"

namespace ptc {

/// How one target image comes into being.
struct ImagePlan {
  std::optional<uint32_t> kept;  // this source image is it already, in the same memory, and of no
                                 // other target; else: TransferPlan::transfers_of()
};

struct TransferPlan {
  std::vector<ImagePlan> images;  // one per target image
  std::shared_ptr<const Choices> choices;
  std::shared_ptr<const RelayGroups> relays;  // null: none

  /// By target offset; none where it is kept. Made of the choices: a cost of its own.
  Result<SharedVector<Transfer>> transfers_of(uint32_t target) const;
  /// visit(Transfer::source_image, bytes) for what the target is made of, whether or not others
  /// pass it on.
  template <class Visit>
  void for_each_source(uint32_t target, Visit&& visit) const {
    if (choices != nullptr) choices->for_each_source(target, visit);
  }

  struct Totals {
    uint64_t total_bytes = 0;    // of all target images
    uint64_t kept_bytes = 0;     // in images that stay as they are
    uint64_t local_bytes = 0;    // copied within a node
    uint64_t moved_bytes = 0;    // between nodes
    uint64_t minimum_bytes = 0;  // between nodes: needed there and not held there, once per node
    uint32_t kept_images = 0;
    uint32_t written_images = 0;
  };
  Totals totals;
  struct Pair {
    uint32_t source_node, target_node;
    uint64_t bytes;
  };
  std::vector<Pair> pairs;  // where bytes > 0, by (source, target)
};

/// The whole plan, with relays; the index must outlive it. Target images that are source images
/// already, in the same memory of the same node, are kept; each source image is one target image,
/// also where several are equal.
Result<TransferPlan> plan_transfers(const SourceIndex& source, std::span<const ImageLayout> target);

}  // namespace ptc
