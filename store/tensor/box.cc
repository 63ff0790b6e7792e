#include "store/tensor/box.h"

#include <fmt/format.h>

#include <algorithm>

namespace ptc {

Dims::Dims(std::initializer_list<uint64_t> values) {
  for (uint64_t value : values) push_back(value);
}

Dims::Dims(size_t size, uint64_t value) {
  PTC_CHECK(size <= kMaxAxes);
  std::fill_n(values_.begin(), size, value);
  size_ = static_cast<uint8_t>(size);
}

void Dims::push_back(uint64_t value) {
  PTC_CHECK(size_ < kMaxAxes);
  values_[size_++] = value;
}

bool operator==(const Dims& a, const Dims& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

std::string Dims::to_string() const { return fmt::format("[{}]", fmt::join(begin(), end(), ", ")); }

Result<uint64_t> num_elements(const Shape& shape) {
  // A zero does not excuse the other counts: strides are computed from them.
  uint64_t nonzero_product = 1;
  bool any_zero = false;
  for (uint64_t count : shape) {
    any_zero |= count == 0;
    if (count != 0 && __builtin_mul_overflow(nonzero_product, count, &nonzero_product))
      return invalid_argument("shape {} has more than 2^64 elements", shape.to_string());
  }
  return any_zero ? 0 : nonzero_product;
}

Result<uint64_t> num_bits(const Shape& shape, uint32_t element_bits) {
  PTC_TRY(auto elements, num_elements(shape));
  uint64_t bits = 0;
  if (__builtin_mul_overflow(elements, element_bits, &bits))
    return invalid_argument("shape {} of {}-bit elements is larger than 2^61 bytes",
                            shape.to_string(), element_bits);
  return bits;
}

Box Box::whole(const Shape& shape) { return {Dims(shape.size()), shape}; }

bool Box::empty() const { return std::find(extent.begin(), extent.end(), 0) != extent.end(); }

uint64_t Box::volume() const {
  uint64_t product = 1;
  for (uint64_t count : extent) product *= count;
  return product;
}

std::string Box::to_string() const {
  std::string text = "[";
  for (size_t axis = 0; axis < axes(); ++axis) {
    fmt::format_to(std::back_inserter(text), "{}{}:{}", axis == 0 ? "" : ", ", offset[axis],
                   offset[axis] + extent[axis]);
  }
  return text + "]";
}

size_t BoxHash::operator()(const Box& box) const {
  uint64_t hash = box.axes();
  for (const Dims* dims : {&box.offset, &box.extent})
    for (uint64_t value : *dims) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
  return hash;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  PTC_CHECK(a.axes() == b.axes());
  Box common{Dims(a.axes()), Dims(a.axes())};
  for (size_t axis = 0; axis < a.axes(); ++axis) {
    uint64_t begin = std::max(a.offset[axis], b.offset[axis]);
    uint64_t end = std::min(a.offset[axis] + a.extent[axis], b.offset[axis] + b.extent[axis]);
    if (begin >= end) return std::nullopt;
    common.offset[axis] = begin;
    common.extent[axis] = end - begin;
  }
  return common;
}

std::vector<Box> subtract(const Box& from, const Box& hole) {
  if (from.empty()) return {};
  std::optional<Box> common = intersect(from, hole);
  if (!common) return {from};
  // Slabs before and after the hole on each axis; what is left then has the hole's extent there.
  std::vector<Box> rest;
  Box core = from;
  for (size_t axis = 0; axis < from.axes(); ++axis) {
    uint64_t hole_begin = common->offset[axis], hole_end = hole_begin + common->extent[axis];
    uint64_t core_end = core.offset[axis] + core.extent[axis];
    if (core.offset[axis] < hole_begin) {
      rest.push_back(core);
      rest.back().extent[axis] = hole_begin - core.offset[axis];
    }
    if (hole_end < core_end) {
      rest.push_back(core);
      rest.back().offset[axis] = hole_end;
      rest.back().extent[axis] = core_end - hole_end;
    }
    core.offset[axis] = hole_begin;
    core.extent[axis] = common->extent[axis];
  }
  return rest;
}

namespace {

/// The elements [begin, end) below one index `at` of all axes before `axis`, of `inner` in all.
void add_boxes_of_run(const Shape& shape, size_t axis, Box at, uint64_t inner, uint64_t begin,
                      uint64_t end, std::vector<Box>& boxes) {
  if (begin >= end) return;
  if (begin == 0 && end == inner) {
    boxes.push_back(std::move(at));
    return;
  }
  inner /= shape[axis];
  auto below = [&](uint64_t index, uint64_t from, uint64_t to) {
    Box row = at;
    row.offset[axis] = index;
    row.extent[axis] = 1;
    add_boxes_of_run(shape, axis + 1, row, inner, from, to, boxes);
  };
  uint64_t first = begin / inner;
  const uint64_t last = end / inner;
  if (first == last) return below(first, begin % inner, end % inner);
  if (begin % inner != 0) below(first++, begin % inner, inner);
  if (first < last) {
    Box middle = at;
    middle.offset[axis] = first;
    middle.extent[axis] = last - first;
    boxes.push_back(middle);
  }
  below(last, 0, end % inner);
}

}  // namespace

std::vector<Box> boxes_of_run(const Shape& shape, uint64_t begin, uint64_t end) {
  std::vector<Box> boxes;
  const Box all = Box::whole(shape);
  add_boxes_of_run(shape, 0, all, all.volume(), begin, end, boxes);
  return boxes;
}

SubTensor SubTensor::whole(const Shape& shape) {
  return {shape, {Piece{Box::whole(shape), Dims(shape.size())}}};
}

}  // namespace ptc
