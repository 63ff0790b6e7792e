#include "store/tensor/checksum.h"

#include <array>
#include <bit>

#include "store/tensor/strided_copy.h"

// The compiler makes the inner loop for each vector width and the loader chooses. The sanitizers'
// runtime is not up yet when it does.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PTC_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PTC_VECTOR_CLONES
#endif

namespace ptc {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr size_t kWordBytes = 4;
constexpr size_t kBlockWords = 1024;

/// A 32-bit word at any address, of any type.
typedef uint32_t __attribute__((aligned(1), may_alias)) AnyWord;

/// Sebastiano Vigna's splitmix64 output function: a bijection of 64 bits.
constexpr uint64_t splitmix64_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}
constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

// Persisted: never change. T[lane][i] is the upper half of output 1024·lane + i of splitmix64 from
// this seed, made odd; M(lane, b) is output b of splitmix64 from the lane's seed, made odd.
constexpr uint64_t kTableSeed = 0x7074636673313032;  // "ptcfs102"
constexpr uint64_t kMixSeeds[2] = {0x243f6a8885a308d3, 0x13198a2e03707344};  // digits of pi

using Table = std::array<uint32_t, kBlockWords>;
constexpr Table make_table(uint64_t lane) {
  Table table{};
  for (uint64_t i = 0; i < kBlockWords; ++i) {
    uint64_t state = kTableSeed + (lane * kBlockWords + i + 1) * kGoldenGamma;
    table[i] = static_cast<uint32_t>(splitmix64_mix(state) >> 32) | 1;
  }
  return table;
}
alignas(64) constexpr Table kTables[2] = {make_table(0), make_table(1)};

uint64_t mix(size_t lane, uint64_t block) {
  return splitmix64_mix(kMixSeeds[lane] + (block + 1) * kGoldenGamma) | 1;
}

struct BlockSum {
  uint64_t lane[2];
};

/// Σ keys[i] · words[i] for both lanes.
PTC_VECTOR_CLONES
BlockSum sum_words(const AnyWord* words, const uint32_t* keys0, const uint32_t* keys1,
                   size_t count) {
  uint64_t sum0 = 0, sum1 = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t word = words[i];
    sum0 += word * keys0[i];
    sum1 += word * keys1[i];
  }
  return {{sum0, sum1}};
}

void add_block_sum(Checksum& sum, uint64_t block, const BlockSum& block_sum) {
  for (size_t lane = 0; lane < 2; ++lane) sum.lane[lane] += mix(lane, block) * block_sum.lane[lane];
}

/// Adds the `count` bytes from byte `first` on of word `index`; the word's other bytes count as 0.
void add_part_of_word(Checksum& sum, uint64_t index, size_t first, const std::byte* bytes,
                      size_t count) {
  uint64_t word = 0;
  for (size_t k = 0; k < count; ++k)
    word |= std::to_integer<uint64_t>(bytes[k]) << (8 * (first + k));
  uint64_t i = index % kBlockWords;
  add_block_sum(sum, index / kBlockWords, {{word * kTables[0][i], word * kTables[1][i]}});
}

}  // namespace

Checksum checksum_of_run(std::span<const std::byte> bytes, uint64_t logical_offset) {
  Checksum sum;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  uint64_t index = logical_offset / kWordBytes;
  if (size_t first = logical_offset % kWordBytes; first != 0 && left > 0) {
    size_t count = std::min(kWordBytes - first, left);
    add_part_of_word(sum, index, first, at, count);
    at += count;
    left -= count;
    ++index;
  }
  while (left >= kWordBytes) {
    uint64_t i = index % kBlockWords;
    size_t count = std::min<size_t>(kBlockWords - i, left / kWordBytes);
    add_block_sum(sum, index / kBlockWords,
                  sum_words(reinterpret_cast<const AnyWord*>(at), &kTables[0][i], &kTables[1][i],
                            count));
    at += count * kWordBytes;
    left -= count * kWordBytes;
    index += count;
  }
  if (left > 0) add_part_of_word(sum, index, 0, at, left);
  return sum;
}

Result<Checksum> checksum_of_sub_tensor(const SubTensor& local, const Shape& global_shape,
                                        DType dtype, std::span<const std::byte> local_bytes) {
  uint32_t element_bits = dtype_bits(dtype);
  PTC_TRY(auto local_bits, num_bits(local.local_shape, element_bits));
  if (local_bits % 8 != 0 || local_bits / 8 != local_bytes.size()) {
    return invalid_argument("a {} array of shape {} has {} bits, but {} bytes are there",
                            dtype_name(dtype), local.local_shape.to_string(), local_bits,
                            local_bytes.size());
  }
  Checksum sum;
  for (const Piece& piece : local.pieces) {
    PTC_TRY(auto copy, make_strided_copy({0, local.local_shape}, piece.local_offset,
                                         {0, global_shape}, piece.global.offset,
                                         piece.global.extent, element_bits));
    for_each_run(copy, [&](uint64_t source, uint64_t target, uint64_t bytes) {
      sum += checksum_of_run(local_bytes.subspan(source, bytes), target);
    });
  }
  return sum;
}

std::string Checksum::to_hex() const { return fmt::format("{:016x}{:016x}", lane[0], lane[1]); }

Result<Checksum> Checksum::from_hex(std::string_view text) {
  Checksum sum;
  bool good = text.size() == 32;
  for (size_t i = 0; good && i < text.size(); ++i) {
    size_t digit = std::string_view("0123456789abcdef").find(text[i]);
    good = digit != std::string_view::npos;
    if (good) sum.lane[i / 16] = sum.lane[i / 16] << 4 | digit;
  }
  if (!good)
    return invalid_argument("'{}' is not a checksum of 32 hexadecimal digits", text.substr(0, 40));
  return sum;
}

}  // namespace ptc
