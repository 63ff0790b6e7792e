// A file of torch.save's made anew with tensors of other shapes: everything else in it stays what
// it was.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/codec/torch_file.h"
#include "store/codec/zip.h"

namespace ptc {

/// What is to be in the place of a tensor of the file.
struct TorchNewTensor {
  Shape shape;
  /// Shares the bytes of this tensor, which comes before it and has the same type and shape (tied
  /// weights).
  uint32_t same_as = TorchTensor::kNone;
  /// Of a DTensor: leaves a plain tensor, instead of the DTensor with what it said of mesh and
  /// placements.
  bool plain = false;
  uint32_t crc32 = 0;  // of its bytes, for who checks; torch does not
};

/// The tensors as they are; those that are the same elements of the same storage share their bytes.
std::vector<TorchNewTensor> same_tensors(const TorchFile& file);

struct TorchLayout {
  struct Place {
    uint64_t offset = 0, bytes = 0;
  };
  /// Bytes that are in no tensor's place, as they are in the file that was read.
  struct Copy {
    uint64_t offset = 0, bytes = 0, source_offset = 0;
  };
  ZipWriter::Layout zip;       // all bytes but those of tensors and copies
  std::vector<Place> tensors;  // by tensor of the file: where its bytes belong, in C order
  std::vector<Copy> copies;    // storages of what is opaque
};

/// Lays out a file in which tensor number i is as `tensors[i]` says: contiguous, in a storage of
/// its own, at a multiple of 64. torch.load(mmap=True, weights_only=True) takes it if it took the
/// file that was read. kInvalidArgument: not one for each tensor; two names of one tensor that
/// shall differ; a tensor shares the bytes of one that is not like it; a storage of what is opaque
/// that is not in the file, compressed, or not named as torch does; more than 2^63 bytes. torch
/// reads where the storages are, and does not compute it (calculate_storage_offsets), because the
/// records that would say so are left out.
Result<TorchLayout> lay_out_torch_file(const TorchFile& file,
                                       std::span<const TorchNewTensor> tensors,
                                       std::string_view root = "archive");

}  // namespace ptc
