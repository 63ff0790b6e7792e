#include "reshard/plan/planner.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "reshard/plan/relay.h"

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
  size_t hash = image.bytes * 0x9e3779b97f4a7c15u;
  for (const Literals::Piece& piece : image.literals.pieces())
    hash = (hash ^ std::hash<std::string>{}(piece.bytes)) * 0x9e3779b97f4a7c15u + piece.offset;
  for (const ArraySlot& slot : image.arrays)
    hash = (hash ^ slot.tensor ^ (slot.byte_offset << 20)) * 0x9e3779b97f4a7c15u;
  return hash;
}

bool same_image(const ImageLayout& a, const ImageLayout& b) {
  return a.node == b.node && a.bytes == b.bytes && a.literals == b.literals && a.arrays == b.arrays;
}

/// Of those targets that count: others are where they shall be.
uint64_t least_moved_bytes(const SourceIndex& source, std::span<const ImageLayout> targets,
                           auto&& counts) {
  struct Need {
    uint32_t node, tensor;
    const Box* box;
    auto place() const { return std::tie(node, tensor); }
  };
  std::vector<Need> needs;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!counts(i)) continue;
    for (size_t a = 0; a < targets[i].arrays.size(); ++a) {
      if (is_other_name(targets[i].arrays, a)) continue;
      const ArraySlot& slot = targets[i].arrays[a];
      for (const Piece& piece : slot.part.pieces)
        if (!piece.global.empty()) needs.push_back({targets[i].node, slot.tensor, &piece.global});
    }
  }
  std::stable_sort(needs.begin(), needs.end(),
                   [](const Need& a, const Need& b) { return a.place() < b.place(); });
  uint64_t bytes = 0;
  std::vector<Box> boxes;
  for (auto first = needs.begin(); first != needs.end();) {
    boxes.clear();
    const auto last = std::find_if(
        first, needs.end(), [&](const Need& need) { return need.place() != first->place(); });
    for (auto need = first; need != last; ++need)
      if (boxes.empty() || !(boxes.back() == *need->box)) boxes.push_back(*need->box);
    if (boxes.size() > 1) {
      const std::unordered_set<Box, BoxHash> each(boxes.begin(), boxes.end());
      boxes = source.disjoint(first->tensor, {each.begin(), each.end()});
    }
    bytes += source.missing_on_node(first->tensor, first->node, boxes);
    first = last;
  }
  return bytes;
}

}  // namespace

bool is_other_name(const SharedVector<ArraySlot>& arrays, size_t number) {
  if (number == 0) return false;
  const ArraySlot &slot = arrays[number], &before = arrays[number - 1];
  if (slot.byte_offset != before.byte_offset || slot.part.pieces.empty() ||
      before.part.pieces.empty())
    return false;
  const Piece &piece = slot.part.pieces.front(), &other = before.part.pieces.front();
  // Padding lies in the array that it pads, elsewhere than that one's pieces.
  return slot.part.local_shape == before.part.local_shape &&
         piece.local_offset == other.local_offset && !piece.global.empty() && !other.global.empty();
}

void sort_arrays(std::vector<ArraySlot>& arrays) {
  // What covers nothing begins where another begins, and comes before it.
  auto key = [&](const ArraySlot& slot) {
    uint64_t elements = 0;
    for (const Piece& piece : slot.part.pieces) elements += piece.global.volume();
    return std::pair(slot.byte_offset, elements == 0 ? 0 : UINT64_MAX - elements);
  };
  std::stable_sort(arrays.begin(), arrays.end(),
                   [&](const ArraySlot& a, const ArraySlot& b) { return key(a) < key(b); });
}

SourceIndex::SourceIndex(std::span<const ImageLayout> images, std::vector<uint8_t> element_bits)
    : images_(images), element_bits_(std::move(element_bits)), tensors_(element_bits_.size()) {
  std::vector<uint32_t> next(tensors_.size() + 1);  // first of a tensor's holders
  auto for_each_holder = [&](auto visit) {
    for (uint32_t image = 0; image < images_.size(); ++image) {
      const SharedVector<ArraySlot>& arrays = images_[image].arrays;
      for (uint32_t slot = 0; slot < arrays.size(); ++slot) {
        const std::vector<Piece>& pieces = arrays[slot].part.pieces;
        for (uint32_t piece = 0; piece < pieces.size(); ++piece)
          if (!pieces[piece].global.empty()) visit(arrays[slot].tensor, Holder{image, slot, piece});
      }
    }
  };
  for_each_holder([&](uint32_t tensor, const Holder&) { ++next[tensor + 1]; });
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) next[tensor + 1] += next[tensor];
  holders_.resize(next.back());
  for_each_holder(
      [&](uint32_t tensor, const Holder& holder) { holders_[next[tensor]++] = holder; });
  uint32_t begin = 0;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    index_tensor(tensors_[tensor], std::span(holders_).subspan(begin, next[tensor] - begin), begin);
    begin = next[tensor];
  }
}

void SourceIndex::index_tensor(Tensor& tensor, std::span<Holder> holders, uint32_t first_holder) {
  if (holders.empty()) return;
  Dims extent(piece(holders.front()).global.axes());
  for (const Holder& holder : holders) {
    const Box& box = piece(holder).global;
    for (size_t axis = 0; axis < extent.size(); ++axis)
      extent[axis] = std::max(extent[axis], box.offset[axis] + box.extent[axis]);
  }
  tensor.strides = Dims(extent.size(), 1);
  for (size_t axis = extent.size(); axis-- > 1;)
    tensor.strides[axis - 1] = tensor.strides[axis] * extent[axis];
  auto before = [](const Dims& a, const Dims& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
  };
  // C order of the first elements is that of the offsets.
  std::sort(holders.begin(), holders.end(), [&](const Holder& a, const Holder& b) {
    const Box &box_a = piece(a).global, &box_b = piece(b).global;
    if (box_a.offset != box_b.offset) return before(box_a.offset, box_b.offset);
    if (box_a.extent != box_b.extent) return before(box_a.extent, box_b.extent);
    return a.image < b.image;
  });
  for (uint32_t i = 0; i < holders.size(); ++i) {
    const Box& here = piece(holders[i]).global;
    if (!tensor.held.empty() && box(tensor.held.back()) == here) {
      ++tensor.held.back().holders;
      continue;
    }
    const Interval at = interval(tensor, here);
    tensor.held.push_back({at.begin, at.end, first_holder + i, 1});
    tensor.reach.push_back(tensor.reach.empty() ? at.end : std::max(at.end, tensor.reach.back()));
  }
}

SourceIndex::Interval SourceIndex::interval(const Tensor& tensor, const Box& box) {
  Interval at{0, 1};
  for (size_t axis = 0; axis < tensor.strides.size(); ++axis) {
    at.begin += box.offset[axis] * tensor.strides[axis];
    at.end += (box.offset[axis] + box.extent[axis] - 1) * tensor.strides[axis];
  }
  return at;
}

bool SourceIndex::on_node(const Held& held, uint32_t node) const {
  const auto all = holders(held);
  return std::any_of(all.begin(), all.end(),
                     [&](const Holder& holder) { return images_[holder.image].node == node; });
}

void SourceIndex::for_each_overlapping(uint32_t tensor, const Box& wanted, auto&& visit) const {
  const Tensor& index = tensors_[tensor];
  const Interval at = interval(index, wanted);
  size_t i =
      std::upper_bound(index.reach.begin(), index.reach.end(), at.begin) - index.reach.begin();
  for (; i < index.held.size() && index.held[i].begin < at.end; ++i)
    if (const std::optional<Box> common = intersect(box(index.held[i]), wanted))
      visit(index.held[i], *common);
}

Result<std::vector<Transfer>> SourceIndex::plan_image(const ImageLayout& target) const {
  return plan(std::span(&target, 1), 0, nullptr);
}

Result<std::vector<Transfer>> SourceIndex::plan_image(std::span<const ImageLayout> targets,
                                                      uint32_t image, PlanState& state) const {
  return plan(targets, image, &state);
}

Result<std::vector<Transfer>> SourceIndex::plan(std::span<const ImageLayout> targets,
                                                uint32_t image, PlanState* state) const {
  const ImageLayout& target = targets[image];
  std::vector<Transfer> transfers;
  std::vector<Box> wanted, left;
  std::vector<const Held*> candidates;
  auto load = [&](const Holder& holder) {
    const uint32_t node = images_[holder.image].node;
    return std::tuple(node != target.node,
                      state != nullptr && node != target.node ? state->node_load_[node] : 0,
                      state != nullptr ? state->image_load_[holder.image] : 0);
  };
  for (uint32_t slot_number = 0; slot_number < target.arrays.size(); ++slot_number) {
    if (is_other_name(target.arrays, slot_number)) continue;
    const ArraySlot& target_slot = target.arrays[slot_number];
    const uint32_t bits = element_bits_[target_slot.tensor];
    const ArrayAt target_array = array_at(target_slot.part, target_slot.byte_offset);
    std::vector<PlanState::Arrival>* arrivals = nullptr;
    if (state != nullptr) {
      const auto known = state->arrivals_.find({target.node, target_slot.tensor});
      if (known != state->arrivals_.end()) arrivals = &known->second;
    }
    const size_t earlier_arrivals = arrivals == nullptr ? 0 : arrivals->size();
    for (uint32_t piece_number = 0; piece_number < target_slot.part.pieces.size(); ++piece_number) {
      const Piece& target_piece = target_slot.part.pieces[piece_number];
      if (target_piece.global.empty()) continue;
      // Takes from one source piece what it has of `wanted`, and says how much that is.
      auto take = [&](uint32_t source_image, const ArraySlot& source, const Piece& source_piece,
                      auto&& taken) -> Result<> {
        left.clear();
        for (const Box& box : wanted) {
          std::optional<Box> common = intersect(box, source_piece.global);
          if (!common) {
            left.push_back(box);
            continue;
          }
          PTC_TRY(
              auto copy,
              make_strided_copy(
                  array_at(source.part, source.byte_offset),
                  plus_minus(common->offset, source_piece.local_offset, source_piece.global.offset),
                  target_array,
                  plus_minus(common->offset, target_piece.local_offset, target_piece.global.offset),
                  common->extent, bits));
          transfers.push_back({source_image, copy});
          taken(*common);
          if (*common == box) continue;
          for (Box& rest : subtract(box, *common)) left.push_back(std::move(rest));
        }
        wanted.swap(left);
        return ok();
      };
      auto take_held = [&](const Held* held) -> Result<> {
        const auto all = holders(*held);
        const Holder& holder =
            *std::min_element(all.begin(), all.end(),
                              [&](const Holder& a, const Holder& b) { return load(a) < load(b); });
        const uint32_t node = images_[holder.image].node;
        return take(holder.image, slot(holder), piece(holder), [&](const Box& common) {
          if (state == nullptr) return;
          const uint64_t bytes = bytes_of(target_slot.tensor, common);
          state->image_load_[holder.image] += bytes;
          if (node == target.node) return;
          state->node_load_[node] += bytes;
          if (arrivals == nullptr) arrivals = &state->arrivals_[{target.node, target_slot.tensor}];
          arrivals->push_back({image, slot_number, piece_number, common});
        });
      };
      wanted.assign(1, target_piece.global);
      candidates.clear();
      for_each_overlapping(target_slot.tensor, target_piece.global,
                           [&](const Held& held, const Box&) { candidates.push_back(&held); });
      const auto remote =
          std::stable_partition(candidates.begin(), candidates.end(),
                                [&](const Held* held) { return on_node(*held, target.node); });
      for (auto it = candidates.begin(); it != remote && !wanted.empty(); ++it) {
        PTC_TRY(take_held(*it));
      }
      for (size_t i = 0; i < earlier_arrivals && !wanted.empty(); ++i) {
        const PlanState::Arrival arrival = (*arrivals)[i];
        const ArraySlot& source = targets[arrival.target].arrays[arrival.slot];
        const Piece& whole = source.part.pieces[arrival.piece];
        const Piece part{arrival.box,
                         plus_minus(arrival.box.offset, whole.local_offset, whole.global.offset)};
        PTC_TRY(take(static_cast<uint32_t>(images_.size() + arrival.target), source, part,
                     [](const Box&) {}));
      }
      for (auto it = remote; it != candidates.end() && !wanted.empty(); ++it) {
        PTC_TRY(take_held(*it));
      }
      if (!wanted.empty())
        return make_error(Code::kCorrupt, "tensor {}, {} is stored nowhere", target_slot.tensor,
                          wanted.front().to_string());
    }
  }
  std::sort(transfers.begin(), transfers.end(), [](const Transfer& a, const Transfer& b) {
    return a.copy.target_offset < b.copy.target_offset;
  });
  return transfers;
}

uint64_t SourceIndex::missing_if(uint32_t tensor, const std::vector<Box>& wanted,
                                 auto&& counts) const {
  uint64_t missing = 0;
  std::vector<Box> rest, left;
  for (const Box& each : wanted) {
    if (each.empty()) continue;
    rest.assign(1, each);
    for_each_overlapping(tensor, each, [&](const Held& held, const Box& common) {
      if (rest.empty() || !counts(held)) return;
      if (common == each) return rest.clear();
      left.clear();
      for (const Box& part : rest)
        for (Box& outside : subtract(part, box(held))) left.push_back(std::move(outside));
      rest.swap(left);
    });
    for (const Box& part : rest) missing += bytes_of(tensor, part);
  }
  return missing;
}

uint64_t SourceIndex::missing_on_node(uint32_t tensor, uint32_t node,
                                      const std::vector<Box>& wanted) const {
  return missing_if(tensor, wanted, [&](const Held& held) { return on_node(held, node); });
}

void SourceIndex::add_held(uint32_t tensor, const Box& wanted,
                           std::vector<uint64_t>& by_node) const {
  if (wanted.empty()) return;
  std::vector<uint32_t> nodes;
  for_each_overlapping(tensor, wanted, [&](const Held& held, const Box& common) {
    nodes.clear();
    for (const Holder& holder : holders(held)) {
      const uint32_t node = images_[holder.image].node;
      if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
    }
    for (uint32_t node : nodes) by_node[node] += bytes_of(tensor, common);
  });
}

uint64_t SourceIndex::missing(uint32_t tensor, const std::vector<Box>& wanted) const {
  return missing_if(tensor, wanted, [](const Held&) { return true; });
}

std::vector<Box> SourceIndex::disjoint(uint32_t tensor, std::vector<Box> boxes) const {
  const Tensor& index = tensors_[tensor];
  std::sort(boxes.begin(), boxes.end(), [&](const Box& a, const Box& b) {
    return interval(index, a).begin < interval(index, b).begin;
  });
  std::vector<Box> result, fresh, left;
  std::vector<Box> active;  // of those taken: may reach beyond the begin of the next
  for (const Box& each : boxes) {
    const uint64_t begin = interval(index, each).begin;
    std::erase_if(active, [&](const Box& box) { return interval(index, box).end <= begin; });
    fresh.assign(1, each);
    for (const Box& known : active) {
      left.clear();
      for (const Box& part : fresh)
        for (Box& outside : subtract(part, known)) left.push_back(std::move(outside));
      fresh.swap(left);
    }
    if (!fresh.empty()) active.push_back(each);
    result.insert(result.end(), fresh.begin(), fresh.end());
  }
  return result;
}

uint64_t minimum_moved_bytes(const SourceIndex& source, std::span<const ImageLayout> target) {
  return least_moved_bytes(source, target, [](size_t) { return true; });
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
  uint32_t nodes = 1;
  for (const ImageLayout& image : images) nodes = std::max(nodes, image.node + 1);
  PlanState state(images.size(), nodes);
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
    PTC_TRY(image_plan.transfers, source.plan_image(target, i, state));
  }
  plan_relays(images, target, plan);
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> pairs;
  for (size_t i = 0; i < target.size(); ++i) {
    const uint32_t to = target[i].node;
    for (const Transfer& transfer : plan.images[i].transfers) {
      const uint32_t from = transfer.relay ? target[*transfer.relay].node
                            : transfer.source_image < images.size()
                                ? images[transfer.source_image].node
                                : to;
      const uint64_t bytes = transfer.bytes();
      pairs[{from, to}] += bytes;
      (from == to ? plan.totals.local_bytes : plan.totals.moved_bytes) += bytes;
    }
  }
  plan.totals.minimum_bytes =
      least_moved_bytes(source, target, [&](size_t image) { return !plan.images[image].kept; });
  for (const auto& [ends, bytes] : pairs)
    if (bytes > 0) plan.pairs.push_back({ends.first, ends.second, bytes});
  return plan;
}

}  // namespace ptc
