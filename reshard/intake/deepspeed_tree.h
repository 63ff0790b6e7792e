// DeepSpeed's checkpoints among the files that are committed: what its engine saves (ZeRO 1, 2 and
// 3), and the universal folders that its ds_to_universal.py makes of that.
//   <tag>/mp_rank_00_model_states.pt
//   <tag>/zero_pp_rank_<dp>_mp_rank_00_optim_states.pt        (or bf16_zero_…, fp16_zero_…)
//   <tag>/zero_pp_rank_<dp>_mp_rank_00_model_states.pt        (stage 3, in the first's place)
//   <tag>_universal/zero/<parameter>/<fp32, exp_avg, …>.pt    (beside the model's)
#pragma once

#include <stop_token>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/found_files.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"

namespace ptc {

/// Whether there is optimizer state of DeepSpeed's among the files, or, where a framework put its
/// files for all ranks at once, a model of it.
bool has_deepspeed(const std::vector<Found>& found);
/// The layout that its files are whole under: every rank has all, and the first wrote it.
LayoutSpec deepspeed_layout(const std::vector<Found>& found);

/// Makes those files the first rank's: the model's is model_states.pt, and is cut as other files of
/// torch.save's; ZeRO's are shards of optim.safetensors (of stage 3, model.safetensors), whose
/// tensors are read where they lie. kInvalidArgument: what is missing, does not fit together, or
/// cannot be cut, and what to do.
Result<> find_deepspeed(int dir_fd, std::vector<Found>& found, Executor& executor,
                        std::stop_token stop);

}  // namespace ptc
