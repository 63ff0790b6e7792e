#include "tools/planner/price/movement.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "reshard/plan/planner.h"
#include "store/codec/safetensors.h"

namespace ptc::planner {
namespace {

Result<std::vector<ImageLayout>> images_of(const Model& model, const LaidOut& layout) {
  const Model::Holdings holdings(model, layout.spec);
  std::vector<ImageLayout> images;
  std::set<std::pair<uint32_t, uint32_t>> made;  // by node and state
  for (uint64_t rank = 0; rank < layout.spec.sizes.world_size(); ++rank) {
    const auto node = layout.first_node + static_cast<uint32_t>(rank / layout.gpus_per_node);
    const StateCoords state = state_of(layout.spec, layout.spec.coords(rank));
    if (!made.emplace(node, state_index(layout.spec, state)).second) continue;
    ImageLayout image;
    image.node = node;
    std::vector<ArraySlot> arrays;
    PTC_TRY(auto held, holdings.of(state));
    for (Model::Held& one : held) {
      PTC_TRY(const uint64_t bytes,
              array_bytes(one.part->local_shape, model.tensors()[one.tensor].dtype));
      arrays.push_back({one.tensor, image.bytes, std::move(one.part)});
      image.bytes += bytes;
    }
    image.arrays = std::move(arrays);
    images.push_back(std::move(image));
  }
  return images;
}

}  // namespace

uint32_t LaidOut::nodes() const {
  return static_cast<uint32_t>((spec.sizes.world_size() + gpus_per_node - 1) / gpus_per_node);
}

Result<Movement> movement_of(const Model& model, const LaidOut& from, const LaidOut& to) {
  for (const LaidOut* layout : {&from, &to}) {
    PTC_TRY(model.check(layout->spec));
  }
  PTC_TRY(const auto held, images_of(model, from));
  PTC_TRY(const auto wanted, images_of(model, to));
  std::vector<uint8_t> bits;
  for (const TensorInfo& tensor : model.tensors()) bits.push_back(dtype_bits(tensor.dtype));
  const SourceIndex index(held, std::move(bits));
  PTC_TRY(const TransferPlan plan, plan_transfers(index, wanted));
  MovementSum<uint32_t> sum;
  for (const TransferPlan::Pair& pair : plan.pairs)
    sum.add(pair.source_node, pair.target_node, pair.bytes);
  return sum.busiest();
}

Movement movement_of(double state_bytes, const LaidOut& from, const LaidOut& to) {
  const auto& before = from.spec.sizes;
  const auto& after = to.spec.sizes;
  const bool same_cut =
      before.tp == after.tp && before.pp == after.pp && from.spec.dp_parts() == to.spec.dp_parts();
  const double parts = static_cast<double>(after.tp) * after.pp * to.spec.dp_parts();
  const double of_a_node =
      state_bytes * std::min(1.0, std::min<double>(to.gpus_per_node, after.world_size()) / parts);
  uint32_t others = 0;
  for (uint32_t node = to.first_node; node < to.first_node + to.nodes(); ++node)
    others += !same_cut || node < from.first_node || node >= from.first_node + from.nodes();
  if (others == 0) return {};
  constexpr double kMost = 0x1p63;  // of which a whole number can be made
  // All of them get as much, from all that had it; who has to send something often is relayed.
  const double sent = std::min(of_a_node * others, state_bytes) / from.nodes();
  const double of_a_link = std::max(of_a_node, sent);
  return Movement{static_cast<uint64_t>(std::min(kMost, of_a_link)), 0};
}

}  // namespace ptc::planner
