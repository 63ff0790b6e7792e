#include "store/tensor/strided_copy.h"

namespace ptc {
namespace {

Result<> check_inside(const ArrayAt& array, const Dims& index, const Dims& extent,
                      std::string_view role) {
  if (array.shape.size() != extent.size() || index.size() != extent.size())
    return invalid_argument("{} array {} and box {} + {} differ in their number of axes", role,
                            array.shape.to_string(), index.to_string(), extent.to_string());
  for (size_t axis = 0; axis < extent.size(); ++axis) {
    if (index[axis] > array.shape[axis] || extent[axis] > array.shape[axis] - index[axis])
      return invalid_argument("box {} + {} leaves the {} array {} on axis {}", index.to_string(),
                              extent.to_string(), role, array.shape.to_string(), axis);
  }
  return ok();
}

/// Checks that every byte of the array has a 64-bit address in its image.
Result<> check_size(const ArrayAt& array, uint32_t element_bits) {
  PTC_TRY(auto bits, num_bits(array.shape, element_bits));
  uint64_t end = 0;
  if (__builtin_add_overflow(array.byte_offset, bits / 8 + 1, &end))
    return invalid_argument("array {} at byte {} ends beyond 2^64", array.shape.to_string(),
                            array.byte_offset);
  return ok();
}

/// `count` runs of `run_bytes`; kRun ≠ 0 states the size to the compiler, which then needs no call.
template <size_t kRun>
void copy_runs(uint64_t count, size_t run_bytes, const std::byte* source, uint64_t source_stride,
               std::byte* target, uint64_t target_stride) {
  for (uint64_t i = 0; i < count; ++i) {
    std::memcpy(target, source, kRun != 0 ? kRun : run_bytes);
    source += source_stride;
    target += target_stride;
  }
}

void copy_innermost(const StridedCopy& copy, uint64_t count, const std::byte* source,
                    std::byte* target, const StridedCopy::Level& loop) {
  auto run = [&]<size_t kRun>() {
    copy_runs<kRun>(count, copy.run_bytes, source, loop.source_stride, target, loop.target_stride);
  };
  switch (copy.run_bytes) {
    case 1:
      return run.operator()<1>();
    case 2:
      return run.operator()<2>();
    case 4:
      return run.operator()<4>();
    case 8:
      return run.operator()<8>();
    case 12:
      return run.operator()<12>();
    case 16:
      return run.operator()<16>();
    case 32:
      return run.operator()<32>();
    case 64:
      return run.operator()<64>();
    default:
      return run.operator()<0>();
  }
}

/// Iterations [0, count) of `level`, all of them wanted whole.
void copy_whole(const StridedCopy& copy, uint32_t level, uint64_t count, const std::byte* source,
                std::byte* target) {
  const StridedCopy::Level& loop = copy.levels[level];
  if (level + 1 == copy.level_count) return copy_innermost(copy, count, source, target, loop);
  for (uint64_t i = 0; i < count; ++i) {
    copy_whole(copy, level + 1, copy.levels[level + 1].count, source + i * loop.source_stride,
               target + i * loop.target_stride);
  }
}

/// Copies the part of a StridedCopy in one window of the target.
class WindowCopy {
 public:
  WindowCopy(const StridedCopy& copy, const std::byte* source, uint64_t begin, uint64_t end,
             std::byte* target_at_begin)
      : copy_(copy), source_(source), begin_(begin), end_(end), target_at_begin_(target_at_begin) {
    spans_[copy.level_count] = copy.run_bytes;
    for (uint32_t level = copy.level_count; level-- > 0;) {
      const StridedCopy::Level& loop = copy.levels[level];
      spans_[level] = (loop.count - 1) * loop.target_stride + spans_[level + 1];
    }
  }

  void copy_level(uint32_t level, uint64_t source, uint64_t target) const {
    if (target >= end_ || target + spans_[level] <= begin_) return;
    if (level == copy_.level_count) return copy_part_of_run(source, target);
    const StridedCopy::Level& loop = copy_.levels[level];
    uint64_t inner_span = spans_[level + 1];
    // Iterations [first, whole_begin) and [whole_end, last) may be cut by the window's edges.
    uint64_t first = begin_ > target ? (begin_ - target) / loop.target_stride : 0;
    uint64_t last = std::min(loop.count, (end_ - target - 1) / loop.target_stride + 1);
    uint64_t whole_begin =
        begin_ > target ? (begin_ - target + loop.target_stride - 1) / loop.target_stride : 0;
    uint64_t whole_end =
        end_ - target >= inner_span ? (end_ - target - inner_span) / loop.target_stride + 1 : 0;
    whole_end = std::min(whole_end, last);
    whole_begin = std::min(whole_begin, last);
    if (whole_begin >= whole_end) return copy_each(level, source, target, first, last);
    copy_each(level, source, target, first, whole_begin);
    copy_whole(copy_, level, whole_end - whole_begin,
               source_ + source + whole_begin * loop.source_stride,
               at(target + whole_begin * loop.target_stride));
    copy_each(level, source, target, whole_end, last);
  }

 private:
  void copy_each(uint32_t level, uint64_t source, uint64_t target, uint64_t first,
                 uint64_t last) const {
    const StridedCopy::Level& loop = copy_.levels[level];
    for (uint64_t i = first; i < last; ++i)
      copy_level(level + 1, source + i * loop.source_stride, target + i * loop.target_stride);
  }

  void copy_part_of_run(uint64_t source, uint64_t target) const {
    uint64_t from = std::max(begin_, target);
    uint64_t to = std::min(end_, target + copy_.run_bytes);
    std::memcpy(at(from), source_ + source + (from - target), to - from);
  }

  std::byte* at(uint64_t target) const { return target_at_begin_ + (target - begin_); }

  const StridedCopy& copy_;
  const std::byte* source_;
  uint64_t begin_, end_;
  std::byte* target_at_begin_;
  std::array<uint64_t, kMaxAxes + 1> spans_{};  // target bytes from first to last of one iteration
};

}  // namespace

ArrayAt array_at(const SubTensor& part, uint64_t byte_offset) {
  if (part.flat) return {byte_offset, part.flat->of, part.flat->begin};
  return {byte_offset, part.local_shape};
}

uint64_t StridedCopy::total_bytes() const {
  uint64_t total = run_bytes;
  for (uint32_t level = 0; level < level_count; ++level) total *= levels[level].count;
  return total;
}

uint64_t StridedCopy::source_end() const {
  uint64_t end = source_offset + run_bytes;
  for (uint32_t level = 0; level < level_count; ++level)
    end += (levels[level].count - 1) * levels[level].source_stride;
  return end;
}

uint64_t StridedCopy::target_end() const {
  uint64_t end = target_offset + run_bytes;
  for (uint32_t level = 0; level < level_count; ++level)
    end += (levels[level].count - 1) * levels[level].target_stride;
  return end;
}

Result<StridedCopy> make_strided_copy(const ArrayAt& source, const Dims& source_index,
                                      const ArrayAt& target, const Dims& target_index,
                                      const Dims& extent, uint32_t element_bits) {
  PTC_TRY(check_inside(source, source_index, extent, "source"));
  PTC_TRY(check_inside(target, target_index, extent, "target"));
  PTC_TRY(check_size(source, element_bits));
  PTC_TRY(check_size(target, element_bits));
  StridedCopy copy;
  copy.source_offset = source.byte_offset;
  copy.target_offset = target.byte_offset;
  if (Box{target_index, extent}.empty()) return copy;

  // From the innermost axis outwards, in bits. `inner` collects levels, innermost first.
  uint64_t run_bits = element_bits;
  uint64_t source_stride = element_bits, target_stride = element_bits;
  uint64_t source_first = 0, target_first = 0;
  std::array<StridedCopy::Level, kMaxAxes> inner{};
  uint32_t level_count = 0;
  for (size_t axis = extent.size(); axis-- > 0;) {
    source_first += source_index[axis] * source_stride;
    target_first += target_index[axis] * target_stride;
    if (extent[axis] > 1) {
      StridedCopy::Level* below = level_count > 0 ? &inner[level_count - 1] : nullptr;
      if (below == nullptr && source_stride == run_bits && target_stride == run_bits) {
        run_bits *= extent[axis];
      } else if (below != nullptr && source_stride == below->source_stride * below->count &&
                 target_stride == below->target_stride * below->count) {
        below->count *= extent[axis];
      } else {
        inner[level_count++] = {extent[axis], source_stride, target_stride};
      }
    }
    source_stride *= source.shape[axis];
    target_stride *= target.shape[axis];
  }

  const uint64_t source_missing = source.first_element * element_bits;
  const uint64_t target_missing = target.first_element * element_bits;
  if (source_first < source_missing || target_first < target_missing) {
    return invalid_argument("box {} begins before the part of the array that is there",
                            Box{target_index, extent}.to_string());
  }
  source_first -= source_missing;
  target_first -= target_missing;

  uint64_t all = run_bits | source_first | target_first;
  for (uint32_t i = 0; i < level_count; ++i) {
    all |= inner[i].source_stride | inner[i].target_stride;
    copy.levels[i] = {inner[level_count - 1 - i].count,
                      inner[level_count - 1 - i].source_stride / 8,
                      inner[level_count - 1 - i].target_stride / 8};
  }
  if (all % 8 != 0) {
    return invalid_argument(
        "box {} of {}-bit elements is not cut at whole bytes in arrays {} and {}",
        Box{target_index, extent}.to_string(), element_bits, source.shape.to_string(),
        target.shape.to_string());
  }
  copy.level_count = level_count;
  copy.run_bytes = run_bits / 8;
  copy.source_offset += source_first / 8;
  copy.target_offset += target_first / 8;
  return copy;
}

void run_strided_copy(const StridedCopy& copy, const std::byte* source, uint64_t begin,
                      uint64_t end, std::byte* target_at_begin) {
  if (copy.run_bytes == 0 || begin >= end) return;
  WindowCopy(copy, source, begin, end, target_at_begin)
      .copy_level(0, copy.source_offset, copy.target_offset);
}

}  // namespace ptc
