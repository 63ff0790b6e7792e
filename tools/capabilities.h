// Of root's capabilities the daemon keeps those that it needs.
#pragma once

#include <cstdint>
#include <span>

namespace ptc {

/// A capability, and what does not work for want of it.
struct NeededCapability {
  int number;
  const char* name;
  const char* without;
  bool is_in(uint64_t set) const { return (set >> number & 1) != 0; }
};
/// The same as in deploy/ptcfs@.service.in.
std::span<const NeededCapability> needed_capabilities();

/// Gives the others up, for this process and all that it starts, and says in the log what does not
/// work for want of one. Of a daemon that is not root there is nothing to keep. Call it before the
/// first thread is started.
void keep_needed_capabilities();

}  // namespace ptc
