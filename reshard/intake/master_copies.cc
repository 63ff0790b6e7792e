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

uint16_t to_f16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
  if (size >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more
  if (size < 0x38800000)  // less than 2^-14: in steps of 2^-24
    return static_cast<uint16_t>(
        sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(std::bit_cast<float>(size), 24))));
  return static_cast<uint16_t>(sign | (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13);
}

bool is_not_a_number(uint16_t value, uint16_t exponent) {
  return (value & exponent) == exponent && (value & 0x7FFF & ~exponent) != 0;
}

}  // namespace

bool is_master_of(std::span<const float> master, DType dtype, std::span<const std::byte> weight) {
  for (size_t i = 0; i < master.size(); ++i) {
    if (dtype == DType::kF32) {
      float value;
      std::memcpy(&value, weight.data() + 4 * i, sizeof value);
      if (value != master[i] && !(std::isnan(value) && std::isnan(master[i]))) return false;
    } else if (dtype == DType::kBF16 || dtype == DType::kF16) {
      const bool is_bf16 = dtype == DType::kBF16;
      uint16_t value;
      std::memcpy(&value, weight.data() + 2 * i, sizeof value);
      const bool both_nan =
          std::isnan(master[i]) && is_not_a_number(value, is_bf16 ? 0x7F80 : 0x7C00);
      if (value != (is_bf16 ? to_bf16(master[i]) : to_f16(master[i])) && !both_nan) return false;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace ptc
