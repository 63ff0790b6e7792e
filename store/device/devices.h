// The devices of a node, and what goes between their memories and the host's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/memory_place.h"
#include "store/device/device.h"
#include "store/device/staging.h"

namespace ptc {

/// Threads: any. Outlives all memory of its devices.
class Devices {
 public:
  /// Which ones: "auto" (those that the driver has, opened when somebody first asks for them, since
  /// that takes memory of each; none is no error), "off" (none), "0,1" (these),
  /// "host:SIZE[,SIZE…]" (HostDevices of these sizes, numbered from 0). kInvalidArgument: none of
  /// these forms; kUnavailable: one that was named is not there, or the driver cannot be used. Both
  /// say what to do.
  static Result<std::unique_ptr<Devices>> open(std::string_view spec);
  /// Whether open() would understand it; nothing is opened.
  static Result<> check(std::string_view spec);
  /// A HostDevice has so much at least: what is on its way takes some of it.
  static constexpr uint64_t kLeastHostBytes = 32 << 20;

  Devices() : Devices(std::vector<std::unique_ptr<Device>>()) {}
  explicit Devices(std::vector<std::unique_ptr<Device>> devices);

  /// nullptr: there is none with this memory.
  Device* find(NodeMemory memory) const;
  /// The same; kInvalidArgument of the host's, and of one that is not here.
  Result<Device*> at(NodeMemory memory) const;
  size_t size() const { return all().size(); }
  bool empty() const { return all().empty(); }
  /// In the order of their numbers.
  std::vector<NodeMemory> memories() const;

  struct DeviceRoom {
    NodeMemory memory;
    std::string name;  // "NVIDIA H200"
    Device::Room room;
  };
  /// Of each, in the order of their numbers; one that does not answer has none. Free is what images
  /// may take: lanes that are still to be made need theirs.
  std::vector<DeviceRoom> room() const;
  /// Why devices that "auto" found are not used, each in a line.
  const std::vector<std::string>& refused() const {
    (void)all();
    return refused_;
  }

  /// A lane of a device that is here. Who has one waits for nothing else; who waits for other nodes
  /// meanwhile takes one of the others, so that nodes never wait for each other's lanes, and of two
  /// lanes that other one first.
  Result<Staging::Lane> lane(NodeMemory memory) const;
  Result<Staging::Lane> waiting_lane(NodeMemory memory) const;

  /// By lanes: the host's bytes to a device's memory; the bytes [begin, end) of the string of the
  /// runs of `copy`, which count from `source`, to `out`; zeros.
  Result<> write(MemoryPointer target, std::span<const std::byte> bytes) const;
  Result<> read(ConstMemoryPointer source, const StridedCopy& copy, uint64_t begin, uint64_t end,
                std::byte* out) const;
  Result<> zero(MemoryPointer begin, uint64_t bytes) const;
  /// DeviceStream::add_checksums, done when it returns. All runs are in `memory`.
  Result<> add_checksums(NodeMemory memory, std::span<const DeviceRun> runs,
                         std::span<Checksum> sums) const;

 private:
  struct One {
    std::unique_ptr<Device> device;
    std::unique_ptr<Staging> lanes, waiting;  // end before the device does
  };
  void add(std::vector<std::unique_ptr<Device>> devices) const;
  const std::vector<One>& all() const;

  bool finds_all_ = false;  // that the driver has, in all()
  mutable std::once_flag found_;
  mutable std::vector<One> devices_;  // by number
  mutable std::vector<std::string> refused_;
};

}  // namespace ptc
