// Who gets what, so that the sum of values is greatest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ptc {

/// For each row a column of its own. `values` has as many columns in each row, and no more rows
/// than columns; a value is at most 2^63. Where several are best: one in which as many rows as can
/// be get the column of their own number. Kuhn and Munkres' method by shortest augmenting paths
/// (Jonker and Volgenant, 1987): O(rows² · columns).
std::vector<size_t> best_assignment(const std::vector<std::vector<uint64_t>>& values);

}  // namespace ptc
