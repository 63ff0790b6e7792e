// The tensors that jobs of a jobs.json will have: their "state", where that is a directory.
#pragma once

#include <vector>

#include "store/base/error.h"
#include "tools/planner/profile/jobs_file.h"
#include "tools/planner/sim/change_prices.h"

namespace ptc::cli {

/// By job. kInvalidArgument, with the place in the file: a directory is not there, or has no
/// tensors.
Result<std::vector<planner::ModelState>> states_of(const planner::JobsAndProfiles& from);

/// kInvalidArgument: the profiles have a time of a job in a layout that its state cannot have, as
/// of tp that does not divide the heads. Of a job without such a directory nobody knows.
Result<> check_layouts(const planner::JobsAndProfiles& from);

}  // namespace ptc::cli
