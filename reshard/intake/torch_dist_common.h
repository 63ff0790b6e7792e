// common.pt of a checkpoint of Megatron-Core's whose optimizer's state was taken apart
// (torch_dist_buckets.h): what it has to say so that Megatron loads it as one that was saved by
// parameters.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "store/codec/zip.h"

namespace ptc {

/// The same file, with the settings of optimizers where that format has them, and its name.
/// `settings`: by optimizer the archive of the value that its first rank has of them; `apart`:
/// there are several. nullopt: the file is another than is known, and stays as it is.
std::optional<std::string> common_of_parameters(const ReadAt& read, uint64_t file_bytes,
                                                const std::map<uint32_t, std::string>& settings,
                                                bool apart);

}  // namespace ptc
