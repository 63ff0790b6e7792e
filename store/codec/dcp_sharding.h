// What PyTorch's distributed checkpointing (HuggingFaceStorageWriter) says in the header of a
// safetensors file: where in the whole tensor each array of the file begins.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/codec/safetensors.h"

namespace ptc {

/// By tensor of the header, in its order: the box that its array is of the whole tensor. nullopt:
/// the file is not of that writer. kInvalidArgument: it says so of other tensors than it has, or
/// boxes that no tensor has.
Result<std::optional<std::vector<Box>>> dcp_boxes(const SafetensorsHeader& header);

}  // namespace ptc
