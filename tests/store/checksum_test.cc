#include "store/tensor/checksum.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "expect_error.h"

namespace ptc {
namespace {

std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

uint64_t splitmix64(uint64_t seed, uint64_t output) {
  uint64_t x = seed + (output + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// The formula of checksum.h, word by word, in its own words.
Checksum slow_checksum(std::span<const std::byte> bytes) {
  constexpr uint64_t kTables = 0x7074636673313032;
  constexpr uint64_t kMix[2] = {0x243f6a8885a308d3, 0x13198a2e03707344};
  Checksum sum;
  for (uint64_t p = 0; 4 * p < bytes.size(); ++p) {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + 4 * p, std::min<size_t>(4, bytes.size() - 4 * p));
    for (uint64_t lane = 0; lane < 2; ++lane) {
      uint64_t key = (splitmix64(kTables, lane * 1024 + p % 1024) >> 32) | 1;
      uint64_t mix = splitmix64(kMix[lane], p / 1024) | 1;
      sum.lane[lane] += mix * (key * word);
    }
  }
  return sum;
}

TEST(Checksum, IsTheDocumentedFormula) {
  for (size_t size : {0, 1, 3, 4, 5, 4095, 4096, 4097, 20000, 100003}) {
    std::vector<std::byte> bytes = random_bytes(size, size);
    EXPECT_EQ(checksum_of_run(bytes, 0), slow_checksum(bytes)) << size;
  }
}

TEST(Checksum, NeverChanges) {  // persisted
  std::vector<std::byte> bytes(10000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  EXPECT_EQ(checksum_of_run(bytes, 0).to_hex(), "5b57b673241503c46fd7a74c68e8a1ec");
}

TEST(Checksum, DoesNotDependOnThePartitionOrTheOrder) {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::byte> bytes = random_bytes(1 + random() % 30000, random());
    Checksum expected = checksum_of_run(bytes, 0);
    std::vector<std::pair<size_t, size_t>> runs;
    uint64_t longest = 1 + random() % (trial % 2 == 0 ? 9 : 9000);
    for (size_t at = 0; at < bytes.size();) {
      size_t count = std::min<size_t>(1 + random() % longest, bytes.size() - at);
      runs.emplace_back(at, count);
      at += count;
    }
    std::shuffle(runs.begin(), runs.end(), random);
    Checksum sum;
    for (auto [at, count] : runs) sum += checksum_of_run(std::span(bytes).subspan(at, count), at);
    EXPECT_EQ(sum, expected) << "trial " << trial;
  }
}

TEST(Checksum, EveryChangedWordIsFound) {
  std::vector<std::byte> bytes = random_bytes(40000, 1);
  Checksum before = checksum_of_run(bytes, 0);
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    size_t at = random() % bytes.size();
    std::byte old = bytes[at];
    bytes[at] ^= static_cast<std::byte>(1 << random() % 8);
    Checksum after = checksum_of_run(bytes, 0);
    EXPECT_NE(after.lane[0], before.lane[0]);
    EXPECT_NE(after.lane[1], before.lane[1]);
    bytes[at] = old;
  }
}

TEST(Checksum, SwapsAndPairsOfSignFlipsAreFound) {
  std::vector<std::byte> bytes = random_bytes(40000, 4);
  Checksum before = checksum_of_run(bytes, 0);
  std::mt19937_64 random(5);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<std::byte> changed = bytes;
    size_t a = random() % 10000, b = trial % 2 == 0 ? random() % 10000 : (a + 1024) % 10000;
    if (a == b) continue;
    for (size_t k = 0; k < 4; ++k) std::swap(changed[4 * a + k], changed[4 * b + k]);
    if (changed != bytes) {
      EXPECT_NE(checksum_of_run(changed, 0), before);
    }
    changed = bytes;
    changed[4 * a + 3] ^= std::byte{0x80};
    changed[4 * b + 3] ^= std::byte{0x80};
    EXPECT_NE(checksum_of_run(changed, 0), before);
  }
}

TEST(Checksum, OfSubTensorsAddsUpToTheWhole) {
  Shape shape{10, 9, 7};
  std::vector<std::byte> bytes = random_bytes(10 * 9 * 7 * 2, 6);
  Checksum whole = checksum_of_run(bytes, 0);
  EXPECT_EQ(checksum_of_sub_tensor(SubTensor::whole(shape), shape, DType::kBF16, bytes).value(),
            whole);
  Checksum sum;
  Box corner{{3, 2, 1}, {4, 5, 5}};
  std::vector<Box> parts = subtract(Box::whole(shape), corner);
  parts.push_back(corner);
  for (const Box& part : parts) {
    // A local array with a row of padding, which must not count.
    Shape local_shape = part.extent;
    local_shape[0] += 1;
    std::vector<std::byte> local(Box::whole(local_shape).volume() * 2, std::byte{0xEE});
    size_t to = 0;
    for (uint64_t x = 0; x < part.extent[0]; ++x)
      for (uint64_t y = 0; y < part.extent[1]; ++y)
        for (uint64_t z = 0; z < 2 * part.extent[2]; ++z)
          local[to++] =
              bytes[((part.offset[0] + x) * 9 + part.offset[1] + y) * 14 + 2 * part.offset[2] + z];
    SubTensor sub{local_shape, {Piece{part, {0, 0, 0}}}};
    auto part_sum = checksum_of_sub_tensor(sub, shape, DType::kBF16, local);
    ASSERT_TRUE(is_ok(part_sum));
    sum += part_sum.value();
    local.pop_back();
    EXPECT_TRUE(has_error(checksum_of_sub_tensor(sub, shape, DType::kBF16, local),
                          Code::kInvalidArgument, "bytes are there"));
  }
  EXPECT_EQ(sum, whole);
}

TEST(Checksum, SubTensorOutsideTheTensorIsRefused) {
  std::vector<std::byte> bytes(8);
  SubTensor sub{{4}, {Piece{Box{{6}, {4}}, {0}}}};
  EXPECT_TRUE(
      has_error(checksum_of_sub_tensor(sub, {8}, DType::kF16, bytes), Code::kInvalidArgument));
}

TEST(Checksum, HexGoesBothWays) {
  Checksum sum{{0x0123456789abcdef, 0xfedcba9876543210}};
  EXPECT_EQ(sum.to_hex(), "0123456789abcdeffedcba9876543210");
  EXPECT_EQ(Checksum::from_hex(sum.to_hex()).value(), sum);
  for (const char* bad :
       {"", "0123", "0123456789abcdeffedcba987654321g", "0123456789ABCDEFfedcba9876543210"})
    EXPECT_TRUE(has_error(Checksum::from_hex(bad), Code::kInvalidArgument)) << bad;
}

TEST(Checksum, SpeedIsRecorded) {
  std::vector<std::byte> bytes = random_bytes(64 << 20, 8);
  double best = 0;
  for (int trial = 0; trial < 5; ++trial) {
    auto begin = std::chrono::steady_clock::now();
    Checksum sum = checksum_of_run(bytes, 0);
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    EXPECT_NE(sum, Checksum{});
    best = std::max(best, static_cast<double>(bytes.size()) / seconds.count() / 1e9);
  }
  RecordProperty("gigabytes_per_second", std::to_string(best));
  std::printf("checksum: %.1f GB/s\n", best);
}

}  // namespace
}  // namespace ptc
