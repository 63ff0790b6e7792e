// The JSON of a safetensors header, read as it comes: no tree of it is ever in memory.
#pragma once

#include <string_view>

#include "store/base/error.h"
#include "store/codec/safetensors.h"

namespace ptc {

inline constexpr std::string_view kMetadataKey = "__metadata__";

/// Adds the tensors and the metadata to `header`, offsets relative to the start of data and in the
/// order of the text. Memory: a small multiple of the text. kInvalidArgument for what is not JSON
/// (RFC 8259), for keys that are there twice, and for members that are no tensors; what belongs to
/// other tensors or to the file's size is not looked at. Members of a tensor that the format does
/// not know are skipped.
Result<> parse_safetensors_json(std::string_view text, SafetensorsHeader& header);

}  // namespace ptc
