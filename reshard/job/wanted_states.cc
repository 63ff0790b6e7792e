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

Result<> put_in_devices_of(const JobPlace& place, const Layout& wanted, Placement& placement) {
  std::set<std::string> nodes;
  for (const MemoryPlace& rank : placement.place_of_rank) nodes.insert(rank.node);
  // Who is away has no say, and gets nothing.
  const std::vector<std::string> alive = place.services.cluster->alive();
  std::erase_if(nodes, [&](const std::string& node) { return !is_among(alive, node); });
  PTC_TRY(const DevicesOfNodes devices,
          devices_of(*place.services.cluster, *place.services.images, nodes));
  return put_in_devices(wanted, devices, placement);
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
  Placement placement;
  if (wanted.devices.empty())
    for (const std::string& node : nodes) placement.place_of_rank.push_back({node});
  for (const std::string& device : wanted.devices)
    placement.place_of_rank.push_back({node_of(device)});
  return put_in_devices_of(place, wanted, placement);
}

Result<WantedState> wanted_state(const JobPlace& place, const Checkpoint& checkpoint,
                                 const Layout& wanted, std::vector<std::string> nodes) {
  WantedState state;
  state.spec = wanted.spec;
  const bool is_alone = !place.services.cluster->shares_bytes();
  if (is_alone && !uses_devices(wanted, *checkpoint.stored())) return state;
  if (is_alone) {
    state.alive = {place.node_key()};
    state.placement.place_of_rank.assign(wanted.spec.sizes.world_size(), {place.services.node});
  } else {
    state.replicas = wanted.replicas;
    state.alive = std::move(nodes);
    if (state.alive.empty()) return no_node_in_service();
    PTC_TRY(state.placement, place_ranks(wanted, checkpoint, *checkpoint.stored(), state.alive));
  }
  if (wanted.in_devices) {
    PTC_TRY(put_in_devices_of(place, wanted, state.placement));
  }
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
