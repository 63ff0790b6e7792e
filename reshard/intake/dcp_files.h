// Checkpoints of PyTorch's distributed checkpointing among the files that are committed: a
// `.metadata`, and beside it the files of which it says what lies where in them.
#pragma once

#include <vector>

#include "reshard/checkpoint/dcp_table.h"
#include "reshard/exec/executor.h"
#include "reshard/intake/found_files.h"
#include "store/base/error.h"

namespace ptc {

inline constexpr std::string_view kDcpMetadata = ".metadata";

/// Whether the file is a `.metadata`.
bool is_dcp_metadata(const Found& file);

/// Makes those files the shards of one, model.safetensors in the same directory: their tensors are
/// read where they lie. Of files on other nodes nothing is known. kInvalidArgument: what
/// parse_dcp_metadata() and find_dcp_array() refuse; files that are missing, or on other nodes; an
/// array whose elements do not follow each other.
Result<> find_dcp(int dir_fd, std::vector<Found>& found, Executor& executor, std::stop_token stop);

}  // namespace ptc
