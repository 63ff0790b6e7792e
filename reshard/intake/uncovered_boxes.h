// What of a local array is padding: the elements that no piece of it covers.
//
// A region with few pieces loses one after the other. One with many is cut in two, along the axis
// that most of their edges cross, so that half of these edges are on either side. Pieces that lie
// in a row or in a grid take n log n so. But another node may have said any, of which what is left
// is n² boxes and more: then there is an error after a number of steps that grows with n.
#pragma once

#include <vector>

#include "store/base/error.h"
#include "store/tensor/box.h"

namespace ptc {

/// Disjoint boxes of the local array; of a flat cut runs of its elements. kInvalidArgument: too
/// much work, or too many.
Result<std::vector<Box>> uncovered_boxes(const SubTensor& part);

}  // namespace ptc
