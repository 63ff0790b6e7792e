// Shapes and offsets in the JSON that nodes send each other and manifests keep.
#pragma once

#include <boost/json/array.hpp>
#include <stdexcept>

#include "store/base/json.h"
#include "store/tensor/box.h"

namespace ptc {

inline json::array to_array(const Dims& dims) {
  json::array array;
  for (uint64_t value : dims) array.push_back(value);
  return array;
}

/// Throws, as Boost.JSON does, where it is no list of at most kMaxAxes whole numbers.
inline Dims dims_from(const json::value& value) {
  const json::array& array = value.as_array();
  if (array.size() > kMaxAxes) throw std::out_of_range("too many axes");
  Dims dims;
  for (const json::value& number : array) dims.push_back(number.to_number<uint64_t>());
  return dims;
}

/// The same for both; throws also where these have not as many axes.
inline Box box_from(const json::value& offset, const json::value& extent) {
  Box box{dims_from(offset), dims_from(extent)};
  if (box.offset.size() != box.extent.size())
    throw std::out_of_range("a part has two numbers of axes");
  return box;
}

}  // namespace ptc
