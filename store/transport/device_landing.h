// The receiving side of a fetch into the memory of a device: what a link brings into a staging
// buffer, put where each item wants it, by the device.
#pragma once

#include <cstdint>
#include <vector>

#include "store/base/error.h"
#include "store/device/device.h"
#include "store/transport/landing.h"

namespace ptc {

/// All targets are in one device's memory.
class DeviceLanding final : public WantedString {
 public:
  using WantedString::WantedString;

  /// The copies that put the next `bytes` ≤ bytes_left(), which are in `buffer`, where they belong.
  /// Until accept() they count as not received. kInternal: one leaves the buffer or its target.
  Result<std::vector<DeviceCopy>> place(uint64_t bytes, ConstMemoryPointer buffer);
  /// That is done.
  void accept();

 private:
  std::vector<Cut> cuts_;
};

}  // namespace ptc
