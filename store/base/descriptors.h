// How the file descriptors that the process may have (RLIMIT_NOFILE) are shared.
#pragma once

#include <cstddef>

namespace ptc {

/// All, as the limit is at the first call.
size_t descriptor_limit();
/// What files that users open leave free, for other nodes, the metadata, mkdir of jobs: a quarter,
/// 8192 at most.
size_t reserved_descriptors();
/// Of these, for connections that other nodes have made: half.
size_t descriptors_for_peers();
/// For images that nobody uses at the moment, so that they need not be opened again: an eighth of
/// all, 1024 at most.
size_t descriptors_for_images();

}  // namespace ptc
