// A shard, mapped: what of it is in memory is copied from there, for half of what pread() takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace ptc {

/// Whether the target's bytes are read next by this thread, or by another one from memory
/// (stream_copy.h).
enum class Stores { kPlain, kPastCaches };

/// Immutable. Threads: any.
class ShardMapping {
 public:
  /// All `bytes` of an open file; nullptr: it cannot be mapped.
  static std::unique_ptr<const ShardMapping> make(int fd, uint64_t bytes);
  ~ShardMapping();
  ShardMapping(const ShardMapping&) = delete;

  /// Fills `out` from `offset` on. false, and `out` is no good: it lies not in memory all over,
  /// where pread() reads further ahead than a fault, or the file was cut short.
  bool copy(uint64_t offset, std::span<std::byte> out, Stores stores) const;

 private:
  ShardMapping(std::byte* begin, uint64_t bytes) : begin_(begin), bytes_(bytes) {}
  std::byte* const begin_;
  const uint64_t bytes_;
};

}  // namespace ptc
