#include "store/device/launch.h"

#include <algorithm>
#include <bit>

namespace ptc {

using kernels::kBlockBytes, kernels::kMostLanes, kernels::kTileBlocks, kernels::kTileLanes;

void CopyLaunch::add(uint64_t source, uint64_t target, const StridedCopy& copy) {
  if (copy.total_bytes() == 0) return;
  add_piece(source + copy.source_offset, target + copy.target_offset, copy);
}

void CopyLaunch::add_piece(uint64_t source, uint64_t target, StridedCopy copy) {
  uint64_t all = source | target | copy.run_bytes;
  for (uint32_t i = 0; i < copy.level_count; ++i)
    all |= copy.levels[i].source_stride | copy.levels[i].target_stride;
  const uint64_t lane_bytes = std::min<uint64_t>(16, uint64_t{1} << std::countr_zero(all));
  const uint64_t lanes = copy.total_bytes() / lane_bytes;
  if (lanes > kMostLanes) {  // two halves
    StridedCopy rest = copy;
    uint64_t source_step = 0, target_step = 0;
    if (copy.level_count > 0) {
      StridedCopy::Level& first = copy.levels[0];
      const uint64_t half = first.count / 2;
      rest.levels[0].count -= half;
      first.count = half;
      source_step = half * first.source_stride, target_step = half * first.target_stride;
    } else {
      copy.run_bytes = copy.run_bytes / 2 / lane_bytes * lane_bytes;
      rest.run_bytes -= copy.run_bytes;
      source_step = target_step = copy.run_bytes;
    }
    add_piece(source, target, copy);
    return add_piece(source + source_step, target + target_step, rest);
  }
  tasks_.push_back({source, target, tiles_, static_cast<uint32_t>(copy.run_bytes / lane_bytes),
                    static_cast<uint32_t>(lanes), static_cast<uint32_t>(levels_.size()),
                    static_cast<uint16_t>(copy.level_count), static_cast<uint16_t>(lane_bytes)});
  for (uint32_t i = 0; i < copy.level_count; ++i)
    levels_.push_back({copy.levels[i].source_stride, copy.levels[i].target_stride,
                       static_cast<uint32_t>(copy.levels[i].count), 0});
  tiles_ += (lanes + kTileLanes - 1) / kTileLanes;
}

void SumLaunch::add(uint64_t bytes, uint64_t count, uint64_t logical_offset, uint64_t sum) {
  if (count == 0) return;
  tasks_.push_back({bytes, count, logical_offset, tiles_, sum});
  const uint64_t blocks =
      (logical_offset + count - 1) / kBlockBytes - logical_offset / kBlockBytes + 1;
  tiles_ += (blocks + kTileBlocks - 1) / kTileBlocks;
}

}  // namespace ptc
