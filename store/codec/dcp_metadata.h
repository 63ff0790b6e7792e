// What PyTorch's distributed checkpointing keeps in `.metadata`: which boxes of which tensors lie
// in which of its files (`__0_0.distcp` …), and where. No I/O but of one item's own header.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/codec/torch_path.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// Bytes of one of the checkpoint's files: an archive as torch.save writes it.
struct DcpItem {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t file = kNone;  // number in DcpMetadata::files
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct DcpChunk {
  Box box;       // of the whole tensor
  DcpItem item;  // of an empty box there may be none
};

/// A chunk that is a run of elements of its item's array, which has one axis.
struct DcpRun {
  uint64_t elements = 0;  // of the array
  uint64_t first = 0;     // of it, that the chunk has
};

struct DcpTensor {
  std::string name;  // "model.layers.0.weight": keys joined by dots
  /// Where it was in the nested state, if the planner says so: keys and indices of lists; else
  /// empty.
  std::vector<TorchStep> path;
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<DcpChunk> chunks;  // disjoint, and together all of the tensor
  std::vector<DcpRun> runs;      // by chunk; empty: each is all of its item's array
};

/// A value that is no tensor: a number, a text, any object, as a pickle in an archive of its own.
struct DcpValue {
  std::string name;
  std::vector<TorchStep> path;
  DcpItem item;
};

struct DcpMetadata {
  std::vector<DcpTensor> tensors;  // in the order of the pickle
  std::vector<DcpValue> values;
  std::vector<std::string> files;  // names in the checkpoint's directory
  std::string version;             // "1.0.0"; of torch before 2.6: empty
};

/// Parses a whole `.metadata`. kInvalidArgument, with the tensor's name: it is no such pickle; a
/// tensor whose type is not supported, or whose chunks overlap, do not fill it, lie outside of it,
/// or are too entangled to tell; a chunk or value of which nobody says in which file it is, or that
/// is in two; a file that would not be in the directory; items too short for what they hold, or
/// that overlap in their file; items that a storage extension has transformed (compressed,
/// encrypted). Time: as the pickle's bytes, times the logarithm of a tensor's chunks; one that
/// takes more steps than pickle_walk.h allows is refused. Memory: at most 40 bytes for one and
/// 4 MiB.
Result<DcpMetadata> parse_dcp_metadata(std::string_view bytes);

/// Checks that all items lie within files of these lengths, by number of file. kInvalidArgument
/// names the file.
Result<> check_dcp_files(const DcpMetadata& metadata, std::span<const uint64_t> file_bytes);

/// Where in its file the array of a chunk is: [offset, offset + bytes), from its first element to
/// its last. Not contiguous (it was a transpose): see TorchTensor. Reads the header of the archive
/// that the item is. kInvalidArgument: it is none, or holds something else than that one tensor.
struct DcpArray {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  Dims strides;  // in elements
  bool contiguous = true;
};
Result<DcpArray> find_dcp_array(const ReadAt& file, const DcpItem& item, DType dtype,
                                const Shape& shape);

}  // namespace ptc
