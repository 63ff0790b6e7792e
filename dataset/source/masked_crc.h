// The checksum of TFRecord: u64 length | u32 masked_crc(length) | data | u32 masked_crc(data).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

#include "store/base/crc32c.h"

namespace ptc {

constexpr uint64_t kTfrecordFrameBytes = 16;  // around the data

constexpr uint32_t mask_crc(uint32_t crc) { return std::rotr(crc, 15) + 0xa282ead8u; }
inline uint32_t masked_crc(std::span<const std::byte> bytes) { return mask_crc(crc32c(bytes)); }

}  // namespace ptc
