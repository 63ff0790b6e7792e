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

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reshard/plan/planner.h"
#include "store/tensor/box.h"

namespace ptc {

/// Immutable once made; threads: any.
class CommonCuts {
 public:
  CommonCuts() = default;  // nothing is cut
  /// By these boxes, in any order; those of one tensor are disjoint.
  explicit CommonCuts(std::vector<std::pair<uint32_t, Box>> cells);
  /// Between what these hold: of each tensor of which two different boxes have elements in common,
  /// the cells that some box has. A pure function of the set of boxes. Cost: O(n log n) in distinct
  /// boxes of a tensor, of which none is cut if they lie side by side. Checksums of all cells are
  /// sent between nodes and kept while they are compared: tensors beyond `most_cells` in all are
  /// not cut, and so not compared.
  static CommonCuts between(const std::vector<const ImageLayout*>& layouts,
                            size_t most_cells = kMostCells);
  static constexpr size_t kMostCells = size_t{1} << 20;

  /// What a piece of it is cut into: the boxes that fill it, or, of other tensors and other boxes,
  /// nothing: it stays as it is. They live as long as this. Cost: O(log n) in boxes of the tensor
  /// where they lie in a row, and their number.
  std::vector<const Box*> of(uint32_t tensor, const Box& piece) const;

  bool empty() const { return cells_.empty(); }
  /// All of one tensor.
  std::vector<Box> of(uint32_t tensor) const;

 private:
  struct Cells {
    size_t axis = 0;         // of most different offsets,
    std::vector<Box> boxes;  // ascending by these
  };
  static Cells in_order(std::vector<Box> boxes);
  std::unordered_map<uint32_t, Cells> cells_;
};

}  // namespace ptc
