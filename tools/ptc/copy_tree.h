// Copies trees of files into and out of the mount, following symbolic links.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "tools/ptc/progress.h"

namespace ptc::cli {

struct CopyItem {
  std::string source;  // path to open
  std::string target;  // relative to the target directory
  uint64_t bytes = 0;
  mode_t mode = 0666;  // less the umask
};

/// For its owner, and those whom `mode` lets read; of the `group`, if it is this process's own,
/// which the copy will have.
mode_t readers_of(mode_t mode, gid_t group);

struct CopyList {
  std::vector<CopyItem> items;       // regular files, by path
  std::vector<std::string> skipped;  // neither file nor directory
  uint64_t bytes = 0;
};

/// All regular files under `directory`, symbolic links followed (a Hugging Face cache is made of
/// them), with `prefix` in front of their targets. `skip` is asked with each path relative to
/// `directory`. A link that leads nowhere or round in a circle is an error. What a group or all
/// others may not read there, themselves or because of a directory, they may not in the copy.
Result<CopyList> list_files(const std::string& directory, const std::string& prefix,
                            const std::function<bool(const std::string&)>& skip);

/// When to stop before the end.
struct CopyStop {
  const std::atomic<bool>* wanted = nullptr;  // true: now
  /// Called by another thread where copying has not stopped a second later, as of a file on a node
  /// that does not answer: ends the process.
  std::function<void()> give_up = {};
};

/// Copies to `target_dir`, which it creates as needed, several files at a time. Existing files are
/// replaced. After an error no other file is begun; of several errors, that of the first by order.
/// `durable`: each file is on its disk when this returns. kCancelled: it was
/// to stop.
Result<> copy_files(const CopyList& list, const std::string& target_dir, Progress& progress,
                    bool durable = false, const CopyStop& stop = {});

}  // namespace ptc::cli
