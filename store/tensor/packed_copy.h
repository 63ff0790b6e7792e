// The bytes of a StridedCopy's runs as one string, one run behind the other: what goes over the
// wire.
#pragma once

#include <algorithm>
#include <cstdint>

#include "store/tensor/strided_copy.h"

namespace ptc {

/// The same runs of the source, lying in the target without gaps from byte 0 on.
StridedCopy packed(const StridedCopy& copy);

/// The other half of the way: from that string, whose byte 0 is source byte 0, to the target.
StridedCopy unpacked(const StridedCopy& copy);

/// How many bytes of runs lie before the target byte `target`. O(levels).
uint64_t packed_offset(const StridedCopy& copy, uint64_t target);

/// … in the target window [begin, end).
inline uint64_t bytes_between(const StridedCopy& copy, uint64_t begin, uint64_t end) {
  return packed_offset(copy, end) - packed_offset(copy, begin);
}

/// The target byte to which byte number `offset` < total_bytes() of the string belongs. O(levels).
uint64_t target_of_packed(const StridedCopy& copy, uint64_t offset);

/// The parts of a copy that together have just its runs in the target window [begin, end), in
/// growing target order: two for each level and one, at most. visit(StridedCopy).
template <class Visit>
void for_each_rectangle(const StridedCopy& copy, uint64_t begin, uint64_t end, Visit&& visit) {
  const uint64_t copy_end = copy.target_end();
  if (copy.total_bytes() == 0 || begin >= end || begin >= copy_end || end <= copy.target_offset)
    return;
  if (begin <= copy.target_offset && end >= copy_end) return visit(copy);
  StridedCopy inner = copy;
  if (copy.level_count == 0) {
    const uint64_t from = std::max(begin, copy.target_offset);
    inner.source_offset += from - copy.target_offset;
    inner.target_offset = from;
    inner.run_bytes = std::min(end, copy_end) - from;
    return visit(inner);
  }
  const StridedCopy::Level outer = copy.levels[0];
  std::copy(copy.levels.begin() + 1, copy.levels.begin() + copy.level_count, inner.levels.begin());
  --inner.level_count;
  const uint64_t span = inner.target_end() - inner.target_offset;
  // Iterations [first, last) of the outermost loop are whole in the window.
  const uint64_t before = begin > copy.target_offset ? begin - copy.target_offset : 0;
  const uint64_t until = end - copy.target_offset;
  const uint64_t first = before / outer.target_stride + (before % outer.target_stride != 0 ? 1 : 0);
  const uint64_t last =
      until < span ? 0 : std::min(outer.count, (until - span) / outer.target_stride + 1);
  const auto at = [&](uint64_t i) {
    StridedCopy one = inner;
    one.source_offset += i * outer.source_stride;
    one.target_offset += i * outer.target_stride;
    return one;
  };
  if (first > 0) for_each_rectangle(at(first - 1), begin, end, visit);
  if (first < last) {
    StridedCopy block = copy;
    block.source_offset += first * outer.source_stride;
    block.target_offset += first * outer.target_stride;
    block.levels[0].count = last - first;
    visit(block);
  }
  if (last >= first && last < outer.count) for_each_rectangle(at(last), begin, end, visit);
}

/// Whether it reads below `source_end` and writes in the target window [begin, end) alone: what a
/// device does not check.
inline bool lies_within(const StridedCopy& copy, uint64_t source_end, uint64_t begin,
                        uint64_t end) {
  return copy.source_end() <= source_end && copy.target_offset >= begin && copy.target_end() <= end;
}

}  // namespace ptc
