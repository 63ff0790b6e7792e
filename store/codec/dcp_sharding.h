// What PyTorch's distributed checkpointing (HuggingFaceStorageWriter) says in the header of a
// safetensors file: where in the whole tensor each array of the file begins. tools/python also says
// how large the whole is:
//
//     "DCP_SHARDING_INFO": {"layers.0.w": {"saved_offsets": [4, 0], "global_shape": [8, 3]}}
#pragma once

#include <optional>
#include <vector>

#include "store/base/error.h"
#include "store/codec/safetensors.h"

namespace ptc {

/// By tensor of the header, in its order.
struct DcpSharding {
  std::vector<Box> boxes;  // that the arrays are of the whole tensors
  /// Of these the shapes, of all or of none: then they are as large as the boxes of all files need.
  std::vector<Shape> wholes;
};

/// nullopt: the file is not of such a writer. kInvalidArgument: it does not say so of each tensor
/// that it has, or boxes that no tensor has, or that are not within their wholes.
Result<std::optional<DcpSharding>> dcp_sharding(const SafetensorsHeader& header);

}  // namespace ptc
