// The transport for what comes from a device of this node, or goes to one.
#pragma once

#include <memory>

#include "store/device/devices.h"
#include "store/transport/transport.h"

namespace ptc {

/// Items whose source or target is in the memory of a device here; the others go to `next` as they
/// are. Within a device all of a call's copies are one launch. Else bytes go packed through lanes
/// (store/device/staging.h), so that a call takes no more memory than a lane has, however much it
/// brings: what comes to a device, from this node or another, `next` brings as far as the lane. A
/// target in the memory of a device that is not here is kInvalidArgument, and then nothing is
/// begun. Without devices (null) it is `next`.
std::unique_ptr<Transport> make_device_transport(std::shared_ptr<const Devices> devices,
                                                 std::unique_ptr<Transport> next);

}  // namespace ptc
