// Files with secrets.
#pragma once

#include <cstddef>
#include <string>

#include "store/base/error.h"

namespace ptc {

/// The text of a regular file that only its owner may read, at most `limit` bytes; kInvalidArgument
/// of another.
Result<std::string> read_private_file(const std::string& path, size_t limit);

}  // namespace ptc
