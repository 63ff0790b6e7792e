// A file of torch.save's made of values at paths, where no file that was read is like it: tensors,
// and values out of the pickles of other files.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/codec/pickle.h"
#include "store/codec/torch_layout.h"
#include "store/codec/torch_path.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

struct TorchPathValue {
  std::vector<TorchStep> path = {};  // not empty, but of a pair, or of one that is all
  /// Of a value that is no tensor, and in which there is none: it is this one of this pickle.
  const Pickle* pickle = nullptr;
  PickleId node = 0;
  /// Of a pair whose key is no step of a path: this one of the same pickle. `path` is the dict's,
  /// and may be empty; several pairs may have the same, and who asks sees to it that their keys
  /// differ.
  std::optional<PickleId> key = {};
  bool empty_list = false;  // it is that, and none of the others
  bool is_tensor() const { return pickle == nullptr && !empty_list; }
  // Of a tensor:
  DType dtype = DType::kF32;
  Shape shape = {};
  uint32_t same_as = TorchTensor::kNone;  // a value before it, whose bytes it shares
};

/// Lays out nested dicts, lists and tuples with these values, in the order in which a path first
/// appears; elements of lists and tuples in theirs. `tensors` of the result are by value; of one
/// that is no tensor it is empty. torch.load(mmap=True, weights_only=True) takes the file where it
/// takes the values. kInvalidArgument, with the path: two values at one place, or one below
/// another; a type of tensor that torch has no name for; a list of which an element is missing.
/// Memory: as many bytes as the pickle
/// has, and some hundred for each value.
Result<TorchLayout> compose_torch_file(std::span<const TorchPathValue> values,
                                       std::string_view root = "archive");

}  // namespace ptc
