// The transport from the memory of a device of another node into that of a device of this one, over
// links between the two (store/rpc/device_links.h).
#pragma once

#include <chrono>
#include <memory>

#include "store/rpc/device_links.h"
#include "store/rpc/peers.h"
#include "store/transport/transport.h"

namespace ptc {

struct NcclTransportOptions {
  /// A node that has no links of this kind, or to which none can be made, is not asked for one
  /// again before.
  std::chrono::milliseconds refusal{60'000};
};

/// Items whose image is in a device's memory on another node, and whose target is in that of a
/// device of `links`, go over a link; all others to `next`, at the same time. One request and one
/// link for each pair of devices, all pairs at the same time. What a link does not bring, for
/// whatever reason but a cancelled call, goes to `next` as well, from what has arrived; its error
/// is the one that comes back. `peers` and `links` outlive the transport.
///
/// A writer of such an item is not asked: all of a device's memory is there from the start.
std::unique_ptr<Transport> make_nccl_transport(Peers& peers, DeviceLinks& links,
                                               std::unique_ptr<Transport> next,
                                               const NcclTransportOptions& options = {});

}  // namespace ptc
