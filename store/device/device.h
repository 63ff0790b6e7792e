// The memory of a device, and what the device does with it: it is filled and read, tensors in it
// are cut and joined, and their checksums are summed, without any byte going through the host.
//
// There are two implementations: cuda_device.h, and host_device.h, which does the same in the
// host's memory. Both pass tests/store/device_conformance.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "store/base/error.h"
#include "store/base/file.h"
#include "store/base/memory_place.h"
#include "store/tensor/checksum.h"
#include "store/tensor/strided_copy.h"

namespace ptc {

class Device;

/// Memory of a device. Given back when the object goes: not before every stream that was told to
/// use it has been waited for. Movable; outlived by its device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(Device* device, MemoryPointer begin, uint64_t bytes)
      : device_(device), begin_(begin), bytes_(bytes) {}
  ~DeviceMemory() { give_back(); }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(begin_, other.begin_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  MemoryPointer begin() const { return begin_; }
  uint64_t bytes() const { return bytes_; }
  void give_back();

 private:
  Device* device_ = nullptr;  // null: there is none
  MemoryPointer begin_;
  uint64_t bytes_ = 0;
};

/// Memory of the host that the device reads and writes by itself, at the rate of the link: its
/// pages stay where they are. Ends with the object; as DeviceMemory.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  RegisteredMemory(Device* device, std::span<std::byte> bytes) : device_(device), bytes_(bytes) {}
  ~RegisteredMemory() { end(); }
  RegisteredMemory(RegisteredMemory&& other) noexcept { *this = std::move(other); }
  RegisteredMemory& operator=(RegisteredMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::span<std::byte> bytes() const { return bytes_; }
  void end();

 private:
  Device* device_ = nullptr;
  std::span<std::byte> bytes_;
};

/// A copy from and to the device's memory. The offsets in `copy` count from these addresses.
struct DeviceCopy {
  ConstMemoryPointer source;
  MemoryPointer target;
  StridedCopy copy;
};

/// Bytes in the device's memory, which lie at `logical_offset` of a tensor's C-order bytes.
struct DeviceRun {
  ConstMemoryPointer bytes;
  uint64_t count = 0;
  uint64_t logical_offset = 0;
  uint32_t sum = 0;  // to which of the sums it is added
};

/// Work that a device does in the order it was given, while the caller goes on. What a call names
/// is left alone until wait() returns: memory of both sides, and where sums come. Threads: one at a
/// time. Ends before its device; its end waits.
///
/// An error of the device itself (kUnavailable) is that of all later calls, too: what was not
/// waited for is in doubt.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  /// Between the host's memory and the device's, or within it. At the rate of the link where the
  /// host's is registered.
  virtual Result<> copy(MemoryPointer target, ConstMemoryPointer source, uint64_t bytes) = 0;
  /// Bytes of the device's memory become zeros.
  virtual Result<> zero(MemoryPointer begin, uint64_t bytes) = 0;
  /// All of them in one launch, however many: in no order among themselves. kInvalidArgument: one
  /// leaves the device's memory, by its number.
  virtual Result<> copy_strided(std::span<const DeviceCopy> copies) = 0;
  /// Adds the checksum of each run to its sum, in one launch. `sums` have it after wait().
  virtual Result<> add_checksums(std::span<const DeviceRun> runs, std::span<Checksum> sums) = 0;
  /// Everything is done and seen.
  virtual Result<> wait() = 0;
};

/// Threads: any.
class Device {
 public:
  virtual ~Device() = default;
  virtual NodeMemory memory() const = 0;
  virtual const std::string& name() const = 0;  // "NVIDIA H200"
  struct Room {
    uint64_t bytes = 0;  // of all its memory
    uint64_t free = 0;
  };
  /// One that nobody has used yet may be believed to be empty.
  virtual Result<Room> room() = 0;

  /// Its content is anything. kNoSpace says how much is free.
  virtual Result<DeviceMemory> allocate(uint64_t bytes) = 0;
  /// kUnavailable: the driver refuses this memory, and says why; a copy from and to it is possible
  /// all the same, and slower. kBusy: some of it is registered already.
  virtual Result<RegisteredMemory> register_host(std::span<std::byte> bytes) = 0;
  virtual Result<std::unique_ptr<DeviceStream>> stream() = 0;

  /// Which device it is for all processes of the machine, whatever numbers they give it.
  using Id = std::array<std::byte, 16>;
  virtual const Id& id() const = 0;
  /// What another process maps the very memory by, which then lasts until both have let go.
  struct Shared {
    UniqueFd descriptor;
    uint64_t bytes = 0;  // that are mapped; as many as the memory has, or more
  };
  /// kUnavailable: this device, or this memory of it, is not shared.
  virtual Result<Shared> share(MemoryPointer begin) = 0;

 private:
  friend class DeviceMemory;
  friend class RegisteredMemory;
  virtual void give_back(MemoryPointer begin) = 0;
  virtual void end_registration(std::byte* begin) = 0;
};

inline void DeviceMemory::give_back() {
  if (Device* device = std::exchange(device_, nullptr)) device->give_back(begin_);
}
inline void RegisteredMemory::end() {
  if (Device* device = std::exchange(device_, nullptr)) device->end_registration(bytes_.data());
}

}  // namespace ptc
