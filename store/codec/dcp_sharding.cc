#include "store/codec/dcp_sharding.h"

#include <boost/json/array.hpp>
#include <boost/json/object.hpp>

#include "store/base/json.h"

namespace ptc {
namespace {

constexpr const char* kInfo = "DCP_SHARDING_INFO";
constexpr const char* kOffsets = "saved_offsets";

Result<Box> box_of(const TensorEntry& tensor, const json::object& info) {
  const json::value* entry = info.if_contains(tensor.name);
  const json::value* offsets =
      entry != nullptr && entry->is_object() ? entry->get_object().if_contains(kOffsets) : nullptr;
  if (offsets == nullptr || !offsets->is_array() ||
      offsets->get_array().size() != tensor.shape.size())
    return invalid_argument("{} does not say where tensor {}, of {} axes, begins", kInfo,
                            quoted(tensor.name), tensor.shape.size());
  Box box{Dims(tensor.shape.size()), tensor.shape};
  for (size_t axis = 0; axis < box.axes(); ++axis) {
    const std::optional<uint64_t> offset = whole_number(offsets->get_array()[axis]);
    if (!offset || *offset > INT64_MAX - std::min<uint64_t>(tensor.shape[axis], INT64_MAX))
      return invalid_argument("{} of tensor {}: an offset is no number of elements", kInfo,
                              quoted(tensor.name));
    box.offset[axis] = *offset;
  }
  return box;
}

}  // namespace

Result<std::optional<std::vector<Box>>> dcp_boxes(const SafetensorsHeader& header) {
  const auto found = header.metadata.find(kInfo);
  if (found == header.metadata.end()) return std::optional<std::vector<Box>>();
  auto info = parse_json(found->second, {.max_bytes = found->second.size(), .max_depth = 8});
  if (info.has_error()) return std::move(info).error().with_context(kInfo);
  if (!info.value().is_object()) return invalid_argument("{} is no JSON object", kInfo);
  std::vector<Box> boxes;
  for (const TensorEntry& tensor : header.tensors) {
    PTC_TRY(auto box, box_of(tensor, info.value().get_object()));
    boxes.push_back(std::move(box));
  }
  return std::optional(std::move(boxes));
}

}  // namespace ptc
