// Whose master copy an array of fp32 is, told by what is in it.
#pragma once

#include <cstddef>
#include <span>

#include "store/tensor/dtype.h"

namespace ptc {

/// Whether these elements of a master copy, rounded to the weight's type (fp32, bf16 or fp16; of
/// others it cannot be told), are what the weight has. `weight`: as many elements.
bool is_master_of(std::span<const float> master, DType dtype, std::span<const std::byte> weight);

}  // namespace ptc
