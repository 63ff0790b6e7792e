// Trees of Megatron-LM's own format among the files that are committed:
//   iter_0000100/mp_rank_<tp>[_<pp>][_<ep>]/model_optim_rng.pt
// in the place of rank/, or below rank/<r>/. Each file is its rank's `model_optim_rng.pt`; which
// rank that is, and under which layout, its `args` say (megatron_file.h); the names are those of
// megatron_names.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ptc {

/// Where a file lies: "iter_0000100/mp_rank_01_002/model_optim_rng.pt".
struct MegatronPlace {
  std::string_view directory;     // "iter_0000100/mp_rank_01_002"
  std::string_view path;          // below it
  std::vector<uint32_t> numbers;  // 1, 2
};
/// nullopt: not in such a tree.
std::optional<MegatronPlace> megatron_place(std::string_view path);

}  // namespace ptc
