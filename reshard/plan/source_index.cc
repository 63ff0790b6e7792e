#include "reshard/plan/source_index.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace ptc {
namespace {

Dims plus_minus(const Dims& at, const Dims& plus, const Dims& minus) {
  Dims result(at.size());
  for (size_t axis = 0; axis < at.size(); ++axis)
    result[axis] = at[axis] + plus[axis] - minus[axis];
  return result;
}

bool before(const Dims& a, const Dims& b) {
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end());
}

}  // namespace

bool is_other_name(const SharedVector<ArraySlot>& arrays, size_t number) {
  if (number == 0) return false;
  const ArraySlot &slot = arrays[number], &before = arrays[number - 1];
  if (slot.byte_offset != before.byte_offset || slot.part->pieces.empty() ||
      before.part->pieces.empty())
    return false;
  const Piece &piece = slot.part->pieces.front(), &other = before.part->pieces.front();
  // Padding lies in the array that it pads, elsewhere than that one's pieces.
  return slot.part->local_shape == before.part->local_shape &&
         piece.local_offset == other.local_offset && !piece.global.empty() && !other.global.empty();
}

void sort_arrays(std::vector<ArraySlot>& arrays) {
  const auto not_behind = [](const ArraySlot& a, const ArraySlot& b) {
    return a.byte_offset >= b.byte_offset;
  };
  if (std::adjacent_find(arrays.begin(), arrays.end(), not_behind) == arrays.end()) return;
  // What covers nothing begins where another begins, and comes before it.
  auto key = [&](const ArraySlot& slot) {
    uint64_t elements = 0;
    for (const Piece& piece : slot.part->pieces) elements += piece.global.volume();
    return std::pair(slot.byte_offset, elements == 0 ? 0 : UINT64_MAX - elements);
  };
  std::stable_sort(arrays.begin(), arrays.end(),
                   [&](const ArraySlot& a, const ArraySlot& b) { return key(a) < key(b); });
}

Piece part_of(const Piece& whole, const Box& box) {
  return {box, plus_minus(box.offset, whole.local_offset, whole.global.offset)};
}

Result<StridedCopy> copy_between(const ArraySlot& source, const Piece& source_piece,
                                 const ArraySlot& target, const Piece& target_piece,
                                 const Box& common, uint32_t element_bits) {
  return make_strided_copy(
      array_at(source.part, source.byte_offset),
      plus_minus(common.offset, source_piece.local_offset, source_piece.global.offset),
      array_at(target.part, target.byte_offset),
      plus_minus(common.offset, target_piece.local_offset, target_piece.global.offset),
      common.extent, element_bits);
}

/// How tensors were put in order of which others have the very same boxes.
class SourceIndex::Cuts {
 public:
  explicit Cuts(SourceIndex& index) : index_(index) {}

  void index(Tensor& tensor, std::span<Holder> holders, uint32_t first_holder) {
    if (holders.empty()) return;
    boxes_.clear();
    size_t hash = holders.size();
    for (const Holder& holder : holders) {
      boxes_.push_back(&index_.piece(holder).global);
      hash = (hash ^ reinterpret_cast<uintptr_t>(boxes_.back())) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    const auto [begin, end] = by_hash_.equal_range(hash);
    for (auto it = begin; it != end; ++it)
      if (it->second.boxes == boxes_) return copy(it->second, tensor, holders, first_holder);
    Cut& cut = by_hash_.emplace(hash, Cut{boxes_, {}, tensor, first_holder})->second;
    cut.order.resize(holders.size());
    std::iota(cut.order.begin(), cut.order.end(), 0);
    // C order of the first elements is that of the offsets. Holders come by kind.
    std::stable_sort(cut.order.begin(), cut.order.end(), [&](uint32_t a, uint32_t b) {
      const Box &box_a = *boxes_[a], &box_b = *boxes_[b];
      if (box_a.offset != box_b.offset) return before(box_a.offset, box_b.offset);
      return box_a.extent != box_b.extent && before(box_a.extent, box_b.extent);
    });
    put_in_order(cut, holders);
    index_.index_tensor(tensor, holders, first_holder);
  }

 private:
  struct Cut {
    std::vector<const Box*> boxes;  // of its holders, by kind
    std::vector<uint32_t> order;    // of these
    const Tensor& tensor;
    uint32_t first_holder;
  };
  void put_in_order(const Cut& cut, std::span<Holder> holders) {
    by_kind_.assign(holders.begin(), holders.end());
    for (size_t i = 0; i < holders.size(); ++i) holders[i] = by_kind_[cut.order[i]];
  }
  void copy(const Cut& cut, Tensor& tensor, std::span<Holder> holders, uint32_t first_holder) {
    put_in_order(cut, holders);
    tensor = cut.tensor;
    for (Held& held : tensor.held) held.first_holder += first_holder - cut.first_holder;
  }

  SourceIndex& index_;
  std::unordered_multimap<size_t, Cut> by_hash_;
  std::vector<const Box*> boxes_;
  std::vector<Holder> by_kind_;
};

Error SourceIndex::stored_nowhere(uint32_t tensor, const Box& box) const {
  return make_error(Code::kCorrupt, "tensor {}, {} is stored nowhere",
                    names_ ? names_(tensor) : std::to_string(tensor), box.to_string());
}

SourceIndex::SourceIndex(std::span<const ImageLayout> images, std::vector<uint8_t> element_bits,
                         TensorNames names)
    : images_(images),
      element_bits_(std::move(element_bits)),
      names_(std::move(names)),
      tensors_(element_bits_.size()) {
  std::unordered_map<const ArraySlot*, uint32_t> known;
  std::vector<std::vector<uint32_t>> images_of_kind;
  for (uint32_t image = 0; image < images_.size(); ++image) {
    if (images_[image].arrays.empty()) continue;
    const auto [kind, is_new] = known.try_emplace(images_[image].arrays.begin(), kinds_.size());
    if (is_new) {
      kinds_.push_back(image);
      images_of_kind.emplace_back();
    }
    images_of_kind[kind->second].push_back(image);
  }
  std::vector<uint32_t> next(tensors_.size() + 1);  // first of a tensor's holders
  auto for_each_holder = [&](auto visit) {
    for (uint32_t kind = 0; kind < kinds_.size(); ++kind) {
      const SharedVector<ArraySlot>& arrays = images_[kinds_[kind]].arrays;
      for (uint32_t slot = 0; slot < arrays.size(); ++slot) {
        const std::vector<Piece>& pieces = arrays[slot].part->pieces;
        for (uint32_t piece = 0; piece < pieces.size(); ++piece)
          if (!pieces[piece].global.empty()) visit(arrays[slot].tensor, Holder{kind, slot, piece});
      }
    }
  };
  for_each_holder([&](uint32_t tensor, const Holder&) { ++next[tensor + 1]; });
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) next[tensor + 1] += next[tensor];
  holders_.resize(next.back());
  for_each_holder(
      [&](uint32_t tensor, const Holder& holder) { holders_[next[tensor]++] = holder; });
  uint32_t begin = 0;
  Cuts cuts(*this);
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    cuts.index(tensors_[tensor], std::span(holders_).subspan(begin, next[tensor] - begin), begin);
    begin = next[tensor];
  }
  make_sets(images_of_kind);
  find_alike();
}

/// Of holders in their order.
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
  for (uint32_t i = 0; i < holders.size(); ++i) {
    const Box& here = piece(holders[i]).global;
    if (!tensor.held.empty() && box(tensor.held.back()) == here) {
      ++tensor.held.back().holders;
      continue;
    }
    const Interval at = interval(tensor, here);
    tensor.held.push_back({at.begin, at.end, first_holder + i, 1, 0, &here});
    tensor.reach.push_back(tensor.reach.empty() ? at.end : std::max(at.end, tensor.reach.back()));
  }
}

void SourceIndex::make_sets(const std::vector<std::vector<uint32_t>>& images_of_kind) {
  std::vector<uint32_t> first_held;  // by set: the first holder of a box of it
  std::unordered_multimap<uint64_t, uint32_t> by_hash;
  auto same_kinds = [&](uint32_t a, uint32_t b, uint32_t count) {
    return std::equal(holders_.begin() + a, holders_.begin() + a + count, holders_.begin() + b,
                      [](const Holder& x, const Holder& y) { return x.kind == y.kind; });
  };
  std::vector<uint32_t> sizes;
  for (Tensor& tensor : tensors_)
    for (Held& held : tensor.held) {
      uint64_t hash = held.holders;
      for (uint32_t i = 0; i < held.holders; ++i)
        hash = (hash ^ holder(held, i).kind) * 0x9e3779b97f4a7c15u ^ hash >> 32;
      held.set = static_cast<uint32_t>(sets_.size());
      const auto [begin, end] = by_hash.equal_range(hash);
      for (auto it = begin; it != end; ++it)
        if (sizes[it->second] == held.holders &&
            same_kinds(first_held[it->second], held.first_holder, held.holders))
          held.set = it->second;
      if (held.set < sets_.size()) continue;
      by_hash.emplace(hash, held.set);
      sizes.push_back(held.holders);
      first_held.push_back(held.first_holder);
      Set& set = sets_.emplace_back();
      for (uint32_t i = 0; i < held.holders; ++i) {
        const uint32_t kind = holder(held, i).kind;
        if (i > 0 && holder(held, i - 1).kind == kind) continue;  // under another name
        for (const uint32_t image : images_of_kind[kind]) set.members.push_back({image, i});
      }
      std::sort(set.members.begin(), set.members.end(),
                [](const Member& a, const Member& b) { return a.image < b.image; });
      set.by_node = set.members;
      std::stable_sort(set.by_node.begin(), set.by_node.end(),
                       [&](const Member& a, const Member& b) {
                         return images_[a.image].node < images_[b.image].node;
                       });
      for (uint32_t i = 0; i < set.by_node.size(); ++i) {
        const uint32_t node = images_[set.by_node[i].image].node;
        if (!set.nodes.empty() && set.nodes.back() == node) continue;
        set.nodes.push_back(node);
        set.first.push_back(i);
      }
      set.first.push_back(set.by_node.size());
    }
}

void SourceIndex::find_alike() {
  std::unordered_multimap<size_t, uint32_t> by_hash;  // the first of those that are alike
  auto same = [&](uint32_t a, uint32_t b) {
    const std::vector<Held>&of_a = tensors_[a].held, &of_b = tensors_[b].held;
    return element_bits_[a] == element_bits_[b] &&
           std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                      [&](const Held& x, const Held& y) {
                        const Box &box_x = box(x), &box_y = box(y);
                        return x.set == y.set && (&box_x == &box_y || box_x == box_y);
                      });
  };
  for (uint32_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    size_t hash = element_bits_[tensor];
    for (const Held& held : tensors_[tensor].held) {
      hash = (hash ^ held.begin ^ uint64_t{held.set} << 40) * 0x9e3779b97f4a7c15u + held.end;
      hash ^= hash >> 32;
    }
    const auto [begin, end] = by_hash.equal_range(hash);
    auto known = begin;
    while (known != end && !same(known->second, tensor)) ++known;
    if (known == end) by_hash.emplace(hash, tensor);
    alike_.push_back(known == end ? tensor : known->second);
  }
}

std::span<const SourceIndex::Member> SourceIndex::members_on(uint32_t set_number,
                                                             uint32_t node) const {
  const Set& set = sets_[set_number];
  const auto found = std::lower_bound(set.nodes.begin(), set.nodes.end(), node);
  if (found == set.nodes.end() || *found != node) return {};
  const size_t i = found - set.nodes.begin();
  return std::span(set.by_node).subspan(set.first[i], set.first[i + 1] - set.first[i]);
}

SourceIndex::Interval SourceIndex::interval(const Tensor& tensor, const Box& box) {
  Interval at{0, 1};
  for (size_t axis = 0; axis < tensor.strides.size(); ++axis) {
    at.begin += box.offset[axis] * tensor.strides[axis];
    at.end += (box.offset[axis] + box.extent[axis] - 1) * tensor.strides[axis];
  }
  return at;
}

std::pair<size_t, SourceIndex::Interval> SourceIndex::first_overlapping(uint32_t tensor,
                                                                        const Box& wanted) const {
  const Tensor& index = tensors_[tensor];
  const Interval at = interval(index, wanted);
  return {std::upper_bound(index.reach.begin(), index.reach.end(), at.begin) - index.reach.begin(),
          at};
}

Result<std::vector<Transfer>> SourceIndex::plan_image(const ImageLayout& target) const {
  std::vector<Transfer> transfers;
  std::vector<Box> wanted, left;
  std::vector<std::pair<const Held*, Member>> candidates;
  for (uint32_t number = 0; number < target.arrays.size(); ++number) {
    if (is_other_name(target.arrays, number)) continue;
    const ArraySlot& target_slot = target.arrays[number];
    for (const Piece& target_piece : target_slot.part->pieces) {
      if (target_piece.global.empty()) continue;
      candidates.clear();
      size_t local = 0;
      for_each_overlapping(
          target_slot.tensor, target_piece.global, [&](const Held& held, const Box&) {
            const std::span<const Member> here = members_on(held.set, target.node);
            if (here.empty())
              return candidates.emplace_back(&held, members(held.set).front()), void();
            candidates.emplace(candidates.begin() + static_cast<ptrdiff_t>(local++), &held,
                               here.front());
          });
      wanted.assign(1, target_piece.global);
      for (const auto& [held, member] : candidates) {
        if (wanted.empty()) break;
        const Holder& source = holder(*held, member.holder);
        left.clear();
        for (const Box& box : wanted) {
          const std::optional<Box> common = intersect(box, piece(source).global);
          if (!common) {
            left.push_back(box);
            continue;
          }
          PTC_TRY(auto copy, copy_between(slot(source), piece(source), target_slot, target_piece,
                                          *common, element_bits_[target_slot.tensor]));
          transfers.push_back({member.image, copy});
          if (*common == box) continue;
          for (Box& rest : subtract(box, *common)) left.push_back(std::move(rest));
        }
        wanted.swap(left);
      }
      if (!wanted.empty()) return stored_nowhere(target_slot.tensor, wanted.front());
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
  return missing_if(tensor, wanted,
                    [&](const Held& held) { return !members_on(held.set, node).empty(); });
}

uint64_t SourceIndex::missing_in_memory(uint32_t tensor, uint32_t node, NodeMemory memory,
                                        const std::vector<Box>& wanted) const {
  return missing_if(tensor, wanted, [&](const Held& held) {
    const std::span<const Member> here = members_on(held.set, node);
    return std::any_of(here.begin(), here.end(), [&](const Member& member) {
      return images_[member.image].memory == memory;
    });
  });
}

uint64_t SourceIndex::missing(uint32_t tensor, const std::vector<Box>& wanted) const {
  return missing_if(tensor, wanted, [](const Held&) { return true; });
}

SourceIndex::HeldOf SourceIndex::held_of(const ImageLayout& file) const {
  HeldOf result;
  std::vector<std::pair<uint32_t, uint64_t>> by_set;  // few
  AlikeParts parts;
  std::vector<uint64_t> times;  // by part
  times.reserve(64);            // more than most have
  by_set.reserve(64);
  for (const ArraySlot& slot : file.arrays) {
    const uint32_t part = parts.number_of(AlikePart(*this, slot));
    if (part == times.size()) times.push_back(0);
    ++times[part];
  }
  for (size_t i = 0; i < times.size(); ++i) {
    const auto& [tensor, part] = parts.all()[i];
    for (const Piece& piece : part->pieces) {
      result.all += times[i] * bytes_of(tensor, piece.global);
      if (piece.global.empty()) continue;
      for_each_overlapping(tensor, piece.global,
                           [&, at = i, of = tensor](const Held& held, const Box& common) {
                             const uint64_t bytes = times[at] * bytes_of(of, common);
                             if (by_set.empty() || by_set.back().first != held.set)
                               by_set.emplace_back(held.set, 0);
                             by_set.back().second += bytes;
                           });
    }
  }
  auto add_up = [](std::vector<std::pair<uint32_t, uint64_t>>& sums) {
    std::sort(sums.begin(), sums.end());
    size_t count = 0;
    for (const auto& [number, bytes] : sums) {
      if (count == 0 || sums[count - 1].first != number) sums[count++] = {number, bytes};
      else sums[count - 1].second += bytes;
    }
    sums.resize(count);
  };
  add_up(by_set);
  size_t nodes = 0;
  for (const auto& [set, bytes] : by_set) nodes += sets_[set].nodes.size();
  result.by_node.reserve(nodes);
  for (const auto& [set, bytes] : by_set)
    for (const uint32_t node : sets_[set].nodes) result.by_node.emplace_back(node, bytes);
  add_up(result.by_node);
  return result;
}

bool SourceIndex::are_disjoint(uint32_t tensor, const std::vector<const Box*>& boxes) const {
  std::vector<Interval> intervals;
  intervals.reserve(boxes.size());
  for (const Box* box : boxes) intervals.push_back(interval(tensors_[tensor], *box));
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  bool behind = true;  // each other: so as a rule
  for (size_t i = 1; i < intervals.size(); ++i)
    behind = behind && intervals[i].begin >= intervals[i - 1].end;
  for (size_t i = 0; !behind && i < boxes.size(); ++i)
    for (size_t k = 0; k < i; ++k)
      if (intersect(*boxes[i], *boxes[k])) return false;
  return true;
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

uint32_t AlikeParts::number_of(const AlikePart& one) {
  size_t at = place_of(one);
  for (; table_[at] != kNone; at = (at + 1) & (table_.size() - 1))
    if (all_[table_[at]] == one) return table_[at];
  const auto number = static_cast<uint32_t>(all_.size());
  table_[at] = number;
  all_.push_back(one);
  if (2 * all_.size() > table_.size()) grow();
  return number;
}

void AlikeParts::grow() {
  table_.assign(2 * table_.size(), kNone);
  for (uint32_t number = 0; number < all_.size(); ++number) {
    size_t at = place_of(all_[number]);
    while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
    table_[at] = number;
  }
}

void AlikeParts::clear() {
  // The table may be that of a much larger one before.
  for (uint32_t number = 0; number < all_.size(); ++number) {
    size_t at = place_of(all_[number]);
    while (table_[at] != number) at = (at + 1) & (table_.size() - 1);
    table_[at] = kNone;
  }
  all_.clear();
}

}  // namespace ptc
