// The best assignment against all there are.
#include "reshard/plan/assignment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace ptc {
namespace {

uint64_t sum_of(const std::vector<std::vector<uint64_t>>& values,
                const std::vector<size_t>& columns) {
  uint64_t sum = 0;
  for (size_t row = 0; row < values.size(); ++row) sum += values[row][columns[row]];
  return sum;
}

TEST(Assignment, IsTheBestOfAll) {
  const unsigned seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int run = 0; run < 300; ++run) {
    const size_t columns = 1 + random() % 7, rows = random() % (columns + 1);
    const uint64_t range = uint64_t{1} << (random() % 60);  // small ones: many ties
    std::vector<std::vector<uint64_t>> values(rows, std::vector<uint64_t>(columns));
    for (auto& row : values)
      for (uint64_t& value : row) value = random() % range;
    uint64_t best = 0;
    std::vector<size_t> order(columns);
    std::iota(order.begin(), order.end(), 0);
    do best = std::max(best, sum_of(values, order));
    while (std::next_permutation(order.begin(), order.end()));

    std::vector<size_t> assigned = best_assignment(values);
    ASSERT_EQ(assigned.size(), rows);
    EXPECT_EQ(sum_of(values, assigned), best);
    std::sort(assigned.begin(), assigned.end());
    EXPECT_EQ(std::adjacent_find(assigned.begin(), assigned.end()), assigned.end());
  }
}

TEST(Assignment, OfEqualOnesEachHasItsOwnNumber) {
  EXPECT_EQ(best_assignment(std::vector(3, std::vector<uint64_t>(5, 7))),
            (std::vector<size_t>{0, 1, 2}));
  EXPECT_EQ(best_assignment({{0, uint64_t{1} << 62}, {0, uint64_t{1} << 62}}),
            (std::vector<size_t>{0, 1}));
  // What is largest goes elsewhere where that is best for all together.
  EXPECT_EQ(best_assignment({{10, 9}, {9, 0}}), (std::vector<size_t>{1, 0}));
  EXPECT_TRUE(best_assignment({}).empty());
}

}  // namespace
}  // namespace ptc
