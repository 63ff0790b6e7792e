#include "tools/planner/profile/analyser.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace ptc::planner {

std::optional<double> seconds_between(const Tried& tried, double each) {
  const auto above = tried.lower_bound(each);
  if (above == tried.end()) return std::nullopt;
  if (above->first == each) return above->second;
  if (above == tried.begin()) return std::nullopt;
  const auto below = std::prev(above);
  const double part = (each - below->first) / (above->first - below->first);
  return below->second + part * (above->second - below->second);
}

std::vector<uint64_t> batch_ladder(uint64_t least, uint64_t most) {
  std::vector<uint64_t> batches;
  for (uint64_t batch = least; batch < most; batch *= 2) batches.push_back(batch);
  batches.push_back(most);
  return batches;
}

std::vector<ProfileRow> interpolated(const std::vector<const ProfileRow*>& rows,
                                     const std::vector<uint64_t>& batches, bool accumulate) {
  using Way = std::tuple<std::string, std::string, uint32_t, uint32_t, uint32_t, uint32_t>;
  std::map<Way, std::pair<const ProfileRow*, Tried>> ways;
  for (const ProfileRow* row : rows) {
    if (!row->iteration_s || row->accumulation != 1) continue;
    auto& [one, tried] =
        ways[{row->technique, row->device, row->tp, row->pp, row->dp, row->gpus_per_node}];
    one = row;
    const double each = static_cast<double>(row->batch) / row->dp;
    const auto [place, is_new] = tried.try_emplace(each, *row->iteration_s);
    if (!is_new) place->second = std::min(place->second, *row->iteration_s);
  }
  std::vector<ProfileRow> found;
  for (const auto& [way, of] : ways) {
    const auto& [one, tried] = of;
    const double most = tried.rbegin()->first;
    for (const uint64_t batch : batches) {
      const double each = static_cast<double>(batch) / one->dp;
      const double steps = each > most && accumulate ? std::ceil(each / most) : 1;
      if (steps == 1 && tried.contains(each)) continue;
      const auto seconds = seconds_between(tried, each / steps);
      if (!seconds || steps > kMostAccumulation) continue;
      ProfileRow row = *one;
      row.batch = batch;
      row.accumulation = static_cast<uint32_t>(steps);
      row.iteration_s = *seconds * steps;
      row.peak_bytes = 0;
      row.origin = "interpolated";
      found.push_back(std::move(row));
    }
  }
  return found;
}

}  // namespace ptc::planner
