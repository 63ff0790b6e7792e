// The formats in which ranks write tensors, each behind one interface: what a file holds, and how a
// file of the same kind is laid out for other parts of the tensors.
//
// Of a file that was written an *outline* is kept (headers.bin): all of it but its tensors' bytes,
// or as much as says where these are. Whatever is to be known of the file later follows from that.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/megatron_file.h"
#include "reshard/checkpoint/torch_names.h"
#include "reshard/plan/literals.h"
#include "reshard/ptc/model.h"
#include "store/base/error.h"
#include "store/codec/safetensors.h"
#include "store/codec/zip.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// The tensors of a file.
struct FileTensors {
  std::vector<TensorEntry> tensors;  // arrays in C order, anywhere in the file
  /// By tensor the box that it is of the whole; empty: a layout says that.
  std::vector<Box> boxes;
  /// By tensor: what its file says it is; may be empty. With `boxes`, of each, and whatever the
  /// layout says counts for nothing; else the layout must agree.
  std::vector<std::optional<SaidPart>> said;
  /// By tensor: one before it of which it is another name, or itself; empty: each is itself.
  std::vector<uint32_t> same_as;
  TorchNaming naming;                    // of torch's: what its names are without
  std::optional<MegatronFile> megatron;  // of torch's: what Megatron's says of its model
  bool of_megatron_stage = false;  // names count layers as such a file's do (TensorInfo::by_stage)
  Literals literals;  // bytes of the file that are no tensor's, as far as its reader may see them
  /// What is in neither is not padding but what its writer put there; no reader sees it.
  bool gaps_are_others = false;

  bool is_other_name(size_t tensor) const { return !same_as.empty() && same_as[tensor] != tensor; }
};

/// A file as it was written.
struct FileOutline {
  std::string_view text;
  uint64_t file_bytes = 0;
};

/// An array that a new file shall have. Name and shape outlive it.
struct NewArray {
  std::string_view name;
  DType dtype = DType::kF32;
  const Shape* shape = nullptr;
  uint64_t content = 0;  // two of equal number have equal bytes
  uint32_t place = SafetensorsArray::kUnknown;
};

/// What the `args` of a file of Megatron's shall say.
struct NewArgument {
  std::string name;
  std::optional<int64_t> value;  // nullopt: None
};

/// Of all files of a checkpoint together, replicas counted once: headers.bin is read at every
/// start, and stays in memory.
inline constexpr uint64_t kMostOutlineBytes = uint64_t{512} << 20;
/// Of those on a node that does not lead the commit, which sends them in one message with what they
/// hold, of kMaxCallBytes.
inline constexpr uint64_t kMostOutlineBytesSent = 192 << 20;
/// While a checkpoint is committed, replicas too: so much memory it may take.
inline constexpr uint64_t kMostOutlineBytesRead = uint64_t{1} << 30;

/// Where everything is in a new file.
struct FileLayout {
  Literals literals;
  uint64_t bytes = 0;
  std::vector<uint64_t> offsets;  // by array; of two with equal content it may be the same
  std::vector<uint32_t> order;    // the arrays by offset; may be empty
};

/// Stateless; threads: any.
class FileFormat {
 public:
  virtual ~FileFormat() = default;
  /// What is kept of a file. `declared` is the true type of an array that the format has no name
  /// for. kInvalidArgument: what is wrong with it.
  virtual Result<std::string> outline(const ReadAt& file, uint64_t file_bytes,
                                      std::optional<DType> declared) const = 0;

  /// `path`: below its rank. kInvalidArgument also of tensors that cannot be cut, by name.
  virtual Result<FileTensors> tensors(const FileOutline& outline, std::string_view path,
                                      std::optional<DType> declared) const = 0;

  /// `like`: files of this name that ranks wrote, best first; what they have beside these tensors
  /// the new one gets, too. `arguments`: numbers that are others than in these.
  virtual Result<FileLayout> lay_out(std::span<const NewArray> arrays,
                                     std::span<const FileOutline> like,
                                     std::span<const NewArgument> arguments) const = 0;
  Result<FileLayout> lay_out(std::span<const NewArray> arrays,
                             std::span<const FileOutline> like) const {
    return lay_out(arrays, like, {});
  }
};

/// What a file's name says of its format.
struct FormatRow {
  std::string_view name;
  /// `in_set`: it is a shard.
  bool (*takes)(std::string_view path, bool in_set);
  const FileFormat& (*format)();
  /// Only files of this format end so: one that does holds tensors, or is broken. Empty: its name
  /// says only that it may, or others say what is in it.
  std::string_view ending;
  bool keeps_values = false;  // a new one has what those that ranks wrote have beside tensors
  bool is_one_array = false;  // which is named by the path
};
/// Of a file that holds tensors, or may.
const FormatRow& format_row(std::string_view path, bool in_set);
inline const FileFormat& format_of(std::string_view path, bool in_set) {
  return format_row(path, in_set).format();
}
inline bool keeps_values(std::string_view path) { return format_row(path, false).keeps_values; }
inline bool is_one_array(std::string_view path) { return format_row(path, false).is_one_array; }
/// Whether its name says that it holds tensors.
bool is_named_for_tensors(std::string_view path);
/// Whether a file of this name may be torch.save's with tensors of a model; it may as well be
/// something else. Those of random generators (`rng_state_0.pth`) are not.
bool may_be_torch(std::string_view path);

const FileFormat& safetensors_format();
const FileFormat& npy_format();
/// torch.save's. Values that are no tensors, and states of random generators, are literals. Names
/// are those of torch_path.h without what encloses the model (torch_names.h).
const FileFormat& torch_format();
/// The same outline of a file of torch's, whose names are without this from then on.
std::string with_naming(std::string_view outline, const TorchNaming& naming);
/// A file of which other files say what lies where in it: of PyTorch's distributed checkpointing,
/// where `.metadata` does, and DeepSpeed's. Its outline is a table made of that (dcp_table.h).
const FileFormat& dcp_format();

}  // namespace ptc
