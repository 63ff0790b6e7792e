// Which links a node's devices have to those of other nodes: what --transport says, and what is
// there.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "store/base/error.h"
#include "store/device/devices.h"
#include "store/rpc/device_links.h"

namespace ptc {

/// kAuto: over NCCL between devices of nodes that have it, if bytes between nodes need not be
/// encrypted; all else over TCP.
enum class NodeTransport : uint8_t { kAuto, kTcp, kNccl };
/// kInvalidArgument: none of auto, tcp, nccl.
Result<NodeTransport> parse_node_transport(std::string_view word);
std::string_view to_string(NodeTransport transport);

/// Null: this node has none. With kAuto what is here is looked at when links are first wanted.
/// Errors, of kNccl: no devices, no NCCL, no driver; they say what to do. Devices that are none
/// (HostDevice) have links to those of other daemons on this machine, with kAuto. `encrypted`:
/// bytes between nodes are, and NCCL encrypts nothing: kAuto leaves them to TCP. Null for
/// `devices`: there are none.
Result<std::unique_ptr<DeviceLinks>> open_links(NodeTransport transport,
                                                std::shared_ptr<const Devices> devices,
                                                bool encrypted);

}  // namespace ptc
