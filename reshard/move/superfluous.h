// Copies that a checkpoint has beyond those that are wanted: as after the return of a node whose
// files were made anew elsewhere meanwhile, or an edit that asks for fewer.
//
// Which they are is said here; what makes it safe that they go, in job/trim.cc.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "reshard/checkpoint/checkpoint.h"
#include "reshard/checkpoint/examine.h"
#include "reshard/move/change.h"

namespace ptc {

/// Images within reach, ascending, that can go together: without all of them, each file of `placed`
/// (place_files(): one entry for each copy that is wanted) is whole on its node, and of each file
/// without tensors there are as many copies as are wanted, on `wanted.alive`. None where `stored`
/// lacks something of that now: what is superfluous goes when nothing is to come any more. Pure.
/// Cost: O(n log n) in images and arrays, and their overlaps.
std::vector<uint32_t> superfluous_images(const Checkpoint& checkpoint, const StoredState& stored,
                                         const WantedState& wanted,
                                         const std::vector<StateFile>& placed);

/// What is left of the same when the images `going` (ascending) are gone: the images within reach
/// that hold some tensor, or a file, of which one of them holds anything; by node. Pure.
std::map<std::string, std::vector<uint32_t>> copies_beside(const Checkpoint& checkpoint,
                                                           const StoredState& stored,
                                                           const std::vector<uint32_t>& going);

/// Whether `contents`, as read of copies_beside() and cut alike, are all of that, and as it was
/// committed. Pure.
bool are_good(const Checkpoint& checkpoint, const StoredState& stored,
              const std::vector<uint32_t>& going, const std::vector<ImageContent>& contents);

}  // namespace ptc
