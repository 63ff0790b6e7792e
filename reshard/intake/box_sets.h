// Tensors that are spread over several files of a rank, each with a box of them, as PyTorch's
// distributed checkpointing writes them (dcp_sharding()).
#pragma once

#include <vector>

#include "reshard/intake/found_files.h"
#include "store/base/error.h"

namespace ptc {

/// Makes the files of one rank and directory that hold parts of tensors the shards of one,
/// model.safetensors; of all other files forgets the boxes, which say nothing there. Lets those be
/// that say what they are parts of (Found::spread()). kInvalidArgument: that file is there too, or
/// an index names a shard.
Result<> find_box_sets(std::vector<Found>& found);

}  // namespace ptc
