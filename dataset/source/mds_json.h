// index.json of a directory of MDS shards, as MosaicML's writers make it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/sample_source.h"
#include "store/base/error.h"

namespace ptc {

inline constexpr size_t kMaxMdsIndexBytes = 256 << 20;

struct MdsListing {
  struct Shard {
    std::string basename;
    uint64_t samples, bytes;
  };
  std::vector<Shard> shards;
  std::vector<MdsColumn> columns;  // sorted by name
};
/// Errors are kInvalidArgument, "shard 3: …". Refused: compressed shards, and shards of unlike
/// columns.
Result<MdsListing> parse_mds_json(std::string_view text);

}  // namespace ptc
