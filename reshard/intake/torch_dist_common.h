// common.pt of a checkpoint of Megatron-Core's whose optimizer's state was taken apart
// (torch_dist_buckets.h): what it has to say so that Megatron loads it as one that was saved by
// parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "store/codec/zip.h"

namespace ptc {

/// What the first rank of an optimizer has beside its parameters' state.
struct OptimizerSettings {
  uint32_t optimizer = 0;
  std::string key;      // "optimizer": its groups; "grad_scaler"
  std::string archive;  // as torch.save writes it: a list with that alone
};

/// The same file, with the settings of optimizers where that format has them, and its name.
/// `apart`: there are several optimizers. nullopt: it is another than is known.
std::optional<std::string> common_of_parameters(const ReadAt& read, uint64_t file_bytes,
                                                std::span<const OptimizerSettings> settings,
                                                bool apart);

}  // namespace ptc
