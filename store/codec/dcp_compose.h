// A checkpoint of PyTorch's distributed checkpointing made of tensors and values: its `.metadata`,
// and of its other files all bytes but the tensors' own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/base/error.h"
#include "store/codec/pickle.h"
#include "store/codec/torch_path.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

struct DcpNewTensor {
  std::string name;             // no other's, nor a value's
  std::vector<TorchStep> path;  // where it is in the nested state; empty: under its name
  DType dtype = DType::kF32;    // that torch has a name for
  Shape shape;
  std::vector<Box> chunks;  // disjoint, and together all of it
};

/// What is no tensor.
struct DcpNewValue {
  std::string name;
  std::vector<TorchStep> path;
  std::string archive;  // as torch.save writes it
};

/// Of one file.
struct DcpNewFile {
  std::string name;                      // "__0_0.distcp"
  std::vector<ZipWriter::Piece> pieces;  // by offset, apart from each other
  uint64_t bytes = 0;
};

struct DcpNewCheckpoint {
  struct Place {
    uint32_t file = 0;    // number in `files`
    uint64_t offset = 0;  // of the array, in C order
  };
  std::string metadata;  // of protocol 2; what torch from 2.1 on reads
  std::vector<DcpNewFile> files;
  std::vector<std::vector<Place>> places;  // by tensor and chunk
};

/// `file_bytes`: a file is not begun with more than that in it. kInvalidArgument, with the name: a
/// type that torch has no name for; arrays too large. Memory: some 700 bytes for each chunk.
Result<DcpNewCheckpoint> compose_dcp(std::span<const DcpNewTensor> tensors,
                                     std::span<const DcpNewValue> values, uint64_t file_bytes);

/// A value of a pickle in which there is no tensor, as torch.save writes it.
Result<std::string> save_value(const Pickle& pickle, PickleId node);

}  // namespace ptc
