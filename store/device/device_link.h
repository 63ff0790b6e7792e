// A connection between a device of this node and one of another, over which bytes go from the
// memory of the one to that of the other, without the host's in between where the hardware can.
//
// There are two implementations: nccl_link.h, and host_link.h, which is a socket between two
// HostDevices. Both pass tests/store/link_conformance.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "store/base/error.h"
#include "store/base/memory_place.h"
#include "store/device/device.h"

namespace ptc {

/// Work is begun by send() and receive() in their order, and what one end sends the other receives:
/// as many bytes at a time, in the same order. What they name is left alone until wait() returns.
/// Memory that a stream of the device is still at is not named: who filled it has waited.
///
/// Nothing waits longer than its deadline, whatever the other end does, which may have died.
/// Threads: one at a time; abort(): any, also while another one waits. Ends before its device.
///
/// Errors: kInvalidArgument (memory that is not the device's; the link stays good). All others are
/// those of all later calls, too, and the link is good for nothing more: kUnavailable (the other
/// end is gone, silent until the deadline, or of another kind), kCancelled (abort()).
class DeviceLink {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  /// Waits for nobody: where work was begun and not waited for, the device may be at it for a
  /// while.
  virtual ~DeviceLink() = default;
  /// The link lets go of it when it is gone and its device is at none of its work any more. So what
  /// send() and receive() name is not given back under their hands, whatever becomes of the link.
  void keep(std::shared_ptr<const void> memory) { kept_.push_back(std::move(memory)); }
  /// Once, before anything is sent: both ends do it at the same time.
  virtual Result<> connect(Deadline deadline) = 0;
  virtual Result<> send(ConstMemoryPointer bytes, uint64_t count) = 0;
  virtual Result<> receive(MemoryPointer to, uint64_t count) = 0;
  /// Until all that was begun is done: what was sent can be written over, what was received is
  /// there. That it is sent does not mean that it has come.
  virtual Result<> wait(Deadline deadline) = 0;
  virtual void abort() = 0;

 protected:
  std::vector<std::shared_ptr<const void>> kept_;
};

/// Makes links of one kind. Threads: any. Outlives them, and ends before their devices: its end
/// waits until these are at no work of links that are gone.
class DeviceLinkMaker {
 public:
  static constexpr size_t kMostIdBytes = 128;
  /// Which of the two: who asks makes the id.
  enum class End : uint8_t { kAsks, kAnswers };

  virtual ~DeviceLinkMaker() = default;
  /// "NCCL 2.27.3"; both ends must have the same.
  virtual const std::string& name() const = 0;
  /// Of a new link: any bytes, which the other end gets by other ways.
  virtual Result<std::string> make_id() = 0;
  /// An end that is not connected yet. The id may be a stranger's.
  virtual Result<std::unique_ptr<DeviceLink>> make(Device& device, const std::string& id,
                                                   End end) = 0;
};

}  // namespace ptc
