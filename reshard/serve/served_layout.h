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

/// A part of a worker, as a state of a layout has it.
struct ServedState {
  LayoutSpec spec;
  StateCoords state;
};

/// An engine and the sizes that it is started with. Workers are numbered tensor-parallel rank
/// fastest, then stage, then data-parallel rank where that is beside tp.
struct ServedLayout {
  const Engine* engine = nullptr;
  uint32_t tp = 1, pp = 1;
  /// Data-parallel ranks, each with an attention of its own: beside tp, or groups of tp's workers
  /// (Engine::Sizes).
  uint32_t dp = 1;
  uint32_t ep = 1;  // ranks that have their own experts; beside tp: 1, or all workers of a stage

  /// "vllm-tp8-pp2-dp4-ep", "sglang-tp8-pp2-dp4-ep8": what is behind tp only where it is not the
  /// default.
  std::string name() const;
  /// Whether it begins with an engine's name and "-", as no other layout's does.
  static bool is_name(std::string_view name);
  /// kInvalidArgument says what is wrong with the name, or which sizes do not go together. Only as
  /// name() has it, so that one layout has one path.
  static Result<ServedLayout> parse(std::string_view name);
  /// The same without the reason.
  static std::optional<ServedLayout> from_name(std::string_view name);

  bool dp_within_tp() const { return engine->sizes() == Engine::Sizes::kWithinTp; }
  uint32_t workers() const { return tp * pp * (dp_within_tp() ? 1 : dp); }
  /// Whether the engine loads the files of all workers from one directory.
  bool in_one_directory() const {
    return dp_within_tp() ? pp == 1 || engine->has_stage_files() : dp == 1;
  }
  std::string file_name(uint32_t worker) const;

  LayoutSpec spec(uint32_t layers) const;
  StateCoords state(uint32_t worker) const;
  /// What a worker has as one of its group of data-parallel attention; the same as above where no
  /// group is smaller than tp.
  ServedState attention(uint32_t layers, uint32_t worker) const;
  uint32_t attention_tp() const { return dp_within_tp() ? tp / dp : tp; }
  /// The same with vocabularies padded as the engine pads them that `ranks` workers share.
  /// kInvalidArgument: it cannot be cut so.
  Result<Model> padded(const Model& model, uint32_t ranks) const;
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

/// A model as an engine's workers cut it; immutable.
struct ServedModel {
  ServedLayout layout;
  Engine::Family family;  // with what the engine adds for quantised weights
  Model model;            // padded() for tp
  Model attention;        // padded() for attention_tp()
  std::vector<NamedTensor> tensors;

  /// kInvalidArgument: the engine has no place for such a model, or it cannot be cut so.
  static Result<ServedModel> make(const ServedLayout& layout, Engine::Family family,
                                  const Model& model, std::vector<NamedTensor> tensors);
};

/// All that a worker keeps, by name. kInvalidArgument: a tensor without which an array is not
/// whole, or arrays that do not fit each other, by name.
Result<std::vector<ServedArray>> served_arrays(const ServedModel& model, uint32_t worker);

}  // namespace ptc
