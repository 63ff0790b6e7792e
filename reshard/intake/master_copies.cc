#include "reshard/intake/master_copies.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptc {
namespace {

/// Rounded to the nearest, as torch does; of two as near the even one.
uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

bool is_master_of(std::span<const float> master, DType dtype, std::span<const std::byte> weight) {
  for (size_t i = 0; i < master.size(); ++i) {
    if (dtype == DType::kF32) {
      float value;
      std::memcpy(&value, weight.data() + 4 * i, sizeof value);
      if (value != master[i] && !(std::isnan(value) && std::isnan(master[i]))) return false;
    } else if (dtype == DType::kBF16) {
      uint16_t value;
      std::memcpy(&value, weight.data() + 2 * i, sizeof value);
      const bool both_nan =
          std::isnan(master[i]) && (value & 0x7F80) == 0x7F80 && (value & 0x7F) != 0;
      if (value != to_bf16(master[i]) && !both_nan) return false;
    }
  }
  return true;
}

}  // namespace ptc
