// Whose master copy an array of fp32 is, told by what is in it.
#pragma once

#include <cstddef>
#include <span>

#include "store/tensor/dtype.h"

namespace ptc {

/// Whether these elements of a master copy, rounded to the weight's type, are what the weight has,
/// as far as can be told: of types but fp32 and bf16 it cannot. `weight`: as many elements.
bool is_master_of(std::span<const float> master, DType dtype, std::span<const std::byte> weight);

}  // namespace ptc
