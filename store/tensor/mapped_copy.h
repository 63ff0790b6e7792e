// Reading a mapping of a file that somebody else may cut short meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "store/tensor/checksum.h"

namespace ptc {

/// memcpy, or stream_copy() where the target's bytes are to go past the caches.
///
/// false: some page of the source could not be had, because its file ends before or its device
/// failed; what the target holds then, nobody knows. That is found out by SIGBUS: the first call
/// takes this signal for the whole process. One that no copy here raised ends the program, as
/// before. Threads: any.
[[nodiscard]] bool mapped_copy(std::byte* target, const std::byte* source, size_t bytes,
                               bool past_caches);

/// The same of checksum_of_run(), which is added to `sum`.
[[nodiscard]] bool add_mapped_checksum(std::span<const std::byte> source, uint64_t logical_offset,
                                       Checksum& sum);

}  // namespace ptc
