// The planner: which bytes go where. Pure functions of what images hold and what images are wanted.
//
// For every array of a target image, each of its pieces (a box of the global tensor) is covered by
// boxes that source images hold: the box is intersected with what a source has, and what is left of
// it is looked for further on. Every target byte is written exactly once; bytes that no source is
// asked for are padding. Boxes that the target's own node holds come first, then those that came to
// it for another target, so that no byte is moved to a node twice; of the holders of one box the
// one that was asked for the fewest bytes so far, so that the load spreads over all of them.
//
// Cost: O(n log n) in the boxes held and wanted, and their overlaps. Boxes are found by the
// interval of their elements' numbers in C order: what tp (on the first axis), FSDP and ZeRO-1 cut
// are intervals that hardly overlap.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "reshard/plan/literals.h"
#include "reshard/plan/shared_vector.h"
#include "store/base/error.h"
#include "store/tensor/box.h"
#include "store/tensor/packed_copy.h"

namespace ptc {

/// A local array inside an image.
struct ArraySlot {
  uint32_t tensor = 0;
  uint64_t byte_offset = 0;
  SubTensor part;
  friend bool operator==(const ArraySlot&, const ArraySlot&) = default;
};

/// What one image holds, or shall hold: arrays, and bytes of the file's own. A copy is cheap.
struct ImageLayout {
  uint32_t node = 0;
  uint64_t bytes = 0;
  Literals literals;
  /// By byte_offset. Several that begin at the same byte are one array, which has several names;
  /// the first is planned, and what covers least of it comes last.
  SharedVector<ArraySlot> arrays;
  bool gaps_are_others = false;  // what is in neither is not known to be zeros, and is nobody's
  friend bool operator==(const ImageLayout&, const ImageLayout&) = default;
};

/// Whether it is the same array as the one before it, under another name.
bool is_other_name(const SharedVector<ArraySlot>& arrays, size_t number);
/// Puts arrays in their order.
void sort_arrays(std::vector<ArraySlot>& arrays);

struct Transfer {
  /// Of the source images; from their number on: a target image on the same node, by its place
  /// among the targets, which got the bytes from another node.
  uint32_t source_image = 0;
  StridedCopy copy;  // target offsets from the start of the target image
  /// Of what the copy writes, what lies in [begin, end) of the target image.
  uint64_t begin = 0, end = UINT64_MAX;
  /// A target on another node, by its place among the targets, that gets the same bytes at the same
  /// place from the source image: to be taken from there (plan/relay.h), and from the source where
  /// that fails.
  std::optional<uint32_t> relay = {};

  bool has_window() const { return end != UINT64_MAX; }
  uint64_t bytes() const { return bytes_between(copy, begin, end); }
};

/// How one target image comes into being.
struct ImagePlan {
  std::optional<uint32_t> kept;      // this source image is it already, on the same node
  SharedVector<Transfer> transfers;  // by target offset; empty when kept
};

struct TransferPlan {
  std::vector<ImagePlan> images;  // one per target image

  struct Totals {
    uint64_t total_bytes = 0;    // of all target images
    uint64_t kept_bytes = 0;     // in images that stay as they are
    uint64_t local_bytes = 0;    // copied within a node
    uint64_t moved_bytes = 0;    // between nodes
    uint64_t minimum_bytes = 0;  // between nodes: needed there and not held there, once per node
    uint32_t kept_images = 0;
    uint32_t written_images = 0;
  };
  Totals totals;
  struct Pair {
    uint32_t source_node, target_node;
    uint64_t bytes;
  };
  std::vector<Pair> pairs;  // where bytes > 0, by (source, target)
};

/// What a plan asks for so far, to spread it over all holders and to move no byte to a node twice.
class PlanState {
 public:
  PlanState(size_t source_images, uint32_t nodes) : image_load_(source_images), node_load_(nodes) {}

 private:
  friend class SourceIndex;
  /// A box that comes to a node from another one, as part of a target image.
  struct Arrival {
    uint32_t target, slot, piece;
    Box box;
  };
  std::vector<uint64_t> image_load_;  // bytes asked of each image
  std::vector<uint64_t> node_load_;   // bytes asked of each node by others
  std::map<std::pair<uint32_t, uint32_t>, std::vector<Arrival>> arrivals_;  // by (node, tensor)
};

/// Which images hold which part of each tensor. Immutable; threads: any.
class SourceIndex {
 public:
  /// `images` must outlive the index. Tensors are numbered 0 … element_bits.size() − 1.
  SourceIndex(std::span<const ImageLayout> images, std::vector<uint8_t> element_bits);

  /// The transfers of one target image by itself. kCorrupt when some part is held by nobody: the
  /// message gives the tensor's number and the box.
  Result<std::vector<Transfer>> plan_image(const ImageLayout& target) const;
  /// The same as one of many: `targets` up to number `image` were planned with this `state`.
  Result<std::vector<Transfer>> plan_image(std::span<const ImageLayout> targets, uint32_t image,
                                           PlanState& state) const;

  uint64_t bytes_of(uint32_t tensor, const Box& box) const {
    return box.volume() * element_bits_[tensor] / 8;
  }
  /// Bytes of `wanted` (disjoint boxes of the tensor) that no image on `node` holds.
  uint64_t missing_on_node(uint32_t tensor, uint32_t node, const std::vector<Box>& wanted) const;
  /// … that no image holds at all.
  uint64_t missing(uint32_t tensor, const std::vector<Box>& wanted) const;
  /// Adds the bytes of a box that each node holds; those that images hold are equal or disjoint.
  void add_held(uint32_t tensor, const Box& wanted, std::vector<uint64_t>& by_node) const;

  std::span<const ImageLayout> images() const { return images_; }

  /// The boxes without what is in several of them.
  std::vector<Box> disjoint(uint32_t tensor, std::vector<Box> boxes) const;

 private:
  struct Holder {
    uint32_t image;
    uint32_t slot;
    uint32_t piece;
  };
  /// A box that one or more images hold, and the numbers of its first and behind its last element.
  struct Held {
    uint64_t begin, end;
    uint32_t first_holder;
    uint32_t holders;
  };
  struct Tensor {
    Dims strides;                 // of element numbers
    std::vector<Held> held;       // by begin
    std::vector<uint64_t> reach;  // greatest end of held[0 … i]
  };
  struct Interval {
    uint64_t begin, end;
  };
  static Interval interval(const Tensor& tensor, const Box& box);
  const ArraySlot& slot(const Holder& holder) const {
    return images_[holder.image].arrays[holder.slot];
  }
  const Piece& piece(const Holder& holder) const { return slot(holder).part.pieces[holder.piece]; }
  const Box& box(const Held& held) const { return piece(holders_[held.first_holder]).global; }
  std::span<const Holder> holders(const Held& held) const {
    return std::span(holders_).subspan(held.first_holder, held.holders);
  }
  bool on_node(const Held& held, uint32_t node) const;
  uint64_t missing_if(uint32_t tensor, const std::vector<Box>& wanted, auto&& counts) const;
  Result<std::vector<Transfer>> plan(std::span<const ImageLayout> targets, uint32_t image,
                                     PlanState* state) const;
  void for_each_overlapping(uint32_t tensor, const Box& box, auto&& visit) const;
  void index_tensor(Tensor& tensor, std::span<Holder> holders, uint32_t first_holder);

  std::span<const ImageLayout> images_;
  std::vector<uint8_t> element_bits_;
  std::vector<Tensor> tensors_;
  std::vector<Holder> holders_;  // by tensor, then as its `held`
};

/// The least that any plan must move between nodes: for each node what the targets on it need and
/// no source on it holds, every byte once per node.
uint64_t minimum_moved_bytes(const SourceIndex& source, std::span<const ImageLayout> target);

/// The whole plan, with relays. Target images that are source images already, on the same node, are
/// kept.
Result<TransferPlan> plan_transfers(const SourceIndex& source, std::span<const ImageLayout> target);

}  // namespace ptc
