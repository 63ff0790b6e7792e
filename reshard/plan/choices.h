// From which holder each box of each target comes.
//
// What is the same for all copies of a file (the boxes that it needs, and who has them) is looked
// up once for each *kind* of target, those that share their arrays, and there once for parts of
// alike tensors; for each copy only the choice is left, one number a box. Transfers are made of
// these when somebody asks: a node asks for its own. The load of each holder, which decides the
// choices, is that of all targets before.
//
// Cost: O(n log n) in the boxes of all kinds of targets and their overlaps, and for each copy
// O(log holders) a box, with some 8 bytes of memory; 16 where boxes overlap each other.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "reshard/plan/source_index.h"
#include "store/base/error.h"

namespace ptc {

/// Immutable once made; threads: any. The index outlives it.
class Choices {
 public:
  /// Of the targets that are not `kept`. Holders on the target's own node come first, then targets
  /// of that node that got the bytes from another, then the holders that were asked for the fewest
  /// bytes so far, by node and then by image. kCorrupt: some part is held by nobody; the message
  /// gives the tensor's number and the box.
  static Result<std::shared_ptr<const Choices>> make(const SourceIndex& source,
                                                     std::span<const ImageLayout> targets,
                                                     const std::vector<bool>& kept);

  /// In the order of the choices; of one that is kept, none.
  Result<std::vector<Transfer>> transfers(uint32_t target) const;
  /// visit(Transfer::source_image, bytes) for each of these.
  template <class Visit>
  void for_each_source(uint32_t target, Visit&& visit) const;

  /// What a target takes of a source image: its transfer number `number`.
  struct Take {
    uint32_t target, number, source_image;
  };
  using CopyFrom = std::function<Result<StridedCopy>(const Take&)>;
  /// visit(takes, CopyFrom) → Result<>: with what all targets of a kind take of one box, by target,
  /// for each box. The copy of a take is that of all of them from the same source image.
  template <class Visit>
  Result<> for_each_alike(Visit&& visit) const;

  /// What the targets need and no source on their node holds, every byte once a node.
  uint64_t minimum_bytes() const { return minimum_bytes_; }

 private:
  class Disjoint;
  class Maker;
  using Held = SourceIndex::Held;
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Candidate {
    uint32_t held;  // SourceIndex::held() of the want's tensor
    uint64_t bytes;
    uint32_t set;             // its number in Kind::sets
    uint32_t common = kNone;  // what it has of the want, in boxes_, once that was asked for
  };
  /// A piece of an array of a kind: the same for equal parts of alike tensors.
  struct Part {
    const Box* box;
    uint32_t piece;
    uint32_t first, count;  // candidates
    /// They have nothing in common and fill it: each is taken whole, in whatever order.
    bool simple;
  };
  /// That piece of one of these arrays.
  struct Want {
    uint32_t slot, tensor;
    uint32_t part;
  };
  struct Kind {
    std::vector<Want> wants;
    std::vector<Part> parts;
    std::vector<Candidate> candidates;
    std::vector<uint32_t> sets;
  };
  /// A box that comes to a node from another one, as part of a target image.
  struct Arrival {
    uint32_t target, slot, piece;
    uint32_t next;  // of the same box of a source, on the same node
    const Box* box;
  };
  /// Of a want that is taken in an order, since what is taken later is what is left: one transfer,
  /// by the candidate or of the arrival; those of one source in a row are of one look at it.
  struct Taken {
    uint32_t candidate;  // of the want; of an arrival any
    uint32_t choice;
    uint64_t bytes;
  };
  // A choice is a source image, or an arrival. Of a simple want there is one for each candidate in
  // turn; of one that is not simple, or not with what has arrived: kInOrder and
  // taken_[first … + count), with `first` in two numbers.
  static constexpr uint32_t kArrival = 1u << 31, kInOrder = UINT32_MAX;
  static constexpr size_t kInOrderNumbers = 4;

  explicit Choices(const SourceIndex& source) : source_(source) {}
  Result<Transfer> transfer(const ImageLayout& target, const Want& want, const Part& part,
                            const Candidate& candidate, uint32_t choice) const;
  /// An array and a piece of it that a choice takes from.
  struct From {
    const ArraySlot& slot;
    Piece piece;
  };
  From from(const Held& held, uint32_t choice) const;
  From from_arrival(const Arrival& arrival) const;
  uint32_t source_image(uint32_t choice) const {
    return (choice & kArrival) == 0 ? choice
                                    : static_cast<uint32_t>(source_.images().size()) +
                                          arrivals_[choice & ~kArrival].target;
  }
  std::span<const Taken> taken(const uint32_t* choice) const {
    return std::span(taken_).subspan(uint64_t{choice[1]} << 32 | choice[2], choice[3]);
  }
  /// Appends the transfers of what was taken in order.
  Result<> make_taken(const ImageLayout& target, const Kind& kind, const Want& want,
                      std::span<const Taken> taken, std::vector<Transfer>& transfers) const;
  const Held& held_of(const Want& want, const Candidate& candidate) const {
    return source_.held(want.tensor, candidate.held);
  }

  const SourceIndex& source_;
  std::vector<ImageLayout> targets_;
  std::vector<Kind> kinds_;
  std::vector<uint32_t> kind_of_;     // by target; kNone: kept
  std::vector<size_t> first_choice_;  // by target; and their number
  std::vector<uint32_t> choices_;
  std::vector<Arrival> arrivals_;
  std::deque<Box> boxes_;  // of arrivals that are no whole pieces
  std::vector<Taken> taken_;
  uint64_t minimum_bytes_ = 0;
};

template <class Visit>
void Choices::for_each_source(uint32_t target, Visit&& visit) const {
  if (kind_of_[target] == kNone) return;
  const Kind& kind = kinds_[kind_of_[target]];
  const uint32_t* choice = choices_.data() + first_choice_[target];
  for (const Want& want : kind.wants) {
    if (*choice == kInOrder) {
      for (const Taken& one : taken(choice)) visit(source_image(one.choice), one.bytes);
      choice += kInOrderNumbers;
      continue;
    }
    const Part& part = kind.parts[want.part];
    for (uint32_t i = 0; i < part.count; ++i, ++choice)
      visit(source_image(*choice), kind.candidates[part.first + i].bytes);
  }
}

template <class Visit>
Result<> Choices::for_each_alike(Visit&& visit) const {
  std::vector<std::vector<uint32_t>> targets_of(kinds_.size());
  for (uint32_t target = 0; target < targets_.size(); ++target)
    if (kind_of_[target] != kNone) targets_of[kind_of_[target]].push_back(target);
  std::vector<const uint32_t*> next;  // choice, by target of the kind
  std::vector<uint32_t> number;
  std::vector<Take> takes;
  std::vector<Transfer> in_order;
  for (size_t k = 0; k < kinds_.size(); ++k) {
    const std::vector<uint32_t>& targets = targets_of[k];
    next.clear();
    for (const uint32_t target : targets) next.push_back(choices_.data() + first_choice_[target]);
    number.assign(targets.size(), 0);
    for (const Want& want : kinds_[k].wants) {
      const Part& part = kinds_[k].parts[want.part];
      for (size_t i = 0; i < targets.size(); ++i) {
        if (*next[i] != kInOrder) continue;
        in_order.clear();
        PTC_TRY(make_taken(targets_[targets[i]], kinds_[k], want, taken(next[i]), in_order));
        for (const Transfer& transfer : in_order) {
          takes.assign(1, {targets[i], number[i]++, transfer.source_image});
          const CopyFrom copy = [&](const Take&) -> Result<StridedCopy> { return transfer.copy; };
          PTC_TRY(visit(takes, copy));
        }
      }
      for (uint32_t c = 0; c < part.count; ++c) {
        const Candidate& candidate = kinds_[k].candidates[part.first + c];
        takes.clear();
        for (size_t i = 0; i < targets.size(); ++i) {
          if (*next[i] == kInOrder) continue;
          const uint32_t choice = next[i][c];
          if ((choice & kArrival) == 0) takes.push_back({targets[i], number[i], choice});
          ++number[i];
        }
        const CopyFrom copy = [&](const Take& take) -> Result<StridedCopy> {
          PTC_TRY(const Transfer one,
                  transfer(targets_[take.target], want, part, candidate, take.source_image));
          return one.copy;
        };
        PTC_TRY(visit(takes, copy));
      }
      for (const uint32_t*& choice : next)
        choice += *choice == kInOrder ? kInOrderNumbers : part.count;
    }
  }
  return ok();
}

}  // namespace ptc
