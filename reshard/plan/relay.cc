#include "reshard/plan/relay.h"

#include <algorithm>
#include <compare>
#include <map>
#include <tuple>
#include <vector>

namespace ptc {
namespace {

constexpr uint64_t kLeastWindowBytes = 4 << 20;
constexpr uint64_t kMostWindows = 1024;
constexpr ptrdiff_t kMostInGroup = 32;  // each takes from all others at the same time

/// Equal transfers put the same bytes at the same places of images of one size.
std::strong_ordering compare(const Transfer& a, uint64_t a_bytes, const Transfer& b,
                             uint64_t b_bytes) {
  auto key = [](const Transfer& transfer, uint64_t bytes) {
    const StridedCopy& copy = transfer.copy;
    return std::tuple(bytes, transfer.source_image, copy.target_offset, copy.source_offset,
                      copy.run_bytes, copy.level_count);
  };
  if (const auto order = key(a, a_bytes) <=> key(b, b_bytes); order != 0) return order;
  for (uint32_t level = 0; level < a.copy.level_count; ++level) {
    auto strides = [&](const Transfer& transfer) {
      const auto& of_level = transfer.copy.levels[level];
      return std::tuple(of_level.count, of_level.source_stride, of_level.target_stride);
    };
    if (const auto order = strides(a) <=> strides(b); order != 0) return order;
  }
  return std::strong_ordering::equal;
}

struct Place {
  uint32_t target, transfer;
};

}  // namespace

uint64_t relay_window_bytes(uint64_t image_bytes) {
  return std::max(kLeastWindowBytes, image_bytes / kMostWindows + 1);
}

void plan_relays(std::span<const ImageLayout> sources, std::span<const ImageLayout> targets,
                 TransferPlan& plan) {
  std::map<uint32_t, uint64_t> sent, received;  // by node
  auto for_each_remote = [&](auto visit) {
    for (uint32_t target = 0; target < targets.size(); ++target)
      for (uint32_t i = 0; i < plan.images[target].transfers.size(); ++i) {
        const Transfer& transfer = plan.images[target].transfers[i];
        if (transfer.source_image < sources.size() &&
            sources[transfer.source_image].node != targets[target].node)
          visit(Place{target, i}, transfer);
      }
  };
  for_each_remote([&](Place place, const Transfer& transfer) {
    sent[sources[transfer.source_image].node] += transfer.bytes();
    received[targets[place.target].node] += transfer.bytes();
  });
  uint64_t most_received = 0;
  for (const auto& [node, bytes] : received) most_received = std::max(most_received, bytes);
  std::vector<Place> places;
  for_each_remote([&](Place place, const Transfer& transfer) {
    if (sent[sources[transfer.source_image].node] > most_received) places.push_back(place);
  });

  auto at = [&](Place place) -> const Transfer& {
    return plan.images[place.target].transfers[place.transfer];
  };
  auto order = [&](Place a, Place b) {
    return compare(at(a), targets[a.target].bytes, at(b), targets[b.target].bytes);
  };
  std::stable_sort(places.begin(), places.end(), [&](Place a, Place b) { return order(a, b) < 0; });
  std::map<uint32_t, std::vector<Transfer>> cut;  // by target
  std::vector<Place> whole;                       // that were cut
  for (auto first = places.begin(); first != places.end();) {
    const auto last = std::find_if(first, first + std::min(kMostInGroup, places.end() - first),
                                   [&](Place place) { return order(place, *first) != 0; });
    const std::span<Place> group(first, last);
    first = last;
    if (group.size() < 2) continue;
    const StridedCopy& copy = at(group[0]).copy;
    const uint64_t step = relay_window_bytes(targets[group[0].target].bytes);
    const size_t turn =
        group[0].target / group.size();  // small images have one window, of many owners
    for (uint64_t window = copy.target_offset / step; window * step < copy.target_end(); ++window) {
      const uint32_t owner = group[(window + turn) % group.size()].target;
      for (const Place& place : group) {
        Transfer part = at(place);
        part.begin = window * step;
        part.end = part.begin + step;
        if (place.target != owner) part.relay = owner;
        if (part.bytes() > 0) cut[place.target].push_back(part);
      }
    }
    whole.insert(whole.end(), group.begin(), group.end());
  }
  for (const Place& place : whole)
    plan.images[place.target].transfers.own()[place.transfer].end = 0;
  for (auto& [target, parts] : cut) {
    std::vector<Transfer>& all = plan.images[target].transfers.own();
    std::erase_if(all, [](const Transfer& transfer) { return transfer.end == 0; });
    all.insert(all.end(), parts.begin(), parts.end());
    std::stable_sort(all.begin(), all.end(), [](const Transfer& a, const Transfer& b) {
      return std::max(a.begin, a.copy.target_offset) < std::max(b.begin, b.copy.target_offset);
    });
  }
}

}  // namespace ptc
