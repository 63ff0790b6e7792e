// Finds the parameter that a tensor of optimizer state belongs to: the one whose whole name is part
// of the tensor's name, "exp_avg.model.norm.weight", "state.model.norm.weight.step".
#pragma once

#include <array>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <optional>
#include <string_view>

namespace ptc {

/// An index of parameters' names. Cost of a search: one hash look-up for each run of components of
/// the name that has as many components as some parameter.
class ParameterNames {
 public:
  static constexpr size_t kMaxComponents = 64;  // names with more follow nothing

  struct Entry {
    uint32_t parameter = 0;
    size_t dropped = 0;  // bytes of the family's prefix that the indexed name lacks
  };

  /// Adds a parameter under its name and, if `prefix_length` > 0, without its family's prefix. Of
  /// equal names the first whole one stays. `name` must outlive this.
  void add(std::string_view name, size_t prefix_length, uint32_t parameter);

  /// The parameter of exactly this name.
  std::optional<uint32_t> exact(std::string_view name) const;

  /// Calls accept(entry, offset in name) for the parameters whose names lie in `name` between
  /// borders of components; those of most components first, then those furthest to the right; until
  /// it returns true. False: none was accepted.
  template <class Accept>
  bool find(std::string_view name, Accept accept) const {
    std::array<size_t, kMaxComponents + 1> begins;
    size_t count = 0;
    for (size_t begin = 0;;) {
      if (count == kMaxComponents) return false;
      begins[count++] = begin;
      const size_t dot = name.find('.', begin);
      if (dot == std::string_view::npos) break;
      begin = dot + 1;
    }
    begins[count] = name.size() + 1;
    for (size_t length = count; length > 0; --length) {
      if ((component_counts_ >> (length - 1) & 1) == 0) continue;
      for (size_t first = count - length + 1; first-- > 0;) {
        const size_t begin = begins[first];
        const auto found = entries_.find(name.substr(begin, begins[first + length] - 1 - begin));
        if (found != entries_.end() && accept(found->second, begin)) return true;
      }
    }
    return false;
  }

 private:
  void insert(std::string_view name, Entry entry);

  boost::unordered_flat_map<std::string_view, Entry> entries_;
  uint64_t component_counts_ = 0;  // bit n-1: some name has n components
};

}  // namespace ptc
