// A checksum of a tensor that does not depend on how the tensor is cut.
//
// Let w(p) be the p-th little-endian 32-bit word of the tensor's logical bytes (C order, zero
// padded at the end). With fixed pseudo-random tables T₁, T₂ of 1024 odd 32-bit keys and 64-bit
// mixing functions M₁, M₂ (always odd), each of two lanes is
//
//     H = Σ_b M(b) · Σ_{i<1024} T[i] · w(1024·b + i)      (mod 2⁶⁴)
//
// H is linear in the words, so bytes may be added in any order, in runs of any length and
// alignment, by different threads or nodes, and the sums added: any partition of a tensor into
// disjoint boxes gives the same value. That is what lets one value travel with a tensor through
// every layout and be checked without bringing the tensor together. A single changed word is
// always found, any other error but for about 2⁻⁶². Each lane has its own M: with a common one, two
// sign flips at the same place of two blocks would escape both lanes or neither (2⁻³²). Trailing
// zeros do not count, so dtype and shape are compared beside it. (Multilinear hashing after Carter
// and Wegman, two levels; not cryptographic.) Persisted: the tables and M never change.
//
// Cost: one multiply-add per word and lane, tables in the L1 cache; bound by memory bandwidth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "store/base/error.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

struct Checksum {
  uint64_t lane[2] = {0, 0};

  Checksum& operator+=(const Checksum& other) {
    lane[0] += other.lane[0];
    lane[1] += other.lane[1];
    return *this;
  }
  friend bool operator==(const Checksum&, const Checksum&) = default;

  std::string to_hex() const;  // 32 hexadecimal digits
  static Result<Checksum> from_hex(std::string_view text);
};

/// Contribution of `bytes`, which lie at `logical_offset` (bytes) of the tensor's C-order bytes.
Checksum checksum_of_run(std::span<const std::byte> bytes, uint64_t logical_offset);

/// Contribution of what `local` holds of a tensor of `global_shape`: the pieces' bytes at their
/// global places; padding counts nothing. `local_bytes` is the local C-order array.
Result<Checksum> checksum_of_sub_tensor(const SubTensor& local, const Shape& global_shape,
                                        DType dtype, std::span<const std::byte> local_bytes);

}  // namespace ptc
