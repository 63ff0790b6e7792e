// All that lies below a directory that users fill and change: nested as deeply as they like, so
// with little stack and two descriptors.
#pragma once

#include <sys/stat.h>

#include <functional>

#include "store/base/error.h"

namespace ptc {

/// Of one entry: `name` in the directory `dir_fd`, at most as long as the call. false: enough.
using TreeVisitor = std::function<bool(int dir_fd, const char* name, const struct stat& facts)>;

/// Visits each entry below a directory (O_PATH will do), each directory's own before what is below
/// them; follows no symbolic link, and never leaves the tree. What others move meanwhile is visited
/// once, or not at all. What cannot be read is left out, and the first error of that returned at
/// the end; what has gone meanwhile is none.
Result<> walk_tree(int dir_fd, const TreeVisitor& visit);

}  // namespace ptc
