#include "store/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace ptc {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // bits reversed

using Table = std::array<std::array<uint32_t, 256>, 8>;

/// table[k][b]: the register after byte b and k zero bytes.
constexpr Table make_table() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    table[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xFF];
  return table;
}
constexpr Table kTable = make_table();

#if defined(__x86_64__)

/// What `kZeros` zero bytes do to a register: a linear map, by its four bytes.
template <size_t kZeros>
struct Shift {
  std::array<std::array<uint32_t, 256>, 4> table{};

  Shift() {
    std::array<uint32_t, 32> of_bit{};
    for (size_t bit = 0; bit < 32; ++bit) {
      uint32_t crc = uint32_t{1} << bit;
      for (size_t i = 0; i < kZeros; ++i) crc = (crc >> 8) ^ kTable[0][crc & 0xFF];
      of_bit[bit] = crc;
    }
    for (size_t at = 0; at < 4; ++at)
      for (size_t byte = 0; byte < 256; ++byte)
        for (size_t bit = 0; bit < 8; ++bit)
          if (byte >> bit & 1) table[at][byte] ^= of_bit[at * 8 + bit];
  }
  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 0xFF] ^ table[1][crc >> 8 & 0xFF] ^ table[2][crc >> 16 & 0xFF] ^
           table[3][crc >> 24];
  }
};

uint64_t load(const std::byte* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

/// As long as there are three blocks: the instruction takes three cycles and can start in each.
template <size_t kBlock>
__attribute__((target("sse4.2"))) uint32_t three_at_a_time(const std::byte*& at, size_t& left,
                                                           uint32_t crc) {
  static const Shift<kBlock> shift;
  while (left >= 3 * kBlock) {
    uint64_t a = crc, b = 0, c = 0;
    for (const std::byte* end = at + kBlock; at != end; at += 8) {
      a = _mm_crc32_u64(a, load(at));
      b = _mm_crc32_u64(b, load(at + kBlock));
      c = _mm_crc32_u64(c, load(at + 2 * kBlock));
    }
    crc = shift(shift(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^
          static_cast<uint32_t>(c);
    at += 2 * kBlock;
    left -= 3 * kBlock;
  }
  return crc;
}

__attribute__((target("sse4.2"))) uint32_t by_instruction(std::span<const std::byte> bytes,
                                                          uint32_t crc) {
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  crc = three_at_a_time<4096>(at, left, crc);
  crc = three_at_a_time<256>(at, left, crc);
  uint64_t wide = crc;
  for (; left >= 8; at += 8, left -= 8) wide = _mm_crc32_u64(wide, load(at));
  crc = static_cast<uint32_t>(wide);
  for (; left > 0; ++at, --left) crc = _mm_crc32_u8(crc, static_cast<uint8_t>(*at));
  return crc;
}

#endif

}  // namespace

uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t before) {
  uint32_t crc = ~before;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  auto byte = [&](size_t i) { return static_cast<uint32_t>(at[i]); };
  for (; left >= 8; at += 8, left -= 8) {
    crc ^= byte(0) | byte(1) << 8 | byte(2) << 16 | byte(3) << 24;
    crc = kTable[7][crc & 0xFF] ^ kTable[6][crc >> 8 & 0xFF] ^ kTable[5][crc >> 16 & 0xFF] ^
          kTable[4][crc >> 24] ^ kTable[3][byte(4)] ^ kTable[2][byte(5)] ^ kTable[1][byte(6)] ^
          kTable[0][byte(7)];
  }
  for (; left > 0; ++at, --left) crc = (crc >> 8) ^ kTable[0][(crc ^ byte(0)) & 0xFF];
  return ~crc;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~by_instruction(bytes, ~before);
#endif
  return crc32c_by_table(bytes, before);
}

}  // namespace ptc
