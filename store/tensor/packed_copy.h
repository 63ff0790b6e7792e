// The bytes of a StridedCopy's runs as one string, one run behind the other: what goes over the
// wire.
#pragma once

#include <cstdint>

#include "store/tensor/strided_copy.h"

namespace ptc {

/// The same runs of the source, lying in the target without gaps from byte 0 on.
StridedCopy packed(const StridedCopy& copy);

/// How many bytes of runs lie before the target byte `target`. O(levels).
uint64_t packed_offset(const StridedCopy& copy, uint64_t target);

/// … in the target window [begin, end).
inline uint64_t bytes_between(const StridedCopy& copy, uint64_t begin, uint64_t end) {
  return packed_offset(copy, end) - packed_offset(copy, begin);
}

/// The target byte to which byte number `offset` < total_bytes() of the string belongs. O(levels).
uint64_t target_of_packed(const StridedCopy& copy, uint64_t offset);

}  // namespace ptc
