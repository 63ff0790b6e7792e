#include "reshard/ptc/slicing.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace ptc {
namespace {

using Wide = unsigned __int128;

constexpr uint64_t kMaxExtent = uint64_t{1} << 62;
constexpr uint64_t kMaxVocabMultiple = 4096;  // largest that is looked for

uint64_t padded(uint64_t rows, uint64_t multiple, uint32_t ranks) {
  const Wide step = Wide{multiple} * ranks;
  const Wide result = (Wide{rows} + step - 1) / step * step;
  return result > kMaxExtent ? UINT64_MAX : static_cast<uint64_t>(result);
}

void append(AxisSlice& slice, uint64_t global_offset, uint64_t extent) {
  if (extent == 0) return;
  slice.segments.push_back({global_offset, slice.local_extent, extent});
  slice.local_extent += extent;
}

Result<AxisSlice> slice_vocabulary(const ResolvedCut& cut, uint64_t rows, uint32_t rank,
                                   uint32_t ranks) {
  if (ranks == 1 && !cut.pad_single_rank) return AxisSlice::whole(rows);
  const uint64_t all = padded(rows, cut.vocab_multiple, ranks);
  if (all == UINT64_MAX) return invalid_argument("a vocabulary of {} rows is too long", rows);
  AxisSlice slice;
  slice.local_extent = all / ranks;
  const uint64_t begin = std::min(rows, rank * slice.local_extent);
  const uint64_t end = std::min(rows, (rank + uint64_t{1}) * slice.local_extent);
  if (begin < end) slice.segments.push_back({begin, 0, end - begin});
  return slice;
}

struct Stretch {
  uint64_t begin;
  uint64_t extent;
};

Result<Stretch> slice_part(const ResolvedCut& cut, const ResolvedCut::Part& part, uint64_t length,
                           uint32_t rank, uint32_t ranks) {
  if (part.heads == 0) {
    if (length % ranks != 0) {
      return invalid_argument("length {} of axis {} is not divisible by tp = {}", length, cut.axis,
                              ranks);
    }
    return Stretch{rank * (length / ranks), length / ranks};
  }
  if (length % part.heads != 0) {
    return invalid_argument("length {} of axis {} is not divisible into {} heads", length, cut.axis,
                            part.heads);
  }
  if (ranks <= part.heads) {
    if (part.heads % ranks != 0) {
      return invalid_argument("the {} heads on axis {} (length {}) are not divisible by tp = {}",
                              part.heads, cut.axis, length, ranks);
    }
    return Stretch{rank * (length / ranks), length / ranks};
  }
  if (!part.share && !part.split) {
    return invalid_argument("axis {} (length {}) has {} heads, fewer than tp = {}", cut.axis,
                            length, part.heads, ranks);
  }
  if (ranks % part.heads != 0) {
    return invalid_argument("tp = {} ranks cannot share the {} heads on axis {} (length {}) evenly",
                            ranks, part.heads, cut.axis, length);
  }
  if (part.split) {
    if (length % ranks != 0) {
      return invalid_argument(
          "the {} heads on axis {} (length {}) cannot be cut over tp = {} ranks evenly", part.heads,
          cut.axis, length, ranks);
    }
    return Stretch{rank * (length / ranks), length / ranks};
  }
  const uint64_t head_length = length / part.heads;
  return Stretch{rank * part.heads / ranks * head_length, head_length};
}

/// Multiples to try for the padding of a vocabulary, likeliest first.
std::vector<uint64_t> likely_multiples(uint64_t rule_multiple) {
  std::vector<uint64_t> multiples = {rule_multiple};
  for (uint64_t m = kMaxVocabMultiple; m >= 1; m /= 2) {
    if (m < rule_multiple) multiples.push_back(m);
  }
  for (uint64_t m = 1; m <= kMaxVocabMultiple; m *= 2) {
    if (m > rule_multiple) multiples.push_back(m);
  }
  return multiples;
}

Result<uint64_t> vocabulary_extent(ResolvedCut& cut, uint64_t rows, uint32_t ranks,
                                   uint64_t vocab) {
  const uint64_t expected = vocab == 0 ? rows : vocab;
  if (ranks == 1 && rows == expected) {
    if (cut.pad_single_rank && padded(rows, cut.vocab_multiple, 1) != rows) {
      cut.pad_single_rank = false;
    }
    return rows;
  }
  if (rows == expected && padded(expected, cut.vocab_multiple, ranks) != rows) {
    cut.vocab_multiple = 1;
    return expected;
  }
  for (uint64_t multiple : likely_multiples(cut.vocab_multiple)) {
    if (padded(expected, multiple, ranks) != rows) continue;
    cut.vocab_multiple = multiple;
    if (ranks == 1) cut.pad_single_rank = true;
    return expected;
  }
  if (ranks == 1) {
    cut.pad_single_rank = false;
    return rows;
  }
  return invalid_argument(
      "the {} ranks of tp hold {} rows on axis {}, which is not the vocabulary of {} rows with any "
      "padding",
      ranks, rows, cut.axis, vocab);
}

}  // namespace

AxisSlice AxisSlice::whole(uint64_t extent) {
  AxisSlice slice;
  append(slice, 0, extent);
  return slice;
}

Result<AxisSlice> slice_axis(const ResolvedCut& cut, uint64_t extent, uint32_t rank,
                             uint32_t ranks) {
  if (cut.vocab_multiple > 0) return slice_vocabulary(cut, extent, rank, ranks);
  if (ranks == 1 || cut.parts.empty()) return AxisSlice::whole(extent);

  Wide total = 0;
  for (const ResolvedCut::Part& part : cut.parts) total += part.size;
  if (total == 0) return invalid_argument("the parts of axis {} have no size", cut.axis);
  AxisSlice slice;
  uint64_t part_begin = 0;
  for (const ResolvedCut::Part& part : cut.parts) {
    if (part.size == 0) continue;
    const Wide scaled = Wide{extent} * part.size;
    if (scaled % total != 0) {
      return invalid_argument("length {} of axis {} is not divisible into its {} parts", extent,
                              cut.axis, cut.parts.size());
    }
    const uint64_t length = static_cast<uint64_t>(scaled / total);
    PTC_TRY(const Stretch stretch, slice_part(cut, part, length, rank, ranks));
    const uint64_t begin = part_begin + stretch.begin;
    const uint64_t end = begin + stretch.extent;
    if (begin % cut.block != 0 || (end % cut.block != 0 && end != extent)) {
      return invalid_argument(
          "tp = {} cuts axis {} (length {}) at [{}:{}], which is off its blocks of {} elements",
          ranks, cut.axis, extent, begin, end, cut.block);
    }
    append(slice, begin, stretch.extent);
    part_begin += length;
  }
  return slice;
}

Result<uint64_t> global_extent(ResolvedCut& cut, uint64_t local_extent, uint32_t ranks,
                               uint64_t vocab) {
  const Wide rows = Wide{local_extent} * ranks;
  if (rows > kMaxExtent) {
    return invalid_argument("{} ranks with {} elements each on axis {} are too many", ranks,
                            local_extent, cut.axis);
  }
  if (cut.vocab_multiple > 0) {
    return vocabulary_extent(cut, static_cast<uint64_t>(rows), ranks, vocab);
  }
  if (ranks == 1 || cut.parts.empty()) return local_extent;

  // With k ranks that hold different stretches of a part (tp, or its heads where they are shared),
  // local = Σ L_p / k_p, and L_p = n · size_p / Σ size.
  auto distinct = [&](const ResolvedCut::Part& part) -> uint64_t {
    return part.share && part.heads > 0 && part.heads < ranks ? part.heads : ranks;
  };
  Wide common = 1;
  Wide total = 0;
  for (const ResolvedCut::Part& part : cut.parts) {
    const uint64_t k = distinct(part);
    common = common / std::gcd(static_cast<uint64_t>(common % k), k) * k;
    total += part.size;
    if (common > kMaxExtent || total > kMaxExtent) {
      return invalid_argument("the parts of axis {} have sizes that are too large", cut.axis);
    }
  }
  if (total == 0) return invalid_argument("the parts of axis {} have no size", cut.axis);
  Wide weight = 0;
  for (const ResolvedCut::Part& part : cut.parts) weight += part.size * (common / distinct(part));
  const Wide unit = Wide{local_extent} * total;
  const Wide divisor =
      weight / std::gcd(static_cast<uint64_t>(weight % common), static_cast<uint64_t>(common));
  const Wide factor = common / (weight / divisor);
  if (unit % divisor != 0) {
    return invalid_argument("local length {} of axis {} does not fit its {} parts on tp = {} ranks",
                            local_extent, cut.axis, cut.parts.size(), ranks);
  }
  if (unit / divisor > kMaxExtent / factor) {
    return invalid_argument("axis {} with local length {} is too long", cut.axis, local_extent);
  }
  return static_cast<uint64_t>(unit / divisor * factor);
}

Result<AxisSlice> slice_experts(uint64_t extent, uint32_t rank, uint32_t ranks) {
  if (extent % ranks != 0) {
    return invalid_argument("the {} experts are not divisible by ep = {}", extent, ranks);
  }
  AxisSlice slice;
  append(slice, extent / ranks * rank, extent / ranks);
  return slice;
}

Result<AxisSlice> slice_of_blocks(const AxisSlice& weight, uint64_t weight_extent, uint64_t block) {
  AxisSlice slice;
  slice.local_extent = (weight.local_extent + block - 1) / block;
  for (const AxisSegment& segment : weight.segments) {
    const uint64_t end = segment.global_offset + segment.extent;
    const bool last =
        end == weight_extent && segment.local_offset + segment.extent == weight.local_extent;
    if (segment.global_offset % block != 0 || segment.local_offset % block != 0 ||
        (end % block != 0 && !last)) {
      return invalid_argument("its weight is cut at [{}:{}], off the grid of blocks of {}",
                              segment.global_offset, end, block);
    }
    slice.segments.push_back({segment.global_offset / block, segment.local_offset / block,
                              (segment.extent + block - 1) / block});
  }
  return slice;
}

std::optional<AxisUnit> unit_of(uint64_t weight_extent, uint64_t extent) {
  if (extent == 0 || extent > weight_extent) return std::nullopt;
  constexpr uint64_t kWordBits = 32;
  const uint64_t words = weight_extent / kWordBits;  // of one bit each
  if (weight_extent % kWordBits == 0 && extent % words == 0) {
    const uint64_t bits = extent / words;
    if (bits < 8 && !std::has_single_bit(bits)) return AxisUnit{kWordBits, bits};
  }
  // A group is longer than half the next power of two, however short the last one is.
  const uint64_t group = std::bit_ceil((weight_extent + extent - 1) / extent);
  if ((weight_extent + group - 1) / group != extent) return std::nullopt;
  return AxisUnit{group, 1};
}

std::optional<AxisSlice> slice_of_units(const AxisSlice& weight, uint64_t weight_extent,
                                        AxisUnit unit) {
  auto slice = slice_of_blocks(weight, weight_extent, unit.elements);
  if (!slice) return std::nullopt;
  AxisSlice kept = std::move(slice).value();
  kept.local_extent *= unit.kept;
  for (AxisSegment& segment : kept.segments) {
    segment.global_offset *= unit.kept;
    segment.local_offset *= unit.kept;
    segment.extent *= unit.kept;
  }
  return kept;
}

void cut_axis(SubTensor& part, uint32_t axis, const AxisSlice& slice) {
  part.local_shape[axis] = slice.local_extent;
  auto cut_piece = [axis](Piece& piece, const AxisSegment& segment) {
    piece.global.offset[axis] = segment.global_offset;
    piece.global.extent[axis] = segment.extent;
    piece.local_offset[axis] = segment.local_offset;
  };
  if (slice.segments.empty()) {
    part.pieces.clear();
  } else if (slice.segments.size() == 1) {
    for (Piece& piece : part.pieces) cut_piece(piece, slice.segments.front());
  } else {
    std::vector<Piece> pieces;
    pieces.reserve(part.pieces.size() * slice.segments.size());
    for (const Piece& piece : part.pieces) {
      for (const AxisSegment& segment : slice.segments) {
        pieces.push_back(piece);
        cut_piece(pieces.back(), segment);
      }
    }
    part.pieces = std::move(pieces);
  }
}

namespace {

/// Leaves the elements from number `begin` on of the local array, which become one of this shape.
/// Of an array that is flat, all of it is there before.
void cut_run(SubTensor& part, uint64_t begin, Shape shape) {
  const Shape of = part.flat ? part.flat->of : part.local_shape;
  const uint64_t elements = Box::whole(of).volume();
  const uint64_t count = Box::whole(shape).volume();
  SubTensor flat{shape, {}, SubTensor::Flat{of, begin}};
  for (const Box& box : boxes_of_run(of, begin, std::min(begin + count, elements))) {
    for (const Piece& piece : part.pieces) {
      const auto common = intersect(box, {piece.local_offset, piece.global.extent});
      if (!common) continue;
      Piece cut{*common, common->offset};
      for (size_t axis = 0; axis < common->axes(); ++axis) {
        cut.global.offset[axis] += piece.global.offset[axis] - piece.local_offset[axis];
      }
      flat.pieces.push_back(cut);
    }
  }
  part = std::move(flat);
}

}  // namespace

void cut_rows(SubTensor& part, uint64_t begin, uint64_t rows) {
  begin = std::min(begin, part.local_shape[0]);
  const uint64_t end = std::min(begin + rows, part.local_shape[0]);
  if (part.flat) {
    Shape shape = part.local_shape;
    shape[0] = 1;
    const uint64_t first = begin * Box::whole(shape).volume();
    shape[0] = end - begin;
    cut_run(part, first, shape);
    return;
  }
  part.local_shape[0] = end - begin;
  std::vector<Piece> pieces;
  for (Piece& piece : part.pieces) {
    const uint64_t from = std::max(begin, piece.local_offset[0]);
    const uint64_t to = std::min(end, piece.local_offset[0] + piece.global.extent[0]);
    if (from >= to) continue;
    piece.global.offset[0] += from - piece.local_offset[0];
    piece.global.extent[0] = to - from;
    piece.local_offset[0] = from - begin;
    pieces.push_back(piece);
  }
  part.pieces = std::move(pieces);
}

void cut_flat(SubTensor& part, uint64_t begin, uint64_t count) { cut_run(part, begin, {count}); }

Shape folded(const Shape& shape, uint32_t into) {
  Shape result;
  for (size_t axis = 1; axis < shape.size(); ++axis)
    result.push_back(axis == into + size_t{1} ? shape[0] * shape[axis] : shape[axis]);
  return result;
}

void fold(SubTensor& part, uint32_t into) {
  Shape shape = folded(part.local_shape, into);
  part.flat = SubTensor::Flat{part.local_shape, 0};
  part.local_shape = shape;
}

SubTensor product(const std::vector<AxisSlice>& slices) {
  Dims zero(slices.size());
  SubTensor part{zero, {Piece{Box{zero, zero}, zero}}};
  for (size_t axis = 0; axis < slices.size(); ++axis) {
    cut_axis(part, static_cast<uint32_t>(axis), slices[axis]);
  }
  return part;
}

}  // namespace ptc
