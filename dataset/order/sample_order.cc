#include "dataset/order/sample_order.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "store/base/json.h"

namespace ptc {
namespace {

// All constants here are part of kOrderVersion.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

/// SplitMix64's finalizer.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

/// The upper half of the product: x scaled to [0, range).
uint64_t scale(uint64_t x, uint64_t range) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(x) * range) >> 64);
}

/// In [0, range), by a key.
uint64_t round_value(uint64_t x, uint64_t key, uint64_t range) {
  uint64_t z = (x ^ key) * kGolden;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93;
  return scale(z, range);
}

uint64_t add(uint64_t a, uint64_t b, uint64_t modulus) {
  const uint64_t sum = a + b;
  return sum >= modulus ? sum - modulus : sum;
}
uint64_t subtract(uint64_t a, uint64_t b, uint64_t modulus) {
  return a >= b ? a - b : a + modulus - b;
}

uint64_t ceil_sqrt(uint64_t x) {
  auto root = static_cast<uint64_t>(std::sqrt(static_cast<double>(x)));
  while (root * root >= x && root > 0) --root;
  while (root * root < x) ++root;
  return root;
}

/// Fisher–Yates, without the bias of a plain remainder (Lemire).
std::vector<uint16_t> shuffled_table(uint64_t size, uint64_t key) {
  std::vector<uint16_t> table(size);
  for (uint64_t i = 0; i < size; ++i) table[i] = static_cast<uint16_t>(i);
  uint64_t state = key;
  auto below = [&](uint64_t range) {
    for (;;) {
      const uint64_t x = mix(state += kGolden);
      if (x * range >= -range % range) return scale(x, range);
    }
  };
  for (uint64_t left = size; left > 1; --left) std::swap(table[left - 1], table[below(left)]);
  return table;
}

enum Purpose : uint64_t { kOfSamples = 1, kOfBlocks = 2, kOfWindows = 3, kOfLastWindow = 4 };

uint64_t order_key(uint64_t seed, uint64_t epoch, Purpose purpose) {
  return mix(mix(mix(seed + kGolden) ^ epoch) + purpose * kGolden);
}

}  // namespace

std::string Shuffle::name() const {
  if (kind == ShuffleKind::kBlock) return fmt::format("block:{}", block);
  return kind == ShuffleKind::kNone ? "none" : "global";
}

std::optional<uint64_t> samples_after(std::string_view word, std::string_view text, uint64_t most) {
  if (!text.starts_with(word)) return std::nullopt;
  const std::string_view digits = text.substr(word.size());
  uint64_t samples = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), samples);
  const bool right = error == std::errc() && end == digits.data() + digits.size() &&
                     digits[0] != '0' && samples <= most;
  return right ? samples : 0;
}

Result<Shuffle> Shuffle::parse(std::string_view text) {
  if (text == "global") return Shuffle{};
  if (text == "none") return Shuffle{.kind = ShuffleKind::kNone};
  if (const auto block = samples_after("block:", text, kMaxBlock)) {
    if (*block > 0) return Shuffle{.kind = ShuffleKind::kBlock, .block = *block};
    return invalid_argument("the block of {} must be a whole number of samples from 1 to {}",
                            quoted(text), kMaxBlock);
  }
  return invalid_argument("must be \"global\", \"block:K\" (K samples a block) or \"none\"");
}

FeistelPermutation::FeistelPermutation(uint64_t size, uint64_t key)
    : size_(size), left_(std::max<uint64_t>(1, ceil_sqrt(size))) {
  right_ = std::max<uint64_t>(1, (size + left_ - 1) / left_);
  for (uint64_t& round : keys_) round = mix(key += kGolden);
}

uint64_t FeistelPermutation::at(uint64_t index, uint64_t tweak) const {
  do {
    uint64_t l = index / right_, r = index % right_;
    for (int round = 0; round < kRounds; round += 2) {
      l = add(l, round_value(r, keys_[round] + tweak, left_), left_);
      r = add(r, round_value(l, keys_[round + 1] + tweak, right_), right_);
    }
    index = l * right_ + r;
  } while (index >= size_);
  return index;
}

uint64_t FeistelPermutation::index_of(uint64_t image) const {
  do {
    uint64_t l = image / right_, r = image % right_;
    for (int round = kRounds - 2; round >= 0; round -= 2) {
      r = subtract(r, round_value(l, keys_[round + 1], right_), right_);
      l = subtract(l, round_value(r, keys_[round], left_), left_);
    }
    image = l * right_ + r;
  } while (image >= size_);
  return image;
}

SampleOrder::SampleOrder(uint64_t samples, const Shuffle& shuffle, uint64_t seed, uint64_t epoch)
    : samples_(samples), shuffle_(shuffle) {
  PTC_CHECK(samples <= kMaxSamples);
  if (shuffle.kind == ShuffleKind::kNone || samples == 0) return;
  const bool blocks = shuffle.kind == ShuffleKind::kBlock;
  const uint64_t block = blocks ? std::min(shuffle.block, samples) : 1;
  const uint64_t size = (samples - 1) / block + 1;
  const uint64_t key = order_key(seed, epoch, blocks ? kOfBlocks : kOfSamples);
  if (size < kTableBelow) {
    table_ = shuffled_table(size, key);
  } else {
    feistel_ = FeistelPermutation(size, key);
  }
  if (!blocks) return;

  shuffle_.block = block;
  const uint64_t place =
      table_.empty() ? feistel_.index_of(size - 1)
                     : static_cast<uint64_t>(std::find(table_.begin(), table_.end(), size - 1) -
                                             table_.begin());
  short_block_begin_ = place * block;
  short_block_end_ = short_block_begin_ + (samples - (size - 1) * block);
  const uint64_t window = std::min(block * kWindowBlocks, samples);
  window_ = FeistelPermutation(window, order_key(seed, epoch, kOfWindows));
  last_window_ = FeistelPermutation(samples % window, order_key(seed, epoch, kOfLastWindow));
}

uint64_t SampleOrder::in_window(uint64_t position) const {
  const uint64_t window = position / window_.size(), place = position % window_.size();
  const uint64_t begin = position - place;
  return begin + (samples_ - begin < window_.size() ? last_window_.at(place)
                                                    : window_.at(place, mix(window)));
}

uint64_t SampleOrder::at(uint64_t position) const {
  PTC_CHECK(position < samples_);
  if (shuffle_.kind == ShuffleKind::kNone) return position;
  if (shuffle_.kind == ShuffleKind::kGlobal) return permuted(position);
  const uint64_t block = shuffle_.block;
  uint64_t place = in_window(position);
  if (place < short_block_begin_) return permuted(place / block) * block + place % block;
  if (place < short_block_end_) return samples_ - short_block_end_ + place;
  place += block - (short_block_end_ - short_block_begin_);  // as if that block were whole
  return permuted(place / block) * block + place % block;
}

}  // namespace ptc
