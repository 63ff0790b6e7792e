#include "reshard/plan/relay.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>

namespace ptc {

namespace {

constexpr uint64_t kLeastWindowBytes = 4 << 20;
constexpr uint64_t kMostWindows = 1024;
constexpr size_t kMostInGroup = 32;  // each takes from all others at the same time

}  // namespace

uint64_t relay_window_bytes(uint64_t image_bytes) {
  return std::max(kLeastWindowBytes, image_bytes / kMostWindows + 1);
}

class RelayGroups::Maker {
 public:
  Maker(std::span<const ImageLayout> sources, std::span<const ImageLayout> targets,
        const std::vector<bool>& overloaded, RelayGroups& groups)
      : sources_(sources), targets_(targets), overloaded_(overloaded), all_(groups) {
    for (const ImageLayout& target : targets) all_.image_bytes_.push_back(target.bytes);
    all_.relayed_.resize(targets.size());
  }

  Result<> add(std::span<const Choices::Take> alike, const Choices::CopyFrom& copy_from) {
    takes_.clear();
    for (const Choices::Take& take : alike)
      if (take.source_image < sources_.size() && overloaded_[sources_[take.source_image].node] &&
          sources_[take.source_image].node != targets_[take.target].node)
        takes_.push_back(take);
    auto key = [&](const Choices::Take& take) {
      return std::pair(take.source_image, targets_[take.target].bytes);
    };
    std::stable_sort(
        takes_.begin(), takes_.end(),
        [&](const Choices::Take& a, const Choices::Take& b) { return key(a) < key(b); });
    for (auto first = takes_.begin(); first != takes_.end();) {
      const auto last = std::find_if(
          first, takes_.end(), [&](const Choices::Take& take) { return key(take) != key(*first); });
      PTC_TRY(const StridedCopy copy, copy_from(*first));
      Group& group = group_of(first->source_image, targets_[first->target].bytes, copy);
      group.takes.insert(group.takes.end(), first, last);
      first = last;
    }
    return ok();
  }

  void finish() {
    for (Group& group : groups_) {
      std::sort(group.takes.begin(), group.takes.end(),
                [](const Choices::Take& a, const Choices::Take& b) { return a.target < b.target; });
      for (size_t begin = 0; begin < group.takes.size(); begin += kMostInGroup)
        pass_on(group.copy,
                std::span(group.takes)
                    .subspan(begin, std::min(kMostInGroup, group.takes.size() - begin)));
    }
    for (std::vector<Relayed>& relayed : all_.relayed_)
      std::sort(relayed.begin(), relayed.end(),
                [](const Relayed& a, const Relayed& b) { return a.number < b.number; });
  }

 private:
  /// Equal transfers put the same bytes at the same places of images of one size.
  struct Group {
    uint32_t source_image;
    uint64_t image_bytes;
    StridedCopy copy;
    std::vector<Choices::Take> takes;
  };

  static bool same(const StridedCopy& a, const StridedCopy& b) {
    auto key = [](const StridedCopy& copy) {
      return std::tie(copy.target_offset, copy.source_offset, copy.run_bytes, copy.level_count);
    };
    if (key(a) != key(b)) return false;
    for (uint32_t level = 0; level < a.level_count; ++level) {
      auto strides = [&](const StridedCopy& copy) {
        const StridedCopy::Level& of_level = copy.levels[level];
        return std::tie(of_level.count, of_level.source_stride, of_level.target_stride);
      };
      if (strides(a) != strides(b)) return false;
    }
    return true;
  }

  Group& group_of(uint32_t source_image, uint64_t image_bytes, const StridedCopy& copy) {
    size_t hash = 0;
    for (const uint64_t part : {uint64_t{source_image}, image_bytes, copy.target_offset,
                                copy.source_offset, copy.run_bytes}) {
      hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    const auto [begin, end] = by_hash_.equal_range(hash);
    for (auto it = begin; it != end; ++it) {
      Group& group = groups_[it->second];
      if (group.source_image == source_image && group.image_bytes == image_bytes &&
          same(group.copy, copy))
        return group;
    }
    by_hash_.emplace(hash, groups_.size());
    groups_.push_back({source_image, image_bytes, copy, {}});
    return groups_.back();
  }

  void pass_on(const StridedCopy& copy, std::span<const Choices::Take> takes) {
    if (takes.size() < 2) return;
    targets_of_.clear();
    for (const Choices::Take& take : takes) targets_of_.push_back(take.target);
    const auto [number, is_new] =
        numbers_.try_emplace(targets_of_, static_cast<uint32_t>(all_.members_.size()));
    if (is_new) all_.members_.push_back(targets_of_);
    const std::vector<uint32_t>& members = all_.members_[number->second];
    for (const Choices::Take& take : takes)
      all_.relayed_[take.target].push_back({take.number, number->second});
    const auto [shares, first] =
        shares_.try_emplace({takes.front().source_image, number->second}, all_.shares_.size());
    if (first)
      all_.shares_.push_back(
          {takes.front().source_image, number->second, std::vector<uint64_t>(members.size())});
    std::vector<uint64_t>& bytes = all_.shares_[shares->second].bytes;
    const uint64_t step = all_.window_bytes(members);
    for (uint64_t window = copy.target_offset / step; window * step < copy.target_end(); ++window)
      bytes[owner_of(members, window)] += bytes_between(copy, window * step, (window + 1) * step);
  }

  std::span<const ImageLayout> sources_, targets_;
  const std::vector<bool>& overloaded_;
  RelayGroups& all_;
  std::vector<Choices::Take> takes_;
  std::vector<uint32_t> targets_of_;
  std::vector<Group> groups_;
  std::unordered_multimap<size_t, size_t> by_hash_;         // in groups_
  std::map<std::vector<uint32_t>, uint32_t> numbers_;       // in members_
  std::map<std::pair<uint32_t, uint32_t>, size_t> shares_;  // in shares_
};

Result<std::shared_ptr<const RelayGroups>> RelayGroups::make(const Choices& choices,
                                                             std::span<const ImageLayout> sources,
                                                             std::span<const ImageLayout> targets,
                                                             const std::vector<bool>& overloaded) {
  auto groups = std::make_shared<RelayGroups>();
  Maker maker(sources, targets, overloaded, *groups);
  PTC_TRY(choices.for_each_alike(
      [&](std::span<const Choices::Take> takes, const Choices::CopyFrom& copy_from) {
        return maker.add(takes, copy_from);
      }));
  maker.finish();
  return std::shared_ptr<const RelayGroups>(std::move(groups));
}

void RelayGroups::cut(uint32_t target, std::vector<Transfer>& transfers) const {
  std::vector<Transfer> parts;
  for (const auto& [number, members_number] : relayed_[target]) {
    const std::vector<uint32_t>& members = members_[members_number];
    const StridedCopy& copy = transfers[number].copy;
    const uint64_t step = window_bytes(members);
    for (uint64_t window = copy.target_offset / step; window * step < copy.target_end(); ++window) {
      Transfer part = transfers[number];
      part.begin = window * step;
      part.end = part.begin + step;
      const uint32_t owner = members[owner_of(members, window)];
      if (target != owner) part.relay = owner;
      if (part.bytes() > 0) parts.push_back(part);
    }
  }
  for (const Relayed& relayed : relayed_[target]) transfers[relayed.number].end = 0;
  std::erase_if(transfers, [](const Transfer& transfer) { return transfer.end == 0; });
  transfers.insert(transfers.end(), parts.begin(), parts.end());
}

}  // namespace ptc
