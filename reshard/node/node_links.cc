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
  const bool must = transport == NodeTransport::kNccl;
  const bool has_devices = devices != nullptr && !devices->empty();
  if (must && (!has_devices || are_none(*devices)))
    return make_error(Code::kUnavailable,
                      "--transport nccl: this node keeps nothing in the memory of a GPU");
  if (transport == NodeTransport::kTcp || !has_devices) return std::unique_ptr<DeviceLinks>();
  if (!must && encrypted) {
    spdlog::info(
        "bytes between GPUs of two nodes go over TCP as all others, for NCCL does not encrypt "
        "them; "
        "--transport nccl allows it");
    return std::unique_ptr<DeviceLinks>();
  }
  if (are_none(*devices))
    return std::make_unique<DeviceLinks>(std::move(devices), std::make_unique<HostLinkMaker>());
  auto maker = make_nccl_links();
  if (maker.has_error()) {
    if (must) return std::move(maker).error().with_context("--transport nccl");
    spdlog::info("bytes between GPUs of two nodes go over TCP: {}", maker.error().message());
    return std::unique_ptr<DeviceLinks>();
  }
  spdlog::info("bytes between GPUs of two nodes go over {}", maker.value()->name());
  return std::make_unique<DeviceLinks>(std::move(devices), std::move(maker).value());
}

}  // namespace ptc
