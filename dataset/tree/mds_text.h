// The JSON of MDS shards: one for each in index.json, and one in the shard itself.
#pragma once

#include <string>

#include "dataset/source/sample_source.h"

namespace ptc {

/// What stands between a shard's table of offsets and its samples, its columns; and what each entry
/// of index.json begins with.
std::string mds_config(const SampleSource& source);
/// kInvalidArgument: so many do not fit in one shard.
Result<> check_mds_bytes(uint64_t bytes);

}  // namespace ptc
