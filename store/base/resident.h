// Which pages of mapped files are in memory, for threads that must not wait for a disk.
#pragma once

#include <cstddef>
#include <span>

namespace ptc {

/// Whether all pages of these mapped bytes are in memory; as it was a moment ago. True, too, where
/// the kernel does not say, as of files that this process may not write and does not own. Threads:
/// any.
bool is_in_memory(std::span<const std::byte> mapped);

/// Reads pages of mapped files that are not: asks for all first, then waits for them. Those that
/// the file or its device lacks stay absent, without a signal. Threads: any.
void read_into_memory(std::span<const std::span<const std::byte>> mapped);

}  // namespace ptc
