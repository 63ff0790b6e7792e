#include "reshard/node/node_links.h"

#include <spdlog/spdlog.h>

#include <array>
#include <utility>

#include "store/device/host_device.h"
#include "store/device/host_link.h"
#include "store/device/nccl_link.h"

namespace ptc {
namespace {

constexpr std::array<std::pair<NodeTransport, std::string_view>, 3> kTransports{{
    {NodeTransport::kAuto, "auto"},
    {NodeTransport::kTcp, "tcp"},
    {NodeTransport::kNccl, "nccl"},
}};

bool are_none(const Devices& devices) {
  for (const NodeMemory memory : devices.memories())
    if (dynamic_cast<const HostDevice*>(devices.find(memory)) == nullptr) return false;
  return true;
}

}  // namespace

Result<NodeTransport> parse_node_transport(std::string_view word) {
  for (const auto& [transport, name] : kTransports)
    if (name == word) return transport;
  return invalid_argument("'{}' is none of auto, tcp, nccl", word);
}

std::string_view to_string(NodeTransport transport) {
  for (const auto& [one, name] : kTransports)
    if (one == transport) return name;
  return {};
}

Result<std::unique_ptr<DeviceLinks>> open_links(NodeTransport transport,
                                                std::shared_ptr<const Devices> devices,
                                                bool encrypted) {
  if (transport == NodeTransport::kNccl) {
    if (devices == nullptr || devices->empty() || are_none(*devices))
      return make_error(Code::kUnavailable,
                        "--transport nccl: this node keeps nothing in the memory of a GPU (--gpu)");
  } else if (transport == NodeTransport::kTcp || devices == nullptr || encrypted) {
    return std::unique_ptr<DeviceLinks>();
  }
  const DeviceLinks::FindMaker find_maker =
      [all = devices.get()]() -> Result<std::unique_ptr<DeviceLinkMaker>> {
    Result<std::unique_ptr<DeviceLinkMaker>> maker = std::make_unique<HostLinkMaker>();
    if (!are_none(*all)) maker = make_nccl_links();
    if (maker) spdlog::info("bytes go between devices of two nodes over {}", maker.value()->name());
    else
      spdlog::info("bytes go between devices of two nodes over TCP: {}", maker.error().message());
    return maker;
  };
  auto links = std::make_unique<DeviceLinks>(std::move(devices), find_maker);
  if (transport == NodeTransport::kNccl) {
    if (const auto maker = links->maker(); maker.has_error())
      return Error(maker.error()).with_context("--transport nccl");
  }
  return links;
}

}  // namespace ptc
