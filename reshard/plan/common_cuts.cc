#include "reshard/plan/common_cuts.h"

#include <algorithm>
#include <unordered_set>

namespace ptc {
namespace {

uint64_t end_of(const Box& box, size_t axis) { return box.offset[axis] + box.extent[axis]; }

/// Whether two of them have elements in common; all are different, and none is empty.
bool any_overlap(std::vector<const Box*> boxes) {
  if (boxes.size() < 2) return false;
  size_t axis = 0, most = 0;
  for (size_t one = 0; one < boxes.front()->axes(); ++one) {
    std::unordered_set<uint64_t> offsets;
    for (const Box* box : boxes) offsets.insert(box->offset[one]);
    if (offsets.size() > most) axis = one, most = offsets.size();
  }
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

/// Adds the cells of `region`, which the boxes all have elements of.
void split(const Box& region, const std::vector<const Box*>& boxes, std::vector<Box>& cells) {
  if (boxes.empty()) return;
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
    return;
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
    split(half, in_it, cells);
  }
}

}  // namespace

CommonCuts CommonCuts::between(const std::vector<const ImageLayout*>& layouts) {
  std::unordered_map<uint32_t, std::unordered_set<Box, BoxHash>> held;
  std::unordered_set<const ArraySlot*> known;  // states that are copies share their arrays
  for (const ImageLayout* layout : layouts) {
    if (!known.insert(layout->arrays.begin()).second) continue;
    for (const ArraySlot& slot : layout->arrays)
      for (const Piece& piece : slot.part.pieces)
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
    split(all, boxes, cuts.cells_[tensor]);
  }
  return cuts;
}

std::vector<const Box*> CommonCuts::of(uint32_t tensor, const Box& piece) const {
  const auto known = cells_.find(tensor);
  if (known == cells_.end()) return {};
  std::vector<const Box*> inside;
  uint64_t elements = 0;
  for (const Box& cell : known->second)
    if (intersect(cell, piece) == cell) {
      inside.push_back(&cell);
      elements += cell.volume();
    }
  if (elements != piece.volume()) inside.clear();
  return inside;
}

}  // namespace ptc
