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

#include "reshard/intake/found_files.h"
#include "reshard/ptc/layout.h"
#include "store/base/error.h"

namespace ptc {

/// Where a file lies: "iter_0000100/mp_rank_01_002/model_optim_rng.pt".
struct MegatronPlace {
  std::string_view directory;     // "iter_0000100/mp_rank_01_002"
  std::string_view path;          // below it
  std::vector<uint32_t> numbers;  // 1, 2
};
/// nullopt: not in such a tree.
std::optional<MegatronPlace> megatron_place(std::string_view path);

/// Files of such a tree get the names that they have in a checkpoint; those of a tree in the place
/// of rank/ (`is_tree`) a number for each directory, until settle_megatron() knows their ranks.
/// Below rank/<r>/ a directory is of such a tree if a model_optim_rng.pt is in it.
/// kInvalidArgument: one rank has two.
Result<> name_megatron_files(bool is_tree, std::vector<Found>& found);

/// Once all files are read: checks that they are of one model and the whole grid of ranks, and
/// gives those of a tree their ranks. `said`: `spec` is what the writer says of himself; else a
/// tree's own sizes count, and become `spec`. kInvalidArgument: what does not fit.
Result<> settle_megatron(bool said, LayoutSpec& spec, std::vector<Found>& found);

}  // namespace ptc
