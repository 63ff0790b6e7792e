// What DeepSpeed writes with torch.save: ZeRO's files of optimizer state, those of the model beside
// them, and the files of a universal folder. Read as data, by offsets (store/codec/torch_file.h);
// how the ranks' files fit together is not known here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// Elements that follow each other in a file.
struct FlatArray {
  DType dtype = DType::kF32;
  uint64_t offset = 0;  // in the file
  uint64_t elements = 0;
};

/// What is no tensor of a parameter: its exact path (torch_path.h), and an archive of torch.save's.
using DeepSpeedValues = std::vector<std::pair<std::string, std::string>>;

/// What one data-parallel rank has of parameters (`…_optim_states.pt`).
struct ZeroFile {
  /// Of stages 1 and 2 a run of the group's parameters behind each other; of stage 3 of each
  /// parameter a part, padded.
  bool of_stage_3 = false;
  struct Slice {
    std::string parameter;
    uint64_t begin = 0, elements = 0;  // in the flat array
  };
  /// Parameters that are one flat array; of stage 3 a sub-group.
  struct Group {
    FlatArray master;
    std::vector<std::pair<std::string, FlatArray>> state;  // "exp_avg" …
    std::optional<uint64_t> padding;           // elements of this rank's part that are none
    std::vector<uint64_t> gaps;                // behind each parameter; empty: none
    std::optional<uint64_t> partitions;        // how many ranks have a part
    std::optional<std::vector<Slice>> slices;  // which parameters are here, where it says so
  };
  std::vector<Group> groups;
  DeepSpeedValues values;

  /// kInvalidArgument: it is no such file, or has tensors of which it cannot be told whose they
  /// are.
  static Result<ZeroFile> read(const ReadAt& file, uint64_t file_bytes);
};

/// What the model's file (`…_model_states.pt`) says of all parameters, and of those that are in no
/// optimizer's file.
struct DeepSpeedModel {
  using Shapes = std::vector<std::pair<std::string, Shape>>;
  std::vector<Shapes> groups;  // as those of ZeroFile, each in its order
  Shapes frozen;               // parameters that are not trained
  /// Of those what is here: all of stages 1 and 2, of stage 3 a part, padded.
  std::vector<std::pair<std::string, FlatArray>> frozen_parts;
  struct Buffer {
    std::string name;
    Shape shape;
    FlatArray array;
  };
  std::vector<Buffer> buffers;
  std::optional<uint64_t> model_parallel;  // how many ranks share the model, tp and pp
  DeepSpeedValues values;                  // all else that is no tensor, if that is asked for

  /// kInvalidArgument: it is no such file.
  static Result<DeepSpeedModel> read(const ReadAt& file, uint64_t file_bytes, bool with_values);
};

/// `zero/<parameter>/<state>.pt` of a universal folder: one tensor, alone or as "param" of a dict.
struct UniversalState {
  std::optional<FlatArray> array;  // nullopt: a value, as the number of steps may be
  Shape shape;
  std::string number;      // the array as an archive, where it is one element and alone
  DeepSpeedValues values;  // what is beside it, or all

  /// kInvalidArgument: it has more tensors than one, or one that is not contiguous.
  static Result<UniversalState> read(const ReadAt& file, uint64_t file_bytes);
};

}  // namespace ptc
