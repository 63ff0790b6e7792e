// The values that ptc's options and arguments can have, for completion: what the mount holds.
#pragma once

#include "tools/cli/complete.h"

namespace ptc::cli {

/// Nothing where no mount is found: completion never complains.
Values values_in_mount(const std::string& type, const Typed& typed);

}  // namespace ptc::cli
