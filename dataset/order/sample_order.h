// In which order an epoch's samples come: a seeded bijection of [0, N), computed a position at a
// time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"

namespace ptc {

/// Persisted in the plans of runs: the name of exactly the algorithms below, and of their
/// constants. What gives another order gets another name.
inline constexpr std::string_view kOrderVersion = "feistel8-1";

inline constexpr uint64_t kMaxSamples = uint64_t{1} << 62;
inline constexpr uint64_t kMaxBlock = uint64_t{1} << 32;

/// The samples of a word like "block:4096". nullopt: `text` does not begin with `word`; 0: what
/// follows is no number from 1 to `most`, in decimal digits without a leading zero.
std::optional<uint64_t> samples_after(std::string_view word, std::string_view text, uint64_t most);

enum class ShuffleKind { kGlobal, kBlock, kNone };

/// "global", "block:K" or "none", as order.json says it.
struct Shuffle {
  ShuffleKind kind = ShuffleKind::kGlobal;
  uint64_t block = 0;  // samples of a block; kBlock only
  friend bool operator==(const Shuffle&, const Shuffle&) = default;

  std::string name() const;
  static Result<Shuffle> parse(std::string_view text);  // kInvalidArgument
};

/// A pseudo-random bijection of [0, size), chosen by a key, that needs no table: a Feistel network
/// over pairs (l, r) in [0, A) × [0, B) with A = ⌈√size⌉, B = ⌈size / A⌉,
///     l ← l + F₁(r) mod A,  r ← r + F₂(l) mod B,  … eight rounds,
/// walked again while it leads outside of [0, size), which is less than one in √size times.
class FeistelPermutation {
 public:
  FeistelPermutation() = default;
  FeistelPermutation(uint64_t size, uint64_t key);
  /// `tweak` chooses among as many permutations of the same size.
  uint64_t at(uint64_t index, uint64_t tweak = 0) const;
  uint64_t index_of(uint64_t image) const;  // of tweak 0
  uint64_t size() const { return size_; }

 private:
  static constexpr int kRounds = 8;
  uint64_t size_ = 0, left_ = 0, right_ = 0;
  std::array<uint64_t, kRounds> keys_{};
};

/// π of one (seed, epoch). Immutable: any thread.
///
/// kGlobal: a FeistelPermutation of all samples; below 4096 samples, where its rounds would mix
/// badly,
///   a Fisher–Yates shuffle, held as a table of at most 8 KiB.
/// kBlock: the source is cut into blocks of K samples, the last one shorter where K does not divide
///   N. The blocks are permuted, as under kGlobal, and laid one behind the other. A *window* is
///     16·K
///   consecutive positions of that sequence, [16·K·w, 16·K·(w+1)), the last one shorter; inside of
///     each
///   window positions are permuted. So a window draws on the samples of 16 blocks (of 17 from the
///     window
///   on in which the shorter block lies), and who reads a window reads these blocks whole.
/// kNone: the identity.
///
/// Cost: O(1), tens of nanoseconds, a position; memory O(1).
class SampleOrder {
 public:
  static constexpr uint64_t kTableBelow = 4096;
  static constexpr uint64_t kWindowBlocks = 16;

  /// `samples` ≤ kMaxSamples; a block ≤ kMaxBlock.
  SampleOrder(uint64_t samples, const Shuffle& shuffle, uint64_t seed, uint64_t epoch);

  uint64_t samples() const { return samples_; }
  /// The sample at `position` < samples().
  uint64_t at(uint64_t position) const;

 private:
  uint64_t permuted(uint64_t index) const {
    return table_.empty() ? feistel_.at(index) : table_[index];
  }
  uint64_t in_window(uint64_t position) const;

  uint64_t samples_;
  Shuffle shuffle_;
  FeistelPermutation feistel_;      // of all samples, or of all blocks
  std::vector<uint16_t> table_;     // the same where these are few
  uint64_t short_block_begin_ = 0;  // kBlock: where the last block of the source lies
  uint64_t short_block_end_ = 0;    //   in the sequence of permuted blocks
  FeistelPermutation window_, last_window_;
};

}  // namespace ptc
