// Whether the nodes of a cluster have room for what a decision would bring them, before it is made.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/cluster/cluster.h"
#include "reshard/move/change.h"
#include "store/base/error.h"
#include "store/image/image_store.h"

namespace ptc {

/// In bytes, by memory.
using BytesByPlace = std::map<MemoryPlace, uint64_t>;

/// What a plan writes into each memory of each node, added to `bytes`.
void add_bytes(const ChangePlan& change, const StoredState& stored, BytesByPlace& bytes);

/// What a node has of devices, and their room.
struct NodeRoom {
  uint64_t free_bytes = 0;  // of the host's memory
  struct OfDevice {
    NodeMemory memory;
    uint64_t free_bytes = 0;
  };
  std::vector<OfDevice> devices;  // in the order of their numbers; none unless asked for

  /// What a node answers to PeerMethod::kSpace: {"free": <bytes>}, and when it was asked for
  /// kWithDevices also "devices": {"cuda:0": <bytes>, …}.
  static constexpr const char* kWithDevices = "devices";
  static Result<NodeRoom> of_store(const ImageStore& images, std::string_view request);
  std::string to_text() const;
  static Result<NodeRoom> from_text(std::string_view text);
};

/// Of those nodes, asked at the same time. kUnavailable: one does not answer.
Result<DevicesOfNodes> devices_of(Cluster& cluster, const ImageStore& own,
                                  const std::set<std::string>& nodes);

/// Asks all nodes at the same time. kNoSpace says which memory of which node lacks how much, and
/// what to do. kUnavailable: none lacks any, but one does not answer. A node without a name is this
/// one.
Result<> check_space(Cluster& cluster, const ImageStore& own, const BytesByPlace& needed);

}  // namespace ptc
