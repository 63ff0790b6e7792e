// order.json: in which order samples are read, and how they are cut into batches.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "dataset/order/sample_order.h"
#include "store/base/error.h"

namespace ptc {

/// What becomes of the end of an epoch that does not fill a global batch.
enum class Tail {
  kCarry,  // the batch goes on in the next epoch; the last one of the run is cut
  kShort,  // the batch is cut
  kDrop,   // left out
  kPad,    // filled up with the first samples of the same epoch
};
std::string_view tail_name(Tail tail);

/// Who gets what of a global batch G of b samples among D ranks; i is the place in G.
struct Assign {
  enum class Kind {
    kContig,  // rank r: ⌊r·b/D⌋ ≤ i < ⌊(r+1)·b/D⌋
    kStride,  // rank i mod D
    kMicro,   // rank ⌊i/micro⌋ mod D: micro-batches dealt out in turn
  };
  Kind kind = Kind::kContig;
  uint64_t micro = 0;  // kMicro only
  friend bool operator==(const Assign&, const Assign&) = default;

  std::string name() const;  // "contig", "stride", "micro:4"
  static Result<Assign> parse(std::string_view text);
};

inline constexpr uint64_t kMaxBatch = uint64_t{1} << 31;
inline constexpr uint64_t kMaxEpochs = 1'000'000;
inline constexpr uint64_t kMaxLocalBatch = 1 << 20;  // which is one file of a tree

struct OrderSpec {
  uint64_t seed = 0;
  uint64_t batch = 0;  // global: samples a step
  Tail tail = Tail::kCarry;
  Shuffle shuffle;
  Assign assign;
  bool uneven = false;  // dp need not divide the batch: the job weights its gradients
  uint64_t epochs = 1;
  bool round_down =
      false;  // "round": "down": a change between two steps repeats the step that was begun
  friend bool operator==(const OrderSpec&, const OrderSpec&) = default;

  /// Strict JSON of at most 64 KiB; `batch` is required. Errors: kInvalidArgument, "line 2, column
  /// 3: …"; an unknown key names the nearest.
  static Result<OrderSpec> parse(std::string_view text);

  /// Whether `dp` ranks can read so from `samples` samples (nullopt: not known yet).
  /// kInvalidArgument says what to do.
  Result<> check(uint64_t dp, std::optional<uint64_t> samples) const;
};

}  // namespace ptc
