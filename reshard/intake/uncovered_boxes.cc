#include "reshard/intake/uncovered_boxes.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "store/tensor/strided_copy.h"

namespace ptc {
namespace {

constexpr size_t kFewPieces = 32;
/// Pieces that are looked at and boxes that are left, together: of each piece so many, and these.
constexpr uint64_t kStepsOfPiece = 128, kStepsAnyway = 1 << 22;
constexpr uint64_t kMostRuns = 1 << 20;

class PieceCutter {
 public:
  explicit PieceCutter(const std::vector<Piece>& pieces) {
    for (const Piece& piece : pieces) {
      Box box{piece.local_offset, piece.global.extent};
      if (!box.empty()) holes_.push_back(std::move(box));
    }
    steps_left_ = kStepsAnyway + kStepsOfPiece * holes_.size();
  }

  Result<> add(const Box& region) {
    std::vector<uint32_t> all(holes_.size());
    for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    return cut(region, all);
  }
  std::vector<Box> uncovered() && { return std::move(uncovered_); }
  Error too_many() const {
    return invalid_argument("its {} pieces leave too many parts of it uncovered", holes_.size());
  }

 private:
  Result<> take_steps(uint64_t count) {
    if (count > steps_left_) return too_many();
    steps_left_ -= count;
    return ok();
  }

  Result<> cut(const Box& region, const std::vector<uint32_t>& candidates) {
    PTC_TRY(take_steps(1 + candidates.size()));
    std::vector<uint32_t> pieces;
    for (const uint32_t i : candidates) {
      const auto common = intersect(region, holes_[i]);
      if (!common) continue;
      if (*common == region) return ok();
      pieces.push_back(i);
    }
    if (pieces.size() <= kFewPieces) return subtract_all(region, pieces);
    const auto [axis, middle] = cut_at(region, pieces);
    Box before = region, behind = region;
    before.extent[axis] = middle - region.offset[axis];
    behind.offset[axis] = middle;
    behind.extent[axis] -= before.extent[axis];
    PTC_TRY(cut(before, pieces));
    return cut(behind, pieces);
  }

  Result<> subtract_all(const Box& region, const std::vector<uint32_t>& pieces) {
    std::vector<Box> uncovered{region};
    for (const uint32_t i : pieces) {
      std::vector<Box> left;
      for (const Box& box : uncovered)
        for (Box& rest : subtract(box, holes_[i])) left.push_back(std::move(rest));
      uncovered.swap(left);
      PTC_TRY(take_steps(uncovered.size()));
    }
    for (Box& box : uncovered)
      if (!box.empty()) uncovered_.push_back(std::move(box));
    return ok();
  }

  /// Within the region, at an edge of a piece: none covers it, so there is one.
  std::pair<size_t, uint64_t> cut_at(const Box& region, const std::vector<uint32_t>& pieces) const {
    size_t axis = 0;
    std::vector<uint64_t> most, edges;
    for (size_t a = 0; a < region.axes(); ++a) {
      edges.clear();
      const uint64_t begin = region.offset[a], end = begin + region.extent[a];
      for (const uint32_t i : pieces)
        for (const uint64_t edge : {holes_[i].offset[a], holes_[i].offset[a] + holes_[i].extent[a]})
          if (edge > begin && edge < end) edges.push_back(edge);
      if (edges.size() <= most.size()) continue;
      most.swap(edges);
      axis = a;
    }
    const auto middle = most.begin() + static_cast<std::ptrdiff_t>(most.size() / 2);
    std::nth_element(most.begin(), middle, most.end());
    return {axis, *middle};
  }

  std::vector<Box> holes_;  // in the local array
  std::vector<Box> uncovered_;
  uint64_t steps_left_ = 0;
};

}  // namespace

Result<std::vector<Box>> uncovered_boxes(const SubTensor& part) {
  PieceCutter cutter(part.pieces);
  if (!part.flat) {
    PTC_TRY(cutter.add(Box::whole(part.local_shape)));
    return std::move(cutter).uncovered();
  }
  const uint64_t begin = part.flat->begin;
  PTC_TRY(const uint64_t wanted, num_elements(part.local_shape));
  PTC_TRY(const uint64_t elements, num_elements(part.flat->of));
  const uint64_t there = std::min(wanted, std::max(elements, begin) - begin);
  for (const Box& region : boxes_of_run(part.flat->of, begin, begin + there)) {
    PTC_TRY(cutter.add(region));
  }
  const std::vector<Box> uncovered = std::move(cutter).uncovered();
  std::vector<Box> runs;  // as boxes of the local array
  const auto add = [&](uint64_t from, uint64_t count) {
    for (Box& box : boxes_of_run(part.local_shape, from, from + count))
      runs.push_back(std::move(box));
  };
  for (const Box& box : uncovered) {
    PTC_TRY(auto copy, make_strided_copy(array_at(part, 0), box.offset, {0, box.extent},
                                         Dims(box.axes()), box.extent, 8));
    // Each of them has at least one element.
    if (runs.size() > kMostRuns ||
        box.volume() / std::max<uint64_t>(copy.run_bytes, 1) > kMostRuns - runs.size())
      return cutter.too_many();
    for_each_run(copy, [&](uint64_t from, uint64_t, uint64_t count) { add(from, count); });
  }
  if (there < wanted) add(there, wanted - there);
  return runs;
}

}  // namespace ptc
