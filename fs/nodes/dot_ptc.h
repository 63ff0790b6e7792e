// .ptc/: what the mount says about itself, and the file through which the ptc tool asks it things.
#pragma once

#include "fs/tree/tree.h"

namespace ptc {

FsResult<NodeRef> make_dot_ptc(Tree& tree);

}  // namespace ptc
