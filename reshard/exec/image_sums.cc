#include "reshard/exec/image_sums.h"

#include <algorithm>
#include <map>

namespace ptc {
namespace {

// Shorter ones cost more as tasks of a device than as bytes of the link.
constexpr uint64_t kLeastDeviceRun = 256;
constexpr uint64_t kReadAtOnce = 4 << 20;

/// Runs of one image, summed by its device, so many in a launch.
class DeviceRuns {
 public:
  DeviceRuns(const Image& image, ConstMemoryPointer begin, std::span<Checksum> sums)
      : image_(image), begin_(begin), sums_(sums) {}

  Result<> add(uint64_t offset, uint64_t bytes, uint64_t logical_offset, uint32_t sum) {
    constexpr size_t kMostAtOnce = 64 << 10;
    runs_.push_back({begin_ + offset, bytes, logical_offset, sum});
    return runs_.size() < kMostAtOnce ? ok() : finish();
  }
  Result<> finish() {
    if (runs_.empty()) return ok();
    PTC_TRY(image_.device()->devices->add_checksums(begin_.memory(), runs_, sums_));
    runs_.clear();
    return ok();
  }

 private:
  const Image& image_;
  const ConstMemoryPointer begin_;
  const std::span<Checksum> sums_;
  std::vector<DeviceRun> runs_;
};

}  // namespace

Result<ImageSums> ImageSums::make(const ImageLayout& layout, const SummedTensors& tensors) {
  ImageSums sums;
  for (size_t number = 0; number < layout.arrays.size(); ++number) {
    const ArraySlot& slot = layout.arrays[number];
    const bool other_name = is_other_name(layout.arrays, number);
    const TensorFacts& facts = tensors.facts[slot.tensor];
    PTC_TRY(auto elements, num_elements(slot.part->local_shape));
    uint64_t bytes = elements * dtype_bits(facts.dtype) / 8;
    if (slot.byte_offset > layout.bytes || bytes > layout.bytes - slot.byte_offset)
      return make_error(Code::kCorrupt, "an image has {} bytes, {} are needed", layout.bytes,
                        slot.byte_offset + bytes);
    for (const Piece& piece : slot.part->pieces) {
      if (piece.global.empty()) continue;
      std::vector<const Box*> boxes = tensors.cuts.of(slot.tensor, piece.global);
      if (boxes.empty()) boxes.push_back(&piece.global);
      for (const Box* box : boxes) {
        Dims local = piece.local_offset;
        for (size_t axis = 0; axis < box->axes(); ++axis)
          local[axis] += box->offset[axis] - piece.global.offset[axis];
        PTC_TRY(auto copy, make_strided_copy({0, facts.shape}, box->offset,
                                             array_at(slot.part, slot.byte_offset), local,
                                             box->extent, dtype_bits(facts.dtype)));
        sums.pieces_.emplace_back(slot.tensor, box, copy, other_name);
      }
    }
  }
  std::sort(sums.pieces_.begin(), sums.pieces_.end(), [](const PieceSum& a, const PieceSum& b) {
    return a.from_logical.target_offset < b.from_logical.target_offset;
  });
  uint64_t end = 0, in_pieces = 0;
  for (const PieceSum& piece : sums.pieces_)
    if (!piece.other_name) in_pieces += piece.from_logical.total_bytes();
  sums.literals_ = layout.literals;
  sums.padded_ = !layout.gaps_are_others && layout.literals.bytes() + in_pieces < layout.bytes;
  for (PieceSum& piece : sums.pieces_) piece.end_so_far = end = std::max(end, piece.end_so_far);
  return sums;
}

void ImageSums::add(uint64_t offset, std::span<const std::byte> window) {
  const uint64_t end = offset + window.size();
  auto it = std::partition_point(pieces_.begin(), pieces_.end(),
                                 [&](const PieceSum& piece) { return piece.end_so_far <= offset; });
  for (; it != pieces_.end() && it->from_logical.target_offset < end; ++it) {
    Checksum sum;
    for_each_run(it->from_logical, offset, end,
                 [&](uint64_t logical_offset, uint64_t image_offset, uint64_t bytes) {
                   sum += checksum_of_run(window.subspan(image_offset - offset, bytes),
                                          logical_offset);
                 });
    add_to(*it, sum);
  }
}

void ImageSums::add_to(PieceSum& piece, const Checksum& sum) {
  for (size_t lane = 0; lane < 2; ++lane)
    piece.lane[lane].fetch_add(sum.lane[lane], std::memory_order_relaxed);
}

Result<> ImageSums::add_on_device(const Image& image, std::stop_token stop) {
  PTC_TRY(const ConstMemoryPointer begin, image.map());
  std::vector<Checksum> sums(pieces_.size());
  DeviceRuns runs(image, begin, sums);
  std::vector<std::byte> buffer;
  for (uint32_t number = 0; number < pieces_.size(); ++number) {
    if (stop.stop_requested()) return Error(Code::kCancelled, "cancelled");
    const StridedCopy& copy = pieces_[number].from_logical;
    Result<> added = ok();
    if (copy.run_bytes >= kLeastDeviceRun) {
      for_each_run(copy, [&](uint64_t logical_offset, uint64_t offset, uint64_t bytes) {
        if (added.has_value()) added = runs.add(offset, bytes, logical_offset, number);
      });
      PTC_TRY(std::move(added));
      continue;
    }
    for (uint64_t at = copy.target_offset; at < copy.target_end(); at += kReadAtOnce) {
      buffer.resize(std::min(kReadAtOnce, copy.target_end() - at));
      PTC_TRY(image.read(at, buffer));
      for_each_run(copy, at, at + buffer.size(),
                   [&](uint64_t logical_offset, uint64_t offset, uint64_t bytes) {
                     sums[number] += checksum_of_run(
                         std::span<const std::byte>(buffer).subspan(offset - at, bytes),
                         logical_offset);
                   });
    }
  }
  PTC_TRY(runs.finish());
  for (size_t number = 0; number < pieces_.size(); ++number) add_to(pieces_[number], sums[number]);
  return ok();
}

Result<> ImageSums::give_to(ChecksumLedger& ledger) const {
  for (const PieceSum& piece : pieces_) {
    PTC_TRY(ledger.add(piece.tensor, *piece.box, {{piece.lane[0].load(), piece.lane[1].load()}}));
  }
  return ok();
}

Checksum ImageSums::beside(uint64_t offset, std::span<const std::byte> window) const {
  if (!padded_) return {};
  const uint64_t end = offset + window.size();
  // Checksums are linear: what all have, without what literals and pieces have.
  Checksum rest = checksum_of_run(window, offset);
  auto take_away = [&](uint64_t at, uint64_t bytes) {
    const Checksum sum = checksum_of_run(window.subspan(at - offset, bytes), at);
    for (size_t lane = 0; lane < 2; ++lane) rest.lane[lane] -= sum.lane[lane];
  };
  literals_.for_each(offset, end,
                     [&](uint64_t at, std::string_view bytes) { take_away(at, bytes.size()); });
  auto it = std::partition_point(pieces_.begin(), pieces_.end(),
                                 [&](const PieceSum& piece) { return piece.end_so_far <= offset; });
  for (; it != pieces_.end() && it->from_logical.target_offset < end; ++it)
    if (!it->other_name)
      for_each_run(it->from_logical, offset, end,
                   [&](uint64_t, uint64_t at, uint64_t bytes) { take_away(at, bytes); });
  return rest;
}

bool ImageSums::padding_is_zero(std::span<const std::byte> image) const {
  // Zeros count nothing.
  return beside(0, image) == Checksum();
}

Result<bool> ImageSums::padding_is_zero_on_device(const Image& image) const {
  if (!padded_) return true;
  std::map<uint64_t, uint64_t> ends;  // of what is no padding, by where it begins
  const auto add_range = [&](uint64_t begin, uint64_t end) {
    uint64_t& last = ends[begin];
    last = std::max(last, end);
  };
  for (const Literals::Piece& piece : literals_.pieces()) add_range(piece.offset, piece.end());
  for (const PieceSum& piece : pieces_) {
    const StridedCopy& copy = piece.from_logical;
    if (copy.total_bytes() == copy.target_end() - copy.target_offset) {
      add_range(copy.target_offset, copy.target_end());
      continue;
    }
    for_each_run(copy, [&](uint64_t, uint64_t at, uint64_t bytes) { add_range(at, at + bytes); });
  }
  add_range(image.bytes(), image.bytes());
  PTC_TRY(const ConstMemoryPointer begin, image.map());
  std::vector<Checksum> sum(1);
  DeviceRuns runs(image, begin, sum);
  uint64_t at = 0;
  for (const auto& [from, to] : ends) {
    if (from > at) {
      PTC_TRY(runs.add(at, from - at, at, 0));
    }
    at = std::max(at, to);
  }
  PTC_TRY(runs.finish());
  return sum.front() == Checksum();
}

}  // namespace ptc
