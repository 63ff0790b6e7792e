// What a rank holds of each tensor, said once more: element by element, straight from what tensor,
// expert and pipeline parallelism mean for each family. Knows neither rules nor slices.
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
  /// `numbers`: hidden, heads, kv_heads, head_dim, intermediate, moe_intermediate, vocab, layers,
  /// experts, tied (0, 1), and DeepSeek's nope, rope, value.
  SlowOracle(std::string family, std::map<std::string, uint64_t> numbers)
      : family_(std::move(family)), numbers_(std::move(numbers)) {}

  /// Along every axis of the local array: the global index of each place, or nullopt where there is
  /// padding. No axes' lists at all: the rank does not hold the tensor.
  using AxisIndices = std::vector<std::optional<uint64_t>>;
  std::optional<std::vector<AxisIndices>> held(const std::string& parameter, const Shape& shape,
                                               const LayoutSpec& spec,
                                               const StateCoords& state) const;

 private:
  uint64_t number(const std::string& name) const { return numbers_.at(name); }
  bool on_stage(const std::string& name, const LayoutSpec& spec, uint32_t stage) const;
  /// The axis that tp cuts; nullopt: none.
  std::optional<size_t> cut_axis(const std::string& name) const;
  bool holds(const std::string& name, uint64_t index, uint64_t extent, uint32_t rank,
             uint32_t ranks) const;

  std::string family_;
  std::map<std::string, uint64_t> numbers_;
};

}  // namespace ptc::testing
