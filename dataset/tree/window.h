// The part of a virtual file that somebody reads, filled from front to back.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "dataset/source/sample_source.h"
#include "store/base/error.h"

namespace ptc {

/// Whoever knows the file names all its bytes in order, from a position at or before `offset` on;
/// what lies outside of the window costs nothing. Runs of a shard that follow each other become one
/// copy, straight into `out`; whether a shard is what was indexed is asked once while the window is
/// filled, or a few times where many take part. flush() comes last. Threads: one.
class Window {
 public:
  /// Bytes [offset, offset + out.size()) of the file; `stores` is said of runs.
  Window(const SampleSource& source, uint64_t offset, std::span<std::byte> out,
         Stores stores = Stores::kPlain)
      : source_(source),
        begin_(offset),
        end_(offset + out.size()),
        out_(out.data()),
        stores_(stores) {}

  /// Where in the file the next bytes lie.
  uint64_t position() const { return position_; }
  void move_to(uint64_t position) { position_ = position; }
  bool full() const { return position_ >= end_; }
  /// Whether any of the next `bytes` are in the window: what is dear to make need not be made else.
  bool wants(uint64_t bytes) const { return position_ < end_ && position_ + bytes > begin_; }

  void skip(uint64_t bytes) { position_ += bytes; }
  void literal(std::string_view bytes);
  void zeros(uint64_t bytes);
  Result<> run(const Extent& extent);
  /// The last `bytes` named; empty unless all of them are in the window.
  Result<std::span<const std::byte>> last(uint64_t bytes);
  /// `count` little-endian numbers at(0), at(1) …
  template <class Number, class At>
  void numbers(uint64_t count, const At& at) {
    const uint64_t base = position_;
    const uint64_t last =
        end_ <= base ? 0 : std::min(count, (end_ - base + sizeof(Number) - 1) / sizeof(Number));
    for (uint64_t i = begin_ <= base ? 0 : (begin_ - base) / sizeof(Number); i < last; ++i) {
      const Number number = at(i);
      position_ = base + i * sizeof(Number);
      literal({reinterpret_cast<const char*>(&number), sizeof number});
    }
    position_ = base + count * sizeof(Number);
  }
  Result<> flush();

 private:
  /// The part of the next `bytes` that is in the window; empty: none. Goes on behind them.
  struct Part {
    uint64_t skipped;  // of the bytes, before the window
    std::span<std::byte> target;
  };
  Part take(uint64_t bytes);
  Result<const OpenShard*> open(uint64_t shard);

  const SampleSource& source_;
  uint64_t position_ = 0;
  const uint64_t begin_, end_;
  std::byte* const out_;
  const Stores stores_;
  Extent pending_;  // to be read to pending_target_
  std::byte* pending_target_ = nullptr;
  std::array<OpenShard, 64> open_;  // those used last, each at its number mod 64
};

}  // namespace ptc
