// The load of each holder, as parts are taken of it.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "reshard/plan/source_index.h"

namespace ptc {

/// How much was asked of each source, in bytes, and who of a set was asked for the least. Threads:
/// one. The index outlives it.
class SourceLoads {
 public:
  using Member = SourceIndex::Member;
  explicit SourceLoads(const SourceIndex& source)
      : source_(source), of_image_(source.images().size()), heaps_(source.sets()) {
    uint32_t nodes = 1;
    for (const ImageLayout& image : source.images()) {
      node_of_.push_back(image.node);
      nodes = std::max(nodes, image.node + 1);
    }
    of_node_.resize(nodes);
  }

  uint32_t node_of(uint32_t image) const { return node_of_[image]; }
  void take_here(uint32_t image, uint64_t bytes) { of_image_[image] += bytes; }
  void take_elsewhere(uint32_t image, uint64_t bytes) {
    of_image_[image] += bytes;
    of_node_[node_of_[image]] += bytes;
  }

  /// Of members that are all on the node that asks.
  const Member& least_here(std::span<const Member> members) const {
    return *std::min_element(members.begin(), members.end(), [&](const Member& a, const Member& b) {
      return of_image_[a.image] < of_image_[b.image];
    });
  }
  /// Of a set of which none is on the node that asks.
  const Member& least_elsewhere(uint32_t set) {
    const std::span<const Member> members = source_.members(set);
    if (members.size() == 1) return members.front();
    std::vector<Entry>& heap = heaps_[set];
    if (heap.empty()) {
      for (uint32_t i = 0; i < members.size(); ++i) heap.push_back(entry(members, i));
      std::make_heap(heap.begin(), heap.end(), std::greater<>());
    }
    // Loads only grow: what is on top as it is now is the least.
    for (;;) {
      const Entry now = entry(members, heap.front().member);
      if (now == heap.front()) return members[now.member];
      sink(heap, now);
    }
  }

 private:
  struct Entry {
    uint64_t of_node, of_image;
    uint32_t member;
    friend auto operator<=>(const Entry&, const Entry&) = default;
  };
  Entry entry(std::span<const Member> members, uint32_t i) const {
    const uint32_t image = members[i].image;
    return {of_node_[node_of_[image]], of_image_[image], i};
  }
  /// Puts `entry` where the first one was, and down to its place.
  static void sink(std::vector<Entry>& heap, const Entry& entry) {
    size_t at = 0;
    for (size_t child = 1; child < heap.size(); child = 2 * at + 1) {
      if (child + 1 < heap.size() && heap[child + 1] < heap[child]) ++child;
      if (entry < heap[child]) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = entry;
  }

  const SourceIndex& source_;
  std::vector<uint32_t> node_of_;          // by image
  std::vector<uint64_t> of_image_;         // bytes asked of each image
  std::vector<uint64_t> of_node_;          // bytes asked of each node by others
  std::vector<std::vector<Entry>> heaps_;  // by set
};

}  // namespace ptc
