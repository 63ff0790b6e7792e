// Element types, under the names safetensors gives them.
#pragma once

#include <cstdint>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// Persisted by name, never by number.
enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
  kF4,
  kF6E2M3,
  kF6E3M2,
};

/// "BF16" …; an unknown name is kInvalidArgument.
Result<DType> parse_dtype(std::string_view name);
std::string_view dtype_name(DType dtype);

/// Bits of one element: 1 … 64; F4 has 4, F6 has 6. BOOL takes 8.
uint32_t dtype_bits(DType dtype);

/// NumPy's type string: "<f4"; "|V2" for types that NumPy does not know (bf16, float8 …).
std::string_view dtype_npy_descr(DType dtype);
/// Of "<f4"; "|V2" and "<V2" are read as BF16, the type that is written so by ml_dtypes.
Result<DType> dtype_of_npy_descr(std::string_view descr);

}  // namespace ptc
