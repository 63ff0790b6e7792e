// What a rank holds of each tensor, said once more: element by element, straight from what tensor,
// expert, pipeline and data parallelism mean for each family. Knows neither rules nor slices.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "reshard/ptc/model.h"

namespace ptc::testing {

class SlowOracle {
 public:
  /// `numbers`: hidden, heads, kv_heads, head_dim, layers, experts, tied, head, gated,
  /// attention_gate (0, 1); DeepSeek's nope, rope, value; Mamba's mamba_heads, mamba_head_dim,
  /// mamba_groups, mamba_state.
  SlowOracle() = default;
  SlowOracle(std::string family, std::map<std::string, uint64_t> numbers)
      : family_(std::move(family)), numbers_(std::move(numbers)) {}

  /// A local array: its shape, and the global number (C order) of each of its elements; nullopt is
  /// padding.
  struct Held {
    std::vector<uint64_t> shape;
    std::vector<std::optional<uint64_t>> elements;
  };
  /// Where Megatron-Core puts a rank, by its order tp-cp-ep-dp-pp: one count for experts, and one
  /// for all else.
  static RankCoords place(const LayoutSpec& spec, uint64_t global_rank);
  /// Among how many ranks state is dealt out that is cut over dp, of experts or of all else, and
  /// how many of these come before `rank`, by their global ranks.
  struct Share {
    uint64_t before = 0, ranks = 0;
  };
  static Share share_of(const LayoutSpec& spec, const RankCoords& rank, bool experts);
  /// nullopt: the rank does not hold the tensor. Names of optimizer state are those that
  /// optimizer_tensors() makes.
  std::optional<Held> held(const std::string& name, const Shape& shape, const LayoutSpec& spec,
                           const RankCoords& rank) const;
  /// The same of one rank and many tensors: two layers of a stage hold the same of tensors of one
  /// shape.
  class OfRank {
   public:
    OfRank(const SlowOracle& oracle, const LayoutSpec& spec, const RankCoords& rank)
        : oracle_(oracle), spec_(spec), rank_(rank) {}
    /// nullptr: nothing; else valid until the next call.
    const Held* held(const std::string& name, const Shape& shape);

   private:
    const SlowOracle& oracle_;
    const LayoutSpec& spec_;
    const RankCoords rank_;
    std::map<uint64_t, bool> on_stage_;                    // by layer
    std::map<std::string, std::pair<Shape, Held>> known_;  // by the name without the layer's number
    std::optional<Held> last_;
  };

  /// The name in the files of a stage.
  std::string local_name(const std::string& name, const LayoutSpec& spec, uint32_t stage) const;

  const std::string& family() const { return family_; }
  uint64_t number(const std::string& name) const { return numbers_.at(name); }

 private:
  using AxisIndices = std::vector<std::optional<uint64_t>>;
  std::vector<uint64_t> layers_of_stages(const LayoutSpec& spec) const;
  bool on_stage(const std::string& name, const LayoutSpec& spec, uint32_t stage) const;
  /// The axis that tp cuts of a model's own tensor; nullopt: none.
  std::optional<size_t> cut_axis(const std::string& name) const;
  bool holds(const std::string& name, uint64_t index, uint64_t extent, uint32_t rank,
             uint32_t ranks) const;
  std::vector<AxisIndices> axes(const std::string& parameter, const Shape& shape,
                                const LayoutSpec& spec, const RankCoords& rank) const;

  std::string family_;
  std::map<std::string, uint64_t> numbers_;
};

}  // namespace ptc::testing
