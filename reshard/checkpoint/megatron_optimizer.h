// The state of an optimizer by number, as Megatron's files have it, under its parameters' names.
//
// `state` has a number for each parameter, and each of `param_groups` lists those of its own. Which
// parameter has which number follows from the order: groups are numbered one after the other, and
// each has its parameters in the order of the model. What is not decayed (`wd_mult` 0) are biases
// and what has one axis; some versions decay norms of queries and keys. A division is taken only if
// all groups have as many parameters as it gives them, and each has the shape of its state. So
//   optimizer.optimizer.state.3.exp_avg           is  optimizer.optimizer.state.<parameter>.exp_avg
//   optimizer.optimizer.fp32_from_fp16_params.0.2  is  optimizer.fp32_from_fp16_params.<parameter>
// in a checkpoint, and the other way round in the files of each layout. Where experts are cut over
// ranks they have groups of their own (`is_expert_parallel`), in an optimizer of their own: those
// are optimizer.0 and optimizer.1, and each counts from 0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/codec/torch_file.h"
#include "store/codec/torch_path.h"

namespace ptc {

/// The last parameter of the last stage, also where it is the embedding's copy.
inline constexpr std::string_view kMegatronHead = "output_layer.weight";
inline constexpr std::string_view kMegatronEmbedding = "embedding.word_embeddings.weight";

/// Numbers of `names`, a model's of one rank, in the order in which Megatron goes through it: the
/// head is last, also one that is the embedding. Layers and experts are in the order of their
/// numbers, where the first of them is.
std::vector<uint32_t> megatron_order(std::span<const std::string_view> names);

/// Whether the optimizer has it, as far as its name and type tell.
bool is_megatron_parameter(std::string_view name, DType dtype);
/// Of a rank's own, not of those that all tokens go through.
bool is_megatron_expert(std::string_view name);
/// "decoder.layers.#.w" of all layers and stretches of layers.
std::string megatron_kind(std::string_view name);
/// What is known of a parameter's kind, or else, of the embedding and the head, of the other one of
/// them, which may be the same tensor; nullptr: neither.
template <class Known>
const Known* find_megatron_kind(const std::unordered_map<std::string, Known>& by_kind,
                                std::string_view parameter) {
  std::string kind = megatron_kind(parameter);
  if (const auto found = by_kind.find(kind); found != by_kind.end()) return &found->second;
  for (const auto& [own, other] : {std::pair(kMegatronHead, kMegatronEmbedding),
                                   std::pair(kMegatronEmbedding, kMegatronHead)}) {
    if (!parameter.ends_with(own)) continue;
    kind.replace(kind.size() - own.size(), own.size(), other);
    if (const auto found = by_kind.find(kind); found != by_kind.end()) return &found->second;
  }
  return nullptr;
}

/// An array that is in a file, or shall be.
struct MegatronArray {
  std::string_view name;  // in a checkpoint
  DType dtype = DType::kF32;
  std::span<const uint64_t> shape;
};

class MegatronOptimizer {
 public:
  /// `arrays` are those of the model in their order, of `file`; each is number `numbers[i]` of its
  /// tensors. nullopt: it has no state by number. kInvalidArgument: whose it is cannot be told.
  static Result<std::optional<MegatronOptimizer>> find(const TorchFile& file,
                                                       std::span<const MegatronArray> arrays,
                                                       std::span<const uint32_t> numbers);
  /// The name of `arrays[i]`, if it is state by number.
  const std::optional<std::string>& name(size_t array) const;

  /// Where they belong in a file that has exactly `arrays` (in the model's order: by stretch of
  /// layers, where there are several), with groups as
  /// this one: by array; empty: it is no state of the optimizer's.
  struct Places {
    std::vector<std::vector<TorchStep>> paths;
    /// The path of each group's `params`, and the numbers that it has.
    std::vector<std::pair<std::vector<TorchStep>, std::vector<int64_t>>> groups;
    std::vector<std::vector<TorchStep>> empty_lists;  // of groups without master copies
  };
  /// kInvalidArgument: a parameter's group is not known.
  Result<Places> places(std::span<const MegatronArray> arrays) const;
  /// Also knows the groups of the parameters of another file of the checkpoint.
  void add(const MegatronOptimizer& other);

 private:
  class Finder;
  struct GroupId {
    uint32_t unit, group;
  };
  /// What of a name is the parameter's, and the kind of state (empty: a master copy).
  struct State {
    uint32_t unit;
    std::string_view parameter, kind;
  };
  std::optional<State> state_of(std::string_view name) const;

  /// One optimizer.
  struct Unit {
    std::vector<TorchStep> path;    // the dict with `state` and `param_groups`
    std::vector<TorchStep> copies;  // the list of groups of master copies; empty: there are none
    std::string state_prefix, copies_prefix;  // of names: "optimizer.optimizer.state."
    size_t groups = 0;
  };
  std::vector<Unit> units_;
  std::unordered_map<std::string, GroupId> group_of_;  // by name without chunk and numbers
  std::vector<std::optional<std::string>> names_;      // by array
};

}  // namespace ptc
