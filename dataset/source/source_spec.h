// source.json: where a data set's samples are.
//
//   {"format": "auto", "shards": ["/data/train", "/data/more/part-*.tar"], "on_error": "refuse",
//    "fingerprint": "places"}
//
// Only "shards" is required: a directory, a glob, a file, or a list of these. Absolute paths.
// The fingerprint of a data set has names, sizes and places of its samples, and of their content
// some places of each shard; "content": all of it, which is read once on each node.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

enum class SourceFormat {
  kTar,
  kMds,
  kMegatron,
  kTfrecord,
  kJsonl,
  kFiles
};  // persisted: never renumber

/// "tar", "mds", "megatron", "tfrecord", "jsonl", "files".
std::string_view format_name(SourceFormat format);

enum class OnError { kRefuse, kSkip };  // what becomes of a data set with a bad shard

struct SourceSpec {
  std::optional<SourceFormat> format;  // nullopt: by what lies there
  std::vector<std::string> shards;     // in the order given
  OnError on_error = OnError::kRefuse;
  bool fingerprint_of_all_content = false;
  uint64_t saved = 0;  // of each saving another: all is looked at anew then; not in the text
  friend bool operator==(const SourceSpec&, const SourceSpec&) = default;
};

/// Errors are kInvalidArgument with line and column; unknown keys are named.
Result<SourceSpec> parse_source(std::string_view text);

}  // namespace ptc
