// Whether boxes of a tensor have elements in common.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "store/base/error.h"
#include "store/tensor/box.h"

namespace ptc {

/// Numbers of two that overlap; nullopt: none do. Boxes that were cut from one, again and again
/// along whole faces, are told apart by sorting, in O(n log n); what is left after 64 such cuts
/// within each other, or not so, is compared each with each. `boxes` are not empty, and have the
/// same number of axes. `count` is told of each step, and may end it. kInvalidArgument: more than
/// 2^24 pairs would have to be compared. The stack has 64 levels at most.
Result<std::optional<std::pair<uint32_t, uint32_t>>> find_overlap(
    std::span<const Box* const> boxes, const std::function<Result<>(uint64_t steps)>& count = {});

}  // namespace ptc
