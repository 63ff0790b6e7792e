// What a file of Megatron-LM's own format says of its model (model_optim_rng.pt, what
// `--ckpt-format torch` writes): a dict with `args`, the argparse.Namespace of the program that
// wrote it, `checkpoint_version`, `iteration`, `model`, `optimizer` and more.
//
// Such a file is its rank's own: layers count from the stage's first, experts from the rank's. Of a
// virtual pipeline it has `model0`, `model1` … in the place of `model`, one for each stretch of
// layers, and in each layers count from its first.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/codec/torch_file.h"

namespace ptc {

struct MegatronFile {
  std::optional<int64_t> iteration;
  std::optional<int64_t> rank;  // `args` say that this process was its writer
  /// Of `args` those that matter to ptcfs and are whole numbers, true as 1: "num_layers" → 24.
  std::map<std::string, int64_t, std::less<>> arguments;
  /// The same as values of the pickle.
  std::vector<std::pair<std::string, PickleId>> nodes;
  std::set<uint32_t> chunks;  // 0 and 1 of model0 and model1, which are stretches of layers
  bool has_model = false;     // there are tensors in `model`
  std::string of_layer;  // the name of a value among a layer's tensors that is neither; empty: none

  std::optional<int64_t> argument(std::string_view name) const;
  /// The size of a dimension, 1 where `args` has none: "tensor_model_parallel_size".
  int64_t size(std::string_view name) const { return argument(name).value_or(1); }
  bool flag(std::string_view name) const { return argument(name).value_or(0) != 0; }

  /// The facts of `args` as the text of a config.json.
  std::string config_text() const;
};

/// The number of "model1"; nullopt: it is no such key.
std::optional<uint32_t> megatron_chunk(std::string_view key);
/// How many bytes "model1." has at the beginning of a name; 0: it does not begin so.
size_t megatron_chunk_bytes(std::string_view name);

/// nullopt: it is another file. Nothing of the Namespace is built; its attributes are read where
/// the pickle has them.
std::optional<MegatronFile> megatron_file(const TorchFile& file);

}  // namespace ptc
