// A growing row of numbers in a few bits each: where the samples of a shard begin.
//
// Blocks of 64. A block has its first number in full, and of each number the difference to it in as
// many bits as the widest of the block needs. With it goes an optional second number a sample,
// `extra`, packed likewise. Bytes a number: 0.25 + (bits + extra bits) / 8; at most 6 while bits +
// extra bits ≤ 46, so always while 64 samples span less than 64 TiB (of tar, whose offsets are
// counted in 512 bytes: 512 GiB).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ptc {

/// Takes the numbers one after the other; holds only what is packed.
class OffsetPacker {
 public:
  /// `unit`: a power of two that divides every number.
  explicit OffsetPacker(uint64_t unit = 1);

  /// `start` ≥ the one before, and less than 2^56 behind the first of its block; `extra` < 2^56.
  void add(uint64_t start, uint64_t extra = 0);
  uint64_t count() const { return count_; }
  /// The packed bytes, as PackedOffsets reads them.
  std::string finish();

 private:
  void flush();

  unsigned shift_;
  uint64_t count_ = 0;
  size_t pending_ = 0;
  uint64_t starts_[64], extras_[64];
  std::string directory_, data_;
};

/// Reads what OffsetPacker made; the bytes outlive it.
class PackedOffsets {
 public:
  PackedOffsets(const std::byte* packed, uint64_t count, uint64_t unit);

  uint64_t start(uint64_t i) const;
  uint64_t extra(uint64_t i) const;
  static uint64_t directory_bytes(uint64_t count) { return (count + 63) / 64 * 16; }

 private:
  const std::byte* packed_;
  const std::byte* data_;
  unsigned shift_;
};

}  // namespace ptc
