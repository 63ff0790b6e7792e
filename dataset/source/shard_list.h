// Which shards source.json means, as they lie there now.
#pragma once

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/source/file_stamp.h"
#include "dataset/source/sample_source.h"
#include "dataset/source/source_access.h"
#include "dataset/source/source_spec.h"
#include "store/base/error.h"

namespace ptc {

struct ListedShard {
  uint32_t root = 0;
  std::string name;                         // below its root
  FileStamp stamp;                          // of the .bin, for Megatron
  FileStamp idx_stamp;                      // of Megatron's .idx
  uint64_t mds_samples = 0, mds_bytes = 0;  // as index.json says
};

struct ShardList {
  SourceFormat format = SourceFormat::kTar;
  bool detected = false;           // the format was not asked for
  std::vector<std::string> roots;  // directories, no '/' at their end
  std::vector<ListedShard>
      shards;  // in their order; kFiles: the files and directories that were named
  std::vector<MdsColumn> columns;
  uint64_t digest = 0;  // of all this: an index is true of the shards as long as it is the same
};

/// What a shard of this name holds; nullopt: nothing known.
std::optional<SourceFormat> format_of_name(std::string_view name);

/// Errors: kInvalidArgument (also: more paths than path_pattern.h lets them be), kNotFound,
/// kPermissionDenied, with the path; kCancelled: stop.
Result<ShardList> list_shards(const SourceSpec& spec, const SourceAccess& access,
                              const std::stop_token& stop = {});

/// What can be said of a source without listing it, by the first thousand paths that it names.
/// kInvalidArgument: one leads into a mount of ptcfs, or all are too many; kPermissionDenied: a
/// path may not be read, or not by data sets; kCancelled: stop. What is not there is ok, but where
/// `in_use`, of samples that are being read, nothing of it is: kNotFound.
Result<> check_source(const SourceSpec& spec, const SourceAccess& access,
                      const std::stop_token& stop = {}, bool in_use = false);

}  // namespace ptc
