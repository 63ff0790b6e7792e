// Weights that are kept quantised, in several tensors: how tp cuts each of these.
//
// A weight's axis that tp cuts runs along one axis of each of its tensors, or along none. The
// longest of these is the measure: what a rank has of it, its rule says, and it has the same share
// of the others. They keep the elements in words or in groups, which no cut goes through.

#include <algorithm>

#include "reshard/ptc/model.h"
#include "reshard/ptc/tp_sizes.h"

namespace ptc {
namespace {

constexpr uint32_t kMostTried = 64;  // of tp, to say which would do

}  // namespace

std::string tp_that_fits(const std::function<bool(uint32_t rank, uint32_t ranks)>& fits) {
  std::vector<uint32_t> would_do;
  for (uint32_t ranks = 2; ranks <= kMostTried; ++ranks)
    if (fits(0, ranks) && fits(ranks - 1, ranks)) would_do.push_back(ranks);
  if (would_do.empty()) return "no tp but 1 would do";
  return fmt::format("tp = {} would do", fmt::join(would_do, ", "));
}

/// The axis of the tensor that runs along the weight's axis that tp cuts.
std::optional<uint32_t> Model::own_axis(uint32_t tensor) const {
  const Bound& bound = bound_[tensor];
  if (bound.cut == kNone) return std::nullopt;
  const uint32_t axis = bound.rule->cut->axis;
  if (bound.part_of == nullptr) return axis;
  const Shape& shape = tensors_[tensor].shape;
  const bool inputs = axis == (bound.rule->inputs_first ? 0 : 1);
  std::optional<uint32_t> own;
  switch (bound.part_of->axes) {
    case QuantisedPart::Axes::kWeight:
      if (shape.size() != 1) {
        own = axis;
      } else if (!bound.rule->expert_axis && (!inputs || bound.rule->cut->vocab_multiple)) {
        own = 0;  // one for each output, or of a vocabulary
      }
      break;
    case QuantisedPart::Axes::kInOut:
      own = inputs ? 0 : 1;
      break;
    case QuantisedPart::Axes::kIn:
      if (inputs) own = 0;
      break;
    case QuantisedPart::Axes::kOne:
    case QuantisedPart::Axes::kHeads:  // of more it is no part: bind_quantised()
    case QuantisedPart::Axes::kWhole:
      break;
  }
  if (!own || *own >= shape.size()) return std::nullopt;
  return own;
}

/// Whether one element on this axis is of all elements of the weight: a scale of all, but no word
/// that they are packed in. Zeros are packed along the outputs.
bool Model::may_be_for_all(uint32_t tensor, uint32_t axis) const {
  const Bound& bound = bound_[tensor];
  if (bound.part_of == nullptr || !bound.part_of->groups || tensors_[tensor].shape[axis] != 1)
    return false;
  const bool inputs = bound.rule->cut->axis == (bound.rule->inputs_first ? 0 : 1);
  const DType dtype = tensors_[tensor].dtype;
  return inputs || (dtype != DType::kI32 && dtype != DType::kU32);
}

/// The axis of the tensor that tp cuts; nullopt: all ranks have all of it.
std::optional<uint32_t> Model::tp_axis(uint32_t tensor) const {
  const auto axis = own_axis(tensor);
  return axis && !may_be_for_all(tensor, *axis) ? axis : std::nullopt;
}

/// How long the axis that tp cuts is in the longest tensor of the weight that this one is part of.
uint64_t Model::weight_extent(uint32_t tensor) const {
  uint64_t longest = 0;
  for (const uint32_t each : weights_[bound_[tensor].weight]) {
    const auto axis = tp_axis(each);
    const Shape& shape = tensors_[each].shape;
    if (axis && *axis < shape.size()) longest = std::max(longest, shape[*axis]);
  }
  return longest;
}

/// Which other numbers of ranks cut all tensors of the weight.
std::string Model::tp_that_would_do(uint32_t tensor) const {
  const uint64_t extent = weight_extent(tensor);
  return tp_that_fits([&](uint32_t rank, uint32_t ranks) {
    const auto fits = [&](uint32_t each) {
      const auto axis = tp_axis(each);
      if (!axis) return true;
      const auto unit = unit_of(extent, tensors_[each].shape[*axis]);
      const auto slice = tp_slice(each, extent, rank, ranks);
      return slice && unit && slice_of_units(slice.value(), extent, *unit);
    };
    const std::vector<uint32_t>& tensors = weights_[bound_[tensor].weight];
    return std::all_of(tensors.begin(), tensors.end(), fits);
  });
}

Result<> Model::cut_quantised(SubTensor& part, uint32_t tensor, uint32_t rank,
                              uint32_t ranks) const {
  const auto axis = tp_axis(tensor);
  if (!axis) return ok();
  const uint64_t extent = weight_extent(tensor);
  const uint64_t own = tensors_[tensor].shape[*axis];
  PTC_TRY(const AxisSlice weight, tp_slice(tensor, extent, rank, ranks));
  const auto unit = unit_of(extent, own);
  // On one axis alone there is one for each output; else it is of what was fused.
  if (!unit || (own != extent && tensors_[tensor].shape.size() == 1)) {
    return invalid_argument(
        "its axis {} has {} elements, which are no words or groups of the {} of its weight", *axis,
        own, extent);
  }
  const auto slice = slice_of_units(weight, extent, *unit);
  if (!slice) {
    return invalid_argument(
        "tp = {} gives a rank {} of the {} elements that its weight has on the axis that is cut, "
        "and {} of them are one {} here that cannot be cut; {}",
        ranks, weight.local_extent, extent, unit->elements,
        bound_[tensor].part_of->groups ? "group" : "packed word", tp_that_would_do(tensor));
  }
  cut_axis(part, *axis, *slice);
  return ok();
}

}  // namespace ptc
