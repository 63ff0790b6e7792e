// Who passes on what several nodes need of one.
//
// Where a node would send more than any node has to receive, its link would carry the same bytes
// again and again. Bytes that k ≤ 32 targets on k nodes take of it, by equal copies, are therefore
// cut into windows of the target image; each window is taken from the source by one of the k in
// turn, and by the others from that one as soon as it is there. The source sends each byte once,
// each of the k passes (k − 1) / k of what it receives on, all at the same time: no link carries
// more than the receivers' own. What a node receives does not change, so neither does the least
// movement.
//
// Cost: O(n log n) in the transfers from such nodes, and at most 1024 windows a target image.
#pragma once

#include <cstdint>
#include <span>

#include "reshard/plan/planner.h"

namespace ptc {

/// The windows of an image of so many bytes begin at multiples of this.
uint64_t relay_window_bytes(uint64_t image_bytes);

/// Cuts such transfers of a plan without relays, and sets Transfer::relay of those to be taken from
/// another target.
void plan_relays(std::span<const ImageLayout> sources, std::span<const ImageLayout> targets,
                 TransferPlan& plan);

}  // namespace ptc
