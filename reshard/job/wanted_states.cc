#include "reshard/job/wanted_states.h"

#include "reshard/move/placement.h"

namespace ptc {
namespace {

Error no_node_in_service() {
  return make_error(Code::kUnavailable,
                    "no node is in service: all that are there are being drained (ptc "
                    "drain NODE --cancel)");
}

}  // namespace

std::vector<std::string> nodes_in_service(const JobPlace& place, const KnownJob& known) {
  return known.in_service(place.services.cluster->alive());
}

Result<WantedState> wanted_state(const JobPlace& place, const Checkpoint& checkpoint,
                                 const Layout& wanted, std::vector<std::string> nodes) {
  WantedState state;
  state.spec = wanted.spec;
  if (!place.services.cluster->shares_bytes()) return state;
  state.replicas = wanted.replicas;
  state.alive = std::move(nodes);
  if (state.alive.empty()) return no_node_in_service();
  PTC_TRY(state.placement, place_ranks(wanted, checkpoint, *checkpoint.stored(), state.alive));
  return state;
}

/// Ranks on no node in particular: then place_files() leaves each file with who holds most of it.
Result<WantedState> where_it_is(const CheckpointRecord& record, uint32_t replicas,
                                std::vector<std::string> nodes) {
  WantedState wanted;
  wanted.spec = record.where->spec;
  wanted.replicas = replicas;
  wanted.alive = std::move(nodes);
  wanted.placement.place_of_rank.assign(wanted.spec.sizes.world_size(), {});
  if (wanted.alive.empty()) return no_node_in_service();
  return wanted;
}

}  // namespace ptc
