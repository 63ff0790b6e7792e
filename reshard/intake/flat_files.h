// What lies in the place of rank/, as frameworks leave it: a model's own files, or a tree of
// distributed checkpointing's, of DeepSpeed's or of Megatron's. It is a single process', if no
// layout.json says otherwise. Each node knows only what it has: whether it can be one process' the
// files of all nodes together tell, and so these are looked at here.
#pragma once

#include <string>
#include <vector>

#include "reshard/intake/found_files.h"
#include "store/base/error.h"

namespace ptc {

/// Whether the file is not below rank/<r>/.
bool in_place_of_ranks(const Found& file);
/// Whether there are such files, and they are a model's own: no tree of DeepSpeed's or Megatron's.
bool is_flat(const std::vector<Found>& found);

/// Of the files of all nodes, before they are read. `here`: this node in messages; empty: none is
/// named. kInvalidArgument: some are below rank/<r>/ and some are not, or they are not, and nothing
/// that frameworks leave is among them.
Result<> check_places(const std::vector<Found>& found, const std::string& here);
/// Once it is known what has tensors. kInvalidArgument: files in the place of rank/ have weights on
/// several nodes, and neither an index nor their numbers make them one set; a set is not complete;
/// or, where they are `flat`, names or shapes tell of several ranks, as a rank/<r>/ below does.
Result<> check_one_process(const std::vector<Found>& found, bool flat, const std::string& here);
/// Once flat files are hashed. kInvalidArgument: two have a parameter with different values.
Result<> check_same_values(const std::vector<Found>& found, const std::string& here);

}  // namespace ptc
