#include "reshard/move/space.h"

#include <algorithm>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>

#include "store/base/json.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

using Rooms = std::map<std::string, Result<NodeRoom>>;

/// Of nodes by their names; of this one, too, which may have none.
Rooms rooms_of(Cluster& cluster, const ImageStore& own, const std::set<std::string>& nodes,
               bool with_devices) {
  const std::string request = with_devices ? NodeRoom::kWithDevices : "";
  Rooms rooms;
  std::vector<Cluster::Question> others;
  for (const std::string& node : nodes) {
    if (node.empty() || node == cluster.self())
      rooms.emplace(node, NodeRoom::of_store(own, request));
    else others.push_back({node, request});
  }
  const std::vector<Result<std::string>> told = cluster.ask_all(PeerMethod::kSpace, others);
  for (size_t i = 0; i < others.size(); ++i) {
    if (told[i].has_error()) {
      rooms.emplace(others[i].node, Error(told[i].error()));
      continue;
    }
    auto room = NodeRoom::from_text(told[i].value());
    if (room.has_error()) room = std::move(room).error().with_context("node " + others[i].node);
    rooms.emplace(others[i].node, std::move(room));
  }
  return rooms;
}

}  // namespace

void add_bytes(const ChangePlan& change, const StoredState& stored, BytesByPlace& bytes) {
  for (size_t i = 0; i < change.targets.size(); ++i) {
    const ImageLayout& layout = change.targets[i].layout;
    if (!change.transfers.images[i].kept)
      bytes[{change.nodes[layout.node], layout.memory}] += layout.bytes;
  }
  for (const ChangePlan::OtherCopy& copy : change.copies)
    bytes[{change.nodes[copy.node]}] += stored.layouts()[copy.source_image].bytes;
}

Result<NodeRoom> NodeRoom::of_store(const ImageStore& images, std::string_view request) {
  PTC_TRY(const auto space, images.space());
  NodeRoom room{space.free_bytes, {}};
  if (request != kWithDevices || images.devices() == nullptr) return room;
  for (const Devices::DeviceRoom& device : images.devices()->room())
    room.devices.push_back({device.memory, device.room.free});
  return room;
}

std::string NodeRoom::to_text() const {
  json::object text{{"free", free_bytes}};
  json::object by_name;
  for (const OfDevice& device : devices) by_name[device.memory.to_string()] = device.free_bytes;
  if (!by_name.empty()) text["devices"] = std::move(by_name);
  return json::serialize(text);
}

Result<NodeRoom> NodeRoom::from_text(std::string_view text) {
  PTC_TRY(const auto told, parse_json(text));
  if (!told.is_object()) return make_error(Code::kCorrupt, "it does not say what is free");
  NodeRoom room;
  PTC_TRY(const auto free, json_uint(told.get_object(), "free", INT64_MAX));
  room.free_bytes = free.value_or(0);
  const json::value* const devices = told.get_object().if_contains("devices");
  if (devices == nullptr || !devices->is_object()) return room;
  for (const auto& [name, bytes] : devices->get_object()) {
    PTC_TRY(const auto memory, NodeMemory::parse(name));
    PTC_TRY(const auto of_device, json_uint(devices->get_object(), std::string(name), INT64_MAX));
    if (!memory.is_host()) room.devices.push_back({memory, of_device.value_or(0)});
  }
  std::sort(room.devices.begin(), room.devices.end(),
            [](const OfDevice& a, const OfDevice& b) { return a.memory < b.memory; });
  return room;
}

Result<DevicesOfNodes> devices_of(Cluster& cluster, const ImageStore& own,
                                  const std::set<std::string>& nodes) {
  DevicesOfNodes devices;
  for (const auto& [node, room] : rooms_of(cluster, own, nodes, /*with_devices=*/true)) {
    if (room.has_error())
      return make_error(Code::kUnavailable, "node {} does not say which devices it has: {}", node,
                        room.error().message());
    std::vector<NodeMemory>& of_node = devices[node];
    for (const NodeRoom::OfDevice& device : room.value().devices) of_node.push_back(device.memory);
  }
  return devices;
}

Result<> check_space(Cluster& cluster, const ImageStore& own, const BytesByPlace& needed) {
  std::set<std::string> nodes;
  bool with_devices = false;
  for (const auto& [place, bytes] : needed) {
    nodes.insert(place.node);
    with_devices = with_devices || !place.memory.is_host();
  }
  const Rooms rooms = rooms_of(cluster, own, nodes, with_devices);
  Result<> answered = ok();
  for (const auto& [place, bytes] : needed) {
    const Result<NodeRoom>& room = rooms.at(place.node);
    if (room.has_error()) {
      if (answered.has_value()) answered = room.error();
      continue;
    }
    const std::string& node = place.node.empty() ? cluster.self() : place.node;
    if (place.memory.is_host()) {
      if (bytes > room.value().free_bytes)
        return make_error(Code::kNoSpace,
                          "not enough memory on node {}: {} would come there, {} are free; "
                          "remove checkpoints (ptc rm), or give its store more (ptcfs --memory)",
                          node, format_size(bytes), format_size(room.value().free_bytes));
      continue;
    }
    uint64_t free = 0;
    for (const NodeRoom::OfDevice& device : room.value().devices)
      if (device.memory == place.memory) free = device.free_bytes;
    if (bytes > free)
      return make_error(Code::kNoSpace,
                        "not enough memory on {} of node {}: {} would come there, {} are free, {} "
                        "are missing; remove checkpoints (ptc rm), or give ranks other devices",
                        place.memory.to_string(), node, format_size(bytes), format_size(free),
                        format_size(bytes - free));
  }
  return answered;
}

}  // namespace ptc
