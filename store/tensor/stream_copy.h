// A copy past the caches, for bytes that nobody here will read again soon.
#pragma once

#include <cstddef>

namespace ptc {

/// memcpy whose stores do not first read the target's cache lines: two thirds of the traffic, and
/// what is in the caches stays. For large targets; `source` is best in a cache already. The bytes
/// are visible to other threads when the call returns.
void stream_copy(std::byte* target, const std::byte* source, size_t bytes);

}  // namespace ptc
