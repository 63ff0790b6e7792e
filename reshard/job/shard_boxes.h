// Tensors that are spread over several files of a rank, each with a box of them, as PyTorch's
// distributed checkpointing writes them (dcp_boxes()).
#pragma once

#include <vector>

#include "reshard/job/found_files.h"
#include "store/base/error.h"
#include "store/tensor/box.h"

namespace ptc {

/// Makes the files of one rank and directory that hold parts of tensors the shards of one,
/// model.safetensors; of all other files forgets the boxes, which say nothing there.
/// kInvalidArgument: that file is there too, or an index names a shard.
Result<> find_box_sets(std::vector<Found>& found);

/// The box that these make up together, equal ones being copies of each other. kInvalidArgument:
/// something of it is in none of them, or in two. Cost: O(n log n) of boxes that lie in a grid, as
/// they do.
Result<Box> union_of_boxes(std::vector<Box> boxes);

/// An array that is this box and nothing else.
SubTensor box_alone(const Box& box);

/// What `box` is of a rank's part of a tensor, whose local array is that of `whole`.
/// kInvalidArgument: the rank does not hold it there, as one piece.
Result<SubTensor> part_of_box(const SubTensor& part, const Box& whole, const Box& box);

}  // namespace ptc
