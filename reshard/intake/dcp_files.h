// Checkpoints of PyTorch's distributed checkpointing among the files that are committed: a
// `.metadata`, and beside it the files of which it says what lies where in them.
#pragma once

#include <string_view>

#include "reshard/intake/found_files.h"

namespace ptc {

inline constexpr std::string_view kDcpMetadata = ".metadata";

/// Whether the file is a `.metadata`.
bool is_dcp_metadata(const Found& file);

}  // namespace ptc
