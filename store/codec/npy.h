// NumPy's .npy: magic, version, a Python dict literal, then the array. No I/O here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "store/base/error.h"
#include "store/codec/safetensors.h"

namespace ptc {

/// Most header bytes that parse_npy may need.
inline constexpr uint64_t kMaxNpyHeaderBytes = 64 << 10;

/// Parses the first min(file_bytes, kMaxNpyHeaderBytes) bytes of a file of `file_bytes`. The entry
/// has an empty name. The dict is read by a grammar and never evaluated. Refused, with the reason:
/// object arrays, big-endian, structured and string types, Fortran order (of two axes and more),
/// a size that is not the file's. `declared` is the true type of an array that NumPy has no name
/// for (the user attribute user.ptc.dtype says it); its elements must have the size of the file's.
Result<TensorEntry> parse_npy(std::span<const std::byte> prefix, uint64_t file_bytes,
                              std::optional<DType> declared = {});

/// Version 1.0 header, padded to a multiple of 64. Sub-byte types are written as the bytes they are
/// packed in: with the last axis counted in bytes if it fills whole ones, else flat.
std::string write_npy_header(DType dtype, const Shape& shape);

}  // namespace ptc
