// Megatron's .idx: magic | u64 1 | u8 dtype | u64 S | u64 D | i32 length[S] | i64 place[S] | i64
// bound[D].
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace ptc {

constexpr std::string_view kMegatronMagic("MMIDIDX\0\0", 9);
constexpr uint64_t kMegatronHeadBytes = 34;

/// Bytes of a token; 0: no such type.
constexpr uint64_t megatron_item_bytes(uint8_t dtype) {
  constexpr std::array<uint64_t, 9> kBytes = {0, 1, 1, 2, 4, 8, 8, 4, 2};
  return dtype < kBytes.size() ? kBytes[dtype] : 0;
}

}  // namespace ptc
