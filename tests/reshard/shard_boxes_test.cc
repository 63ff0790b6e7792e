#include "reshard/checkpoint/shard_boxes.h"

#include <algorithm>
#include <random>

#include "tests/store/expect_error.h"
#include "tests/store/small_stack.h"

namespace ptc {
namespace {

Box box(Dims offset, Dims extent) { return {offset, extent}; }

TEST(UnionOfBoxesTest, OfAGrid) {
  auto whole = union_of_boxes(
      {box({2, 0}, {2, 3}), box({0, 3}, {2, 5}), box({0, 0}, {2, 3}), box({2, 3}, {2, 5})});
  ASSERT_TRUE(is_ok(whole));
  EXPECT_EQ(whole.value(), box({0, 0}, {4, 8}));
  EXPECT_EQ(union_of_boxes({box({}, {})}).value(), box({}, {}));
  EXPECT_EQ(union_of_boxes({box({3}, {2}), box({5}, {0}), box({3}, {2})}).value(), box({3}, {2}))
      << "copies count once";
  EXPECT_EQ(union_of_boxes({box({0, 4}, {0, 4})}).value(), box({0, 4}, {0, 4}));
}

TEST(UnionOfBoxesTest, OfUnevenCuts) {
  // One row cut in three, the next in two, and a column beside both.
  auto whole = union_of_boxes({box({0, 0}, {1, 2}), box({0, 2}, {1, 2}), box({0, 4}, {1, 2}),
                               box({1, 0}, {3, 5}), box({1, 5}, {3, 1}), box({0, 6}, {4, 2})});
  ASSERT_TRUE(is_ok(whole));
  EXPECT_EQ(whole.value(), box({0, 0}, {4, 8}));
}

TEST(UnionOfBoxesTest, RefusesGapsAndOverlaps) {
  auto refused = [](std::vector<Box> boxes, std::string_view why) {
    return has_error(union_of_boxes(std::move(boxes)), Code::kInvalidArgument, why);
  };
  EXPECT_TRUE(
      refused({box({0, 0}, {2, 8}), box({4, 0}, {2, 8})}, "nothing holds [2:4, 0:8] of it"));
  EXPECT_TRUE(
      refused({box({0, 0}, {2, 8}), box({2, 0}, {2, 4})}, "nothing holds [2:4, 4:8] of it"));
  EXPECT_TRUE(refused({box({0, 0}, {2, 8}), box({2, 0}, {2, 2}), box({2, 2}, {2, 2})},
                      "nothing holds [2:4, 4:8] of it"));
  EXPECT_TRUE(refused({box({0, 0}, {3, 8}), box({2, 0}, {2, 8})}, "overlap"));
  EXPECT_TRUE(refused({box({0, 0}, {2, 2}), box({0, 0}, {4, 4})}, "overlap"));
  EXPECT_TRUE(refused({box({0}, {2}), box({0, 2}, {2, 2})}, "its parts have 1 axes and 2"));
  EXPECT_TRUE(
      refused({box({0, 0}, {uint64_t{1} << 40, 1}), box({0, uint64_t{1} << 40}, {1, 1})}, ""));
}

TEST(UnionOfBoxesTest, OfBoxesThatWindAroundOne) {
  EXPECT_EQ(union_of_boxes({box({0, 0}, {1, 2}), box({0, 2}, {2, 1}), box({2, 1}, {1, 2}),
                            box({1, 0}, {2, 1}), box({1, 1}, {1, 1})})
                .value(),
            box({0, 0}, {3, 3}));
  EXPECT_TRUE(has_error(union_of_boxes({box({0, 0}, {1, 2}), box({0, 2}, {2, 1}),
                                        box({2, 1}, {1, 2}), box({1, 0}, {2, 1})}),
                        Code::kInvalidArgument, "nothing holds 1 of its 9 elements"));
}

TEST(UnionOfBoxesTest, EachCutWithinTheOneBefore) {
  constexpr uint64_t kCuts = 2'000;
  std::vector<Box> boxes;  // a row, then a column of the rest, then a row of the rest …
  Box rest = box({0, 0}, {kCuts, kCuts});
  for (uint64_t i = 0; rest.extent[0] > 1 && rest.extent[1] > 1; ++i) {
    Box cut = rest;
    cut.extent[i % 2] = 1;
    boxes.push_back(cut);
    ++rest.offset[i % 2];
    --rest.extent[i % 2];
  }
  boxes.push_back(rest);
  on_small_stack([&] {
    EXPECT_EQ(union_of_boxes(boxes).value(), box({0, 0}, {kCuts, kCuts}));
    Box& last = boxes.back();
    last.extent[0] = 2;
    EXPECT_FALSE(union_of_boxes(boxes).has_value());
  });
}

TEST(UnionOfBoxesTest, OfManyInAnyOrder) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    std::vector<Box> boxes{box({5, 7, 9}, {64, 64, 64})};  // cut again and again
    for (int cut = 0; cut < 40; ++cut) {
      const size_t which = random() % boxes.size(), axis = random() % 3;
      if (boxes[which].extent[axis] < 2) continue;
      const uint64_t at = 1 + random() % (boxes[which].extent[axis] - 1);
      Box rest = boxes[which];
      rest.offset[axis] += at;
      rest.extent[axis] -= at;
      boxes[which].extent[axis] = at;
      boxes.push_back(rest);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    auto whole = union_of_boxes(boxes);
    ASSERT_TRUE(is_ok(whole));
    EXPECT_EQ(whole.value(), box({5, 7, 9}, {64, 64, 64}));
    boxes.pop_back();
    if (boxes.size() > 1) {
      auto less = union_of_boxes(boxes);
      EXPECT_TRUE(!less || less.value() != whole.value());
    }
  }
}

TEST(PartOfBoxTest, IsWhereTheRankHoldsIt) {
  const SubTensor lower{{4, 8}, {{box({4, 0}, {4, 8}), {0, 0}}}};  // rows 4 to 8
  auto part = part_of_box(lower, box({4, 0}, {4, 8}), box({6, 0}, {2, 8}));
  ASSERT_TRUE(is_ok(part));
  EXPECT_EQ(part.value(), box_alone(box({6, 0}, {2, 8})));
  EXPECT_TRUE(has_error(
      part_of_box(lower, box({0, 0}, {4, 8}), box({2, 0}, {2, 8})), Code::kInvalidArgument,
      "it was saved as [2:4, 0:8] of the whole tensor, but this rank holds [4:8, 0:8]"));
  // Fused: rows 0 to 2 and 4 to 6, behind each other.
  const SubTensor fused{{4, 8}, {{box({0, 0}, {2, 8}), {0, 0}}, {box({4, 0}, {2, 8}), {2, 0}}}};
  EXPECT_TRUE(has_error(part_of_box(fused, box({0, 0}, {4, 8}), box({0, 0}, {4, 8})),
                        Code::kInvalidArgument, "it was saved as [0:4, 0:8] of the whole tensor"));
}

}  // namespace
}  // namespace ptc
