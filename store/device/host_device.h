// A device that is none: its memory is the host's, and what its threads do the processor does.
// For tests, and for programs that are to be tried where no device is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "store/base/mutex.h"
#include "store/device/device.h"

namespace ptc {

/// As strict as a device: an address of its memory is none of the processor's, what is new has
/// bytes that nobody wrote, and nothing is done before wait(). Beyond that an access outside of
/// what was allocated is found, and named. Threads: any.
class HostDevice final : public Device {
 public:
  struct Options {
    uint32_t number = 0;                      // of NodeMemory::cuda()
    uint64_t memory_bytes = 1 << 30;          // that it has
    uint64_t registrable_bytes = UINT64_MAX;  // of the host's, at most
  };
  explicit HostDevice(const Options& options);
  HostDevice();
  ~HostDevice() override;

  NodeMemory memory() const override { return memory_; }
  const std::string& name() const override { return name_; }
  Result<Room> room() override;
  Result<DeviceMemory> allocate(uint64_t bytes) override;
  Result<RegisteredMemory> register_host(std::span<std::byte> bytes) override;
  Result<std::unique_ptr<DeviceStream>> stream() override;
  const Id& id() const override { return id_; }
  Result<Shared> share(MemoryPointer) override {
    return make_error(Code::kUnavailable, "{} is in the host's memory, and not shared", name_);
  }

 private:
  friend class HostStream;
  struct Allocation {
    uint64_t bytes;
    std::unique_ptr<std::byte[]> memory;
  };
  void give_back(MemoryPointer begin) override;
  void end_registration(std::byte* begin) override;
  /// Where the processor has it. kInvalidArgument: it is not all in one allocation.
  Result<std::byte*> find(NodeMemory memory, uintptr_t address, uint64_t bytes) const;

  const NodeMemory memory_;
  const std::string name_;
  const Id id_ = {};
  const Options options_;
  mutable Mutex mutex_;
  std::map<uintptr_t, Allocation> allocations_ PTC_GUARDED_BY(mutex_);  // by address
  std::map<uintptr_t, uint64_t> registered_ PTC_GUARDED_BY(mutex_);     // bytes by address
  uintptr_t next_address_ PTC_GUARDED_BY(mutex_);
  uint64_t used_ PTC_GUARDED_BY(mutex_) = 0, registered_bytes_ PTC_GUARDED_BY(mutex_) = 0;
};

}  // namespace ptc
