// safetensors: u64 length, a JSON header, then the tensors' bytes. No I/O here: bytes ↔ entries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
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

/// A tensor of a new file. Name and shape outlive the call that it is given to.
struct SafetensorsArray {
  std::string_view name;
  DType dtype;
  const Shape* shape;
  /// The name's place in the order of many (name_order.h). Where one is not known none is looked
  /// at.
  static constexpr uint32_t kUnknown = UINT32_MAX;
  uint32_t place = kUnknown;
};
struct SafetensorsLayout {
  std::string header;             // with its 8-byte prefix
  std::vector<uint32_t> order;    // the arrays as they follow each other in the file
  std::vector<uint64_t> offsets;  // by array, in the file
  uint64_t bytes = 0;             // of the file
};
/// Lays tensors out as write_safetensors_header() does. Cost: the text, and sorting by name where
/// the names' places are not known.
Result<SafetensorsLayout> lay_out_safetensors(std::span<const SafetensorsArray> arrays,
                                              const std::map<std::string, std::string>& metadata,
                                              uint64_t align = 4096);

/// Lays tensors out (alignment of the dtype descending, then name, as the reference writer does)
/// and writes the header, padded with spaces so that the data begins at a multiple of `align`
/// bytes. `offset` and `bytes` of the entries are filled in and they are put in file order.
Result<std::string> write_safetensors_header(std::vector<TensorEntry>& tensors,
                                             const std::map<std::string, std::string>& metadata,
                                             uint64_t align = 4096);

/// Bytes of an array; kInvalidArgument on overflow or a sub-byte type that does not fill a byte.
Result<uint64_t> array_bytes(const Shape& shape, DType dtype);

}  // namespace ptc
