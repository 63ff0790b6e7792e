// Reads a shard from front to back through a small buffer, and jumps over what nobody asked for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <vector>

#include "dataset/source/sample_source.h"
#include "store/base/error.h"

namespace ptc {

/// Everything that an indexer may use of its surroundings.
struct IndexContext {
  std::stop_token stop;
  IndexProgress* progress = nullptr;
};

/// Threads: one. Errors: kCancelled, or of pread; a shard that shrank is kInvalidArgument.
class ShardReader {
 public:
  /// Bytes [begin, end) of `fd`, which outlives it.
  ShardReader(int fd, uint64_t begin, uint64_t end, const IndexContext& context = {},
              size_t buffer_bytes = 256 << 10);

  uint64_t position() const { return position_; }
  uint64_t end() const { return end_; }
  uint64_t left() const { return end_ - position_; }

  ~ShardReader() { count_progress(); }
  ShardReader(const ShardReader&) = delete;

  /// The next `bytes` ≤ left() without taking them; valid until the next call.
  Result<std::span<const std::byte>> peek(size_t bytes);
  /// As many as are at hand, at least one; none at the end.
  Result<std::span<const std::byte>> peek_some();
  /// Takes `bytes` ≤ left().
  void skip(uint64_t bytes);
  /// A little-endian number.
  template <class Number>
  Result<Number> number() {
    PTC_TRY(const auto raw, peek(sizeof(Number)));
    Number value;
    std::copy_n(raw.data(), sizeof value, reinterpret_cast<std::byte*>(&value));
    skip(sizeof value);
    return value;
  }

 private:
  void count_progress();

  int fd_;
  uint64_t position_, end_;
  IndexContext context_;
  size_t buffer_bytes_;
  std::vector<std::byte> buffer_;
  uint64_t buffered_from_, buffered_to_;  // which bytes of the shard lie in buffer_
  uint64_t counted_;                      // up to here progress has been told
};

}  // namespace ptc
