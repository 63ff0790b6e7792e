// A copy out of a mapping of a file that somebody else may cut short meanwhile.
#pragma once

#include <cstddef>

namespace ptc {

/// memcpy, or stream_copy() where the target's bytes are to go past the caches.
///
/// false: some page of the source could not be had, because its file ends before or its device
/// failed; what the target holds then, nobody knows. That is found out by SIGBUS: the first call
/// takes this signal for the whole process. One that no copy here raised ends the program, as
/// before. Threads: any.
[[nodiscard]] bool mapped_copy(std::byte* target, const std::byte* source, size_t bytes,
                               bool past_caches);

}  // namespace ptc
