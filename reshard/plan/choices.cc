#include "reshard/plan/choices.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "reshard/plan/source_loads.h"

namespace ptc {

namespace {

/// visit(Box: what the source has of a box that is wanted) → Result<>, for each; what it has not is
/// what is wanted then.
template <class Visit>
Result<> take_common(std::vector<Box>& wanted, std::vector<Box>& left, const Box& source,
                     Visit&& visit) {
  left.clear();
  for (const Box& box : wanted) {
    const std::optional<Box> common = intersect(box, source);
    if (!common) {
      left.push_back(box);
      continue;
    }
    PTC_TRY(visit(*common));
    if (*common == box) continue;
    for (Box& rest : subtract(box, *common)) left.push_back(std::move(rest));
  }
  wanted.swap(left);
  return ok();
}

}  // namespace

/// Whether boxes have nothing in common and are all of `whole`: where they lie side by side along
/// one axis, in their order, or behind each other in C order, as what flat cuts left of it.
class Choices::Disjoint {
 public:
  explicit Disjoint(const Box& whole) : whole_(whole) {}
  void add(const Held& held, const Box& common) {
    behind_ = behind_ && held.begin >= end_;
    end_ = held.end;
    elements_ += common.volume();
    add_beside(common);
  }
  bool fill() const {
    if (count_ == 0) return false;
    if (behind_ && elements_ == whole_.volume()) return true;
    return beside_ && (axis_ == kNone || filled_ == whole_.extent[axis_]);
  }

 private:
  void add_beside(const Box& box) {
    size_t differs = kNone;  // the axis of which the box is not all
    for (size_t axis = 0; axis < box.axes(); ++axis) {
      const bool all =
          box.offset[axis] == whole_.offset[axis] && box.extent[axis] == whole_.extent[axis];
      if (all) continue;
      if (differs != kNone) beside_ = false;
      differs = axis;
    }
    // A box that is all of `whole` is the only one.
    if (count_++ == 0) axis_ = differs;
    else if (differs == kNone || differs != axis_) beside_ = false;
    if (!beside_ || differs == kNone) return;
    beside_ = box.offset[differs] == whole_.offset[differs] + filled_;
    filled_ += box.extent[differs];
  }

  static constexpr size_t kNone = SIZE_MAX;
  const Box& whole_;
  size_t axis_ = kNone, count_ = 0;
  uint64_t filled_ = 0;  // along that axis
  uint64_t end_ = 0, elements_ = 0;
  bool beside_ = true, behind_ = true;
};

class Choices::Maker {
 public:
  Maker(const SourceIndex& source, std::span<const ImageLayout> targets,
        const std::vector<bool>& kept, Choices& choices)
      : source_(source), all_(choices), loads_(source), set_numbers_(source.sets(), kNone) {
    all_.targets_.assign(targets.begin(), targets.end());
    find_kinds(kept);
    look_at_nodes();
  }

  Result<> choose() {
    for (uint32_t target = 0; target < all_.targets_.size(); ++target) {
      all_.first_choice_.push_back(all_.choices_.size());
      if (all_.kind_of_[target] == kNone) continue;
      PTC_TRY(choose_for(target));
    }
    return ok();
  }

 private:
  using Member = SourceIndex::Member;

  void find_kinds(const std::vector<bool>& kept) {
    std::unordered_map<const ArraySlot*, uint32_t> known;
    size_t wants = 0;
    for (uint32_t i = 0; i < all_.targets_.size(); ++i) {
      first_want_.push_back(wants);
      all_.kind_of_.push_back(kNone);
      if (kept[i]) continue;
      const auto [kind, is_new] =
          known.try_emplace(all_.targets_[i].arrays.begin(), all_.kinds_.size());
      if (is_new) all_.kinds_.push_back(kind_of(i));
      all_.kind_of_[i] = kind->second;
      wants += all_.kinds_[kind->second].wants.size();
    }
    list_of_.assign(wants, kNone);
  }

  Kind kind_of(uint32_t target) {
    Kind kind{target, {}, {}, {}};
    const SharedVector<ArraySlot>& arrays = all_.targets_[target].arrays;
    kind.wants.reserve(arrays.size());
    looked_.clear();
    for (uint32_t slot = 0; slot < arrays.size(); ++slot) {
      if (is_other_name(arrays, slot)) continue;
      const uint32_t tensor = arrays[slot].tensor;
      const auto [known, is_new] =
          looked_.try_emplace(AlikePart(source_, arrays[slot]), kind.wants.size(), 0);
      auto& [first_want, wants] = known->second;
      for (size_t i = 0; i < wants; ++i) {
        Want& want = kind.wants.emplace_back(kind.wants[first_want + i]);
        want.slot = slot;
        want.tensor = tensor;
      }
      if (!is_new) continue;
      const std::vector<Piece>& pieces = arrays[slot].part->pieces;
      for (uint32_t piece = 0; piece < pieces.size(); ++piece) {
        const Box& whole = pieces[piece].global;
        if (whole.empty()) continue;
        Want want{slot, piece, static_cast<uint32_t>(kind.candidates.size()), 0, tensor, false};
        Disjoint disjoint(whole);
        source_.for_each_overlapping(tensor, whole, [&](const Held& held, const Box& common) {
          uint32_t& number = set_numbers_[held.set];
          if (number == kNone) {
            number = static_cast<uint32_t>(kind.sets.size());
            kind.sets.push_back(held.set);
          }
          disjoint.add(held, common);
          kind.candidates.push_back(
              {source_.number_of(tensor, held), source_.bytes_of(tensor, common), number});
          ++want.count;
        });
        want.simple = disjoint.fill() && source_.element_bits(tensor) % 8 == 0;
        kind.wants.push_back(want);
        ++wants;
      }
    }
    for (const uint32_t set : kind.sets) set_numbers_[set] = kNone;
    kind.candidates.shrink_to_fit();
    return kind;
  }

  /// Who of the kind's sets is on the node.
  void look_here(const Kind& kind, uint32_t node) {
    here_.clear();
    for (const uint32_t set : kind.sets) here_.push_back(source_.members_on(set, node));
  }

  /// What each node lacks, and which tensors its targets have more than once: what comes of these
  /// may serve again.
  void look_at_nodes() {
    std::vector<uint32_t> by_node;
    for (uint32_t i = 0; i < all_.targets_.size(); ++i)
      if (all_.kind_of_[i] != kNone) by_node.push_back(i);
    std::stable_sort(by_node.begin(), by_node.end(), [&](uint32_t a, uint32_t b) {
      return all_.targets_[a].node < all_.targets_[b].node;
    });
    struct Seen {
      uint32_t node = kNone;
      uint32_t several = kNone;  // in `boxes`: they differ
      size_t want = 0;
      const Box* box = nullptr;
      uint64_t missing = 0;
    };
    std::vector<Seen> seen(source_.tensors());
    std::vector<std::pair<uint32_t, std::vector<const Box*>>> boxes;
    for (size_t i = 0; i < by_node.size(); ++i) {
      const uint32_t node = all_.targets_[by_node[i]].node;
      const ImageLayout& target = all_.targets_[by_node[i]];
      const Kind& kind = all_.kinds_[all_.kind_of_[by_node[i]]];
      look_here(kind, node);
      size_t number = first_want_[by_node[i]];
      for (const Want& want : kind.wants) {
        Seen& one = seen[want.tensor];
        const Box& box = all_.box_of(target, want);
        if (one.node != node) {
          one = {node, kNone, number++, &box, missing_here(kind, want, box, node)};
          all_.minimum_bytes_ += one.missing;
          continue;
        }
        uint32_t& list = list_of_[one.want];
        if (list == kNone) {
          list = static_cast<uint32_t>(has_arrivals_.size());
          has_arrivals_.push_back(false);
        }
        list_of_[number++] = list;
        if (one.several == kNone && (one.box == &box || *one.box == box)) continue;
        if (one.several == kNone) {
          one.several = static_cast<uint32_t>(boxes.size());
          boxes.push_back({want.tensor, {one.box}});
          all_.minimum_bytes_ -= one.missing;
        }
        std::vector<const Box*>& all = boxes[one.several].second;
        if (all.back() != &box) all.push_back(&box);
      }
      const bool last = i + 1 == by_node.size() || all_.targets_[by_node[i + 1]].node != node;
      if (!last) continue;
      for (const auto& [tensor, of_tensor] : boxes) {
        std::unordered_set<Box, BoxHash> each;
        for (const Box* box : of_tensor) each.insert(*box);
        all_.minimum_bytes_ += source_.missing_on_node(
            tensor, node, source_.disjoint(tensor, {each.begin(), each.end()}));
      }
      boxes.clear();
    }
  }

  uint64_t missing_here(const Kind& kind, const Want& want, const Box& box, uint32_t node) const {
    if (!want.simple) return source_.missing_on_node(want.tensor, node, {box});
    uint64_t missing = 0;
    for (uint32_t i = 0; i < want.count; ++i) {
      const Candidate& candidate = kind.candidates[want.first + i];
      if (here_[candidate.set].empty()) missing += candidate.bytes;
    }
    return missing;
  }

  Result<> choose_for(uint32_t number) {
    Kind& kind = all_.kinds_[all_.kind_of_[number]];
    const ImageLayout& target = all_.targets_[number];
    look_here(kind, target.node);
    size_t want_number = first_want_[number];
    for (const Want& want : kind.wants) {
      const uint32_t list = list_of_[want_number++];
      if (!want.simple || (list != kNone && !find_arrivals(target, kind, want, list))) {
        PTC_TRY(cover(number, kind, want, list));
        continue;
      }
      for (uint32_t i = 0; i < want.count; ++i) {
        Candidate& candidate = kind.candidates[want.first + i];
        const std::span<const Member> here = here_[candidate.set];
        if (!here.empty()) {
          const uint32_t image = (here.size() == 1 ? here.front() : loads_.least_here(here)).image;
          loads_.take_here(image, candidate.bytes);
          all_.choices_.push_back(image);
          continue;
        }
        if (list != kNone && arrived_[i] != kNone) {
          all_.choices_.push_back(kArrival | arrived_[i]);
          continue;
        }
        const uint32_t image = loads_.least_elsewhere(kind.sets[candidate.set]).image;
        loads_.take_elsewhere(image, candidate.bytes);
        all_.choices_.push_back(image);
        if (list == kNone) continue;
        add_arrival(list, number, want, all_.held_of(want, candidate),
                    common_of(target, want, candidate));
      }
    }
    return ok();
  }

  /// By candidate of a simple want that is not here: an arrival that is just what it has of it;
  /// false: some arrival is another part of it. An arrival lies in the box that it was taken of,
  /// and these have nothing of the want in common.
  bool find_arrivals(const ImageLayout& target, Kind& kind, const Want& want, uint32_t list) {
    arrived_.assign(want.count, kNone);
    if (!has_arrivals_[list]) return true;
    const Box& box = all_.box_of(target, want);
    for (uint32_t i = 0; i < want.count; ++i) {
      Candidate& candidate = kind.candidates[want.first + i];
      if (!here_[candidate.set].empty()) continue;
      const auto of_held = arrivals_of_.find(key_of(list, all_.held_of(want, candidate)));
      if (of_held == arrivals_of_.end()) continue;
      const Box& part = *common_of(target, want, candidate);
      for (uint32_t a = of_held->second.first; a != kNone; a = all_.arrivals_[a].next) {
        const Box& arrival = *all_.arrivals_[a].box;
        if (&arrival != &part && !(arrival == part)) {
          if (!intersect(arrival, part)) continue;
          if (!(intersect(arrival, box) == part)) return false;
        }
        arrived_[i] = a;
        break;
      }
    }
    return true;
  }

  /// All that have something of the want, and perhaps others, in their order.
  void find_all_arrivals(const Kind& kind, const Want& want, uint32_t list) {
    arrived_.clear();
    if (list == kNone || !has_arrivals_[list]) return;
    for (uint32_t i = 0; i < want.count; ++i) {
      const Held& held = all_.held_of(want, kind.candidates[want.first + i]);
      const auto of_held = arrivals_of_.find(key_of(list, held));
      if (of_held == arrivals_of_.end()) continue;
      for (uint32_t a = of_held->second.first; a != kNone; a = all_.arrivals_[a].next)
        arrived_.push_back(a);
    }
    std::sort(arrived_.begin(), arrived_.end());
  }

  const Box* keep(Box box) { return &all_.boxes_.emplace_back(std::move(box)); }
  /// What a candidate has of a want, once for all targets of the kind.
  const Box* common_of(const ImageLayout& target, const Want& want, Candidate& candidate) {
    const Box& box = all_.box_of(target, want);
    if (want.count == 1 && want.simple) return &box;
    if (candidate.common == kNone) {
      candidate.common = static_cast<uint32_t>(all_.boxes_.size());
      all_.boxes_.push_back(*intersect(source_.box(all_.held_of(want, candidate)), box));
    }
    return &all_.boxes_[candidate.common];
  }

  static uint64_t key_of(uint32_t list, const Held& held) {
    return uint64_t{list} << 32 | held.first_holder;
  }

  void add_arrival(uint32_t list, uint32_t target, const Want& want, const Held& held,
                   const Box* box) {
    const auto number = static_cast<uint32_t>(all_.arrivals_.size());
    all_.arrivals_.push_back({target, want.slot, want.piece, kNone, box});
    const auto [of_held, is_first] = arrivals_of_.try_emplace(key_of(list, held), number, number);
    if (!is_first) all_.arrivals_[std::exchange(of_held->second.second, number)].next = number;
    has_arrivals_[list] = true;
  }

  /// Of a want that is not simple: box by box, as they overlap.
  Result<> cover(uint32_t number, Kind& kind, const Want& want, uint32_t list) {
    const ImageLayout& target = all_.targets_[number];
    const ArraySlot& slot = target.arrays[want.slot];
    const Piece& piece = slot.part->pieces[want.piece];
    const uint32_t bits = source_.element_bits(want.tensor);
    const size_t first_taken = all_.taken_.size();
    wanted_.assign(1, piece.global);
    auto take_held = [&](uint32_t i) -> Result<> {
      Candidate& candidate = kind.candidates[want.first + i];
      const std::span<const Member> here = here_[candidate.set];
      const Member member =
          here.empty() ? loads_.least_elsewhere(kind.sets[candidate.set]) : loads_.least_here(here);
      const SourceIndex::Holder& holder =
          source_.holder(all_.held_of(want, candidate), member.holder);
      return take_common(
          wanted_, left_, source_.box(all_.held_of(want, candidate)),
          [&](const Box& common) -> Result<> {
            PTC_TRY(check_bytes(source_.slot(holder), source_.piece(holder), slot, piece, common));
            const uint64_t bytes = source_.bytes_of(want.tensor, common);
            all_.taken_.push_back({i, member.image, bytes});
            if (!here.empty()) {
              loads_.take_here(member.image, bytes);
              return ok();
            }
            loads_.take_elsewhere(member.image, bytes);
            if (list == kNone) return ok();
            const Box* whole = common_of(target, want, candidate);
            add_arrival(list, number, want, all_.held_of(want, candidate),
                        common == *whole ? whole : keep(common));
            return ok();
          });
    };
    for (uint32_t i = 0; i < want.count && !wanted_.empty(); ++i) {
      if (here_[kind.candidates[want.first + i].set].empty()) continue;
      PTC_TRY(take_held(i));
    }
    find_all_arrivals(kind, want, list);
    for (const uint32_t arrived : arrived_) {
      if (wanted_.empty()) break;
      const Arrival& arrival = all_.arrivals_[arrived];
      PTC_TRY(take_common(wanted_, left_, *arrival.box, [&](const Box& common) -> Result<> {
        if (bits % 8 != 0) {
          const From from = all_.from_arrival(arrival);
          PTC_TRY(check_bytes(from.slot, from.piece, slot, piece, common));
        }
        all_.taken_.push_back({0, kArrival | arrived, source_.bytes_of(want.tensor, common)});
        return ok();
      }));
    }
    for (uint32_t i = 0; i < want.count && !wanted_.empty(); ++i) {
      if (!here_[kind.candidates[want.first + i].set].empty()) continue;
      PTC_TRY(take_held(i));
    }
    if (!wanted_.empty())
      return make_error(Code::kCorrupt, "tensor {}, {} is stored nowhere", want.tensor,
                        wanted_.front().to_string());
    for (const uint64_t part : {uint64_t{kInOrder}, uint64_t{first_taken} >> 32,
                                uint64_t{first_taken}, all_.taken_.size() - first_taken})
      all_.choices_.push_back(static_cast<uint32_t>(part));
    return ok();
  }

  /// That a copy can be made of it later on: of elements of whole bytes each can.
  Result<> check_bytes(const ArraySlot& source, const Piece& source_piece, const ArraySlot& slot,
                       const Piece& piece, const Box& common) const {
    const uint32_t bits = source_.element_bits(slot.tensor);
    if (bits % 8 == 0) return ok();
    PTC_TRY(copy_between(source, source_piece, slot, piece, common, bits));
    return ok();
  }

  const SourceIndex& source_;
  Choices& all_;
  SourceLoads loads_;
  std::vector<uint32_t> set_numbers_;  // in the kind that is made
  std::vector<size_t> first_want_;     // by target, over all of them
  std::vector<uint32_t> list_of_;      // by want, over all targets: of arrivals, or kNone
  std::vector<bool> has_arrivals_;     // by list
  /// By list and the box that they were taken of: the first and the last.
  std::unordered_map<uint64_t, std::pair<uint32_t, uint32_t>> arrivals_of_;
  std::vector<std::span<const Member>> here_;  // by set of the kind that is looked at
  std::vector<uint32_t> arrived_;              // of the want that is looked at
  std::vector<Box> wanted_, left_;
  /// Of the kind that is made: the first want and their number.
  std::unordered_map<AlikePart, std::pair<size_t, size_t>, AlikePartHash> looked_;
};

Result<std::shared_ptr<const Choices>> Choices::make(const SourceIndex& source,
                                                     std::span<const ImageLayout> targets,
                                                     const std::vector<bool>& kept) {
  std::shared_ptr<Choices> choices(new Choices(source));
  Maker maker(source, targets, kept, *choices);
  PTC_TRY(maker.choose());
  return std::shared_ptr<const Choices>(std::move(choices));
}

Choices::From Choices::from_arrival(const Arrival& arrival) const {
  const ArraySlot& slot = targets_[arrival.target].arrays[arrival.slot];
  return {slot, part_of(slot.part->pieces[arrival.piece], *arrival.box)};
}

Choices::From Choices::from(const Held& held, uint32_t choice) const {
  if ((choice & kArrival) != 0) return from_arrival(arrivals_[choice & ~kArrival]);
  const std::span<const SourceIndex::Member> members = source_.members(held.set);
  const auto member =
      std::partition_point(members.begin(), members.end(),
                           [&](const SourceIndex::Member& one) { return one.image < choice; });
  const SourceIndex::Holder& holder = source_.holder(held, member->holder);
  return {source_.slot(holder), source_.piece(holder)};
}

Result<Transfer> Choices::transfer(const ImageLayout& target, const Want& want,
                                   const Candidate& candidate, uint32_t choice) const {
  const ArraySlot& slot = target.arrays[want.slot];
  const Piece& piece = slot.part->pieces[want.piece];
  const Held& held = held_of(want, candidate);
  const Box common = want.count == 1 ? piece.global : *intersect(source_.box(held), piece.global);
  const From source = from(held, choice);
  Transfer transfer;
  transfer.source_image = source_image(choice);
  PTC_TRY(transfer.copy, copy_between(source.slot, source.piece, slot, piece, common,
                                      source_.element_bits(want.tensor)));
  return transfer;
}

Result<> Choices::make_taken(const ImageLayout& target, const Kind& kind, const Want& want,
                             std::span<const Taken> taken, std::vector<Transfer>& transfers) const {
  const ArraySlot& slot = target.arrays[want.slot];
  const Piece& piece = slot.part->pieces[want.piece];
  std::vector<Box> wanted{piece.global}, left;
  while (!taken.empty()) {
    const Taken& one = taken.front();
    const From source =
        from(held_of(want, kind.candidates[want.first + one.candidate]), one.choice);
    size_t count = 0;
    PTC_TRY(take_common(wanted, left, source.piece.global, [&](const Box& common) -> Result<> {
      Transfer& transfer = transfers.emplace_back();
      transfer.source_image = source_image(one.choice);
      PTC_TRY(transfer.copy, copy_between(source.slot, source.piece, slot, piece, common,
                                          source_.element_bits(want.tensor)));
      ++count;
      return ok();
    }));
    PTC_CHECK(count > 0 && count <= taken.size());
    taken = taken.subspan(count);
  }
  return ok();
}

Result<std::vector<Transfer>> Choices::transfers(uint32_t target_number) const {
  std::vector<Transfer> transfers;
  if (kind_of_[target_number] == kNone) return transfers;
  const ImageLayout& target = targets_[target_number];
  const Kind& kind = kinds_[kind_of_[target_number]];
  const uint32_t* choice = choices_.data() + first_choice_[target_number];
  for (const Want& want : kind.wants) {
    if (*choice == kInOrder) {
      PTC_TRY(make_taken(target, kind, want, taken(choice), transfers));
      choice += kInOrderNumbers;
      continue;
    }
    for (uint32_t i = 0; i < want.count; ++i) {
      PTC_TRY(transfers.emplace_back(),
              transfer(target, want, kind.candidates[want.first + i], *choice++));
    }
  }
  return transfers;
}

}  // namespace ptc
