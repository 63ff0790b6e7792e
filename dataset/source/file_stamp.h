// Whether a file is still the one that was indexed.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "store/base/error.h"

namespace ptc {

/// What must be the same for a file to be the file that was indexed.
struct FileStamp {
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;
  uint64_t inode = 0;
  friend bool operator==(const FileStamp&, const FileStamp&) = default;
};
Result<FileStamp> stamp_of(int fd);
Result<FileStamp> stamp_of(const struct stat& facts);
Result<FileStamp> stamp_at(const class SourceAccess& access, const std::string& path);

}  // namespace ptc
