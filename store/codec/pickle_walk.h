// Walks through the values of a pickle from a stranger with a budget: a value that is used often is
// there once, and so what a few bytes lead to may be long.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "store/base/error.h"
#include "store/codec/pickle.h"

namespace ptc {

/// Counts what is looked at. Not for several threads.
class PickleWalk {
 public:
  /// `pickle` must outlive it. Steps: 32 for each of the pickle's bytes, and 2^20.
  explicit PickleWalk(const Pickle& pickle)
      : pickle_(pickle), steps_left_(32 * uint64_t{pickle.length_bytes()} + (1 << 20)) {}

  /// kInvalidArgument: these were too many.
  Result<> count(uint64_t steps = 1) {
    if (steps > steps_left_) return invalid_argument("the values in its pickle are too entangled");
    steps_left_ -= steps;
    return ok();
  }
  /// What a text's bytes cost who compares, hashes or copies them.
  Result<> count_text(std::string_view text) { return count(text.size() / 16); }

  /// As those of Pickle, counted. f may end them with an error.
  template <class F>
  Result<> for_pairs(PickleId id, F&& f) {
    return for_changes(id, Pickle::Change::Kind::kPairs, 2, [&](uint32_t first) -> Result<> {
      return f(pickle_.value(first), pickle_.value(first + 1));
    });
  }
  template <class F>
  Result<> for_items(PickleId id, F&& f) {
    if (pickle_.is(id, PickleKind::kTuple) || pickle_.is(id, PickleKind::kFrozenSet)) {
      for (size_t i = 0; i < pickle_.tuple_size(id); ++i) {
        PTC_TRY(count());
        PTC_TRY(f(pickle_.element(id, i)));
      }
      return ok();
    }
    return for_changes(id, Pickle::Change::Kind::kItems, 1,
                       [&](uint32_t first) -> Result<> { return f(pickle_.value(first)); });
  }
  template <class F>
  Result<> for_states(PickleId id, F&& f) {
    return for_changes(id, Pickle::Change::Kind::kState, 1,
                       [&](uint32_t first) -> Result<> { return f(pickle_.value(first)); });
  }

  /// The value under a key of a dict; of two, the last. nullopt: it is no dict, or has none.
  Result<std::optional<PickleId>> value(PickleId dict, std::string_view key) {
    std::optional<PickleId> found;
    if (!pickle_.is(dict, PickleKind::kDict)) return found;
    PTC_TRY(for_pairs(dict, [&](PickleId name, PickleId value) -> Result<> {
      if (pickle_.is(name, PickleKind::kText) && pickle_.text(name) == key) found = value;
      return ok();
    }));
    return found;
  }

 private:
  template <class F>
  Result<> for_changes(PickleId id, Pickle::Change::Kind kind, uint32_t step, F&& f) {
    for (Pickle::Changes changes = pickle_.changes(id); changes.more(); changes.next()) {
      PTC_TRY(count());
      const Pickle::Change change = *changes;
      if (change.kind != kind) continue;
      for (uint32_t i = 0; i < change.count; i += step) {
        PTC_TRY(count());
        PTC_TRY(f(change.first + i));
      }
    }
    return ok();
  }

  const Pickle& pickle_;
  uint64_t steps_left_;
};

}  // namespace ptc
