#include "dataset/source/packed_offsets.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "store/base/error.h"

namespace ptc {
namespace {

constexpr unsigned kMaxPackedBits =
    56;  // a number then lies within the 8 bytes from its first one on

/// An entry of the directory; persisted.
struct PackedBlock {
  uint64_t base;   // the first number, in units
  uint64_t where;  // of the block's numbers in the data, bytes << 12 | bits << 6 | extra bits
  unsigned bits() const { return where >> 6 & 63; }
  unsigned extra_bits() const { return where & 63; }
};

PackedBlock load_block(const std::byte* packed, uint64_t i) {
  PackedBlock block;
  std::memcpy(&block, packed + i / 64 * sizeof block, sizeof block);
  return block;
}

uint64_t load_bits(const std::byte* data, uint64_t bit, unsigned bits) {
  uint64_t word;
  std::memcpy(&word, data + bit / 8, sizeof word);
  return word >> (bit % 8) & ((uint64_t{1} << bits) - 1);
}

void append_bits(std::string& data, const uint64_t (&numbers)[64], unsigned bits) {
  const size_t at = data.size();
  data.resize(at + size_t{8} * bits);
  for (size_t i = 0; i < 64 && bits > 0; ++i) {
    const size_t bit = i * bits;
    for (unsigned done = 0; done < bits;) {
      const unsigned room = 8 - (bit + done) % 8;
      data[at + (bit + done) / 8] |= static_cast<char>(numbers[i] >> done << (8 - room));
      done += std::min(room, bits - done);
    }
  }
}

}  // namespace

OffsetPacker::OffsetPacker(uint64_t unit) : shift_(std::countr_zero(unit)) {}

void OffsetPacker::add(uint64_t start, uint64_t extra) {
  starts_[pending_] = start >> shift_;
  extras_[pending_] = extra;
  ++count_;
  if (++pending_ == 64) flush();
}

void OffsetPacker::flush() {
  if (pending_ == 0) return;
  PackedBlock block{.base = starts_[0], .where = uint64_t{data_.size()} << 12};
  uint64_t widest_extra = 0;
  for (size_t i = 0; i < pending_; ++i) {
    PTC_CHECK(starts_[i] >= block.base);
    starts_[i] -= block.base;
    widest_extra |= extras_[i];
  }
  std::fill(starts_ + pending_, starts_ + 64, 0);
  std::fill(extras_ + pending_, extras_ + 64, 0);
  const unsigned bits = std::bit_width(starts_[pending_ - 1]);
  const unsigned extra_bits = std::bit_width(widest_extra);
  PTC_CHECK(bits <= kMaxPackedBits && extra_bits <= kMaxPackedBits);
  block.where |= bits << 6 | extra_bits;
  directory_.append(reinterpret_cast<const char*>(&block), sizeof block);
  append_bits(data_, starts_, bits);
  append_bits(data_, extras_, extra_bits);
  pending_ = 0;
}

std::string OffsetPacker::finish() {
  flush();
  std::string packed = std::move(directory_);
  packed += data_;
  packed.append(8, '\0');  // so that eight bytes can be read from any number on
  return packed;
}

PackedOffsets::PackedOffsets(const std::byte* packed, uint64_t count, uint64_t unit)
    : packed_(packed), data_(packed + directory_bytes(count)), shift_(std::countr_zero(unit)) {}

uint64_t PackedOffsets::start(uint64_t i) const {
  const PackedBlock block = load_block(packed_, i);
  return (block.base + load_bits(data_ + (block.where >> 12), i % 64 * block.bits(), block.bits()))
         << shift_;
}

uint64_t PackedOffsets::extra(uint64_t i) const {
  const PackedBlock block = load_block(packed_, i);
  const std::byte* extras = data_ + (block.where >> 12) + size_t{8} * block.bits();
  return load_bits(extras, i % 64 * block.extra_bits(), block.extra_bits());
}

}  // namespace ptc
