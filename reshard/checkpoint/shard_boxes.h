// Boxes of tensors that are spread over several files of a rank (intake/box_sets.h).
#pragma once

#include <vector>

#include "reshard/ptc/slicing.h"
#include "store/base/error.h"
#include "store/tensor/box.h"

namespace ptc {

/// The box that these make up together, equal ones being copies of each other. kInvalidArgument:
/// something of it is in none of them, or in two. Cost and stack: those of find_overlap(), so
/// O(n log n) of boxes that lie in a grid, as they do.
Result<Box> union_of_boxes(std::vector<Box> boxes);

/// An array that is this box and nothing else.
SubTensor box_alone(const Box& box);

/// What `box` is of a rank's part of a tensor, whose local array is that of `whole`.
/// kInvalidArgument: the rank does not hold it there, as one piece.
Result<SubTensor> part_of_box(const SubTensor& part, const Box& whole, const Box& box);

}  // namespace ptc
