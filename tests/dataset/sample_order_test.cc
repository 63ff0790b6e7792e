#include "dataset/order/sample_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace ptc {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint64_t kSizes[] = {1,    2,    3,     4,     5,     7,      16,
                               17,   64,   255,   1009,  4095,  4096,   4097,
                               4099, 5000, 65521, 65536, 65537, 100003, 1000000};

Shuffle shuffle_of(std::string_view text) { return Shuffle::parse(text).value(); }

std::vector<uint64_t> all_of(const SampleOrder& order) {
  std::vector<uint64_t> samples(order.samples());
  for (uint64_t p = 0; p < samples.size(); ++p) samples[p] = order.at(p);
  return samples;
}

void expect_bijection(const std::vector<uint64_t>& samples) {
  std::vector<bool> seen(samples.size());
  for (uint64_t sample : samples) {
    ASSERT_LT(sample, samples.size());
    ASSERT_FALSE(seen[sample]) << "twice: " << sample;
    seen[sample] = true;
  }
}

TEST(SampleOrder, GlobalIsABijection) {
  for (uint64_t size : kSizes) {
    for (uint64_t seed : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
      SCOPED_TRACE(fmt::format("N={} seed={}", size, seed));
      expect_bijection(all_of(SampleOrder(size, Shuffle{}, seed, seed % 5)));
    }
  }
}

TEST(SampleOrder, BlocksAreABijection) {
  for (uint64_t size : kSizes) {
    for (uint64_t block : {1, 2, 3, 10, 100, 256, 4096, 99999999}) {
      SCOPED_TRACE(fmt::format("N={} block:{}", size, block));
      const Shuffle shuffle{.kind = ShuffleKind::kBlock, .block = block};
      expect_bijection(all_of(SampleOrder(size, shuffle, size + block, 1)));
    }
  }
}

TEST(SampleOrder, NoneIsTheSourceOrder) {
  const SampleOrder order(1000, shuffle_of("none"), 7, 3);
  for (uint64_t p = 0; p < 1000; ++p) EXPECT_EQ(order.at(p), p);
}

TEST(SampleOrder, PermutationsHaveInverses) {
  for (uint64_t size : kSizes) {
    const FeistelPermutation permutation(size, 99);
    for (uint64_t i = 0; i < size; i += 1 + size / 1000) {
      EXPECT_EQ(permutation.index_of(permutation.at(i)), i);
    }
  }
}

// What a run of an earlier ptcfs began, a later one goes on with: these never change.
TEST(SampleOrder, GoldenValuesOfThisVersion) {
  ASSERT_EQ(kOrderVersion, "feistel8-1");
  auto first = [](uint64_t size, const char* shuffle, uint64_t seed, uint64_t epoch) {
    const SampleOrder order(size, shuffle_of(shuffle), seed, epoch);
    return std::vector<uint64_t>{order.at(0), order.at(1), order.at(2), order.at(size / 2),
                                 order.at(size - 1)};
  };
  EXPECT_THAT(first(20, "global", 0, 0), ElementsAre(1, 0, 9, 3, 7));
  EXPECT_THAT(first(4095, "global", 1, 0), ElementsAre(1520, 284, 316, 4038, 1601));
  EXPECT_THAT(first(4096, "global", 1, 0), ElementsAre(2342, 1795, 2846, 59, 1705));
  EXPECT_THAT(first(1000003, "global", 42, 7), ElementsAre(630549, 421656, 542120, 356230, 927852));
  EXPECT_THAT(first(100'000'000, "global", 42, 0),
              ElementsAre(18418261, 12812640, 51687829, 59552764, 23303640));
  EXPECT_THAT(first(uint64_t{1} << 62, "global", 42, 0),
              ElementsAre(3039048986891975973, 1011428018419023423, 1682802970674190296,
                          2136574108614169436, 2190182995703969383));
  EXPECT_THAT(first(1000, "block:16", 3, 0), ElementsAre(277, 769, 311, 517, 248));
  EXPECT_THAT(first(1000003, "block:100", 3, 2),
              ElementsAre(942924, 733809, 406287, 813984, 257498));
}

TEST(SampleOrder, SeedsAndEpochsGiveOtherPermutations) {
  for (const char* shuffle : {"global", "block:8"}) {
    for (uint64_t size : {uint64_t{100}, uint64_t{5000}, uint64_t{100000}}) {
      std::set<std::vector<uint64_t>> heads;
      for (uint64_t seed = 0; seed < 20; ++seed) {
        for (uint64_t epoch = 0; epoch < 20; ++epoch) {
          const SampleOrder order(size, shuffle_of(shuffle), seed, epoch);
          std::vector<uint64_t> head;
          for (uint64_t p = 0; p < 12; ++p) head.push_back(order.at(p));
          heads.insert(head);
        }
      }
      EXPECT_EQ(heads.size(), 400u) << shuffle << " " << size;
    }
  }
}

/// (χ² − k) / √(2k) for k degrees of freedom: about normal.
double chi_score(const std::vector<uint64_t>& counts, double expected) {
  double chi = 0;
  for (uint64_t count : counts) {
    chi += (static_cast<double>(count) - expected) * (static_cast<double>(count) - expected) /
           expected;
  }
  const auto freedom = static_cast<double>(counts.size() - 1);
  return (chi - freedom) / std::sqrt(2 * freedom);
}

TEST(SampleOrder, EachSampleComesAnywhere) {
  for (uint64_t size : {uint64_t{64}, uint64_t{4096}, uint64_t{4099}, uint64_t{1000000}}) {
    // One position over many seeds: which 64th of the samples it shows.
    for (uint64_t position : {uint64_t{0}, size / 3, size - 1}) {
      std::vector<uint64_t> counts(64);
      for (uint64_t seed = 0; seed < 6400; ++seed) {
        ++counts[SampleOrder(size, Shuffle{}, seed, 0).at(position) * 64 / size];
      }
      EXPECT_LT(std::abs(chi_score(counts, 100)), 5) << "N=" << size << " position " << position;
    }
  }
}

TEST(SampleOrder, NeighboursLeadAnywhere) {
  // Pairs of neighbours in one order fall into 32 × 32 fields alike.
  for (uint64_t size : {uint64_t{4096 * 8}, uint64_t{1000000}}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      const SampleOrder order(size, Shuffle{}, seed, 0);
      std::vector<uint64_t> fields(32 * 32), steps(64);
      for (uint64_t p = 0; p + 1 < size; ++p) {
        const uint64_t a = order.at(p), b = order.at(p + 1);
        ++fields[a * 32 / size * 32 + b * 32 / size];
        ++steps[(b + size - a) % size * 64 / size];
      }
      EXPECT_LT(chi_score(fields, static_cast<double>(size) / 1024), 5) << size;
      EXPECT_LT(chi_score(steps, static_cast<double>(size) / 64), 5) << size;
    }
  }
}

TEST(SampleOrder, AsFewFixedPointsAsByChance) {
  uint64_t fixed = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const SampleOrder order(4096, Shuffle{}, seed, 0);
    for (uint64_t p = 0; p < 4096; ++p) fixed += order.at(p) == p;
  }
  EXPECT_GT(fixed, 60u);  // 100 ± 10 are expected
  EXPECT_LT(fixed, 140u);
}

TEST(SampleOrder, AWindowDrawsOnFewBlocks) {
  constexpr uint64_t kBlock = 50, kSize = 40 * kBlock * SampleOrder::kWindowBlocks + 17;
  const SampleOrder order(kSize, shuffle_of("block:50"), 5, 0);
  constexpr uint64_t kWindow = kBlock * SampleOrder::kWindowBlocks;
  std::set<uint64_t> windows_of_first_blocks;
  for (uint64_t begin = 0; begin < kSize; begin += kWindow) {
    std::set<uint64_t> blocks;
    uint64_t neighbours = 0;
    const uint64_t end = std::min(begin + kWindow, kSize);
    for (uint64_t p = begin; p < end; ++p) {
      blocks.insert(order.at(p) / kBlock);
      neighbours += p > begin && order.at(p) == order.at(p - 1) + 1;
      if (order.at(p) < kWindow) windows_of_first_blocks.insert(begin);
    }
    EXPECT_LE(blocks.size(), SampleOrder::kWindowBlocks + 1);
    EXPECT_LT(neighbours, kWindow / 20);  // the samples of a block come mixed with others
  }
  EXPECT_GT(windows_of_first_blocks.size(), 6u);  // blocks go far
}

TEST(Shuffle, Names) {
  for (const char* name : {"global", "none", "block:1", "block:4294967296"}) {
    EXPECT_EQ(shuffle_of(name).name(), name);
  }
  for (const char* name : {"", "Global", "block", "block:", "block:0", "block:08", "block:-1",
                           "block:1x", "block:4294967297", "block:99999999999999999999"}) {
    EXPECT_FALSE(Shuffle::parse(name)) << name;
  }
  EXPECT_THAT(Shuffle::parse("block:0").error().message(), HasSubstr("from 1 to 4294967296"));
}

}  // namespace
}  // namespace ptc
