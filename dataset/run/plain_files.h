// Virtual files that are no samples: text, and ids.
#pragma once

#include <string>

#include "dataset/run/data_set.h"
#include "dataset/tree/virtual_file.h"

namespace ptc {

VirtualFileRef make_text_file(std::string text);
/// ids.u64 of a rank: 8 bytes a sample, little-endian.
VirtualFileRef make_ids_file(ShownGenerationRef generation, uint64_t rank);

}  // namespace ptc
