#include "store/codec/dcp_sharding.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr const char* kInfo = "DCP_SHARDING_INFO";
constexpr const char* kOffsets = "saved_offsets";
constexpr const char* kWhole = "global_shape";

const json::array* array_of(const json::object& info, const TensorEntry& tensor, const char* key) {
  const json::value* entry = info.if_contains(tensor.name);
  const json::value* value =
      entry != nullptr && entry->is_object() ? entry->get_object().if_contains(key) : nullptr;
  return value != nullptr && value->is_array() ? &value->get_array() : nullptr;
}

Result<Box> box_of(const TensorEntry& tensor, const json::object& info) {
  const json::array* offsets = array_of(info, tensor, kOffsets);
  if (offsets == nullptr || offsets->size() != tensor.shape.size())
    return invalid_argument("{} does not say where tensor {}, of {} axes, begins", kInfo,
                            quoted(tensor.name), tensor.shape.size());
  Box box{Dims(tensor.shape.size()), tensor.shape};
  for (size_t axis = 0; axis < box.axes(); ++axis) {
    const std::optional<uint64_t> offset = whole_number((*offsets)[axis]);
    if (!offset || *offset > INT64_MAX - std::min<uint64_t>(tensor.shape[axis], INT64_MAX))
      return invalid_argument("{} of tensor {}: an offset is no number of elements", kInfo,
                              quoted(tensor.name));
    box.offset[axis] = *offset;
  }
  return box;
}

Result<Shape> whole_of(const TensorEntry& tensor, const Box& box, const json::object& info) {
  const json::array* extents = array_of(info, tensor, kWhole);
  if (extents == nullptr || extents->size() != tensor.shape.size())
    return invalid_argument("{} does not say what tensor {}, of {} axes, is part of", kInfo,
                            quoted(tensor.name), tensor.shape.size());
  Shape whole(extents->size());
  for (size_t axis = 0; axis < whole.size(); ++axis) {
    const std::optional<uint64_t> extent = whole_number((*extents)[axis]);
    if (!extent || box.offset[axis] + box.extent[axis] > *extent)
      return invalid_argument("{}: {} of tensor {} does not lie within the whole", kInfo,
                              box.to_string(), quoted(tensor.name));
    whole[axis] = *extent;
  }
  PTC_TRY(array_bytes(whole, tensor.dtype));
  return whole;
}

}  // namespace

Result<std::optional<DcpSharding>> dcp_sharding(const SafetensorsHeader& header) {
  const auto found = header.metadata.find(kInfo);
  if (found == header.metadata.end()) return std::optional<DcpSharding>();
  auto info = parse_json(found->second, {.max_bytes = found->second.size(), .max_depth = 8});
  if (info.has_error()) return std::move(info).error().with_context(kInfo);
  if (!info.value().is_object()) return invalid_argument("{} is no JSON object", kInfo);
  const json::object& of_tensors = info.value().get_object();
  const auto says_whole = [&](const TensorEntry& tensor) {
    return array_of(of_tensors, tensor, kWhole) != nullptr;
  };
  const bool whole = std::any_of(header.tensors.begin(), header.tensors.end(), says_whole);
  DcpSharding sharding;
  for (const TensorEntry& tensor : header.tensors) {
    PTC_TRY(auto box, box_of(tensor, of_tensors));
    if (whole) {
      PTC_TRY(auto shape, whole_of(tensor, box, of_tensors));
      sharding.wholes.push_back(shape);
    }
    sharding.boxes.push_back(std::move(box));
  }
  return std::optional(std::move(sharding));
}

}  // namespace ptc
