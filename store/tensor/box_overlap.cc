#include "store/tensor/box_overlap.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace ptc {
namespace {

class OverlapFinder {
 public:
  OverlapFinder(std::span<const Box* const> boxes,
                const std::function<Result<>(uint64_t steps)>& count)
      : boxes_(boxes), count_(count), order_(boxes.size()) {
    std::iota(order_.begin(), order_.end(), 0u);
  }

  Result<std::optional<std::pair<uint32_t, uint32_t>>> run() {
    PTC_TRY(split(0, order_.size(), 0, 0));
    return found_;
  }

 private:
  static constexpr int kMostDepth = 64;
  static constexpr uint64_t kMostPairs = 1 << 24;

  Result<> count(uint64_t steps) { return count_ ? count_(steps) : ok(); }

  Result<> split(size_t begin, size_t end, size_t axis, int depth) {
    const size_t axes = boxes_.empty() ? 0 : boxes_[0]->axes();
    if (end - begin < 2 || found_) return ok();
    if (depth < kMostDepth) {
      for (size_t tried = 0; tried < axes; ++tried, axis = (axis + 1) % axes) {
        PTC_TRY(count(end - begin));
        auto first = order_.begin() + static_cast<ptrdiff_t>(begin),
             last = order_.begin() + static_cast<ptrdiff_t>(end);
        auto before = [&](uint32_t a, uint32_t b) {
          return boxes_[a]->offset[axis] < boxes_[b]->offset[axis];
        };
        if (!std::is_sorted(first, last, before)) std::sort(first, last, before);
        // A cut is where all before it have ended.
        size_t from = begin;
        uint64_t reach = 0;
        bool cut = false;
        for (size_t i = begin; i < end; ++i) {
          const Box& box = *boxes_[order_[i]];
          if (i > begin && box.offset[axis] >= reach) {
            cut = true;
            PTC_TRY(split(from, i, (axis + 1) % axes, depth + 1));
            from = i;
          }
          reach = std::max(reach, box.offset[axis] + box.extent[axis]);
        }
        if (cut) return split(from, end, (axis + 1) % axes, depth + 1);
      }
    }
    for (size_t i = begin; i < end && !found_; ++i) {
      for (size_t k = i + 1; k < end; ++k) {
        PTC_TRY(count(1));
        if (++pairs_ > kMostPairs)
          return invalid_argument("its {} parts are too entangled", boxes_.size());
        if (!intersect(*boxes_[order_[i]], *boxes_[order_[k]])) continue;
        found_ = std::pair(order_[i], order_[k]);
        break;
      }
    }
    return ok();
  }

  const std::span<const Box* const> boxes_;
  const std::function<Result<>(uint64_t steps)>& count_;
  std::vector<uint32_t> order_;
  uint64_t pairs_ = 0;
  std::optional<std::pair<uint32_t, uint32_t>> found_;
};

}  // namespace

Result<std::optional<std::pair<uint32_t, uint32_t>>> find_overlap(
    std::span<const Box* const> boxes, const std::function<Result<>(uint64_t steps)>& count) {
  return OverlapFinder(boxes, count).run();
}

}  // namespace ptc
