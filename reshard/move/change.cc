#include "reshard/move/change.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_set>

#include "reshard/move/placement.h"
#include "reshard/move/superfluous.h"

namespace ptc {
namespace {

/// Whether all of a file is in its memory of its node.
bool is_on(const StoredState& stored, const StateFile& target) {
  const ImageLayout& file = target.layout;
  // Stored as it is, most often.
  const std::vector<StoredImage>& images = stored.images;
  auto image = std::partition_point(images.begin(), images.end(), [&](const StoredImage& one) {
    return std::tie(one.state, one.path) < std::tie(target.owner, target.path);
  });
  for (; image != images.end() && image->state == target.owner && image->path == target.path;
       ++image) {
    const ImageLayout& held = stored.layouts()[image - images.begin()];
    if (held.node == file.node && held.memory == file.memory && held.arrays == file.arrays)
      return true;
  }
  return std::all_of(file.arrays.begin(), file.arrays.end(), [&](const ArraySlot& slot) {
    return std::all_of(slot.part->pieces.begin(), slot.part->pieces.end(), [&](const Piece& piece) {
      return stored.index().missing_in_memory(slot.tensor, file.node, file.memory,
                                              {piece.global}) == 0;
    });
  });
}

/// Files without tensors stay where they are, and get the copies that they lack, each from another
/// node in turn.
void plan_other_files(const Checkpoint& checkpoint, const StoredState& stored,
                      const WantedState& wanted,
                      const std::unordered_set<std::string_view>& is_alive, ChangePlan& plan) {
  const std::vector<WrittenFile>& files = checkpoint.manifest().files;
  NumberedNodes numbers(plan.nodes);
  size_t turn = 0;
  for (uint32_t i = 0; i < stored.images.size(); ++i) {
    const StoredImage& image = stored.images[i];
    if (image.written < 0 || files[image.written].has_tensors) continue;
    const bool first = i == 0 || stored.images[i - 1].written != image.written;
    if (!first) continue;
    std::set<std::string_view> on;
    int64_t source = -1;
    for (uint32_t copy = i;
         copy < stored.images.size() && stored.images[copy].written == image.written; ++copy) {
      if (stored.images[copy].image == nullptr) continue;
      if (is_alive.contains(stored.images[copy].node)) on.insert(stored.images[copy].node);
      source = copy;
    }
    if (source < 0) continue;
    ++turn;
    for (size_t k = 0; k < wanted.alive.size() && on.size() <= wanted.replicas; ++k) {
      const std::string& node = wanted.alive[(turn + k) % wanted.alive.size()];
      if (!on.insert(node).second) continue;
      plan.copies.push_back({static_cast<uint32_t>(source), numbers.of(node)});
    }
  }
}

Result<ChangePlan> make_plan(const Checkpoint& checkpoint, const StoredState& stored,
                             const WantedState& wanted) {
  ChangePlan plan;
  plan.held = stored.held;
  plan.nodes = stored.nodes;
  plan.same_states = state_key(stored.spec) == state_key(wanted.spec);
  const bool placed = !wanted.placement.place_of_rank.empty();
  if (!plan.same_states || placed) {
    PTC_TRY(auto targets, checkpoint.target_images(wanted.spec));
    plan.targets = *targets;
  }
  if (placed) {
    plan.targets = place_files(std::move(plan.targets), wanted.spec, wanted.placement,
                               wanted.replicas, wanted.alive, stored, plan.nodes);
    const std::unordered_set<std::string_view> is_alive(wanted.alive.begin(), wanted.alive.end());
    plan_other_files(checkpoint, stored, wanted, is_alive, plan);
    for (uint32_t i = 0; i < stored.images.size() && !wanted.nothing_leaves; ++i)
      if (stored.images[i].image != nullptr && !is_alive.contains(stored.images[i].node))
        plan.leaving.push_back(i);
  }
  const std::vector<StateFile> all = plan.same_states ? plan.targets : std::vector<StateFile>();
  // A set of shards need not be joined where it is.
  if (plan.same_states)
    std::erase_if(plan.targets, [&](const StateFile& file) { return is_on(stored, file); });
  if (placed && plan.nothing() && !wanted.nothing_leaves)
    plan.superfluous = superfluous_images(checkpoint, stored, wanted, all);
  std::vector<ImageLayout> layouts;
  layouts.reserve(plan.targets.size());
  for (const StateFile& target : plan.targets) layouts.push_back(target.layout);
  PTC_TRY(plan.transfers, plan_transfers(stored.index(), layouts));
  if (plan.same_states && !layouts.empty()) {
    std::vector<const ImageLayout*> compared;
    for (const ImageLayout& layout : layouts) compared.push_back(&layout);
    // Nodes that see others within reach sum up by the same cuts.
    for (const ImageLayout& layout : stored.held->with_lost()) compared.push_back(&layout);
    plan.cuts = CommonCuts::between(compared);
  }
  TransferPlan::Totals& totals = plan.transfers.totals;
  auto stays = [&](uint32_t image) {
    return !std::binary_search(plan.leaving.begin(), plan.leaving.end(), image);
  };
  for (size_t i = 0; plan.same_states && i < stored.images.size(); ++i) {
    if (stored.images[i].image == nullptr || !stays(i)) continue;
    totals.total_bytes += stored.layouts()[i].bytes;
    totals.kept_bytes += stored.layouts()[i].bytes;
    ++totals.kept_images;
  }
  for (const ChangePlan::OtherCopy& copy : plan.copies) {
    const uint64_t bytes = stored.layouts()[copy.source_image].bytes;
    totals.total_bytes += bytes;
    totals.moved_bytes += bytes;
    totals.minimum_bytes += bytes;
  }
  return plan;
}

}  // namespace

Result<std::shared_ptr<const ChangePlan>> plan_change(const Checkpoint& checkpoint,
                                                      const StoredState& stored,
                                                      const WantedState& wanted) {
  ResultKey key = checkpoint.key("change");
  key.add(stored.held->key())
      .add(key_text(wanted.spec))
      .add(wanted.replicas)
      .add(wanted.nothing_leaves ? 1 : 0);
  key.add(wanted.placement.place_of_rank.size());
  for (const MemoryPlace& place : wanted.placement.place_of_rank) key.add(place.to_string());
  for (const std::string& node : wanted.alive) key.add(node);
  return checkpoint.results().get<ChangePlan>(
      key, [&]() -> Result<std::shared_ptr<const ChangePlan>> {
        Result<ChangePlan> plan = make_plan(checkpoint, stored, wanted);
        if (plan.has_value()) return std::make_shared<const ChangePlan>(std::move(plan).value());
        const auto loss = plan.error().code() == Code::kCorrupt
                              ? checkpoint.loss()
                              : std::nullopt;  // it says which by name
        return loss ? std::move(plan).error().with_context(*loss) : std::move(plan).error();
      });
}

}  // namespace ptc
