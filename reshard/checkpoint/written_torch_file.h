// A file of torch.save's as it is kept: its outline, and what is read out of that.
//
// An outline is the file without its tensors' bytes, as text: a magic text, the number of pieces,
// of each its offset and length, then their bytes. Before that there may be a TorchNaming, which
// files of one name that several ranks wrote have in common, or which has a key above the model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reshard/checkpoint/file_format.h"
#include "reshard/checkpoint/megatron_file.h"
#include "reshard/checkpoint/megatron_optimizer.h"
#include "reshard/checkpoint/torch_names.h"
#include "reshard/plan/literals.h"
#include "store/base/error.h"
#include "store/codec/torch_file.h"
#include "store/codec/torch_layout.h"

namespace ptc {

struct TorchOutlineRange {
  uint64_t begin, end;
};
/// The outline of a file of which `bytes` lie at these places, one behind the other.
std::string torch_outline(const std::vector<TorchOutlineRange>& ranges, std::string_view bytes);
/// That of a file of which these bytes are not kept, as no others lie among them. kInvalidArgument:
/// too many others.
Result<std::string> read_torch_outline(const ReadAt& read, uint64_t file_bytes,
                                       std::vector<TorchOutlineRange> arrays);
/// Removes what is before the pieces of an outline. nullopt: its names are by that file alone.
/// kCorrupt: it is none.
Result<std::optional<TorchNaming>> take_torch_naming(std::string_view& text);
/// kCorrupt: it is no outline.
Result<Literals> torch_literals(const FileOutline& outline);
/// The file that they are of, with zeros for what they are without.
ReadAt read_torch_literals(const Literals& literals);

/// The tensors of a file that are a model's, and not its rank's own.
struct TorchModelTensors {
  std::vector<uint32_t> numbers;        // in TorchFile::tensors()
  std::vector<std::string_view> names;  // in the same order, in that file's own
  TorchNaming naming;
  std::optional<MegatronFile> megatron;
  std::optional<MegatronOptimizer> optimizer;  // of such a file, whose names are in it
};
/// `as`: how they are named; else each is by what this file has. `written_now`: no outline of it
/// was kept before that says how. kInvalidArgument: of state by number it cannot be told whose it
/// is.
Result<TorchModelTensors> torch_model_tensors(const TorchFile& file,
                                              const std::optional<TorchNaming>& as,
                                              bool written_now = false);

/// One that a new file shall be like.
class WrittenTorchFile {
 public:
  /// `arguments`: what its `args` say from now on, where they say anything of that.
  static Result<std::shared_ptr<const WrittenTorchFile>> read(
      const FileOutline& outline, std::span<const NewArgument> arguments = {});
  const TorchFile& file() const { return file_; }
  const TorchModelTensors& model() const { return model_; }

  bool has_exactly(std::span<const NewArray> arrays) const;
  /// Of what is no tensor of the model.
  Result<std::string> bytes(uint64_t offset, uint64_t count) const;

 private:
  WrittenTorchFile(Literals literals, TorchFile file, TorchModelTensors model)
      : literals_(std::move(literals)), file_(std::move(file)), model_(std::move(model)) {}
  const Literals literals_;
  const TorchFile file_;
  const TorchModelTensors model_;
};
using WrittenTorchFileRef = std::shared_ptr<const WrittenTorchFile>;

/// Bytes that `made` wants at places of a file, of `literals` and of the archive's own.
FileLayout finish_torch_layout(TorchLayout made, std::vector<uint64_t> offsets,
                               std::vector<Literals::Piece> literals);

}  // namespace ptc
