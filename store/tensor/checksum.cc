#include "store/tensor/checksum.h"

#include <algorithm>
#include <array>
#include <bit>

#include "store/tensor/checksum_keys.h"
#include "store/tensor/strided_copy.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "store/base/json.h"
#endif

namespace ptc {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

using checksum_keys::kBlockWords, checksum_keys::kWordBytes, checksum_keys::mix;

/// A 32-bit word at any address, of any type.
typedef uint32_t __attribute__((aligned(1), may_alias)) AnyWord;

using Table = std::array<uint32_t, kBlockWords>;
constexpr Table make_table(uint32_t lane) {
  Table table{};
  for (uint32_t i = 0; i < kBlockWords; ++i) table[i] = checksum_keys::key(lane, i);
  return table;
}
alignas(64) constexpr Table kTables[2] = {make_table(0), make_table(1)};

struct BlockSum {
  uint64_t lane[2];
};

/// Σ keys[i] · words[i] for both lanes.
using SumWords = BlockSum (*)(const AnyWord* words, const uint32_t* keys0, const uint32_t* keys1,
                              size_t count);

BlockSum sum_words_plain(const AnyWord* words, const uint32_t* keys0, const uint32_t* keys1,
                         size_t count) {
  BlockSum sum{{0, 0}};
  for (size_t i = 0; i < count; ++i) {
    uint64_t word = words[i];
    sum.lane[0] += word * keys0[i];
    sum.lane[1] += word * keys1[i];
  }
  return sum;
}

#if defined(__x86_64__)
// By hand, since GCC 12 makes shuffles between the words of the loop above, at half the speed of
// memory. _mm256_mul_epu32 multiplies the words at even places; a shift brings the odd ones there.
// The far prefetch doubles the rate from memory, since the hardware's own stops at each page.
__attribute__((target("avx2"))) BlockSum sum_words_avx2(const AnyWord* words, const uint32_t* keys0,
                                                        const uint32_t* keys1, size_t count) {
  constexpr size_t kStep = 8;
  constexpr uintptr_t kPrefetchBytes = 4096;
  __m256i even0 = _mm256_setzero_si256(), odd0 = even0, even1 = even0, odd1 = even0;
  size_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    _mm_prefetch(
        reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(words + i) + kPrefetchBytes),
        _MM_HINT_T0);
    __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(words + i));
    __m256i key0 = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(keys0 + i));
    __m256i key1 = _mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(keys1 + i));
    even0 = _mm256_add_epi64(even0, _mm256_mul_epu32(word, key0));
    even1 = _mm256_add_epi64(even1, _mm256_mul_epu32(word, key1));
    word = _mm256_srli_epi64(word, 32);
    odd0 = _mm256_add_epi64(odd0, _mm256_mul_epu32(word, _mm256_srli_epi64(key0, 32)));
    odd1 = _mm256_add_epi64(odd1, _mm256_mul_epu32(word, _mm256_srli_epi64(key1, 32)));
  }
  BlockSum sum = sum_words_plain(words + i, keys0 + i, keys1 + i, count - i);
  alignas(32) uint64_t parts[2][4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts[0]), _mm256_add_epi64(even0, odd0));
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts[1]), _mm256_add_epi64(even1, odd1));
  for (size_t lane = 0; lane < 2; ++lane)
    for (uint64_t part : parts[lane]) sum.lane[lane] += part;
  return sum;
}
#endif

SumWords choose_sum_words() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return sum_words_avx2;
#endif
  return sum_words_plain;
}

void add_block_sum(Checksum& sum, uint64_t block, const BlockSum& block_sum) {
  for (uint32_t lane = 0; lane < 2; ++lane)
    sum.lane[lane] += mix(lane, block) * block_sum.lane[lane];
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
  static const SumWords sum_words = choose_sum_words();
  Checksum sum;
  const std::byte* at = bytes.data();
  size_t left = bytes.size();
  uint64_t index = logical_offset / kWordBytes;
  if (size_t first = logical_offset % kWordBytes; first != 0 && left > 0) {
    size_t count = std::min<size_t>(kWordBytes - first, left);
    add_part_of_word(sum, index, first, at, count);
    at += count;
    left -= count;
    ++index;
  }
  while (left >= kWordBytes) {
    uint64_t i = index % kBlockWords;
    size_t count = std::min<size_t>(kBlockWords - i, left / kWordBytes);
    add_block_sum(
        sum, index / kBlockWords,
        sum_words(reinterpret_cast<const AnyWord*>(at), &kTables[0][i], &kTables[1][i], count));
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
    PTC_TRY(auto copy, make_strided_copy(array_at(local, 0), piece.local_offset, {0, global_shape},
                                         piece.global.offset, piece.global.extent, element_bits));
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
    return invalid_argument("{} is not a checksum of 32 hexadecimal digits",
                            quoted(text.substr(0, 40)));
  return sum;
}

}  // namespace ptc
