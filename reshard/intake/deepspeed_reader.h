// Puts together what DeepSpeed's ranks have written (deepspeed_tree.cc).
#pragma once

#include <cstdint>
#include <map>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/exec/executor.h"
#include "reshard/intake/file_reads.h"
#include "reshard/intake/found_files.h"
#include "store/base/error.h"

namespace ptc {

inline constexpr std::string_view kMakeUniversal =
    "make a universal folder of it with DeepSpeed's ds_to_universal.py, and commit that";

/// The files of one checkpoint, by their numbers.
struct DeepSpeedTree {
  std::map<uint32_t, Found*> models, zero, zero_models;
  std::map<std::string, std::map<std::string, Found*>> universal;  // by parameter and state
  std::vector<Found*> again;  // what deepspeed_folder.h has for stage 3 beside the same of others
  /// What the optimizer has beside parameters, of a universal folder that is not the only one:
  /// what is read has no folder in its name, and so is told from what the others have.
  Found* optimizer = nullptr;
  std::string folder;
};

/// Makes the files the first rank's: the model's is model_states.pt, and is cut as other files of
/// torch.save's; ZeRO's are shards of optim.safetensors (of stage 3, model.safetensors), whose
/// tensors are read where they lie. `beside_model`: files with the model are there and read, and
/// have all parameters; DeepSpeed's of the model are kept as they are, and the others are shards of
/// optim.safetensors. kInvalidArgument: they cannot be put together; `found` is of no use then.
/// `tree`: some of `found`.
Result<> read_deepspeed_tree(const FileReader& files, DeepSpeedTree tree, std::vector<Found>& found,
                             bool beside_model, Executor& executor, std::stop_token stop);

}  // namespace ptc
