#include "store/tensor/packed_copy.h"

#include <algorithm>

namespace ptc {
namespace {

/// Of the loops from `level` on, which begin at these places.
class WindowCut {
 public:
  WindowCut(const StridedCopy& copy, uint64_t begin, uint64_t end)
      : copy_(copy), begin_(begin), end_(end) {}

  void cut(uint32_t level, uint64_t source, uint64_t target) {
    if (level == copy_.level_count) {
      const uint64_t from = std::max(begin_, target);
      const uint64_t to = std::min(end_, target + copy_.run_bytes);
      if (from >= to) return;
      StridedCopy& run = found_.emplace_back();
      run.source_offset = source + (from - target);
      run.target_offset = from;
      run.run_bytes = to - from;
      return;
    }
    const StridedCopy::Level& loop = copy_.levels[level];
    const uint64_t span = span_of(level + 1);
    // Those that touch the window, [first, last); all but the two at its ends lie in it.
    if (end_ <= target || begin_ >= target + (loop.count - 1) * loop.target_stride + span) return;
    uint64_t first = begin_ > target ? (begin_ - target) / loop.target_stride : 0;
    if (target + first * loop.target_stride + span <= begin_) ++first;
    uint64_t last = std::min((end_ - target - 1) / loop.target_stride + 1, loop.count);
    const auto cut_one = [&](uint64_t i) {
      cut(level + 1, source + i * loop.source_stride, target + i * loop.target_stride);
    };
    if (first < last && target + first * loop.target_stride < begin_) cut_one(first++);
    if (first < last && target + (last - 1) * loop.target_stride + span > end_) cut_one(--last);
    if (first >= last) return;
    StridedCopy& whole = found_.emplace_back();
    whole.source_offset = source + first * loop.source_stride;
    whole.target_offset = target + first * loop.target_stride;
    whole.run_bytes = copy_.run_bytes;
    for (uint32_t i = level; i < copy_.level_count; ++i)
      whole.levels[whole.level_count++] = copy_.levels[i];
    whole.levels[0].count = last - first;
  }
  std::vector<StridedCopy> take() { return std::move(found_); }

 private:
  /// Of the target, from the first byte to the last.
  uint64_t span_of(uint32_t level) const {
    uint64_t span = copy_.run_bytes;
    for (; level < copy_.level_count; ++level)
      span += (copy_.levels[level].count - 1) * copy_.levels[level].target_stride;
    return span;
  }

  const StridedCopy& copy_;
  const uint64_t begin_, end_;
  std::vector<StridedCopy> found_;
};

}  // namespace

StridedCopy unpacked(const StridedCopy& copy) {
  StridedCopy result = copy;
  const StridedCopy dense = packed(copy);
  result.source_offset = 0;
  for (uint32_t level = 0; level < copy.level_count; ++level)
    result.levels[level].source_stride = dense.levels[level].target_stride;
  return result;
}

std::vector<StridedCopy> cut_to_window(const StridedCopy& copy, uint64_t begin, uint64_t end) {
  if (begin >= end || copy.total_bytes() == 0) return {};
  WindowCut cut(copy, begin, end);
  cut.cut(0, copy.source_offset, copy.target_offset);
  return cut.take();
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
