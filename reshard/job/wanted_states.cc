#include "reshard/job/wanted_states.h"

#include <algorithm>
#include <set>

#include "reshard/move/placement.h"
#include "reshard/move/space.h"

namespace ptc {
namespace {

Error no_node_in_service() {
  return make_error(Code::kUnavailable,
                    "no node is in service: all that are there are being drained (ptc "
                    "drain NODE --cancel)");
}

/// Of those that a layout names, else of `nodes`. Who is away has no say, and gets nothing.
Result<DevicesOfNodes> devices_for(const JobPlace& place, const Layout& wanted,
                                   const std::vector<std::string>& nodes) {
  std::set<std::string> asked = nodes_of(wanted);
  if (asked.empty()) asked.insert(nodes.begin(), nodes.end());
  const std::vector<std::string> alive = place.services.cluster->alive();
  std::erase_if(asked, [&](const std::string& node) { return !is_among(alive, node); });
  return devices_of(*place.services.cluster, *place.services.images, asked);
}

/// Of `nodes` those that have devices; where none has, all.
std::vector<std::string> with_devices(const std::vector<std::string>& nodes,
                                      const DevicesOfNodes& devices) {
  std::vector<std::string> have;
  for (const std::string& node : nodes)
    if (const auto found = devices.find(node); found != devices.end() && !found->second.empty())
      have.push_back(node);
  return have.empty() ? nodes : have;
}

}  // namespace

std::vector<std::string> nodes_in_service(const JobPlace& place, const KnownJob& known) {
  return known.in_service(place.services.cluster->alive());
}

bool uses_devices(const Layout& wanted, const StoredState& stored) {
  return wanted.in_devices ||
         std::any_of(stored.layouts().begin(), stored.layouts().end(),
                     [](const ImageLayout& image) { return !image.memory.is_host(); });
}

Result<> check_devices(const JobPlace& place, const Layout& wanted,
                       const std::vector<std::string>& nodes) {
  if (!wanted.in_devices) return ok();
  PTC_TRY(const DevicesOfNodes devices, devices_for(place, wanted, nodes));
  Placement placement;
  if (wanted.devices.empty())
    for (const std::string& node : with_devices(nodes, devices))
      placement.place_of_rank.push_back({node});
  for (const std::string& device : wanted.devices)
    placement.place_of_rank.push_back({node_of(device)});
  return check_devices_of_ranks(wanted, devices, placement);
}

Result<WantedState> wanted_state(const JobPlace& place, const Checkpoint& checkpoint,
                                 const Layout& wanted, std::vector<std::string> nodes) {
  WantedState state;
  state.spec = wanted.spec;
  const bool is_alone = !place.services.cluster->shares_bytes();
  if (is_alone && !uses_devices(wanted, *checkpoint.stored())) return state;
  DevicesOfNodes devices;
  if (wanted.in_devices) {
    PTC_TRY(devices,
            devices_for(place, wanted, is_alone ? std::vector{place.services.node} : nodes));
  }
  if (is_alone) {
    state.alive = {place.node_key()};
    state.placement.place_of_rank.assign(wanted.spec.sizes.world_size(), {place.services.node});
  } else {
    state.replicas = wanted.replicas;
    state.alive = std::move(nodes);
    if (state.alive.empty()) return no_node_in_service();
    PTC_TRY(state.placement, place_ranks(wanted, checkpoint, *checkpoint.stored(),
                                         with_devices(state.alive, devices)));
  }
  put_in_devices(wanted, devices, state.placement);
  if (is_alone)
    for (MemoryPlace& rank : state.placement.place_of_rank) rank.node = place.node_key();
  return state;
}

/// Ranks on no node in particular: then place_files() leaves each file with who holds most of it.
Result<WantedState> where_it_is(const JobPlace& place, const CheckpointRecord& record,
                                uint32_t replicas, std::vector<std::string> nodes) {
  const bool is_alone = !place.services.cluster->shares_bytes();
  WantedState wanted;
  wanted.spec = record.where->spec;
  wanted.replicas = is_alone ? 0 : replicas;
  wanted.alive = is_alone ? std::vector<std::string>{place.node_key()} : std::move(nodes);
  wanted.placement.place_of_rank.assign(wanted.spec.sizes.world_size(), {});
  if (wanted.alive.empty()) return no_node_in_service();
  return wanted;
}

}  // namespace ptc
