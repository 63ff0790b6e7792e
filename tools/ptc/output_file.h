// Files that a command writes, by names that its user gave.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc::cli {

/// Where output goes. A regular file, or none yet: the old or the new content is there, whatever
/// happens meanwhile; the end of a symbolic link is what is replaced, and a file that was there
/// keeps its mode. What else exists (a device, a FIFO) is written into. "-", /dev/stdout and the
/// file behind it are standard output; the same of standard error.
class OutputFile {
 public:
  /// Changes nothing yet, so that who computes for long learns before that it cannot be written.
  /// kInvalidArgument: it is one of `inputs` (by inode), or a directory.
  static Result<OutputFile> at(const std::string& path, const std::vector<std::string>& inputs);

  bool is_standard_output() const { return descriptor_ == 1; }
  Result<> write(std::string_view text) const;

 private:
  Result<> replace(std::string_view text) const;

  std::string path_, end_;            // as it was given; behind symbolic links
  std::optional<struct stat> there_;  // none: there is no such file yet
  int descriptor_ = 0;                // 1: standard output, 2: standard error
  bool is_replaced_ = false;          // else it is written into
};

}  // namespace ptc::cli
