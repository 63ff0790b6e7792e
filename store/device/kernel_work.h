// What the threads of a device do: cuts and sums, divided into tiles of about 64 KiB.
//
// The same functions run on a device (kernels.cu) and on the processor (host_device.cc), where the
// tests compare them with store/tensor. A launch has any number of copies or runs; a group of
// kThreads threads takes one tile at a time, and finds by halving whose it is. Plain data and plain
// arithmetic: no library, no error. Addresses are the device's.
#pragma once

#include <cstdint>

#include "store/tensor/checksum_keys.h"

namespace ptc::kernels {

inline constexpr uint32_t kThreads = 256;

/// One loop of a StridedCopy. Strides in bytes.
struct CopyLevel {
  uint64_t source_stride, target_stride;
  uint32_t count, unused;
};

/// A StridedCopy in lanes: pieces of a run that are read and written at once. Their size divides
/// the run, all strides and both addresses. There are fewer than 2³² of them, since a device
/// divides 64 bits in six times the time: what has more is several tasks.
struct CopyTask {
  uint64_t source, target;  // addresses
  uint64_t first_tile;      // how many tiles the tasks before it have
  uint32_t run_lanes;       // of one run; > 0
  uint32_t lanes;           // of all runs; > 0, ≤ kMostLanes
  uint32_t first_level;     // of its levels, outermost first
  uint16_t levels;
  uint16_t lane_bytes;  // 16, 8, 4, 2 or 1
};
inline constexpr uint32_t kTileLanes = 4096;
inline constexpr uint64_t kMostLanes = uint64_t{1} << 31;

/// Bytes of a tensor, for its checksum. A tile has kTileBlocks blocks of the checksum.
struct SumTask {
  uint64_t bytes;           // address
  uint64_t count;           // > 0
  uint64_t logical_offset;  // of the first in the tensor's bytes
  uint64_t first_tile;
  uint64_t sum;  // which of the sums it is added to
};
inline constexpr uint64_t kTileBlocks = 16;
inline constexpr uint64_t kBlockBytes =
    uint64_t{checksum_keys::kBlockWords} * checksum_keys::kWordBytes;
/// A thread has the same words of each block, and so one set of keys.
inline constexpr uint32_t kThreadWords = checksum_keys::kBlockWords / kThreads;
inline constexpr uint32_t kThreadBytes = kThreadWords * checksum_keys::kWordBytes;
static_assert(kThreadBytes == 16);

/// What a thread adds to a sum.
struct ThreadSum {
  uint64_t lane[2];
};

// Bytes of any type are read and written so.
#if defined(__CUDACC__)
#define PTC_ANY_TYPE
#define PTC_UNROLL _Pragma("unroll")
#else
#define PTC_ANY_TYPE __attribute__((may_alias))
#define PTC_UNROLL
#endif
typedef uint8_t PTC_ANY_TYPE Lane1;
typedef uint16_t PTC_ANY_TYPE Lane2;
typedef uint32_t PTC_ANY_TYPE Lane4;
typedef uint64_t PTC_ANY_TYPE Lane8;
struct PTC_ANY_TYPE Lane16 {
  alignas(16) uint64_t low;
  uint64_t high;
};

/// Of tasks in order, the one that has the tile.
template <class Task>
PTC_ON_DEVICES_TOO inline uint64_t task_of(const Task* tasks, uint64_t count, uint64_t tile) {
  uint64_t begin = 0;
  while (count > 1) {
    const uint64_t half = count / 2;
    if (tasks[begin + half].first_tile <= tile) begin += half, count -= half;
    else count = half;
  }
  return begin;
}

struct LanePlace {
  uint64_t source, target;
};

PTC_ON_DEVICES_TOO inline LanePlace place_of(const CopyTask& task, const CopyLevel* levels,
                                             uint32_t lane) {
  uint32_t run = lane / task.run_lanes;
  const uint64_t in_run = uint64_t{lane - run * task.run_lanes} * task.lane_bytes;
  LanePlace place = {task.source + in_run, task.target + in_run};
  for (uint32_t i = task.levels; i-- > 0;) {
    const CopyLevel& level = levels[task.first_level + i];
    const uint32_t rest = i == 0 ? 0 : run / level.count;
    const uint64_t index = run - rest * level.count;
    place.source += index * level.source_stride;
    place.target += index * level.target_stride;
    run = rest;
  }
  return place;
}

template <class Lane>
PTC_ON_DEVICES_TOO inline void copy_lanes(const CopyTask& task, const CopyLevel* levels,
                                          uint32_t first, uint32_t end, uint32_t thread) {
  constexpr uint32_t kAtOnce = 4;  // so many are on their way before the first is written
  for (uint32_t lane = first + thread; lane < end; lane += kAtOnce * kThreads) {
    Lane values[kAtOnce];
    uint64_t targets[kAtOnce];
    PTC_UNROLL
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (lane + k * kThreads >= end) break;
      const LanePlace place = place_of(task, levels, lane + k * kThreads);
      values[k] = *reinterpret_cast<const Lane*>(place.source);
      targets[k] = place.target;
    }
    PTC_UNROLL
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      if (lane + k * kThreads >= end) break;
      *reinterpret_cast<Lane*>(targets[k]) = values[k];
    }
  }
}

/// What one of kThreads threads copies of a tile.
PTC_ON_DEVICES_TOO inline void copy_tile(const CopyTask& task, const CopyLevel* levels,
                                         uint64_t tile, uint32_t thread) {
  const auto first = static_cast<uint32_t>((tile - task.first_tile) * kTileLanes);
  const uint32_t end = task.lanes - first < kTileLanes ? task.lanes : first + kTileLanes;
  switch (task.lane_bytes) {
    case 16:
      return copy_lanes<Lane16>(task, levels, first, end, thread);
    case 8:
      return copy_lanes<Lane8>(task, levels, first, end, thread);
    case 4:
      return copy_lanes<Lane4>(task, levels, first, end, thread);
    case 2:
      return copy_lanes<Lane2>(task, levels, first, end, thread);
    default:
      return copy_lanes<Lane1>(task, levels, first, end, thread);
  }
}

/// Four words from an address, of which all bytes are there.
PTC_ON_DEVICES_TOO inline void load_words(uint64_t address, uint32_t (&words)[kThreadWords]) {
  if (address % 16 == 0) {
    const Lane16 all = *reinterpret_cast<const Lane16*>(address);
    words[0] = static_cast<uint32_t>(all.low), words[1] = static_cast<uint32_t>(all.low >> 32);
    words[2] = static_cast<uint32_t>(all.high), words[3] = static_cast<uint32_t>(all.high >> 32);
  } else if (address % 4 == 0) {
    PTC_UNROLL
    for (uint32_t k = 0; k < kThreadWords; ++k)
      words[k] = *reinterpret_cast<const Lane4*>(address + 4 * k);
  } else {
    PTC_UNROLL
    for (uint32_t k = 0; k < kThreadWords; ++k) {
      words[k] = 0;
      PTC_UNROLL
      for (uint32_t b = 0; b < 4; ++b)
        words[k] |= uint32_t{*reinterpret_cast<const Lane1*>(address + 4 * k + b)} << (8 * b);
    }
  }
}

/// What one of kThreads threads finds of a tile.
PTC_ON_DEVICES_TOO inline ThreadSum sum_tile(const SumTask& task, uint64_t tile, uint32_t thread) {
  uint32_t keys[2][kThreadWords];
  PTC_UNROLL
  for (uint32_t k = 0; k < kThreadWords; ++k) {
    keys[0][k] = checksum_keys::key(0, thread * kThreadWords + k);
    keys[1][k] = checksum_keys::key(1, thread * kThreadWords + k);
  }
  const uint64_t begin = task.logical_offset, end = begin + task.count;
  uint64_t block = begin / kBlockBytes + (tile - task.first_tile) * kTileBlocks;
  ThreadSum sum = {{0, 0}};
  for (uint64_t left = kTileBlocks; left > 0; --left, ++block) {
    const uint64_t at = block * kBlockBytes + uint64_t{thread} * kThreadBytes;
    if (block * kBlockBytes >= end) break;
    uint32_t words[kThreadWords];
    if (at >= begin && at + kThreadBytes <= end) {
      load_words(task.bytes + (at - begin), words);
    } else {
      PTC_UNROLL
      for (uint32_t k = 0; k < kThreadWords; ++k) {
        words[k] = 0;
        for (uint32_t b = 0; b < 4; ++b) {
          const uint64_t byte = at + 4 * k + b;
          if (byte >= begin && byte < end)
            words[k] |= uint32_t{*reinterpret_cast<const Lane1*>(task.bytes + (byte - begin))}
                        << (8 * b);
        }
      }
    }
    uint64_t of_block[2] = {0, 0};
    PTC_UNROLL
    for (uint32_t k = 0; k < kThreadWords; ++k) {
      of_block[0] += uint64_t{words[k]} * keys[0][k];
      of_block[1] += uint64_t{words[k]} * keys[1][k];
    }
    sum.lane[0] += checksum_keys::mix(0, block) * of_block[0];
    sum.lane[1] += checksum_keys::mix(1, block) * of_block[1];
  }
  return sum;
}

}  // namespace ptc::kernels
