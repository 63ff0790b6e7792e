#include "reshard/move/placement.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "reshard/plan/assignment.h"

namespace ptc {
namespace {

/// What nodes hold of the bytes of a file; what is in no array, each does.
class HeldBytes {
 public:
  /// `held` must outlive this.
  HeldBytes(const ImageLayout& file, const SourceIndex::HeldOf& held)
      : file_bytes_(file.bytes), held_(held) {}

  /// Of a node that holds none of its arrays.
  uint64_t least() const { return of_held(0); }
  /// visit(number of the node in StoredState::nodes, bytes) for all others.
  template <class Visit>
  void for_each(Visit visit) const {
    for (const auto& [node, bytes] : held_.by_node) visit(node, of_held(bytes));
  }

 private:
  uint64_t of_held(uint64_t bytes) const {
    return file_bytes_ - std::min(file_bytes_, held_.all - std::min(held_.all, bytes));
  }
  const uint64_t file_bytes_;
  const SourceIndex::HeldOf& held_;
};

/// visit(number of the node in StoredState::nodes) for each image of this very file in the host's
/// memory. What is in it may be there as part of others, which then could not go.
template <class Visit>
void for_each_with(const StoredState& stored, const StateFile& file, Visit visit) {
  const std::vector<StoredImage>& images = stored.images;
  auto image = std::partition_point(images.begin(), images.end(), [&](const StoredImage& one) {
    return std::tie(one.state, one.path) < std::tie(file.owner, file.path);
  });
  for (; image != images.end() && image->state == file.owner && image->path == file.path; ++image)
    if (image->image != nullptr && image->memory.is_host())
      visit(stored.layouts()[image - images.begin()].node);
}

/// Ranks with those of a tensor-parallel group side by side.
std::vector<uint64_t> ranks_by_group(const LayoutSpec& spec) {
  std::vector<uint64_t> ranks(spec.sizes.world_size());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (spec.sizes.etp != 0) return ranks;  // numbered so
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

NumberedNodes::NumberedNodes(std::vector<std::string>& nodes) : nodes_(nodes) {
  for (uint32_t i = 0; i < nodes.size(); ++i) numbers_.emplace(nodes[i], i);
}

std::optional<uint32_t> NumberedNodes::find(const std::string& node) const {
  const auto known = numbers_.find(node);
  return known == numbers_.end() ? std::nullopt : std::optional(known->second);
}

uint32_t NumberedNodes::of(const std::string& node) {
  const auto [known, is_new] = numbers_.try_emplace(node, nodes_.size());
  if (is_new) nodes_.push_back(node);
  return known->second;
}

bool is_among(const std::vector<std::string>& nodes, const std::string& node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

std::string node_of(const std::string& device) { return device.substr(0, device.rfind(':')); }

std::set<std::string> nodes_of(const Layout& layout) {
  std::set<std::string> nodes;
  for (const std::string& device : layout.devices) nodes.insert(node_of(device));
  return nodes;
}

namespace {

/// Of a device as layout.json names it.
uint32_t number_of_device(const std::string& device) {
  uint32_t number = UINT32_MAX;
  std::from_chars(device.data() + device.rfind(':') + 1, device.data() + device.size(), number);
  return number;
}

/// The one of `memories` that layout.json names so, or the end.
std::vector<NodeMemory>::const_iterator find_device(const std::vector<NodeMemory>& memories,
                                                    const std::string& device) {
  const uint32_t number = number_of_device(device);
  return std::find_if(memories.begin(), memories.end(),
                      [&](NodeMemory memory) { return memory.device() == number; });
}

/// "cuda:0, cuda:1"
std::string device_list(const std::vector<NodeMemory>& memories) {
  std::vector<std::string> names;
  for (const NodeMemory memory : memories) names.push_back(memory.to_string());
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

void put_in_devices(const Layout& layout, const DevicesOfNodes& devices, Placement& placement) {
  std::map<std::string_view, size_t> ranks_on;
  for (size_t rank = 0; rank < placement.place_of_rank.size(); ++rank) {
    MemoryPlace& place = placement.place_of_rank[rank];
    const auto found = devices.find(place.node);
    if (found == devices.end() || found->second.empty()) continue;
    const std::vector<NodeMemory>& there = found->second;
    if (layout.devices.empty()) {
      place.memory = there[ranks_on[found->first]++ % there.size()];
    } else if (const auto device = find_device(there, layout.devices[rank]);
               device != there.end()) {
      place.memory = *device;
    }
  }
}

Result<> check_devices_of_ranks(const Layout& layout, const DevicesOfNodes& devices,
                                const Placement& placement) {
  for (size_t rank = 0; rank < placement.place_of_rank.size(); ++rank) {
    const auto found = devices.find(placement.place_of_rank[rank].node);
    if (found == devices.end()) continue;
    const std::vector<NodeMemory>& there = found->second;
    if (there.empty())
      return invalid_argument(
          "'memory' is \"device\", and node {} has no device for rank {}: start its ptcfs with "
          "--gpu (with a GPU's number it says why that cannot be had), or give the layout nodes "
          "that "
          "have some (\"devices\")",
          found->first, rank);
    if (!layout.devices.empty() && find_device(there, layout.devices[rank]) == there.end())
      return invalid_argument(
          "'memory' is \"device\", and rank {} is given device {}, which node {} does not have: it "
          "has {}; name one of these (cuda:{} is \"{}:{}\"), or start its ptcfs with others "
          "(--gpu)",
          rank, layout.devices[rank], found->first, device_list(there), there.front().device(),
          found->first, there.front().device());
  }
  return ok();
}

Result<Placement> place_ranks(const Layout& layout, const Checkpoint& checkpoint,
                              const StoredState& stored, const std::vector<std::string>& alive) {
  if (!layout.devices.empty()) {
    Placement placement;
    for (const std::string& device : layout.devices)
      placement.place_of_rank.push_back({node_of(device)});
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
  placement.place_of_rank.assign(world, {alive.front()});
  if (alive.size() == 1) return placement;

  uint64_t block = (world + alive.size() - 1) / alive.size();
  if (block > spec.sizes.tp) block = (block + spec.sizes.tp - 1) / spec.sizes.tp * spec.sizes.tp;
  const std::vector<uint64_t> ranks = ranks_by_group(spec);
  const size_t blocks = (world + block - 1) / block;

  // Bytes that each node holds of what each block needs.
  PTC_TRY(auto targets, checkpoint.target_images(spec));
  std::vector<std::vector<uint32_t>> files_of_state(state_count(spec));
  auto held_of_targets = std::make_shared<HeldOfTargets>();
  held_of_targets->stored_key = stored.held->key();
  held_of_targets->of_target.reserve(targets->size());
  std::vector<HeldBytes> held;
  held.reserve(targets->size());
  for (uint32_t file = 0; file < targets->size(); ++file) {
    const ImageLayout& layout = (*targets)[file].layout;
    for (uint32_t state : (*targets)[file].states) files_of_state[state].push_back(file);
    held_of_targets->of_target.push_back(stored.index().held_of(layout));
    held_of_targets->of_target.back().by_node.shrink_to_fit();  // they stay for a while
    held.emplace_back(layout, held_of_targets->of_target.back());
  }
  std::vector<size_t> place_of(stored.nodes.size(), alive.size());  // in `alive`; or its size
  std::unordered_map<std::string_view, size_t> places;
  for (size_t i = 0; i < alive.size(); ++i) places.emplace(alive[i], i);
  for (size_t i = 0; i < stored.nodes.size(); ++i)
    if (const auto found = places.find(stored.nodes[i]); found != places.end())
      place_of[i] = found->second;
  std::vector<std::vector<uint64_t>> kept(blocks, std::vector<uint64_t>(alive.size()));
  std::vector<uint32_t> needed;
  for (size_t b = 0; b < blocks; ++b) {
    needed.clear();
    for (uint64_t i = b * block; i < std::min(world, (b + 1) * block); ++i) {
      const auto& files = files_of_state[state_index(spec, state_of(spec, spec.coords(ranks[i])))];
      needed.insert(needed.end(), files.begin(), files.end());
    }
    std::sort(needed.begin(), needed.end());
    needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
    uint64_t least = 0;
    for (uint32_t file : needed) least += held[file].least();
    for (size_t place : place_of)
      if (place < alive.size()) kept[b][place] = least;
    for (uint32_t file : needed)
      held[file].for_each([&](uint32_t node, uint64_t bytes) {
        if (place_of[node] < alive.size()) kept[b][place_of[node]] += bytes - held[file].least();
      });
  }
  const std::vector<size_t> node_of_block = best_assignment(kept);
  for (uint64_t i = 0; i < world; ++i)
    placement.place_of_rank[ranks[i]] = {alive[node_of_block[i / block]]};
  placement.held = std::move(held_of_targets);
  return placement;
}

}  // namespace

std::vector<StateFile> place_files(std::vector<StateFile> targets, const LayoutSpec& spec,
                                   const Placement& placement, uint32_t replicas,
                                   const std::vector<std::string>& alive, const StoredState& stored,
                                   std::vector<std::string>& nodes) {
  NumberedNodes numbers(nodes);
  const std::unordered_set<std::string_view> is_alive(alive.begin(), alive.end());
  using Place = std::pair<uint32_t, NodeMemory>;  // number of a node, and a memory of it
  std::vector<std::vector<Place>> places_of_state(state_count(spec));
  for (uint64_t rank = 0; rank < placement.place_of_rank.size(); ++rank) {
    const MemoryPlace& place = placement.place_of_rank[rank];
    if (is_alive.contains(place.node))
      places_of_state[state_index(spec, state_of(spec, spec.coords(rank)))].emplace_back(
          numbers.of(place.node), place.memory);
  }
  std::vector<uint32_t> all;
  for (const std::string& node : alive) all.push_back(numbers.of(node));
  auto make_unique = [](std::vector<Place>& on) {
    std::sort(on.begin(), on.end());
    on.erase(std::unique(on.begin(), on.end()), on.end());
  };
  for (std::vector<Place>& on : places_of_state) make_unique(on);
  // Of places in their order: on how many nodes the host's memory is among them, and on how many
  // only devices are.
  struct Nodes {
    size_t hosts = 0, devices_alone = 0;
    // What is in devices ends with their daemons, all together perhaps: one is the first copy, and
    // no other counts.
    size_t copies() const { return hosts + std::min<size_t>(devices_alone, 1); }
  };
  auto count_nodes = [](const std::vector<Place>& on) {
    Nodes count;
    for (size_t i = 0; i < on.size(); ++i)
      if (i == 0 || on[i].first != on[i - 1].first)
        ++(on[i].second.is_host() ? count.hosts : count.devices_alone);
    return count;
  };
  auto first_on_node = [](const std::vector<Place>& on, uint32_t node) {  // or null
    const auto first = std::lower_bound(on.begin(), on.end(), Place(node, NodeMemory::host()));
    return first != on.end() && first->first == node ? &*first : nullptr;
  };

  struct Candidate {
    uint64_t held;
    bool has_file, is_in_device;
    uint32_t distance, node;
  };
  constexpr uint32_t kNone = UINT32_MAX;
  const size_t known = std::max(nodes.size(), stored.nodes.size());
  std::vector<uint32_t> place_of(known, kNone);   // by node: in `all`
  std::vector<uint32_t> number_of(known, kNone);  // by node: in `candidates`
  for (uint32_t i = 0; i < all.size(); ++i) place_of[all[i]] = i;
  std::vector<Candidate> candidates;

  const bool is_held_known = placement.held && placement.held->stored_key == stored.held->key() &&
                             placement.held->of_target.size() == targets.size();

  std::vector<StateFile> placed;
  placed.reserve(targets.size());
  uint32_t turn = 0;
  std::vector<Place> on;
  for (size_t number = 0; number < targets.size(); ++number) {
    const StateFile& target = targets[number];
    on.clear();
    for (uint32_t state : target.states)
      on.insert(on.end(), places_of_state[state].begin(), places_of_state[state].end());
    if (target.states.empty()) on = places_of_state.front();  // padding: anywhere
    if (target.states.size() > 1) make_unique(on);
    const Nodes nodes_with = count_nodes(on);
    const size_t wanted = std::min<size_t>(replicas + size_t{1}, all.size());
    if (const size_t has = nodes_with.copies(); has < wanted) {
      SourceIndex::HeldOf added_up;
      if (!is_held_known) added_up = stored.index().held_of(target.layout);
      const HeldBytes held_bytes(target.layout,
                                 is_held_known ? placement.held->of_target[number] : added_up);
      auto candidate_of = [&](uint32_t node) -> Candidate* {
        if (place_of[node] == kNone) return nullptr;
        const Place* there = first_on_node(on, node);
        // One whose device has the only other copy would have both.
        if (there != nullptr && (there->second.is_host() || nodes_with.devices_alone == 1))
          return nullptr;
        if (number_of[node] == kNone) {
          number_of[node] = static_cast<uint32_t>(candidates.size());
          const size_t distance = (place_of[node] + all.size() - turn % all.size()) % all.size();
          candidates.push_back(
              {held_bytes.least(), false, there != nullptr, static_cast<uint32_t>(distance), node});
        }
        return &candidates[number_of[node]];
      };
      held_bytes.for_each([&](uint32_t node, uint64_t bytes) {
        if (Candidate* candidate = candidate_of(node)) candidate->held = bytes;
      });
      for_each_with(stored, target, [&](uint32_t node) {
        if (Candidate* candidate = candidate_of(node)) candidate->has_file = true;
      });
      // Of all others the first in turn, and as many that have it in no device.
      const size_t enough = candidates.size() + wanted - has + nodes_with.devices_alone;
      for (size_t i = 0; i < all.size() && candidates.size() < enough; ++i)
        candidate_of(all[(turn + i) % all.size()]);
      const size_t more = std::min(candidates.size(), wanted - has);
      std::partial_sort(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(more),
                        candidates.end(), [](const Candidate& a, const Candidate& b) {
                          return std::tuple(b.held, b.has_file, a.is_in_device, a.distance) <
                                 std::tuple(a.held, a.has_file, b.is_in_device, b.distance);
                        });
      for (const Candidate& candidate : candidates) number_of[candidate.node] = kNone;
      for (size_t i = 0; i < more; ++i) on.emplace_back(candidates[i].node, NodeMemory::host());
      candidates.clear();
      std::sort(on.begin(), on.end());
      ++turn;
    }
    for (const auto& [node, memory] : on) {
      placed.push_back(target);
      placed.back().layout.node = node;
      placed.back().layout.memory = memory;
    }
  }
  return placed;
}

}  // namespace ptc
