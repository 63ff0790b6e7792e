// Puts together what DeepSpeed's ranks have written (deepspeed_tree.cc).
#pragma once

#include <stop_token>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/found_files.h"
#include "store/base/error.h"

namespace ptc {

/// Makes the files the first rank's: the model's is model_states.pt, and is cut as other files of
/// torch.save's; ZeRO's are shards of optim.safetensors (of stage 3, model.safetensors), whose
/// tensors are read where they lie. `beside_model`: files with the model are there and read, and
/// have all parameters; DeepSpeed's of the model are kept as they are, and the others are shards of
/// optim.safetensors. kInvalidArgument: they cannot be put together; `found` is of no use then.
Result<> read_deepspeed_tree(const FileReader& files, std::vector<Found>& found, bool beside_model,
                             Executor& executor, std::stop_token stop);

}  // namespace ptc
