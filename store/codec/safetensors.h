// safetensors: u64 length, a JSON header, then the tensors' bytes. No I/O here: bytes ↔ entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// One tensor of a file: its array is the bytes [offset, offset + bytes) of the *file*.
struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;             // by offset
  std::map<std::string, std::string> metadata;  // "__metadata__"
  uint64_t data_offset = 0;                     // length of the header with its 8-byte prefix
};

/// Bytes of the file that parse_safetensors needs, from the first 8. Checked against the file's
/// size and the format's limit of 100 000 000.
Result<uint64_t> safetensors_header_bytes(std::span<const std::byte> first_8_bytes,
                                          uint64_t file_bytes);

/// Parses `header`, the first safetensors_header_bytes() bytes of a file of `file_bytes`. Believes
/// nothing: overlaps, holes, a data end that is not the file's end, duplicate names, unknown dtypes
/// and shapes that do not multiply to the bytes are kInvalidArgument, named.
Result<SafetensorsHeader> parse_safetensors(std::span<const std::byte> header, uint64_t file_bytes);

/// The order of data in new files, in which write_safetensors_header() sorts: wide types first,
/// then by name.
bool comes_before_in_safetensors(DType a, std::string_view name_a, DType b,
                                 std::string_view name_b);

/// Lays tensors out (alignment of the dtype descending, then name, as the reference writer does)
/// and writes the header, padded with spaces so that the data begins at a multiple of `align`
/// bytes. `offset` and `bytes` of the entries are filled in and they are put in file order.
Result<std::string> write_safetensors_header(std::vector<TensorEntry>& tensors,
                                             const std::map<std::string, std::string>& metadata,
                                             uint64_t align = 4096);

/// Bytes of an array; kInvalidArgument on overflow or a sub-byte type that does not fill a byte.
Result<uint64_t> array_bytes(const Shape& shape, DType dtype);

}  // namespace ptc
