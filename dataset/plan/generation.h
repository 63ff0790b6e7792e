// A generation: the batches of a run from some position on, and who reads what of them.
//
// Position p ∈ ℕ is sample π_e(p mod N) of epoch e = ⌊p/N⌋. A segment begins at position `from`;
// its steps are pieces of [from, epochs·N), one after the other:
//   carry: `batch` positions each, the last one cut at the end of the run;
//   short: the same, and cut at the end of each epoch too, after which the next begins;
//   drop:  what is left of an epoch and is less than a batch is in no step;
//   pad:   as short, and filled up with the first positions of the same epoch, from its beginning
//          on as
//          often as it takes. These are read, and not counted: positions go on with the next epoch.
// A step belongs to the epoch in which it begins; so a batch that spans epochs is listed with the
// first. Every rank has as many local batches as there are steps. Where a cut batch has fewer
// samples than ranks, some of its local batches are empty.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dataset/order/sample_order.h"
#include "dataset/plan/order_spec.h"

namespace ptc {

/// What all generations of a run have in common.
struct Run {
  uint64_t samples = 0;      // N
  uint64_t fingerprint = 0;  // of the samples
  uint64_t seed = 0;
  Shuffle shuffle;
  friend bool operator==(const Run&, const Run&) = default;
};

struct Segment {
  uint64_t generation = 0;  // 1, 2, …; never used twice
  uint64_t from = 0;        // position
  uint64_t batch = 0;
  uint64_t dp = 0;
  Tail tail = Tail::kCarry;
  Assign assign;
  uint64_t epochs = 1;
  uint64_t repeats = 0;  // positions [from, from + repeats) had been read before ("round": "down")
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// One global batch.
struct Step {
  uint64_t epoch = 0;      // in which it begins
  uint64_t begin = 0;      // position
  uint64_t positions = 0;  // how many it covers
  uint64_t padded = 0;     // samples that fill it up
  uint64_t size() const { return positions + padded; }
  uint64_t end() const { return begin + positions; }
  friend bool operator==(const Step&, const Step&) = default;
};

/// Immutable, and small: any thread; copied freely. Each call takes O(1), or O(log epochs), and the
/// time for what it returns. Arguments are in range; nothing else is checked.
class Generation {
 public:
  /// A segment that OrderSpec::check() let pass.
  Generation(const Run& run, const Segment& segment);

  const Run& run() const { return run_; }
  const Segment& segment() const { return segment_; }
  uint64_t end() const { return end_; }  // of the run: a position

  /// Epochs in which a step can begin: [first_epoch, end_epoch).
  uint64_t first_epoch() const { return segment_.from / run_.samples; }
  uint64_t end_epoch() const { return segment_.from < end_ ? segment_.epochs : first_epoch(); }
  uint64_t steps(uint64_t epoch) const;
  Step step(uint64_t epoch, uint64_t index) const;  // index < steps(epoch)

  /// Samples of a rank's local batch.
  uint64_t local_size(const Step& step, uint64_t rank) const;
  /// Their positions, and their ids, from the `first`th on, `count` of them at most. Padding has
  /// positions of the same epoch.
  std::vector<uint64_t> local_positions(const Step& step, uint64_t rank, uint64_t first = 0,
                                        uint64_t count = UINT64_MAX) const;
  std::vector<uint64_t> local_ids(const Step& step, uint64_t rank, uint64_t first = 0,
                                  uint64_t count = UINT64_MAX) const;
  std::vector<uint64_t> ids(const std::vector<uint64_t>& positions) const;

  /// A rank's samples in all steps that begin before `epoch`; of the whole generation: before
  /// end_epoch().
  uint64_t local_samples_before(uint64_t epoch, uint64_t rank) const;
  /// Ids of a rank's samples in the order it reads them, from the `first`th of the generation on.
  std::vector<uint64_t> rank_ids(uint64_t rank, uint64_t first, uint64_t count) const;

  /// All ranks together: the samples of the steps that begin in `epoch`, batch after batch, and
  /// their ids from the `first`th on. And of the whole generation: how many, and the position of
  /// one of them.
  uint64_t global_samples(uint64_t epoch) const;
  std::vector<uint64_t> global_ids(uint64_t epoch, uint64_t first, uint64_t count) const;
  uint64_t global_samples() const;
  uint64_t global_position(uint64_t index) const;

  /// The nearest ends of steps (or the beginning of the segment) at or before, and at or after
  /// `position`, which is in [from, end()]. Equal: it is one.
  std::pair<uint64_t, uint64_t> boundaries(uint64_t position) const;
  /// Epoch and index of the first step that begins at or behind `position`; nullopt: none does.
  std::optional<std::pair<uint64_t, uint64_t>> step_at(uint64_t position) const;

  /// Positions of an epoch that are in no step (drop), and padding (pad); how many: at once.
  uint64_t dropped_count(uint64_t epoch) const;
  uint64_t padding_count(uint64_t epoch) const;
  std::vector<uint64_t> dropped(uint64_t epoch) const;
  std::vector<uint64_t> padding(uint64_t epoch) const;

 private:
  uint64_t epoch_begin(uint64_t epoch) const;   // first position of this segment in it
  uint64_t steps_before(uint64_t epoch) const;  // carry
  uint64_t share(uint64_t size, uint64_t rank) const;
  uint64_t place(uint64_t size, uint64_t rank, uint64_t local) const;
  uint64_t position(const Step& step, uint64_t place) const;

  Run run_;
  Segment segment_;
  uint64_t end_;
};

}  // namespace ptc
