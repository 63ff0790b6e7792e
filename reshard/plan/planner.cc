#include "reshard/plan/planner.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "reshard/plan/relay.h"

namespace ptc {
namespace {

/// Which source images are already what is wanted, each of one target.
class Identities {
 public:
  explicit Identities(std::span<const ImageLayout> images)
      : images_(images), taken_(images.size()) {
    for (uint32_t image = 0; image < images.size(); ++image)
      by_hash_.emplace(hash_of(images[image]), image);
  }

  /// The first that is the same, in the same memory, of those that were not found before.
  std::optional<uint32_t> take(const ImageLayout& wanted) {
    std::optional<uint32_t> found;
    const auto [begin, end] = by_hash_.equal_range(hash_of(wanted));
    for (auto it = begin; it != end; ++it)
      if (!taken_[it->second] && (!found || it->second < *found) &&
          same(images_[it->second], wanted))
        found = it->second;
    if (found) taken_[*found] = true;
    return found;
  }

 private:
  /// Copies of an image share what it has.
  size_t hash_of(const ImageLayout& image) {
    const auto [known, is_new] =
        hashes_.try_emplace(std::pair(image.arrays.begin(), image.literals.pieces().data()), 0);
    if (is_new) {
      // Of some of them; who has the same is compared.
      constexpr size_t kLooked = 16;
      size_t& hash = known->second;
      hash = hash_of(image.literals) ^ image.arrays.size();
      const size_t step = image.arrays.size() / kLooked + 1;
      for (size_t i = 0; i < image.arrays.size(); i += step)
        hash = (hash ^ image.arrays[i].tensor ^ (image.arrays[i].byte_offset << 20)) * kFactor;
    }
    return (known->second ^ image.bytes ^ size_t{image.node} << 32) * kFactor;
  }
  /// Files that were laid out alike share these.
  size_t hash_of(const Literals& literals) {
    const auto [known, is_new] = literal_hashes_.try_emplace(literals.pieces().data(), 0);
    size_t& hash = known->second;
    if (!is_new) return hash;
    for (const Literals::Piece& piece : literals.pieces())
      hash = (hash ^ std::hash<std::string>{}(piece.bytes)) * kFactor + piece.offset;
    return hash;
  }
  bool same(const ImageLayout& a, const ImageLayout& b) {
    if (a.node != b.node || a.memory != b.memory || a.bytes != b.bytes) return false;
    const Things of_a{a.arrays.begin(), a.literals.pieces().data()};
    const Things of_b{b.arrays.begin(), b.literals.pieces().data()};
    if (of_a == of_b) return true;
    if (last_same_ == std::pair(of_a, of_b)) return true;
    if (a.literals != b.literals || a.arrays != b.arrays) return false;
    last_same_ = {of_a, of_b};
    return true;
  }

  using Things = std::pair<const ArraySlot*, const Literals::Piece*>;
  struct ThingsHash {
    size_t operator()(const Things& things) const {
      return (reinterpret_cast<size_t>(things.first) * kFactor) ^
             reinterpret_cast<size_t>(things.second);
    }
  };
  static constexpr size_t kFactor = 0x9e3779b97f4a7c15u;
  std::span<const ImageLayout> images_;
  std::vector<bool> taken_;
  std::unordered_map<Things, size_t, ThingsHash> hashes_;
  std::unordered_map<const Literals::Piece*, size_t> literal_hashes_;
  std::unordered_multimap<size_t, uint32_t> by_hash_;
  std::pair<Things, Things> last_same_;  // targets that are copies follow each other
};

/// What nodes send each other.
class Traffic {
 public:
  Traffic(std::span<const ImageLayout> sources, std::span<const ImageLayout> targets)
      : sources_(sources), targets_(targets) {
    for (const auto* images : {&sources_, &targets_})
      for (const ImageLayout& image : *images) nodes_ = std::max(nodes_, image.node + 1);
    received_.resize(nodes_);
  }

  /// Of the plan as it is without relays.
  void add_sources(const TransferPlan& plan) {
    std::vector<uint64_t> of_nodes(nodes_);  // to one target
    std::vector<uint32_t> from_nodes;
    for (uint32_t i = 0; i < targets_.size(); ++i) {
      plan.for_each_source(i, [&](uint32_t source, uint64_t bytes) {
        uint64_t& sum = of_nodes[node_of(i, source)];
        if (sum == 0) from_nodes.push_back(node_of(i, source));
        sum += bytes;
      });
      for (const uint32_t from : from_nodes)
        received_[targets_[i].node][from] += std::exchange(of_nodes[from], 0);
      from_nodes.clear();
    }
  }

  /// Which nodes send more than any receives.
  std::vector<bool> overloaded() const {
    std::vector<uint64_t> sent(nodes_);
    uint64_t most = 0;
    for (uint32_t to = 0; to < nodes_; ++to) {
      uint64_t received = 0;
      for (const auto& [from, bytes] : received_[to]) {
        if (from == to) continue;
        sent[from] += bytes;
        received += bytes;
      }
      most = std::max(most, received);
    }
    std::vector<bool> nodes(nodes_);
    for (uint32_t node = 0; node < nodes_; ++node) nodes[node] = sent[node] > most;
    return nodes;
  }

  /// With its relays.
  void add_up(TransferPlan& plan) {
    if (plan.relays != nullptr)
      plan.relays->for_each_owner(
          [&](uint32_t source, std::span<const uint32_t> members, size_t owner, uint64_t bytes) {
            const uint32_t from = sources_[source].node, owner_node = targets_[members[owner]].node;
            for (size_t i = 0; i < members.size(); ++i) {
              if (i == owner) continue;
              add(from, targets_[members[i]].node, ~bytes + 1);  // not from there
              add(owner_node, targets_[members[i]].node, bytes);
            }
          });
    for (uint32_t to = 0; to < nodes_; ++to)
      for (const auto& [from, bytes] : received_[to]) {
        if (bytes == 0) continue;
        (from == to ? plan.totals.local_bytes : plan.totals.moved_bytes) += bytes;
        plan.pairs.push_back({from, to, bytes});
      }
    std::sort(plan.pairs.begin(), plan.pairs.end(),
              [](const TransferPlan::Pair& a, const TransferPlan::Pair& b) {
                return std::pair(a.source_node, a.target_node) <
                       std::pair(b.source_node, b.target_node);
              });
  }

 private:
  uint32_t node_of(uint32_t target, uint32_t source_image) const {
    return source_image < sources_.size() ? sources_[source_image].node : targets_[target].node;
  }
  void add(uint32_t from, uint32_t to, uint64_t bytes) { received_[to][from] += bytes; }

  std::span<const ImageLayout> sources_, targets_;
  uint32_t nodes_ = 1;
  std::vector<std::unordered_map<uint32_t, uint64_t>> received_;  // by node, from each
};

}  // namespace

Result<SharedVector<Transfer>> TransferPlan::transfers_of(uint32_t target) const {
  if (choices == nullptr) return SharedVector<Transfer>();
  PTC_TRY(auto transfers, choices->transfers(target));
  if (relays != nullptr) relays->cut(target, transfers);
  std::stable_sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return std::max(a.begin, a.copy.target_offset) < std::max(b.begin, b.copy.target_offset);
  });
  return SharedVector<Transfer>(std::move(transfers));
}

Result<TransferPlan> plan_transfers(const SourceIndex& source,
                                    std::span<const ImageLayout> target) {
  TransferPlan plan;
  plan.images.resize(target.size());
  std::vector<bool> kept(target.size());
  Identities identities(source.images());
  for (size_t i = 0; i < target.size(); ++i) {
    plan.totals.total_bytes += target[i].bytes;
    plan.images[i].kept = identities.take(target[i]);
    kept[i] = plan.images[i].kept.has_value();
    if (kept[i]) plan.totals.kept_bytes += target[i].bytes;
    ++(kept[i] ? plan.totals.kept_images : plan.totals.written_images);
  }
  PTC_TRY(plan.choices, Choices::make(source, target, kept));
  plan.totals.minimum_bytes = plan.choices->minimum_bytes();
  Traffic traffic(source.images(), target);
  traffic.add_sources(plan);
  if (const std::vector<bool> overloaded = traffic.overloaded();
      std::find(overloaded.begin(), overloaded.end(), true) != overloaded.end()) {
    PTC_TRY(plan.relays, RelayGroups::make(*plan.choices, source.images(), target, overloaded));
  }
  traffic.add_up(plan);
  return plan;
}

}  // namespace ptc
