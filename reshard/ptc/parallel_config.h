// Sizes of the parallel dimensions, and how global ranks and coordinates map to each other.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "store/base/error.h"

namespace ptc {

/// Tensor, pipeline, data, expert and context parallel sizes. Every dimension is one of its own:
/// world_size is their product. Parameters that are not experts' are replicated over ep, and all
/// parameters over dp and cp.
///
/// With etp, experts are cut by that, and the ranks of a stage are counted in two ways, as
/// Megatron-Core does: etp, ep, then the replicas of experts (cp, dp), which make up the world; and
/// tp, then the replicas of all else, of which there are as many as there is room for.
struct ParallelConfig {
  uint32_t tp = 1, pp = 1, dp = 1, ep = 1, cp = 1;
  uint32_t etp = 0;  // 0, never tp itself: experts are cut by tp, as all else
  uint32_t expert_tp() const { return etp != 0 ? etp : tp; }
  uint64_t world_size() const { return uint64_t{expert_tp()} * pp * dp * ep * cp; }
  /// Neighbouring ranks of a stage of which no two have the same of tp, etp and ep; the next so
  /// many have the same again.
  uint32_t different_ranks() const;
  friend bool operator==(const ParallelConfig&, const ParallelConfig&) = default;
};

/// Most ranks a layout may have; keeps world_size far from overflow.
inline constexpr uint64_t kMaxWorldSize = 1 << 20;

struct RankCoords {
  uint32_t tp = 0, pp = 0, dp = 0, ep = 0, cp = 0;
  uint32_t etp = 0;  // where ParallelConfig has it
  friend bool operator==(const RankCoords&, const RankCoords&) = default;
};

/// Which dimension varies fastest with the global rank; Megatron's notation, "tp-cp-ep-dp-pp".
class RankOrder {
 public:
  RankOrder() = default;  // tp-cp-ep-dp-pp
  /// All five dimensions, each once; kInvalidArgument otherwise.
  static Result<RankOrder> parse(std::string_view text);

  RankCoords coords(const ParallelConfig& sizes, uint64_t global_rank) const;
  uint64_t global_rank(const ParallelConfig& sizes, const RankCoords& coords) const;
  /// nullopt: there is no such rank.
  std::optional<uint64_t> rank_at(const ParallelConfig& sizes, const RankCoords& coords) const;
  /// Whether the first dimension varies faster; both by their names.
  bool is_before(std::string_view first, std::string_view second) const;
  std::string to_string() const;
  friend bool operator==(const RankOrder&, const RankOrder&) = default;

 private:
  enum class Dim : uint8_t { kTp, kCp, kEp, kDp, kPp };
  static uint32_t& of(RankCoords& coords, Dim dim);
  static uint32_t size_of(const ParallelConfig& sizes, Dim dim);
  std::array<Dim, 5> fastest_first_{Dim::kTp, Dim::kCp, Dim::kEp, Dim::kDp, Dim::kPp};
};

}  // namespace ptc
