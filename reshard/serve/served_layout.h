// What the workers of an inference engine keep of a model: "vllm-tp8-pp2".
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/ptc/layout.h"
#include "reshard/ptc/model.h"
#include "reshard/serve/engine.h"
#include "store/base/error.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

/// An engine and the sizes that it is started with. Workers are numbered tensor-parallel rank
/// fastest, then stage, then data-parallel rank.
struct ServedLayout {
  const Engine* engine = nullptr;
  uint32_t tp = 1, pp = 1;
  /// Data-parallel ranks, each with an attention of its own and all with a share of the experts.
  uint32_t dp = 1;
  bool expert_parallel = false;  // experts are whole, each on one of tp·dp workers

  /// "vllm-tp8-pp2-dp4-ep": what is behind tp only where it is not the default.
  std::string name() const;
  /// nullopt: no such name. Only as name() has it, so that one layout has one path.
  static std::optional<ServedLayout> from_name(std::string_view name);

  uint32_t workers() const { return tp * pp * dp; }
  /// Whether the engine loads the files of all workers from one directory.
  bool in_one_directory() const { return dp == 1; }
  std::string file_name(uint32_t worker) const;

  LayoutSpec spec(uint32_t layers) const;
  StateCoords state(uint32_t worker) const;
  /// The same with vocabularies padded as the engine pads them. kInvalidArgument: it cannot be cut
  /// so.
  Result<Model> padded(const Model& model) const;
};

/// A parameter, and its name without what it was wrapped in.
struct NamedTensor {
  uint32_t tensor = 0;
  std::string name;
};

/// An array of a worker: parts behind each other, or one float32.
struct ServedArray {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<Model::Held> parts;
  std::optional<float> constant;
};

/// All that a worker keeps, by name. `model` is padded(). kInvalidArgument: a tensor without which
/// an array is not whole, or arrays that do not fit each other, by name.
Result<std::vector<ServedArray>> served_arrays(const ServedLayout& layout,
                                               const Engine::Family& family, const Model& model,
                                               std::span<const NamedTensor> tensors,
                                               uint32_t worker);

}  // namespace ptc
