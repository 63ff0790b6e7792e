// Where a mount keeps its bytes: a tmpfs of its own, which outlives the daemon, or a directory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/base/error.h"

namespace ptc {

struct StorePlaceOptions {
  std::string mount_point;               // resolved
  std::string directory;                 // --store; empty: chosen by the mount point
  std::optional<uint64_t> memory_bytes;  // --memory
};

struct StorePlace {
  std::string directory;
  bool in_memory = false;         // gone after a reboot
  bool is_tmpfs = false;          // mounted by us (now or by an earlier daemon)
  bool is_new = false;            // mounted now: it is empty
  std::vector<std::string> made;  // directories that were not there, the deepest first
  std::string note;               // something the user should know, one line; or empty
};

/// Finds or makes the place. With --store and no --memory: the directory as it is. Otherwise a
/// tmpfs on the directory (or on /run/ptcfs/<escaped mount point>): an existing one is used again,
/// and resized where the size differs. Without the right to mount: a directory of the user's own in
/// /dev/shm, or in XDG_RUNTIME_DIR. kInvalidArgument: it would lie in a mount of ptcfs.
Result<StorePlace> prepare_store_place(const StorePlaceOptions& options);

/// Of a start that failed: what prepare_store_place() made goes again, with what is in it; nothing
/// else does.
void take_back_store_place(const StorePlaceOptions& options, const StorePlace& place);

/// Undoes it, with all that is kept there. Returns the directory that went. Refused (kBusy) while
/// in use; kInvalidArgument for a directory that the user gave and that is no tmpfs.
Result<std::string> discard_store_place(const StorePlaceOptions& options);

/// Where a mount's daemon hands out descriptors (fs/tree/page_files.h); empty: nowhere.
std::string pages_socket(const std::string& mount_point);

uint64_t memory_of_machine();  // bytes

}  // namespace ptc
