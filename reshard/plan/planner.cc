#include "reshard/plan/planner.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace ptc {
namespace {

Dims plus_minus(const Dims& at, const Dims& plus, const Dims& minus) {
  Dims result(at.size());
  for (size_t axis = 0; axis < at.size(); ++axis)
    result[axis] = at[axis] + plus[axis] - minus[axis];
  return result;
}

// Hashes what makes two images the same but for their node.
size_t identity_hash(const ImageLayout& image) {
  size_t hash = std::hash<std::string>{}(image.header) ^ (image.bytes * 0x9e3779b97f4a7c15u);
  for (const ArraySlot& slot : image.arrays)
    hash = (hash ^ slot.tensor ^ (slot.byte_offset << 20)) * 0x9e3779b97f4a7c15u;
  return hash;
}

bool same_image(const ImageLayout& a, const ImageLayout& b) {
  return a.node == b.node && a.bytes == b.bytes && a.header == b.header && a.arrays == b.arrays;
}

uint64_t bytes_of(const Box& box, uint32_t element_bits) { return box.volume() * element_bits / 8; }

}  // namespace

SourceIndex::SourceIndex(std::span<const ImageLayout> images, std::vector<uint8_t> element_bits)
    : images_(images), element_bits_(std::move(element_bits)), first_(element_bits_.size() + 1) {
  for (const ImageLayout& image : images_)
    for (const ArraySlot& slot : image.arrays) ++first_[slot.tensor + 1];
  for (size_t tensor = 1; tensor < first_.size(); ++tensor) first_[tensor] += first_[tensor - 1];
  holders_.resize(first_.back());
  std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
  for (uint32_t image = 0; image < images_.size(); ++image)
    for (uint32_t slot = 0; slot < images_[image].arrays.size(); ++slot)
      holders_[next[images_[image].arrays[slot].tensor]++] = {image, slot};
}

Result<std::vector<Transfer>> SourceIndex::plan_image(const ImageLayout& target,
                                                      std::vector<uint64_t>* load) const {
  std::vector<Transfer> transfers;
  std::vector<Holder> candidates;
  std::vector<Box> wanted, left;
  for (const ArraySlot& slot : target.arrays) {
    candidates.assign(holders_.begin() + first_[slot.tensor],
                      holders_.begin() + first_[slot.tensor + 1]);
    if (candidates.size() > 1) {
      std::stable_sort(candidates.begin(), candidates.end(), [&](const Holder& a, const Holder& b) {
        bool a_remote = images_[a.image].node != target.node;
        bool b_remote = images_[b.image].node != target.node;
        if (a_remote != b_remote) return b_remote;
        return load != nullptr && (*load)[a.image] < (*load)[b.image];
      });
    }
    const uint32_t bits = element_bits_[slot.tensor];
    const ArrayAt target_array{slot.byte_offset, slot.part.local_shape};
    for (const Piece& target_piece : slot.part.pieces) {
      if (target_piece.global.empty()) continue;
      wanted.assign(1, target_piece.global);
      for (const Holder& holder : candidates) {
        if (wanted.empty()) break;
        const ArraySlot& source = images_[holder.image].arrays[holder.slot];
        const ArrayAt source_array{source.byte_offset, source.part.local_shape};
        for (const Piece& source_piece : source.part.pieces) {
          left.clear();
          for (const Box& box : wanted) {
            std::optional<Box> common = intersect(box, source_piece.global);
            if (!common) {
              left.push_back(box);
              continue;
            }
            PTC_TRY(auto copy,
                    make_strided_copy(source_array,
                                      plus_minus(common->offset, source_piece.local_offset,
                                                 source_piece.global.offset),
                                      target_array,
                                      plus_minus(common->offset, target_piece.local_offset,
                                                 target_piece.global.offset),
                                      common->extent, bits));
            transfers.push_back({holder.image, copy});
            if (load != nullptr) (*load)[holder.image] += bytes_of(*common, bits);
            if (*common == box) continue;
            for (Box& rest : subtract(box, *common)) left.push_back(std::move(rest));
          }
          wanted.swap(left);
        }
      }
      if (!wanted.empty())
        return make_error(Code::kCorrupt, "tensor {}, {} is stored nowhere", slot.tensor,
                          wanted.front().to_string());
    }
  }
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return a.copy.target_offset < b.copy.target_offset;
  });
  return transfers;
}

uint64_t SourceIndex::missing_on_node(uint32_t tensor, uint32_t node, std::vector<Box> wanted) const {
  std::vector<Box> left;
  for (uint32_t i = first_[tensor]; i < first_[tensor + 1] && !wanted.empty(); ++i) {
    if (images_[holders_[i].image].node != node) continue;
    for (const Piece& piece : images_[holders_[i].image].arrays[holders_[i].slot].part.pieces) {
      left.clear();
      for (const Box& box : wanted)
        for (Box& rest : subtract(box, piece.global)) left.push_back(std::move(rest));
      wanted.swap(left);
    }
  }
  uint64_t missing = 0;
  for (const Box& box : wanted) missing += bytes_of(box, element_bits_[tensor]);
  return missing;
}

uint64_t minimum_moved_bytes(const SourceIndex& source, std::span<const ImageLayout> target) {
  // (node, tensor) → the disjoint boxes that the node needs.
  std::map<std::pair<uint32_t, uint32_t>, std::vector<Box>> needed;
  for (const ImageLayout& image : target) {
    for (const ArraySlot& slot : image.arrays) {
      std::vector<Box>& boxes = needed[{image.node, slot.tensor}];
      for (const Piece& piece : slot.part.pieces) {
        if (piece.global.empty()) continue;
        if (std::find(boxes.begin(), boxes.end(), piece.global) != boxes.end()) continue;
        std::vector<Box> fresh{piece.global}, left;
        for (const Box& known : boxes) {
          left.clear();
          for (const Box& box : fresh)
            for (Box& rest : subtract(box, known)) left.push_back(std::move(rest));
          fresh.swap(left);
        }
        boxes.insert(boxes.end(), fresh.begin(), fresh.end());
      }
    }
  }
  uint64_t bytes = 0;
  for (auto& [place, boxes] : needed)
    bytes += source.missing_on_node(place.second, place.first, std::move(boxes));
  return bytes;
}

Result<TransferPlan> plan_transfers(const SourceIndex& source,
                                    std::span<const ImageLayout> target) {
  std::span<const ImageLayout> images = source.images();
  std::unordered_multimap<size_t, uint32_t> by_identity;
  by_identity.reserve(images.size());
  for (uint32_t image = 0; image < images.size(); ++image)
    by_identity.emplace(identity_hash(images[image]), image);

  TransferPlan plan;
  plan.images.resize(target.size());
  std::vector<uint64_t> load(images.size());
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> pairs;
  for (size_t i = 0; i < target.size(); ++i) {
    ImagePlan& image_plan = plan.images[i];
    plan.totals.total_bytes += target[i].bytes;
    auto [begin, end] = by_identity.equal_range(identity_hash(target[i]));
    for (auto it = begin; it != end; ++it)
      if (same_image(images[it->second], target[i])) image_plan.kept = it->second;
    if (image_plan.kept) {
      plan.totals.kept_bytes += target[i].bytes;
      ++plan.totals.kept_images;
      continue;
    }
    ++plan.totals.written_images;
    PTC_TRY(image_plan.transfers, source.plan_image(target[i], &load));
    for (const Transfer& transfer : image_plan.transfers) {
      uint32_t from = images[transfer.source_image].node;
      uint64_t bytes = transfer.copy.total_bytes();
      pairs[{from, target[i].node}] += bytes;
      (from == target[i].node ? plan.totals.local_bytes : plan.totals.moved_bytes) += bytes;
    }
  }
  plan.totals.minimum_bytes = minimum_moved_bytes(source, target);
  for (const auto& [nodes, bytes] : pairs)
    if (bytes > 0) plan.pairs.push_back({nodes.first, nodes.second, bytes});
  return plan;
}

}  // namespace ptc
