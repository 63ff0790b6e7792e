#include "reshard/plan/common_cuts.h"

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

namespace ptc {
namespace {

uint64_t end_of(const Box& box, size_t axis) { return box.offset[axis] + box.extent[axis]; }

size_t axis_of_most_offsets(const std::vector<const Box*>& boxes) {
  size_t axis = 0, most = 0;
  for (size_t one = 0; one < boxes.front()->axes(); ++one) {
    std::unordered_set<uint64_t> offsets;
    for (const Box* box : boxes) offsets.insert(box->offset[one]);
    if (offsets.size() > most) axis = one, most = offsets.size();
  }
  return axis;
}

/// Whether two of them have elements in common; all are different, and none is empty.
bool any_overlap(std::vector<const Box*> boxes) {
  if (boxes.size() < 2) return false;
  const size_t axis = axis_of_most_offsets(boxes);
  std::sort(boxes.begin(), boxes.end(),
            [&](const Box* a, const Box* b) { return a->offset[axis] < b->offset[axis]; });
  std::vector<const Box*> open;  // which may reach beyond where the next begins
  for (const Box* box : boxes) {
    std::erase_if(open, [&](const Box* one) { return end_of(*one, axis) <= box->offset[axis]; });
    for (const Box* one : open)
      if (intersect(*one, *box)) return true;
    open.push_back(box);
  }
  return false;
}

/// Adds the cells of `region`, which the boxes all have elements of. False: there are more.
bool split(const Box& region, const std::vector<const Box*>& boxes, size_t most,
           std::vector<Box>& cells) {
  if (boxes.empty()) return true;
  // In the middle of the edges along the axis that has most: boxes side by side cost no more than
  // sorting them does.
  size_t axis = 0;
  std::vector<uint64_t> edges;
  for (size_t one = 0; one < region.axes(); ++one) {
    std::vector<uint64_t> here;
    for (const Box* box : boxes)
      for (const uint64_t edge : {box->offset[one], end_of(*box, one)})
        if (edge > region.offset[one] && edge < end_of(region, one)) here.push_back(edge);
    std::sort(here.begin(), here.end());
    here.erase(std::unique(here.begin(), here.end()), here.end());
    if (here.size() > edges.size()) axis = one, edges = std::move(here);
  }
  if (edges.empty()) {
    cells.push_back(region);
    return cells.size() <= most;
  }
  const uint64_t middle = edges[edges.size() / 2];
  Box low = region, high = region;
  low.extent[axis] = middle - region.offset[axis];
  high.offset[axis] = middle;
  high.extent[axis] = end_of(region, axis) - middle;
  for (const Box& half : {low, high}) {
    std::vector<const Box*> in_it;
    for (const Box* box : boxes)
      if (intersect(*box, half)) in_it.push_back(box);
    if (!split(half, in_it, most, cells)) return false;
  }
  return true;
}

}  // namespace

CommonCuts::Cells CommonCuts::in_order(std::vector<Box> boxes) {
  std::vector<const Box*> all;
  for (const Box& box : boxes) all.push_back(&box);
  const size_t axis = axis_of_most_offsets(all);
  if (boxes.front().axes() > 0)
    std::stable_sort(boxes.begin(), boxes.end(),
                     [&](const Box& a, const Box& b) { return a.offset[axis] < b.offset[axis]; });
  return {axis, std::move(boxes)};
}

CommonCuts::CommonCuts(std::vector<std::pair<uint32_t, Box>> cells) {
  std::unordered_map<uint32_t, std::vector<Box>> by_tensor;
  for (auto& [tensor, cell] : cells) {
    std::vector<Box>& boxes = by_tensor[tensor];
    if (boxes.empty() || boxes.front().axes() == cell.axes()) boxes.push_back(cell);
  }
  for (auto& [tensor, boxes] : by_tensor) cells_.emplace(tensor, in_order(std::move(boxes)));
}

CommonCuts CommonCuts::between(const std::vector<const ImageLayout*>& layouts, size_t most_cells) {
  std::map<uint32_t, std::unordered_set<Box, BoxHash>> held;
  std::unordered_set<const ArraySlot*> known;  // states that are copies share their arrays
  for (const ImageLayout* layout : layouts) {
    if (!known.insert(layout->arrays.begin()).second) continue;
    for (const ArraySlot& slot : layout->arrays)
      for (const Piece& piece : slot.part->pieces)
        if (!piece.global.empty()) held[slot.tensor].insert(piece.global);
  }
  CommonCuts cuts;
  for (const auto& [tensor, of_tensor] : held) {
    std::vector<const Box*> boxes;
    for (const Box& box : of_tensor) boxes.push_back(&box);
    if (!any_overlap(boxes)) continue;
    Box all = *boxes.front();
    for (const Box* box : boxes)
      for (size_t axis = 0; axis < all.axes(); ++axis) {
        const uint64_t end = std::max(end_of(all, axis), end_of(*box, axis));
        all.offset[axis] = std::min(all.offset[axis], box->offset[axis]);
        all.extent[axis] = end - all.offset[axis];
      }
    std::vector<Box> cells;
    if (!split(all, boxes, most_cells, cells)) continue;
    most_cells -= cells.size();
    cuts.cells_.emplace(tensor, in_order(std::move(cells)));
  }
  return cuts;
}

std::vector<const Box*> CommonCuts::of(uint32_t tensor, const Box& piece) const {
  const auto known = cells_.find(tensor);
  if (known == cells_.end()) return {};
  const auto& [axis, boxes] = known->second;
  if (boxes.front().axes() != piece.axes()) return {};
  std::vector<const Box*> inside;
  if (piece.axes() == 0) return {&boxes.front()};
  const auto first = std::partition_point(
      boxes.begin(), boxes.end(),
      [&, at = axis](const Box& cell) { return cell.offset[at] < piece.offset[at]; });
  uint64_t elements = 0;
  for (auto cell = first; cell != boxes.end() && cell->offset[axis] < end_of(piece, axis); ++cell)
    if (intersect(*cell, piece) == *cell) {
      inside.push_back(&*cell);
      elements += cell->volume();
    }
  if (elements != piece.volume()) inside.clear();
  return inside;
}

std::vector<Box> CommonCuts::of(uint32_t tensor) const {
  const auto known = cells_.find(tensor);
  return known == cells_.end() ? std::vector<Box>() : known->second.boxes;
}

}  // namespace ptc
