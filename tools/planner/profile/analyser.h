// What profiles say of batches that nobody tried: the job analyser of 2006.13878, as far as
// measured rows carry it (fit.h goes on from there).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "tools/planner/profile/profile.h"

namespace ptc::planner {

/// Of one way of training: samples a replica, and the seconds that they take.
using Tried = std::map<double, double>;

/// On the line between its neighbours; none outside.
std::optional<double> seconds_between(const Tried& tried, double each);

/// Batches to look at: `least`, its doubles, and `most`.
std::vector<uint64_t> batch_ladder(uint64_t least, uint64_t most);

/// A row for each of `batches` and each way of training in `rows` (technique, tp, pp, dp,
/// placement), where that batch was not tried itself: an iteration's time lies on the line between
/// the two nearest numbers of samples a replica. Never beyond them: more may be out of memory, and
/// less wins nothing that is known. `accumulate`: a batch with more samples a replica than fit is
/// made in as few equal steps as can be, each at what a step of its size takes (an upper bound: all
/// but the last need not exchange gradients). Rows of one model; `iteration_s` empty ones are
/// passed over. Cost: O(rows · log + ways × batches).
std::vector<ProfileRow> interpolated(const std::vector<const ProfileRow*>& rows,
                                     const std::vector<uint64_t>& batches, bool accumulate);

}  // namespace ptc::planner
