// Indexes all shards, on several threads, into one file.
#pragma once

#include <stop_token>
#include <string>

#include "dataset/source/sample_source.h"
#include "dataset/source/shard_list.h"
#include "dataset/source/source_access.h"
#include "store/base/error.h"

namespace ptc {

/// The same file on any number of threads. Errors as of open_source(): of the first bad shard.
Result<> build_index(const ShardList& list, const SourceAccess& access, const SourceSpec& spec,
                     const std::string& path, IndexProgress& progress, std::stop_token stop,
                     unsigned threads);

}  // namespace ptc
