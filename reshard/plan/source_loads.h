// The load of each holder, as parts are taken of it.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <vector>

#include "reshard/plan/source_index.h"

namespace ptc {

/// How much was asked of each source, in bytes, and who of a set was asked for the least. Threads:
/// one. The index outlives it.
class SourceLoads {
 public:
  using Member = SourceIndex::Member;
  explicit SourceLoads(const SourceIndex& source) : source_(source), elsewhere_(source.sets()) {
    uint32_t nodes = 1;
    asked_.reserve(source.images().size());
    for (const ImageLayout& image : source.images()) {
      asked_.push_back({0, image.node});
      nodes = std::max(nodes, image.node + 1);
    }
    of_node_.resize(nodes);
  }

  void take_here(uint32_t image, uint64_t bytes) { asked_[image].bytes += bytes; }
  void take_elsewhere(uint32_t image, uint64_t bytes) {
    asked_[image].bytes += bytes;
    of_node_[asked_[image].node] += bytes;
  }

  /// Who of a set is on the node that asks.
  struct Here {
    explicit Here(std::span<const Member> on_node) : members(on_node) {}
    const std::span<const Member> members;  // SourceIndex::members_on()

   private:
    friend class SourceLoads;
    uint32_t heap = UINT32_MAX;  // in here_, once that was looked for
  };
  /// Of one or more.
  const Member& least_here(Here& here) {
    auto load = [&](uint32_t i) { return OfImage{asked_[here.members[i].image].bytes, i}; };
    const size_t count = here.members.size();
    if (count <= kFew) return here.members[least_of<OfImage>(count, load)];
    if (here.heap == UINT32_MAX) {
      here.heap = numbers_.try_emplace(here.members.data(), here_.size()).first->second;
      if (here.heap == here_.size()) here_.emplace_back();
    }
    return here.members[least_in(here_[here.heap], count, load)];
  }
  /// Of a set of which none is on the node that asks.
  const Member& least_elsewhere(uint32_t set) {
    const std::span<const Member> members = source_.members(set);
    auto load = [&](uint32_t i) {
      const Asked& asked = asked_[members[i].image];
      return OfNode{of_node_[asked.node], asked.bytes, i};
    };
    if (members.size() <= kFew) return members[least_of<OfNode>(members.size(), load)];
    return members[least_in(elsewhere_[set], members.size(), load)];
  }

 private:
  struct Asked {
    uint64_t bytes;
    uint32_t node;
  };
  struct OfImage {
    uint64_t of_image;
    uint32_t member;
    friend auto operator<=>(const OfImage&, const OfImage&) = default;
  };
  struct OfNode {
    uint64_t of_node, of_image;
    uint32_t member;
    friend auto operator<=>(const OfNode&, const OfNode&) = default;
  };
  static constexpr size_t kFew = 8;

  template <class Load>
  static uint32_t least_of(size_t count, auto&& load) {
    if (count == 1) return 0;
    Load least = load(0);
    for (uint32_t i = 1; i < count; ++i)
      if (const Load one = load(i); one < least) least = one;
    return least.member;
  }
  template <class Load>
  static uint32_t least_in(std::vector<Load>& heap, size_t count, auto&& load) {
    if (heap.empty()) {
      for (uint32_t i = 0; i < count; ++i) heap.push_back(load(i));
      std::make_heap(heap.begin(), heap.end(), std::greater<>());
    }
    // Loads only grow: what is on top as it is now is the least.
    for (;;) {
      const Load now = load(heap.front().member);
      if (now == heap.front()) return now.member;
      sink(heap, now);
    }
  }
  /// Puts `load` where the first one was, and down to its place.
  template <class Load>
  static void sink(std::vector<Load>& heap, const Load& load) {
    size_t at = 0;
    for (size_t child = 1; child < heap.size(); child = 2 * at + 1) {
      if (child + 1 < heap.size() && heap[child + 1] < heap[child]) ++child;
      if (load < heap[child]) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = load;
  }

  const SourceIndex& source_;
  std::vector<Asked> asked_;                             // by image
  std::vector<uint64_t> of_node_;                        // bytes asked of each node by others
  std::vector<std::vector<OfNode>> elsewhere_;           // by set
  std::vector<std::vector<OfImage>> here_;               // of many on one node
  std::unordered_map<const Member*, uint32_t> numbers_;  // in here_
};

}  // namespace ptc
