#include "reshard/move/placement.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include "reshard/plan/assignment.h"

namespace ptc {
namespace {

uint32_t number_of(const std::string& node, std::vector<std::string>& nodes) {
  const auto it = std::find(nodes.begin(), nodes.end(), node);
  if (it != nodes.end()) return it - nodes.begin();
  nodes.push_back(node);
  return nodes.size() - 1;
}

/// What nodes hold of the bytes of a file.
class HeldBytes {
 public:
  explicit HeldBytes(const StoredState& stored) : stored_(stored) {}

  /// By number of the node in StoredState::nodes; others hold what is in no array.
  std::vector<uint64_t> of(const ImageLayout& file) const {
    uint64_t all = 0;
    std::vector<uint64_t> held(stored_.nodes.size() + 1);
    for (const ArraySlot& slot : file.arrays)
      for (const Piece& piece : slot.part.pieces) {
        all += stored_.index().bytes_of(slot.tensor, piece.global);
        stored_.index().add_held(slot.tensor, piece.global, held);
      }
    for (uint64_t& bytes : held)
      bytes = file.bytes - std::min(file.bytes, all - std::min(all, bytes));
    return held;
  }

 private:
  const StoredState& stored_;
};

/// By number of the node in StoredState::nodes: whether it has this very file. What is in it may
/// be there as part of others, which then could not go.
std::vector<bool> nodes_with(const StoredState& stored, const StateFile& file) {
  std::vector<bool> nodes(stored.nodes.size() + 1);
  const std::vector<StoredImage>& images = stored.images;
  auto image = std::partition_point(images.begin(), images.end(), [&](const StoredImage& one) {
    return std::tie(one.state, one.path) < std::tie(file.owner, file.path);
  });
  for (; image != images.end() && image->state == file.owner && image->path == file.path; ++image)
    if (image->image != nullptr) nodes[stored.layouts()[image - images.begin()].node] = true;
  return nodes;
}

/// Ranks with those of a tensor-parallel group side by side.
std::vector<uint64_t> ranks_by_group(const LayoutSpec& spec) {
  std::vector<uint64_t> ranks(spec.sizes.world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::pair<uint64_t, uint32_t>> key(ranks.size());
  for (uint64_t rank : ranks) {
    RankCoords coords = spec.coords(rank);
    const uint32_t tp = std::exchange(coords.tp, 0);
    key[rank] = {spec.order.global_rank(spec.sizes, coords), tp};
  }
  std::sort(ranks.begin(), ranks.end(), [&](uint64_t a, uint64_t b) { return key[a] < key[b]; });
  return ranks;
}

/// Of a layout that leaves its devices out.
Result<Placement> make_placement(const LayoutSpec& spec, const Checkpoint& checkpoint,
                                 const StoredState& stored, const std::vector<std::string>& alive);

}  // namespace

bool is_among(const std::vector<std::string>& nodes, const std::string& node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

std::string node_of(const std::string& device) { return device.substr(0, device.rfind(':')); }

std::set<std::string> nodes_of(const Layout& layout) {
  std::set<std::string> nodes;
  for (const std::string& device : layout.devices) nodes.insert(node_of(device));
  return nodes;
}

Result<Placement> place_ranks(const Layout& layout, const Checkpoint& checkpoint,
                              const StoredState& stored, const std::vector<std::string>& alive) {
  if (!layout.devices.empty()) {
    Placement placement;
    for (const std::string& device : layout.devices)
      placement.node_of_rank.push_back(node_of(device));
    return placement;
  }
  if (alive.empty()) return make_error(Code::kUnavailable, "no node is there to place ranks on");
  ResultKey key = checkpoint.key("placement").add(stored.held->key()).add(key_text(layout.spec));
  for (const std::string& node : alive) key.add(node);
  PTC_TRY(
      auto placement,
      checkpoint.results().get<Placement>(key, [&]() -> Result<std::shared_ptr<const Placement>> {
        PTC_TRY(auto made, make_placement(layout.spec, checkpoint, stored, alive));
        return std::make_shared<const Placement>(std::move(made));
      }));
  return *placement;
}

namespace {

Result<Placement> make_placement(const LayoutSpec& spec, const Checkpoint& checkpoint,
                                 const StoredState& stored, const std::vector<std::string>& alive) {
  Placement placement;
  const uint64_t world = spec.sizes.world_size();
  placement.node_of_rank.assign(world, alive.front());
  if (alive.size() == 1) return placement;

  uint64_t block = (world + alive.size() - 1) / alive.size();
  if (block > spec.sizes.tp) block = (block + spec.sizes.tp - 1) / spec.sizes.tp * spec.sizes.tp;
  const std::vector<uint64_t> ranks = ranks_by_group(spec);
  const size_t blocks = (world + block - 1) / block;

  // Bytes that each node holds of what each block needs.
  PTC_TRY(auto targets, checkpoint.target_images(spec));
  std::vector<std::vector<uint32_t>> files_of_state(state_count(spec));
  for (uint32_t file = 0; file < targets->size(); ++file)
    for (uint32_t state : (*targets)[file].states) files_of_state[state].push_back(file);
  std::vector<std::vector<uint64_t>> held(targets->size(), std::vector<uint64_t>(alive.size()));
  const HeldBytes held_bytes(stored);
  for (size_t file = 0; file < targets->size(); ++file) {
    const std::vector<uint64_t> bytes = held_bytes.of((*targets)[file].layout);
    for (size_t node = 0; node < alive.size(); ++node) {
      const auto known = std::find(stored.nodes.begin(), stored.nodes.end(), alive[node]);
      if (known != stored.nodes.end()) held[file][node] = bytes[known - stored.nodes.begin()];
    }
  }
  std::vector<std::vector<uint64_t>> kept(blocks, std::vector<uint64_t>(alive.size()));
  for (size_t b = 0; b < blocks; ++b) {
    std::set<uint32_t> needed;
    for (uint64_t i = b * block; i < std::min(world, (b + 1) * block); ++i) {
      const auto& files = files_of_state[state_index(spec, state_of(spec, spec.coords(ranks[i])))];
      needed.insert(files.begin(), files.end());
    }
    for (size_t node = 0; node < alive.size(); ++node)
      for (uint32_t file : needed) kept[b][node] += held[file][node];
  }
  const std::vector<size_t> node_of_block = best_assignment(kept);
  for (uint64_t i = 0; i < world; ++i)
    placement.node_of_rank[ranks[i]] = alive[node_of_block[i / block]];
  return placement;
}

}  // namespace

std::vector<StateFile> place_files(std::vector<StateFile> targets, const LayoutSpec& spec,
                                   const Placement& placement, uint32_t replicas,
                                   const std::vector<std::string>& alive, const StoredState& stored,
                                   std::vector<std::string>& nodes) {
  std::vector<std::set<uint32_t>> nodes_of_state(state_count(spec));
  auto is_alive = [&](const std::string& node) { return is_among(alive, node); };
  for (uint64_t rank = 0; rank < placement.node_of_rank.size(); ++rank)
    if (is_alive(placement.node_of_rank[rank]))
      nodes_of_state[state_index(spec, state_of(spec, spec.coords(rank)))].insert(
          number_of(placement.node_of_rank[rank], nodes));
  std::vector<uint32_t> all;
  for (const std::string& node : alive) all.push_back(number_of(node, nodes));

  const HeldBytes held_bytes(stored);
  std::vector<StateFile> placed;
  uint32_t turn = 0;
  for (StateFile& target : targets) {
    std::set<uint32_t> on;
    for (uint32_t state : target.states)
      on.insert(nodes_of_state[state].begin(), nodes_of_state[state].end());
    if (target.states.empty()) on = nodes_of_state.front();  // padding: anywhere
    if (on.size() < replicas + 1u && on.size() < all.size()) {
      struct Candidate {
        uint64_t held;
        bool has_file;
        uint32_t distance, node;
      };
      std::vector<Candidate> candidates;
      const std::vector<uint64_t> held = held_bytes.of(target.layout);
      const std::vector<bool> has_file = nodes_with(stored, target);
      for (uint32_t i = 0; i < all.size(); ++i) {
        if (on.contains(all[i])) continue;
        const uint32_t distance = (i + all.size() - turn % all.size()) % all.size();
        const size_t known = std::min<size_t>(all[i], held.size() - 1);
        candidates.push_back({held[known], has_file[known], distance, all[i]});
      }
      std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
        return std::tuple(b.held, b.has_file, a.distance) <
               std::tuple(a.held, a.has_file, b.distance);
      });
      for (const Candidate& candidate : candidates)
        if (on.size() < replicas + 1u) on.insert(candidate.node);
      ++turn;
    }
    for (uint32_t node : on) {
      placed.push_back(target);
      placed.back().layout.node = node;
    }
  }
  return placed;
}

}  // namespace ptc
