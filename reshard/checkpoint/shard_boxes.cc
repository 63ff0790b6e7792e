#include "reshard/checkpoint/shard_boxes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "store/tensor/box_overlap.h"

namespace ptc {
namespace {

/// Something of `region` that none of the boxes has, where few cuts find it; for messages.
std::optional<Box> find_gap(std::vector<Box> boxes, const Box& region, int depth) {
  constexpr int kMostDepth = 64;
  if (boxes.empty()) return region;
  if (boxes.size() == 1) {
    if (boxes.front() == region) return std::nullopt;
    return subtract(region, boxes.front()).front();
  }
  for (size_t axis = 0; axis < region.axes() && depth < kMostDepth; ++axis) {
    std::sort(boxes.begin(), boxes.end(),
              [&](const Box& a, const Box& b) { return a.offset[axis] < b.offset[axis]; });
    // Slabs that no box crosses.
    uint64_t end = region.offset[axis];
    std::vector<std::pair<size_t, uint64_t>> slabs;  // of each the first box, and where it begins
    const uint64_t region_end = region.offset[axis] + region.extent[axis];
    for (size_t i = 0; i <= boxes.size(); ++i) {
      const uint64_t next = i < boxes.size() ? boxes[i].offset[axis] : region_end;
      if (next > end) {
        Box gap = region;
        gap.offset[axis] = end;
        gap.extent[axis] = next - end;
        return gap;
      }
      if (i == boxes.size()) break;
      if (boxes[i].offset[axis] == end) slabs.emplace_back(i, end);
      end = std::max(end, boxes[i].offset[axis] + boxes[i].extent[axis]);
    }
    if (slabs.size() < 2) continue;
    for (size_t s = 0; s < slabs.size(); ++s) {
      const bool last = s + 1 == slabs.size();
      Box slab = region;
      slab.offset[axis] = slabs[s].second;
      slab.extent[axis] = (last ? region_end : slabs[s + 1].second) - slab.offset[axis];
      if (auto gap = find_gap({boxes.begin() + slabs[s].first,
                               last ? boxes.end() : boxes.begin() + slabs[s + 1].first},
                              slab, depth + 1))
        return gap;
    }
    return std::nullopt;
  }
  return std::nullopt;
}

/// Whether the boxes, all different and within `region`, fill it.
Result<> check_tiling(const std::vector<Box>& boxes, const Box& region) {
  std::vector<const Box*> pointers;
  for (const Box& box : boxes) pointers.push_back(&box);
  PTC_TRY(const auto overlap, find_overlap(pointers));
  if (overlap)
    return invalid_argument("{} and {} overlap", boxes[overlap->first].to_string(),
                            boxes[overlap->second].to_string());
  uint64_t elements = 0;  // of disjoint boxes: not more than the region has
  for (const Box& box : boxes) elements += box.volume();
  if (elements == region.volume()) return ok();
  if (const std::optional<Box> gap = find_gap(boxes, region, 0))
    return invalid_argument("nothing holds {} of it", gap->to_string());
  return invalid_argument("nothing holds {} of its {} elements", region.volume() - elements,
                          region.volume());
}

}  // namespace

Result<Box> union_of_boxes(std::vector<Box> boxes) {
  const size_t axes = boxes.front().axes();
  for (const Box& box : boxes)
    if (box.axes() != axes)
      return invalid_argument("its parts have {} axes and {}", axes, box.axes());
  const Box empty = boxes.front();
  std::erase_if(boxes, [](const Box& box) { return box.empty(); });
  if (boxes.empty()) return empty;
  const auto less = [](const Dims& a, const Dims& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  };
  const auto earlier = [&](const Box& a, const Box& b) {
    return less(a.offset, b.offset) || (a.offset == b.offset && less(a.extent, b.extent));
  };
  std::sort(boxes.begin(), boxes.end(), earlier);
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  Box all = boxes.front();
  for (const Box& box : boxes)
    for (size_t axis = 0; axis < axes; ++axis) {
      const uint64_t end =
          std::max(all.offset[axis] + all.extent[axis], box.offset[axis] + box.extent[axis]);
      all.offset[axis] = std::min(all.offset[axis], box.offset[axis]);
      all.extent[axis] = end - all.offset[axis];
    }
  PTC_TRY(num_elements(all.extent));
  PTC_TRY(check_tiling(boxes, all));
  return all;
}

SubTensor box_alone(const Box& box) {
  if (box.empty()) return {box.extent, {}};
  return {box.extent, {{box, Dims(box.axes())}}};
}

Result<SubTensor> part_of_box(const SubTensor& part, const Box& whole, const Box& box) {
  if (box.empty()) return box_alone(box);
  for (const Piece& piece : part.pieces) {
    if (part.flat || intersect(piece.global, box) != box) continue;
    bool same_place = true;
    for (size_t axis = 0; axis < box.axes(); ++axis)
      same_place =
          same_place && box.offset[axis] - piece.global.offset[axis] + piece.local_offset[axis] ==
                            box.offset[axis] - whole.offset[axis];
    if (same_place) return box_alone(box);
  }
  return invalid_argument(
      "it was saved as {} of the whole tensor, but this rank holds {}", box.to_string(),
      part.pieces.empty() || part.flat ? "another part" : part.pieces.front().global.to_string());
}

}  // namespace ptc
