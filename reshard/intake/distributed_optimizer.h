// The state of Megatron-LM's distributed optimizer among the files that are committed: each
// distrib_optim.pt is read by what the model_optim_rng.pt beside it has (megatron_buckets.h).
#pragma once

#include <vector>

#include "reshard/intake/found_files.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"

namespace ptc {

/// Once the models are read, and their names are those that they keep: of each such file on this
/// node its outline and tensors. Master copies are compared with the weights, as far as the first
/// elements of each tell. kInvalidArgument: there is no model beside one, or it is of another.
Result<> read_distributed_optimizer(int dir_fd, std::vector<Found>& found);
/// Once ranks are known. kInvalidArgument: there is such a file beside one model, and none beside
/// another; or one lacks what is in the first expert rank's alone, and is that.
Result<> check_distributed_optimizer(const LayoutSpec& spec, const std::vector<Found>& found);

}  // namespace ptc
