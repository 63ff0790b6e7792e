// A rectangular copy between two C-order arrays, reduced to runs of whole bytes.
//
// A box that two arrays share is `run_bytes` contiguous in both, repeated under nested loops
// (`levels`, outermost first). Axes that are contiguous in both arrays are merged, so a copy that
// is one run has no levels. Target offsets grow in loop order; therefore the part of a copy that
// falls into a window of the target is found by division, not by walking, and reading 4 KiB at
// 90 GB into a virtual file costs O(levels) to start.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "store/base/error.h"
#include "store/tensor/box.h"
#include "store/tensor/dtype.h"

namespace ptc {

struct StridedCopy {
  struct Level {
    uint64_t count;
    uint64_t source_stride;  // bytes
    uint64_t target_stride;  // bytes; ≥ the span of all inner levels
  };

  uint64_t source_offset = 0;  // bytes from the start of the source image
  uint64_t target_offset = 0;  // bytes from the start of the target image
  uint64_t run_bytes = 0;
  uint32_t level_count = 0;
  std::array<Level, kMaxAxes> levels{};

  uint64_t total_bytes() const;
  /// One past the last byte touched on either side.
  uint64_t source_end() const;
  uint64_t target_end() const;
};

/// Where a local array lies in an image. Of a flat cut (SubTensor::flat): the whole array, of which
/// only the elements from number `first_element` on are there, at `byte_offset`.
struct ArrayAt {
  uint64_t byte_offset = 0;
  Shape shape;
  uint64_t first_element = 0;
};
ArrayAt array_at(const SubTensor& part, uint64_t byte_offset);

/// The copy of the `extent` elements at `source_index` of one array to `target_index` of another.
/// kInvalidArgument when a cut does not fall on a whole byte (4- and 6-bit types).
Result<StridedCopy> make_strided_copy(const ArrayAt& source, const Dims& source_index,
                                      const ArrayAt& target, const Dims& target_index,
                                      const Dims& extent, uint32_t element_bits);

namespace detail {
template <class Visit>
void visit_level(const StridedCopy& copy, uint32_t level, uint64_t source, uint64_t target,
                 uint64_t begin, uint64_t end, Visit& visit) {
  if (level == copy.level_count) {
    uint64_t from = std::max(begin, target);
    uint64_t to = std::min(end, target + copy.run_bytes);
    if (from < to) visit(source + (from - target), from, to - from);
    return;
  }
  const StridedCopy::Level& loop = copy.levels[level];
  uint64_t first = begin > target ? std::min((begin - target) / loop.target_stride, loop.count) : 0;
  for (uint64_t i = first; i < loop.count; ++i) {
    uint64_t inner_target = target + i * loop.target_stride;
    if (inner_target >= end) return;
    visit_level(copy, level + 1, source + i * loop.source_stride, inner_target, begin, end, visit);
  }
}
}  // namespace detail

/// Calls visit(source_offset, target_offset, bytes) for each run that touches the target window
/// [begin, end), cut to it, in growing target order.
template <class Visit>
void for_each_run(const StridedCopy& copy, uint64_t begin, uint64_t end, Visit visit) {
  detail::visit_level(copy, 0, copy.source_offset, copy.target_offset, begin, end, visit);
}
template <class Visit>
void for_each_run(const StridedCopy& copy, Visit visit) {
  for_each_run(copy, 0, UINT64_MAX, visit);
}

/// Copies the runs inside the target window [begin, end). `source` is the start of the source
/// image, `target_at_begin` is where target byte `begin` lies in memory.
void run_strided_copy(const StridedCopy& copy, const std::byte* source, uint64_t begin,
                      uint64_t end, std::byte* target_at_begin);

}  // namespace ptc
