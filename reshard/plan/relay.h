// Who passes on what several nodes need of one.
//
// Where a node would send more than any node has to receive, its link would carry the same bytes
// again and again. Bytes that k ≤ 32 targets on k nodes take of it, by equal copies, are therefore
// cut into windows of the target image; each window is taken from the source by one of the k in
// turn, and by the others from that one as soon as it is there. The source sends each byte once,
// each of the k passes (k − 1) / k of what it receives on, all at the same time: no link carries
// more than the receivers' own. What a node receives does not change, so neither does the least
// movement.
//
// Cost: O(n log n) in what targets take from such nodes, 8 bytes of memory each; the windows, at
// most 1024 a target image, are made for who asks for a target's transfers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "reshard/plan/choices.h"
#include "reshard/plan/source_index.h"
#include "store/base/error.h"

namespace ptc {

/// The windows of an image of so many bytes begin at multiples of this.
uint64_t relay_window_bytes(uint64_t image_bytes);

/// Which targets of a plan pass on to each other what they all take of one. Immutable once made;
/// threads: any.
class RelayGroups {
 public:
  /// `overloaded`: by node, whether it would send that much.
  static Result<std::shared_ptr<const RelayGroups>> make(const Choices& choices,
                                                         std::span<const ImageLayout> sources,
                                                         std::span<const ImageLayout> targets,
                                                         const std::vector<bool>& overloaded);

  /// Cuts those transfers of a target that are relayed, and sets Transfer::relay of the parts that
  /// come from another target. `transfers` are all of it, in the order of its choices.
  void cut(uint32_t target, std::vector<Transfer>& transfers) const;

  /// visit(source image, member, its target, and of what all members take of that image, the bytes
  /// that this one takes of it, and that all others then take from this one). Several times for one
  /// member, of different bytes.
  template <class Visit>
  void for_each_owner(Visit visit) const {
    for (const Shares& shares : shares_) {
      const std::vector<uint32_t>& members = members_[shares.members];
      for (size_t i = 0; i < members.size(); ++i)
        if (shares.bytes[i] > 0) visit(shares.source_image, std::span(members), i, shares.bytes[i]);
    }
  }

 private:
  /// A transfer of a target, by its number in the order of choices.
  struct Relayed {
    uint32_t number;
    uint32_t members;  // in members_
  };
  /// What all members of a group take of an image is owned by so much by each.
  struct Shares {
    uint32_t source_image, members;
    std::vector<uint64_t> bytes;
  };
  class Maker;

  uint64_t window_bytes(const std::vector<uint32_t>& members) const {
    return relay_window_bytes(image_bytes_[members.front()]);
  }
  static size_t owner_of(const std::vector<uint32_t>& members, uint64_t window) {
    // Small images have one window, of many owners.
    return (window + members.front() / members.size()) % members.size();
  }

  std::vector<uint64_t> image_bytes_;           // by target
  std::vector<std::vector<uint32_t>> members_;  // targets, ascending; of each set once
  std::vector<Shares> shares_;
  std::vector<std::vector<Relayed>> relayed_;  // by target, ascending
};

}  // namespace ptc
