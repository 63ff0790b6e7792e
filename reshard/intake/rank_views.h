// A rank's directory below layouts/ has its tensors one by one, too (tensors/, fs/README.md). Where
// somebody has copied that directory, they came with it.
#pragma once

#include <stop_token>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/found_files.h"
#include "store/base/error.h"

namespace ptc {

/// Takes the files tensors/….npy of a rank on this node out of `found`, if each has just the bytes
/// of an array in the rank's other files: else they are the writer's own, and stay. Cost: reads
/// both once.
Result<> leave_out_views(int dir_fd, std::vector<Found>& found, Executor& executor,
                         std::stop_token stop);

}  // namespace ptc
