// The plan of a run: its segments, and what a change of dp or of the order makes of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dataset/plan/generation.h"
#include "dataset/plan/order_spec.h"
#include "store/base/error.h"

namespace ptc {

/// A value. Segments are in order of `from`, the first from 0, no two from the same position; each
/// reaches to the next one's `from`, and as a Generation, for those who opened it, to the end of
/// the run.
class RunPlan {
 public:
  static constexpr size_t kMaxSegments = 4096;  // so that to_text() is one value of the metadata

  /// A run from its beginning. `generation`: a number that was never used.
  static Result<RunPlan> begin(const OrderSpec& order, uint64_t samples, uint64_t fingerprint,
                               uint64_t dp, uint64_t generation);

  struct Changed;
  /// What the run is when, with `consumed` positions done, `order` and `dp` are what is wanted.
  /// Equal to *this where that is so already. Before anything is consumed all may change;
  /// afterwards neither the seed nor the shuffle, and only at an end of a step: kInvalidArgument
  /// names the nearest, unless the order says "round": "down", which goes back to the one before.
  /// `consumed` ≤ end().
  Result<Changed> change(const OrderSpec& order, uint64_t dp, uint64_t consumed) const;
  /// The same after going back to `consumed`: segments from later positions on are no more.
  Result<Changed> roll_back(const OrderSpec& order, uint64_t dp, uint64_t consumed) const;

  const Run& run() const { return run_; }
  const std::vector<Segment>& segments() const { return segments_; }
  const Segment& last() const { return segments_.back(); }
  /// The segment in which a position is, or nullptr.
  const Segment* find(uint64_t generation) const;
  Generation generation(const Segment& segment) const { return Generation(run_, segment); }
  uint64_t end() const { return last().epochs * run_.samples; }
  uint64_t next_generation() const { return next_generation_; }
  friend bool operator==(const RunPlan&, const RunPlan&) = default;

  /// For the metadata. from_text checks what it reads: a newer version's plan is kInvalidArgument.
  std::string to_text() const;
  static Result<RunPlan> from_text(std::string_view text);

  /// plan.json: the run, its segments, and the ids dropped and padded in the epochs up to that of
  /// `consumed`, at most kMaxListedIds of them.
  std::string to_plan_json(uint64_t consumed) const;
  static constexpr uint64_t kMaxListedIds = 1'000'000;

 private:
  RunPlan() = default;

  Run run_;
  std::vector<Segment> segments_;
  uint64_t next_generation_ = 1;
};

struct RunPlan::Changed {
  RunPlan plan;
  uint64_t consumed;  // less than before where it was rounded down
};

}  // namespace ptc
