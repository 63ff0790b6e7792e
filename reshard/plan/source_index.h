// Which images hold which part of each tensor, and what a file by itself is made of.
//
// Images that share their arrays (copies of one file on many nodes) are indexed once, as one
// *kind*: what is computed of a box is computed once for all of its copies, and who has it is a
// *set* of images, of which there are few: all parameters of a pipeline stage that are on the same
// ranks have the same.
//
// Boxes are found by the interval of their elements' numbers in C order: what tp (on the first
// axis), FSDP and ZeRO-1 cut are intervals that hardly overlap.
//
// Tensors of which equal boxes are held by equal sets, as of a stage's layers and a rank's experts,
// are *alike*: what is found of a part of one is true of the same part of the others.
//
// Cost: O(n log n) in the boxes of all kinds, and the images in all sets.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reshard/plan/literals.h"
#include "reshard/plan/shared_vector.h"
#include "store/base/error.h"
#include "store/base/memory_place.h"
#include "store/tensor/box.h"
#include "store/tensor/packed_copy.h"
#include "store/tensor/shared_part.h"

namespace ptc {

/// A local array inside an image.
struct ArraySlot {
  uint32_t tensor = 0;
  uint64_t byte_offset = 0;
  SharedPart part;
  friend bool operator==(const ArraySlot&, const ArraySlot&) = default;
};

/// What one image holds, or shall hold: arrays, and bytes of the file's own. A copy is cheap.
struct ImageLayout {
  uint32_t node = 0;
  NodeMemory memory = {};  // of that node
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
  /// among the targets, which got the bytes from another node: an earlier one, or this one, which
  /// has them at two places.
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

/// What people call a tensor, by its number; for messages.
using TensorNames = std::function<std::string(uint32_t tensor)>;

/// Immutable; threads: any.
class SourceIndex {
 public:
  /// `images` must outlive the index. Tensors are numbered 0 … element_bits.size() − 1. `names`:
  /// null, messages have the numbers.
  SourceIndex(std::span<const ImageLayout> images, std::vector<uint8_t> element_bits,
              TensorNames names = nullptr);

  /// The transfers of one target image by itself. kCorrupt when some part is held by nobody:
  /// stored_nowhere().
  Result<std::vector<Transfer>> plan_image(const ImageLayout& target) const;

  /// The error that says so, of which tensor and which box.
  Error stored_nowhere(uint32_t tensor, const Box& box) const;

  uint8_t element_bits(uint32_t tensor) const { return element_bits_[tensor]; }
  size_t tensors() const { return tensors_.size(); }
  uint64_t bytes_of(uint32_t tensor, const Box& box) const {
    return box.volume() * element_bits_[tensor] / 8;
  }
  /// Bytes of `wanted` (disjoint boxes of the tensor) that no image on `node` holds.
  uint64_t missing_on_node(uint32_t tensor, uint32_t node, const std::vector<Box>& wanted) const;
  /// … that no image in this memory of `node` holds.
  uint64_t missing_in_memory(uint32_t tensor, uint32_t node, NodeMemory memory,
                             const std::vector<Box>& wanted) const;
  /// … that no image holds at all.
  uint64_t missing(uint32_t tensor, const std::vector<Box>& wanted) const;

  /// Bytes of a file's arrays, and of these what each node holds of them, by node, where it is
  /// some; boxes that images hold are equal or disjoint.
  struct HeldOf {
    uint64_t all = 0;
    std::vector<std::pair<uint32_t, uint64_t>> by_node;
  };
  HeldOf held_of(const ImageLayout& file) const;

  std::span<const ImageLayout> images() const { return images_; }

  /// Whether no two of these boxes of a tensor have elements in common.
  bool are_disjoint(uint32_t tensor, const std::vector<const Box*>& boxes) const;
  /// The boxes without what is in several of them.
  std::vector<Box> disjoint(uint32_t tensor, std::vector<Box> boxes) const;

  /// An array that a kind has, and one piece of it.
  struct Holder {
    uint32_t kind;
    uint32_t slot;
    uint32_t piece;
  };
  /// A box that one or more kinds hold, and the numbers of its first and behind its last element.
  struct Held {
    uint64_t begin, end;
    uint32_t first_holder;
    uint32_t holders;
    uint32_t set;
    const Box* box;  // of an image's part
  };
  /// An image of a set, and which of the holders of each box of that set says where it is in it.
  struct Member {
    uint32_t image;
    uint32_t holder;
  };
  /// Tensors with equal numbers have equal held() but for holders, and elements of as many bits.
  uint32_t alike(uint32_t tensor) const { return alike_[tensor]; }
  const Held& held(uint32_t tensor, uint32_t number) const { return tensors_[tensor].held[number]; }
  uint32_t number_of(uint32_t tensor, const Held& held) const {
    return static_cast<uint32_t>(&held - tensors_[tensor].held.data());
  }
  size_t sets() const { return sets_.size(); }
  /// By image.
  std::span<const Member> members(uint32_t set) const { return sets_[set].members; }
  /// Those on a node, by image.
  std::span<const Member> members_on(uint32_t set, uint32_t node) const;

  const Holder& holder(const Held& held, uint32_t number) const {
    return holders_[held.first_holder + number];
  }
  const ArraySlot& slot(const Holder& holder) const {
    return images_[kinds_[holder.kind]].arrays[holder.slot];
  }
  const Piece& piece(const Holder& holder) const { return slot(holder).part->pieces[holder.piece]; }
  static const Box& box(const Held& held) { return *held.box; }
  /// visit(Held, Box: what they have in common), in C order.
  template <class Visit>
  void for_each_overlapping(uint32_t tensor, const Box& box, Visit&& visit) const;

 private:
  struct Tensor {
    Dims strides;                 // of element numbers
    std::vector<Held> held;       // by begin
    std::vector<uint64_t> reach;  // greatest end of held[0 … i]
  };
  class Cuts;
  struct Set {
    std::vector<Member> members;  // by image
    std::vector<uint32_t> nodes;  // ascending
    std::vector<uint32_t> first;  // in by_node, of each of `nodes`; and its size
    std::vector<Member> by_node;  // by node, then image
  };
  struct Interval {
    uint64_t begin, end;
  };
  static Interval interval(const Tensor& tensor, const Box& box);
  std::pair<size_t, Interval> first_overlapping(uint32_t tensor, const Box& box) const;
  uint64_t missing_if(uint32_t tensor, const std::vector<Box>& wanted, auto&& counts) const;
  void index_tensor(Tensor& tensor, std::span<Holder> holders, uint32_t first_holder);
  void make_sets(const std::vector<std::vector<uint32_t>>& images_of_kind);
  void find_alike();

  std::span<const ImageLayout> images_;
  std::vector<uint8_t> element_bits_;
  TensorNames names_;
  std::vector<uint32_t> kinds_;  // by kind: an image of it
  std::vector<Tensor> tensors_;
  std::vector<uint32_t> alike_;  // by tensor: the first of those that are
  std::vector<Holder> holders_;  // by tensor, then as its `held`
  std::vector<Set> sets_;
};

template <class Visit>
void SourceIndex::for_each_overlapping(uint32_t tensor, const Box& wanted, Visit&& visit) const {
  const Tensor& index = tensors_[tensor];
  auto [i, at] = first_overlapping(tensor, wanted);
  for (; i < index.held.size() && index.held[i].begin < at.end; ++i)
    if (const std::optional<Box> common = intersect(box(index.held[i]), wanted))
      visit(index.held[i], *common);
}

/// Of what a part of a tensor has in common with what is held, what is true of alike tensors too.
struct AlikePart {
  uint32_t alike;  // SourceIndex::alike()
  const SubTensor* part;
  AlikePart(const SourceIndex& index, const ArraySlot& slot)
      : alike(index.alike(slot.tensor)), part(&*slot.part) {}
  friend bool operator==(const AlikePart&, const AlikePart&) = default;
};
/// Numbers those that differ, as they come: 0, 1, … Threads: one.
class AlikeParts {
 public:
  uint32_t number_of(const AlikePart& one);
  /// By number.
  const std::vector<AlikePart>& all() const { return all_; }
  void clear();

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  size_t place_of(const AlikePart& one) const {
    return ((reinterpret_cast<uintptr_t>(one.part) ^ uint64_t{one.alike} << 40) *
                0x9e3779b97f4a7c15u >>
            20) &
           (table_.size() - 1);
  }
  void grow();

  std::vector<AlikePart> all_;
  /// Numbers, each at its place or at the next that was free; a power of 2, half of it free.
  std::vector<uint32_t> table_ = std::vector<uint32_t>(64, kNone);
};

/// A box of it, and where that lies in the local array.
Piece part_of(const Piece& whole, const Box& box);

/// The copy of a box that both pieces have. kInvalidArgument: it is not of whole bytes.
Result<StridedCopy> copy_between(const ArraySlot& source, const Piece& source_piece,
                                 const ArraySlot& target, const Piece& target_piece,
                                 const Box& common, uint32_t element_bits);

}  // namespace ptc
