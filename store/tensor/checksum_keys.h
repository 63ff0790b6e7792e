// The keys of a tensor's checksum (checksum.h). For the processor and for devices: plain
// arithmetic. Persisted: never change.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PTC_ON_DEVICES_TOO __host__ __device__
#else
#define PTC_ON_DEVICES_TOO
#endif

namespace ptc::checksum_keys {

inline constexpr uint32_t kWordBytes = 4;
inline constexpr uint32_t kBlockWords = 1024;

/// Sebastiano Vigna's splitmix64 output function: a bijection of 64 bits.
PTC_ON_DEVICES_TOO constexpr uint64_t splitmix64_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
inline constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

/// T[lane][i]: the upper half of output 1024·lane + i of splitmix64 from one seed ("ptcfs102"),
/// made odd.
PTC_ON_DEVICES_TOO constexpr uint32_t key(uint32_t lane, uint64_t i) {
  const uint64_t state = 0x7074636673313032 + (lane * uint64_t{kBlockWords} + i + 1) * kGoldenGamma;
  return static_cast<uint32_t>(splitmix64_mix(state) >> 32) | 1;
}

/// M(lane, b): output b of splitmix64 from the lane's seed (digits of pi), made odd.
PTC_ON_DEVICES_TOO constexpr uint64_t mix(uint32_t lane, uint64_t block) {
  const uint64_t seed = lane == 0 ? 0x243f6a8885a308d3 : 0x13198a2e03707344;
  return splitmix64_mix(seed + (block + 1) * kGoldenGamma) | 1;
}

}  // namespace ptc::checksum_keys
