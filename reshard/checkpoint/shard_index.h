// model.safetensors.index.json: which tensors of a sharded set are in which file.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// File → the tensors that it holds, as the index says. Files are names beside the index, or paths
/// below its directory; one that leads elsewhere ("../x", "/x", "a//b") is kInvalidArgument, as is
/// a text that is no index. Read as a stream: it takes no more memory than the names in it.
using ShardIndex = std::map<std::string, std::vector<std::string>>;
Result<ShardIndex> parse_shard_index(std::string_view text);

inline constexpr size_t kMaxShardIndexBytes = 256 << 20;

}  // namespace ptc
