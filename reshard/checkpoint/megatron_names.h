// Names in a tree of Megatron-LM's own format:
//   latest_checkpointed_iteration.txt
//   iter_0000100/mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt
// <pp> is left out of one stage, <ep> of one expert rank: the second number is either.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/ptc/layout.h"

namespace ptc {

inline constexpr std::string_view kMegatronFile = "model_optim_rng.pt";
/// Has megatron_tracker_text().
inline constexpr std::string_view kMegatronTracker = "latest_checkpointed_iteration.txt";

/// "iter_0000100" and "release".
bool is_megatron_iteration(std::string_view name);
/// "iter_0000100", and "100"; of none both are "release".
std::string megatron_iteration_name(std::optional<uint64_t> iteration);
/// That of "iter_0000100", whatever lies before or behind that name in a path; nullopt: of none.
std::optional<uint64_t> megatron_iteration_of(std::string_view path);
std::string megatron_tracker_text(std::optional<uint64_t> iteration);

/// The numbers of "mp_rank_01_002"; empty: it is no such name.
std::vector<uint32_t> megatron_rank_numbers(std::string_view name);
/// Whose directory has these numbers, at least one; nullopt: no rank of these sizes. With one stage
/// some versions write _000 all the same.
std::optional<RankCoords> megatron_coords(const ParallelConfig& sizes,
                                          const std::vector<uint32_t>& numbers);
/// "mp_rank_01_002", as Megatron calls it.
std::string megatron_rank_name(const ParallelConfig& sizes, const RankCoords& coords);

}  // namespace ptc
