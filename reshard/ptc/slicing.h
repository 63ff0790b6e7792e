// One axis under one cut: which stretches of the global axis a rank holds, and the inverse.
//
// An axis of n elements has parts p of length L_p = n · size_p / Σ size. Of h_p heads over tp
// ranks, rank r holds [r·L_p/tp, (r+1)·L_p/tp) when tp ≤ h_p (tp must divide h_p); when tp > h_p
// (h_p must divide tp) the same where heads are split, and head ⌊r·h_p/tp⌋ where they are shared.
// The local axis is the parts' stretches behind each other; two ranks' stretches are equal or
// disjoint, never merged with those of the next part. A vocabulary of V rows is padded to P =
// ⌈V/(m·tp)⌉·m·tp; rank r holds the rows of [r·P/tp, (r+1)·P/tp) below V, and padding for the rest.
//
// Over D dp ranks what a rank of tp holds is cut once more. FSDP: rank d has rows [d·c, (d+1)·c) of
// it with c = ⌈rows/D⌉, fewer or none at the end. ZeRO-1: elements [d·c, (d+1)·c) of it as one row
// with c = ⌈elements/D⌉, padded at the end.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "reshard/ptc/rule_set.h"
#include "store/base/error.h"
#include "store/tensor/box.h"

namespace ptc {

/// A stretch of an axis: global [global_offset, +extent) at local [local_offset, +extent).
struct AxisSegment {
  uint64_t global_offset = 0;
  uint64_t local_offset = 0;
  uint64_t extent = 0;
  friend bool operator==(const AxisSegment&, const AxisSegment&) = default;
};

struct AxisSlice {
  uint64_t local_extent = 0;  // with padding
  std::vector<AxisSegment> segments;

  static AxisSlice whole(uint64_t extent);
};

/// A TensorCut with every fact looked up.
struct ResolvedCut {
  struct Part {
    uint64_t size = 1;
    uint64_t heads = 0;  // 0: every element is one
    bool share = false;
    bool split = false;
    friend bool operator==(const Part&, const Part&) = default;
  };
  uint32_t axis = 0;
  std::vector<Part> parts;
  uint64_t vocab_multiple = 0;   // 0: no vocabulary
  bool pad_single_rank = false;  // vocabulary: padded with tp = 1 too
  uint64_t block = 1;
  friend bool operator==(const ResolvedCut&, const ResolvedCut&) = default;
};

/// What tp rank `rank` of `ranks` holds of an axis of `extent`. kInvalidArgument says which length
/// is not divisible by what, without the tensor's name (the caller adds it).
Result<AxisSlice> slice_axis(const ResolvedCut& cut, uint64_t extent, uint32_t rank,
                             uint32_t ranks);

/// The global length of an axis of which each of `ranks` ranks holds `local_extent`. For a
/// vocabulary of `vocab` rows (0: unknown) also finds the padding in use, and stores it in `cut`:
/// the rule's multiple, with one rank padded or not, else 1 if nothing is padded, else a smaller
/// power of two, else a larger one. kInvalidArgument where no padding of `vocab` rows explains what
/// several ranks hold; one rank may hold any number of rows.
Result<uint64_t> global_extent(ResolvedCut& cut, uint64_t local_extent, uint32_t ranks,
                               uint64_t vocab);

/// Every `ranks`-th part of an axis of `extent` experts, contiguous.
Result<AxisSlice> slice_experts(uint64_t extent, uint32_t rank, uint32_t ranks);

/// Cuts an axis of `part` that is whole so far down to `slice`.
void cut_axis(SubTensor& part, uint32_t axis, const AxisSlice& slice);

/// The shape in which an array has no axis of its first axis' experts: axis `into` of the others is
/// as many times as long.
Shape folded(const Shape& shape, uint32_t into);
/// Gives the local array this shape. Its elements stay where they are.
void fold(SubTensor& part, uint32_t into);

/// Cuts what is held so far again: rows [begin, begin + rows) of the local array, as far as it has
/// them.
void cut_rows(SubTensor& part, uint64_t begin, uint64_t rows);

/// Cuts what is held so far again: `count` elements from number `begin` on of the local array as
/// one row. Those behind its end are padding.
void cut_flat(SubTensor& part, uint64_t begin, uint64_t count);

/// The slice of the scales of an axis: `weight` in blocks of `block` elements. kInvalidArgument
/// when a cut of the weight is off the grid of blocks.
Result<AxisSlice> slice_of_blocks(const AxisSlice& weight, uint64_t weight_extent, uint64_t block);

/// How an axis of `extent` elements keeps the `weight_extent` elements of another one.
struct AxisUnit {
  uint64_t elements = 1;  // of the weight in one unit, fewer in the last one
  uint64_t kept = 1;      // elements that keep a unit
};

/// The unit of packed words (4 bits: 8 elements in one word; 3 bits: 32 in three) or of groups of a
/// power of two; nullopt: it is none of these. Bit widths and group sizes are not given because
/// they follow from the lengths.
std::optional<AxisUnit> unit_of(uint64_t weight_extent, uint64_t extent);

/// The slice of an axis that keeps the weight's in such units; nullopt: it cuts through one.
std::optional<AxisSlice> slice_of_units(const AxisSlice& weight, uint64_t weight_extent,
                                        AxisUnit unit);

/// The sub-tensor whose axis a is cut as slices[a]: the product of the axes' segments.
SubTensor product(const std::vector<AxisSlice>& slices);

}  // namespace ptc
