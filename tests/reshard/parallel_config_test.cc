#include "reshard/ptc/parallel_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

namespace ptc {
namespace {

TEST(RankOrder, TensorParallelVariesFastestByDefault) {
  const RankOrder order;
  const ParallelConfig sizes{.tp = 2, .pp = 3, .dp = 2, .ep = 2, .cp = 2};
  EXPECT_EQ(order.to_string(), "tp-cp-ep-dp-pp");
  EXPECT_EQ(order.coords(sizes, 1), (RankCoords{.tp = 1}));
  EXPECT_EQ(order.coords(sizes, 2), (RankCoords{.cp = 1}));
  EXPECT_EQ(order.coords(sizes, 4), (RankCoords{.ep = 1}));
  EXPECT_EQ(order.coords(sizes, 8), (RankCoords{.dp = 1}));
  EXPECT_EQ(order.coords(sizes, 16), (RankCoords{.pp = 1}));
  EXPECT_EQ(order.coords(sizes, 47), (RankCoords{.tp = 1, .pp = 2, .dp = 1, .ep = 1, .cp = 1}));
}

TEST(RankOrder, EveryOrderMapsRanksAndCoordinatesOneToOne) {
  std::array<std::string, 5> dims = {"cp", "dp", "ep", "pp", "tp"};
  const ParallelConfig sizes{.tp = 2, .pp = 3, .dp = 4, .ep = 1, .cp = 5};
  do {
    const std::string text =
        dims[0] + "-" + dims[1] + "-" + dims[2] + "-" + dims[3] + "-" + dims[4];
    const auto order = RankOrder::parse(text);
    ASSERT_TRUE(order.has_value()) << text;
    EXPECT_EQ(order.value().to_string(), text);
    for (uint64_t rank = 0; rank < sizes.world_size(); ++rank) {
      const RankCoords at = order.value().coords(sizes, rank);
      ASSERT_TRUE(at.tp < sizes.tp && at.pp < sizes.pp && at.dp < sizes.dp && at.cp < sizes.cp);
      ASSERT_EQ(order.value().global_rank(sizes, at), rank);
    }
  } while (std::next_permutation(dims.begin(), dims.end()));
}

TEST(RankOrder, RefusesWhatIsNotAllFiveDimensionsOnce) {
  for (const char* text :
       {"", "tp", "tp-pp-dp-ep", "tp-cp-ep-dp-tp", "tp-cp-ep-dp-pp-", "tp--ep-dp-pp",
        "tp-cp-ep-dp-mp", "TP-cp-ep-dp-pp", "-tp-cp-ep-dp-pp", "tp-cp-ep-dp-pp-tp"}) {
    const auto order = RankOrder::parse(text);
    ASSERT_FALSE(order.has_value()) << text;
    EXPECT_EQ(order.error().code(), Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace ptc
