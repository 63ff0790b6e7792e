// Where the copies of a tensor are cut so that each part of one can be compared with the same part
// of another.
//
// Checksums of tensors are sums over their elements, so a box's is the sum of those of boxes that
// fill it. Copies that are cut alike, as those of one layout are, need no more than their own
// boxes. But one may be whole and another in shards (what ranks of FSDP wrote, beside the file that
// was made anew of it), or in rows and in columns: then neither box says which part of the other is
// wrong, and their sum is not the tensor's. Here such a tensor is split, by halves along the edges
// of all of its boxes, into cells of which each lies in every box or beside it.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "reshard/plan/planner.h"
#include "store/tensor/box.h"

namespace ptc {

/// Immutable once made; threads: any.
class CommonCuts {
 public:
  CommonCuts() = default;  // nothing is cut
  /// Between what these hold: of each tensor of which two different boxes have elements in common,
  /// the cells that some box has. A pure function of the set of boxes. Cost: O(n log n) in distinct
  /// boxes of a tensor, of which none is cut if they lie side by side.
  static CommonCuts between(const std::vector<const ImageLayout*>& layouts);

  /// A box by which pieces of the tensor are cut. Boxes of one tensor are disjoint.
  void add(uint32_t tensor, const Box& cell) { cells_[tensor].push_back(cell); }

  /// What a piece of it is cut into: the boxes that fill it, or, of other tensors and other boxes,
  /// nothing: it stays as it is. They live as long as this. Cost: O(boxes of the tensor).
  std::vector<const Box*> of(uint32_t tensor, const Box& piece) const;

  bool empty() const { return cells_.empty(); }
  /// By tensor.
  const std::unordered_map<uint32_t, std::vector<Box>>& cells() const { return cells_; }

 private:
  std::unordered_map<uint32_t, std::vector<Box>> cells_;
};

}  // namespace ptc
