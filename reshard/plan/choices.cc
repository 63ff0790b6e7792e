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
  using Here = SourceLoads::Here;

  void find_kinds(const std::vector<bool>& kept) {
    std::unordered_map<const ArraySlot*, uint32_t> known;
    size_t wants = 0, choices = 0;
    for (uint32_t i = 0; i < all_.targets_.size(); ++i) {
      first_want_.push_back(wants);
      all_.kind_of_.push_back(kNone);
      if (kept[i]) continue;
      const auto [number, is_new] =
          known.try_emplace(all_.targets_[i].arrays.begin(), all_.kinds_.size());
      if (is_new) {
        all_.kinds_.push_back(kind_of(i));
        choices_of_kind_.push_back(choices_of(all_.kinds_.back()));
      }
      all_.kind_of_[i] = number->second;
      wants += all_.kinds_[number->second].wants.size();
      choices += choices_of_kind_[number->second];
    }
    cell_of_.assign(wants, kNone);
    all_.choices_.reserve(choices);
  }

  /// For one target, as a rule.
  static size_t choices_of(const Kind& kind) {
    size_t choices = 0;
    for (const Want& want : kind.wants) {
      const Part& part = kind.parts[want.part];
      choices += part.simple ? part.count : kInOrderNumbers;
    }
    return choices;
  }

  Kind kind_of(uint32_t target) {
    Kind kind;
    const SharedVector<ArraySlot>& arrays = all_.targets_[target].arrays;
    kind.wants.reserve(arrays.size());
    looked_.clear();
    first_part_.assign(1, 0);
    for (uint32_t slot = 0; slot < arrays.size(); ++slot) {
      if (is_other_name(arrays, slot)) continue;
      const uint32_t number = looked_.number_of(AlikePart(source_, arrays[slot]));
      if (number + 1 == first_part_.size()) {
        look_at(arrays[slot], kind);
        first_part_.push_back(static_cast<uint32_t>(kind.parts.size()));
      }
      for (uint32_t part = first_part_[number]; part < first_part_[number + 1]; ++part)
        kind.wants.push_back({slot, arrays[slot].tensor, part});
    }
    for (const uint32_t set : kind.sets) set_numbers_[set] = kNone;
    kind.parts.shrink_to_fit();
    kind.candidates.shrink_to_fit();
    return kind;
  }

  /// Adds what an array is made of.
  void look_at(const ArraySlot& slot, Kind& kind) {
    const uint32_t tensor = slot.tensor;
    const std::vector<Piece>& pieces = slot.part->pieces;
    for (uint32_t piece = 0; piece < pieces.size(); ++piece) {
      const Box& whole = pieces[piece].global;
      if (whole.empty()) continue;
      Part part{&whole, piece, static_cast<uint32_t>(kind.candidates.size()), 0, false};
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
        ++part.count;
      });
      part.simple = disjoint.fill() && source_.element_bits(tensor) % 8 == 0;
      kind.parts.push_back(part);
    }
  }

  /// Who of the kind's sets is on the node.
  void look_here(const Kind& kind, uint32_t node) {
    here_.clear();
    for (const uint32_t set : kind.sets) here_.emplace_back(source_.members_on(set, node));
  }

  /// A box that targets of the node want of a tensor.
  struct Seen {
    const Box* box;
    bool simple;
    uint32_t next;           // of the same tensor, in seen_
    uint32_t cells = kNone;  // of it, if it is wanted again
    size_t want;             // who wanted it first
    uint64_t missing;
  };
  /// Those of a tensor.
  struct OfTensor {
    uint32_t node = kNone;
    uint32_t last = kNone, count = 0;  // in seen_
    uint32_t mixed = kNone;            // in mixed_, with all that come
  };
  /// Boxes of a tensor of which some may have elements in common, or that are no simple wants.
  struct Mixed {
    uint32_t tensor, list;
    std::vector<const Box*> boxes;
  };

  /// What each node lacks, and which parts its targets have more than once: what comes of these
  /// may serve again.
  void look_at_nodes() {
    std::vector<uint32_t> by_node;
    for (uint32_t i = 0; i < all_.targets_.size(); ++i)
      if (all_.kind_of_[i] != kNone) by_node.push_back(i);
    std::stable_sort(by_node.begin(), by_node.end(), [&](uint32_t a, uint32_t b) {
      return all_.targets_[a].node < all_.targets_[b].node;
    });
    std::vector<OfTensor> of_tensor(source_.tensors());
    std::vector<uint32_t> several;  // tensors of which there are different boxes
    for (size_t i = 0; i < by_node.size(); ++i) {
      const uint32_t node = all_.targets_[by_node[i]].node;
      const Kind& kind = all_.kinds_[all_.kind_of_[by_node[i]]];
      look_here(kind, node);
      size_t number = first_want_[by_node[i]];
      for (const Want& want : kind.wants) {
        OfTensor& boxes = of_tensor[want.tensor];
        if (boxes.node != node) boxes = {node, kNone, 0, kNone};
        if (see(kind, want, number++, boxes) && boxes.count == 2) several.push_back(want.tensor);
      }
      const bool last = i + 1 == by_node.size() || all_.targets_[by_node[i + 1]].node != node;
      if (!last) continue;
      for (const uint32_t tensor : several)
        if (of_tensor[tensor].mixed == kNone && !are_apart(tensor, of_tensor[tensor]))
          mix(tensor, of_tensor[tensor]);
      for (const Mixed& mixed : mixed_) {
        std::unordered_set<Box, BoxHash> each;
        for (const Box* box : mixed.boxes) each.insert(*box);
        all_.minimum_bytes_ += source_.missing_on_node(
            mixed.tensor, node, source_.disjoint(mixed.tensor, {each.begin(), each.end()}));
      }
      several.clear();
      seen_.clear();
      mixed_.clear();
    }
  }

  /// Whether it is another box than those before, of which each is looked at by itself.
  bool see(const Kind& kind, const Want& want, size_t number, OfTensor& boxes) {
    const Part& part = kind.parts[want.part];
    if (boxes.mixed == kNone) {
      const uint32_t known = find_seen(boxes, *part.box);
      if (known == kNone && boxes.count < kMostBoxes) {
        const uint64_t missing = missing_here(kind, want, boxes.node);
        all_.minimum_bytes_ += missing;
        seen_.push_back({part.box, part.simple, boxes.last, kNone, number, missing});
        boxes.last = static_cast<uint32_t>(seen_.size() - 1);
        ++boxes.count;
        return true;
      }
      if (known != kNone && part.simple) {
        Seen& first = seen_[known];
        if (first.cells == kNone) cell_of_[first.want] = first.cells = new_cells(part.count);
        cell_of_[number] = first.cells;
        return false;
      }
      mix(want.tensor, boxes);
    }
    Mixed& mixed = mixed_[boxes.mixed];
    cell_of_[number] = mixed.list;
    if (mixed.boxes.back() != part.box) mixed.boxes.push_back(part.box);
    return false;
  }

  uint32_t find_seen(const OfTensor& boxes, const Box& box) const {
    for (uint32_t i = boxes.last; i != kNone; i = seen_[i].next)
      if (seen_[i].box == &box) return i;
    for (uint32_t i = boxes.last; i != kNone; i = seen_[i].next)
      if (*seen_[i].box == box) return i;
    return kNone;
  }

  bool are_apart(uint32_t tensor, const OfTensor& boxes) const {
    std::vector<const Box*> all;
    for (uint32_t i = boxes.last; i != kNone; i = seen_[i].next) {
      if (!seen_[i].simple) return false;
      all.push_back(seen_[i].box);
    }
    return source_.are_disjoint(tensor, all);
  }

  uint32_t new_cells(uint32_t count) {
    const size_t first = cells_.size();
    cells_.resize(first + count);
    return static_cast<uint32_t>(first);
  }

  void mix(uint32_t tensor, OfTensor& boxes) {
    const uint32_t list = new_cells(1);
    cells_[list].list = list;
    boxes.mixed = static_cast<uint32_t>(mixed_.size());
    Mixed& mixed = mixed_.emplace_back(Mixed{tensor, list, {}});
    for (uint32_t i = boxes.last; i != kNone; i = seen_[i].next) {
      const Seen& seen = seen_[i];
      if (seen.cells == kNone) cell_of_[seen.want] = list;
      else cells_[seen.cells].list = list;
      all_.minimum_bytes_ -= seen.missing;
      mixed.boxes.push_back(seen.box);
    }
  }

  uint64_t missing_here(const Kind& kind, const Want& want, uint32_t node) const {
    const Part& part = kind.parts[want.part];
    if (!part.simple) return source_.missing_on_node(want.tensor, node, {*part.box});
    uint64_t missing = 0;
    for (uint32_t i = 0; i < part.count; ++i) {
      const Candidate& candidate = kind.candidates[part.first + i];
      if (here_[candidate.set].members.empty()) missing += candidate.bytes;
    }
    return missing;
  }

  Result<> choose_for(uint32_t number) {
    Kind& kind = all_.kinds_[all_.kind_of_[number]];
    look_here(kind, all_.targets_[number].node);
    size_t want_number = first_want_[number];
    for (const Want& want : kind.wants) {
      const Part& part = kind.parts[want.part];
      const uint32_t cells = cell_of_[want_number++];
      const uint32_t list = cells == kNone ? kNone : cells_[cells].list;
      if (!part.simple || (list != kNone && !find_arrivals(kind, want, list))) {
        PTC_TRY(cover(number, kind, want, list));
        continue;
      }
      for (uint32_t i = 0; i < part.count; ++i) {
        Candidate& candidate = kind.candidates[part.first + i];
        Here& here = here_[candidate.set];
        if (!here.members.empty()) {
          const uint32_t image = loads_.least_here(here).image;
          loads_.take_here(image, candidate.bytes);
          all_.choices_.push_back(image);
          continue;
        }
        if (cells != kNone) {
          const uint32_t arrived = list == kNone ? cells_[cells + i].arrival : arrived_[i];
          if (arrived != kNone) {
            all_.choices_.push_back(kArrival | arrived);
            continue;
          }
        }
        const uint32_t image = loads_.least_elsewhere(kind.sets[candidate.set]).image;
        loads_.take_elsewhere(image, candidate.bytes);
        all_.choices_.push_back(image);
        if (cells == kNone) continue;
        const Box* box = common_of(part, want, candidate);
        if (list != kNone) add_arrival(list, number, part, want, candidate, box);
        else cells_[cells + i].arrival = new_arrival(number, part, want, box);
      }
    }
    return ok();
  }

  /// By candidate of a simple want that is not here: an arrival that is just what it has of it;
  /// false: some arrival is another part of it. An arrival lies in the box that it was taken of,
  /// and these have nothing of the want in common.
  bool find_arrivals(Kind& kind, const Want& want, uint32_t list) {
    const Part& whole = kind.parts[want.part];
    arrived_.assign(whole.count, kNone);
    if (!has_arrivals(list)) return true;
    for (uint32_t i = 0; i < whole.count; ++i) {
      Candidate& candidate = kind.candidates[whole.first + i];
      if (!here_[candidate.set].members.empty()) continue;
      const auto of_held = arrivals_of_.find(key_of(list, all_.held_of(want, candidate)));
      if (of_held == arrivals_of_.end()) continue;
      const Box& part = *common_of(whole, want, candidate);
      for (uint32_t a = of_held->second.first; a != kNone; a = all_.arrivals_[a].next) {
        const Box& arrival = *all_.arrivals_[a].box;
        if (&arrival != &part && !(arrival == part)) {
          if (!intersect(arrival, part)) continue;
          if (!(intersect(arrival, *whole.box) == part)) return false;
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
    if (list == kNone || !has_arrivals(list)) return;
    const Part& part = kind.parts[want.part];
    for (uint32_t i = 0; i < part.count; ++i) {
      const Held& held = all_.held_of(want, kind.candidates[part.first + i]);
      const auto of_held = arrivals_of_.find(key_of(list, held));
      if (of_held == arrivals_of_.end()) continue;
      for (uint32_t a = of_held->second.first; a != kNone; a = all_.arrivals_[a].next)
        arrived_.push_back(a);
    }
    std::sort(arrived_.begin(), arrived_.end());
  }

  const Box* keep(Box box) { return &all_.boxes_.emplace_back(std::move(box)); }
  /// What a candidate has of a want, once for all targets of the kind.
  const Box* common_of(const Part& part, const Want& want, Candidate& candidate) {
    if (part.count == 1 && part.simple) return part.box;
    if (candidate.common == kNone) {
      candidate.common = static_cast<uint32_t>(all_.boxes_.size());
      all_.boxes_.push_back(*intersect(source_.box(all_.held_of(want, candidate)), *part.box));
    }
    return &all_.boxes_[candidate.common];
  }

  static uint64_t key_of(uint32_t list, const Held& held) {
    return uint64_t{list} << 32 | held.first_holder;
  }
  bool has_arrivals(uint32_t list) const { return cells_[list].arrival != kNone; }

  uint32_t new_arrival(uint32_t target, const Part& part, const Want& want, const Box* box) {
    all_.arrivals_.push_back({target, want.slot, part.piece, kNone, box});
    return static_cast<uint32_t>(all_.arrivals_.size() - 1);
  }

  void add_arrival(uint32_t list, uint32_t target, const Part& part, const Want& want,
                   const Candidate& candidate, const Box* box) {
    const uint32_t number = new_arrival(target, part, want, box);
    const auto [of_held, is_first] =
        arrivals_of_.try_emplace(key_of(list, all_.held_of(want, candidate)), number, number);
    if (!is_first) all_.arrivals_[std::exchange(of_held->second.second, number)].next = number;
    cells_[list].arrival = number;
  }

  /// Of a want that is not simple: box by box, as they overlap.
  Result<> cover(uint32_t number, Kind& kind, const Want& want, uint32_t list) {
    const ImageLayout& target = all_.targets_[number];
    const ArraySlot& slot = target.arrays[want.slot];
    const Part& part = kind.parts[want.part];
    const Piece& piece = slot.part->pieces[part.piece];
    const uint32_t bits = source_.element_bits(want.tensor);
    const size_t first_taken = all_.taken_.size();
    wanted_.assign(1, piece.global);
    auto take_held = [&](uint32_t i) -> Result<> {
      Candidate& candidate = kind.candidates[part.first + i];
      Here& here = here_[candidate.set];
      const bool is_here = !here.members.empty();
      const Member member =
          is_here ? loads_.least_here(here) : loads_.least_elsewhere(kind.sets[candidate.set]);
      const SourceIndex::Holder& holder =
          source_.holder(all_.held_of(want, candidate), member.holder);
      return take_common(
          wanted_, left_, source_.box(all_.held_of(want, candidate)),
          [&](const Box& common) -> Result<> {
            PTC_TRY(check_bytes(source_.slot(holder), source_.piece(holder), slot, piece, common));
            const uint64_t bytes = source_.bytes_of(want.tensor, common);
            all_.taken_.push_back({i, member.image, bytes});
            if (is_here) {
              loads_.take_here(member.image, bytes);
              return ok();
            }
            loads_.take_elsewhere(member.image, bytes);
            if (list == kNone) return ok();
            const Box* whole = common_of(part, want, candidate);
            add_arrival(list, number, part, want, candidate,
                        common == *whole ? whole : keep(common));
            return ok();
          });
    };
    for (uint32_t i = 0; i < part.count && !wanted_.empty(); ++i) {
      if (here_[kind.candidates[part.first + i].set].members.empty()) continue;
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
    for (uint32_t i = 0; i < part.count && !wanted_.empty(); ++i) {
      if (!here_[kind.candidates[part.first + i].set].members.empty()) continue;
      PTC_TRY(take_held(i));
    }
    if (!wanted_.empty()) return source_.stored_nowhere(want.tensor, wanted_.front());
    for (const uint64_t one : {uint64_t{kInOrder}, uint64_t{first_taken} >> 32,
                               uint64_t{first_taken}, all_.taken_.size() - first_taken})
      all_.choices_.push_back(static_cast<uint32_t>(one));
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

  /// Where it is noted which arrival has what a candidate has of a want, for all wants of one box
  /// of a tensor on one node: a cell for each candidate. Where boxes on the node are mixed, each
  /// want is of a list, by the number of a cell, and arrivals are looked for.
  struct Cell {
    uint32_t arrival = kNone;  // of a list: any
    uint32_t list = kNone;     // in the first cell of a want
  };
  static constexpr uint32_t kMostBoxes = 32;  // of a tensor on a node, if not mixed

  const SourceIndex& source_;
  Choices& all_;
  SourceLoads loads_;
  std::vector<uint32_t> set_numbers_;    // in the kind that is made
  std::vector<size_t> choices_of_kind_;  // by kind
  std::vector<size_t> first_want_;       // by target, over all of them
  std::vector<uint32_t> cell_of_;        // by want, over all targets: the first, or kNone
  std::vector<Cell> cells_;
  /// By list and the box that they were taken of: the first and the last.
  std::unordered_map<uint64_t, std::pair<uint32_t, uint32_t>> arrivals_of_;
  std::vector<Here> here_;         // by set of the kind that is looked at
  std::vector<uint32_t> arrived_;  // of the want that is looked at
  std::vector<Seen> seen_;         // of the node that is looked at
  std::vector<Mixed> mixed_;       // of that node
  std::vector<Box> wanted_, left_;
  AlikeParts looked_;                 // of the kind that is made
  std::vector<uint32_t> first_part_;  // by number in looked_; and how many parts there are
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

Result<Transfer> Choices::transfer(const ImageLayout& target, const Want& want, const Part& part,
                                   const Candidate& candidate, uint32_t choice) const {
  const ArraySlot& slot = target.arrays[want.slot];
  const Piece& piece = slot.part->pieces[part.piece];
  const Held& held = held_of(want, candidate);
  const Box common = part.count == 1 ? piece.global : *intersect(source_.box(held), piece.global);
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
  const Part& part = kind.parts[want.part];
  const Piece& piece = slot.part->pieces[part.piece];
  std::vector<Box> wanted{piece.global}, left;
  while (!taken.empty()) {
    const Taken& one = taken.front();
    const From source =
        from(held_of(want, kind.candidates[part.first + one.candidate]), one.choice);
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
    const Part& part = kind.parts[want.part];
    for (uint32_t i = 0; i < part.count; ++i) {
      PTC_TRY(transfers.emplace_back(),
              transfer(target, want, part, kind.candidates[part.first + i], *choice++));
    }
  }
  return transfers;
}

}  // namespace ptc
