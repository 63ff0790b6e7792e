// What Megatron-Core's distributed checkpointing (`--ckpt-format torch_dist`) writes otherwise than
// a model has it. All layers of a kind are one tensor there, with an axis for the layers before all
// others (`decoder.layers.mlp.linear_fc2.weight`), where it does not number them in names; and a
// vocabulary is padded as for the writer's tensor parallelism.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/checkpoint/megatron_file.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// Beside a `.metadata`: a file of torch.save's with the values that are the same on all ranks,
/// `args` among them if Megatron-LM wrote it.
inline constexpr std::string_view kTorchDistCommon = "common.pt";

struct TorchDistTensor {
  std::string_view name;
  DType dtype = DType::kF32;
  const Shape* shape = nullptr;
};

/// How one of them is taken.
struct TorchDistPart {
  /// It is the stack of all layers' tensors: where in its name a layer's number belongs.
  std::optional<size_t> layer_at;
  /// Only so many rows of it: the others are padding that a single rank has not.
  std::optional<uint64_t> rows;

  /// "decoder.layers.mlp.linear_fc2.weight" → "decoder.layers.3.mlp.linear_fc2.weight".
  std::string name_of(std::string_view name, uint64_t layer) const;
};

/// By tensor, for those of one `.metadata`. A stack is what a rule of Megatron's knows as a
/// layer's if its name had a number, and what is named after such a parameter and has its shape
/// (`optimizer.state.exp_avg.<parameter>`). Where not all of them have as many layers, one has no
/// element or more layers than any model, or a name with a number would be there twice, none is
/// one. `said`: what common.pt says, if anything.
std::vector<TorchDistPart> torch_dist_parts(std::span<const TorchDistTensor> tensors,
                                            const MegatronFile* said);

}  // namespace ptc
