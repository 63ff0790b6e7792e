// Tensors that are spread over several files, each with a box of them (dcp_sharding()): of a rank,
// as PyTorch's distributed checkpointing writes them, or of all ranks, as tools/python does.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "reshard/intake/found_files.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"
#include "store/tensor/box.h"

namespace ptc {

/// Makes the files of one rank and directory that hold parts of tensors the shards of one,
/// model.safetensors; of all other files forgets the boxes, which say nothing there. Lets those be
/// that say what they are parts of (Found::spread()). kInvalidArgument: that file is there too, or
/// an index names a shard.
Result<> find_box_sets(std::vector<Found>& found);

/// Files that are spread over ranks otherwise than the layout cuts them (Inferred::cut_otherwise)
/// become shards of one of their own name, which is made of them when it is read. The others are
/// the layout's, as they are. kInvalidArgument, with the tensor's name: something of it is in none
/// of them, or two have boxes that are neither equal nor disjoint.
Result<> settle_spread(const Model::Inferred& inferred, std::vector<Found>& found);

/// What files that are spread over ranks have.
class KeptBoxes {
 public:
  /// Whether the file has any box that none before it has.
  bool adds(const Found& file);

 private:
  std::unordered_map<uint32_t, std::unordered_set<Box, BoxHash>> boxes_;  // by tensor of the model
};

}  // namespace ptc
