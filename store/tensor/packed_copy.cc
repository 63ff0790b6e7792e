#include "store/tensor/packed_copy.h"

#include <algorithm>

namespace ptc {
StridedCopy unpacked(const StridedCopy& copy) {
  StridedCopy result = copy;
  const StridedCopy dense = packed(copy);
  result.source_offset = 0;
  for (uint32_t level = 0; level < copy.level_count; ++level)
    result.levels[level].source_stride = dense.levels[level].target_stride;
  return result;
}

StridedCopy packed(const StridedCopy& copy) {
  StridedCopy result = copy;
  result.target_offset = 0;
  uint64_t inner = copy.run_bytes;
  for (uint32_t level = copy.level_count; level-- > 0;) {
    result.levels[level].target_stride = inner;
    inner *= copy.levels[level].count;
  }
  return result;
}

uint64_t packed_offset(const StridedCopy& copy, uint64_t target) {
  if (target <= copy.target_offset) return 0;
  uint64_t rest = target - copy.target_offset, before = 0, inner = copy.total_bytes();
  for (uint32_t level = 0; level < copy.level_count; ++level) {
    const StridedCopy::Level& loop = copy.levels[level];
    inner /= loop.count;
    const uint64_t i = std::min(rest / loop.target_stride, loop.count);
    before += i * inner;
    if (i == loop.count) return before;
    rest -= i * loop.target_stride;
  }
  return before + std::min(rest, copy.run_bytes);
}

uint64_t target_of_packed(const StridedCopy& copy, uint64_t offset) {
  uint64_t target = copy.target_offset, inner = copy.total_bytes();
  for (uint32_t level = 0; level < copy.level_count; ++level) {
    const StridedCopy::Level& loop = copy.levels[level];
    inner /= loop.count;
    target += offset / inner * loop.target_stride;
    offset %= inner;
  }
  return target + offset;
}

}  // namespace ptc
