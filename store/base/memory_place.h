// Where bytes lie: which node, which of its memories, and at what address there.
//
// A device's memory has addresses like the host's, and a processor that follows one of them dies of
// it. So an address goes about together with the memory that it is in, and host() alone makes a
// pointer of it. All of these are values; threads: any.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// A memory of a node: the host's, or that of one of its devices, by the device's number on that
/// node. 4 bytes.
class NodeMemory {
 public:
  static constexpr uint32_t kMostDevices = 1024;  // of a node

  constexpr NodeMemory() = default;  // the host's
  static constexpr NodeMemory host() { return NodeMemory(); }
  /// device < kMostDevices.
  static constexpr NodeMemory cuda(uint32_t device) {
    PTC_CHECK(device < kMostDevices);
    return NodeMemory(device + 1);
  }

  constexpr bool is_host() const { return number_ == 0; }
  /// Of a memory that is not the host's.
  constexpr uint32_t device() const {
    PTC_CHECK(!is_host());
    return number_ - 1;
  }

  /// "host", "cuda:0". Persisted: never changed.
  std::string to_string() const;
  /// kInvalidArgument: no such name.
  static Result<NodeMemory> parse(std::string_view name);

  friend constexpr auto operator<=>(const NodeMemory&, const NodeMemory&) = default;

 private:
  explicit constexpr NodeMemory(uint32_t number) : number_(number) {}
  uint32_t number_ = 0;  // of the device, plus 1
};

/// A memory of a certain node.
struct MemoryPlace {
  std::string node = {};  // empty: this one, or the only one there is
  NodeMemory memory = {};

  /// "w1": the host's memory there; "w1/cuda:0". Nodes send each other these.
  std::string to_string() const;
  /// kInvalidArgument: what is behind the last '/' names no memory.
  static Result<MemoryPlace> parse(std::string_view text);

  friend auto operator<=>(const MemoryPlace&, const MemoryPlace&) = default;
};

/// kInvalidArgument: the processor reads and writes the host's memory, and this is another.
Error not_in_host_memory(NodeMemory memory);

/// An address in a memory of this node. 16 bytes. It owns nothing.
template <class Byte>
class BasicMemoryPointer {
 public:
  BasicMemoryPointer() = default;  // null, in the host's memory
  BasicMemoryPointer(NodeMemory memory, uintptr_t address) : memory_(memory), address_(address) {}

  NodeMemory memory() const { return memory_; }
  /// As the driver of the memory's device counts them.
  uintptr_t address() const { return address_; }
  /// For the processor. kInvalidArgument: not_in_host_memory().
  Result<Byte*> host() const {
    if (!memory_.is_host()) return not_in_host_memory(memory_);
    return reinterpret_cast<Byte*>(address_);
  }

  BasicMemoryPointer& operator+=(uint64_t bytes) {
    address_ += bytes;
    return *this;
  }
  friend BasicMemoryPointer operator+(BasicMemoryPointer pointer, uint64_t bytes) {
    return pointer += bytes;
  }
  friend bool operator==(const BasicMemoryPointer&, const BasicMemoryPointer&) = default;

 private:
  NodeMemory memory_;
  uintptr_t address_ = 0;
};
using MemoryPointer = BasicMemoryPointer<std::byte>;
using ConstMemoryPointer = BasicMemoryPointer<const std::byte>;

/// Of an address that is the processor's.
inline MemoryPointer in_host_memory(std::byte* address) {
  return {NodeMemory::host(), reinterpret_cast<uintptr_t>(address)};
}
inline ConstMemoryPointer in_host_memory(const std::byte* address) {
  return {NodeMemory::host(), reinterpret_cast<uintptr_t>(address)};
}

}  // namespace ptc
