// Cells by which copies of tensors are compared, against every element by itself.
#include "reshard/plan/common_cuts.h"

#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <random>
#include <set>

#include "tests/support/job_fixture.h"

namespace ptc {
namespace {

ImageLayout image_with(uint32_t tensor, const std::vector<Box>& boxes) {
  ImageLayout image;
  for (const Box& box : boxes)
    image.arrays.push_back({tensor, 0, {box.extent, {{box, Dims(box.axes())}}}});
  return image;
}

template <class Visit>
void for_each_element(const Box& box, Visit visit) {
  Dims at = box.offset;
  if (box.empty()) return;
  for (;;) {
    visit(std::vector<uint64_t>(at.begin(), at.end()));
    size_t axis = box.axes();
    while (axis-- > 0) {
      if (++at[axis] < box.offset[axis] + box.extent[axis]) break;
      at[axis] = box.offset[axis];
    }
    if (axis == SIZE_MAX) return;
  }
}

/// A tiling of the shape, by cutting boxes in two.
std::vector<Box> random_tiling(std::mt19937_64& random, const Shape& shape, size_t cuts) {
  std::vector<Box> boxes{Box::whole(shape)};
  for (size_t i = 0; i < cuts; ++i) {
    const size_t which = random() % boxes.size(), axis = random() % shape.size();
    if (boxes[which].extent[axis] < 2) continue;
    const uint64_t at = 1 + random() % (boxes[which].extent[axis] - 1);
    Box rest = boxes[which];
    rest.offset[axis] += at;
    rest.extent[axis] -= at;
    boxes[which].extent[axis] = at;
    boxes.push_back(rest);
  }
  return boxes;
}

TEST(CommonCutsTest, CellsAreThePartsThatBoxesHaveInCommon) {
  const uint64_t seed = testing::test_seed();
  std::cout << "PTC_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    Shape shape;
    for (size_t axis = 0; axis < 1 + random() % 3; ++axis) shape.push_back(1 + random() % 9);
    std::vector<std::vector<Box>> copies(1 + random() % 3);
    for (std::vector<Box>& copy : copies) {
      copy = random_tiling(random, shape, random() % 8);
      if (random() % 3 == 0) copy.erase(copy.begin() + random() % copy.size());  // it is lost
      copy.push_back({Dims(shape.size()), Dims(shape.size())});                  // and one is empty
    }
    std::vector<ImageLayout> images;
    for (const std::vector<Box>& copy : copies) images.push_back(image_with(7, copy));
    std::vector<const ImageLayout*> layouts;
    for (const ImageLayout& image : images) layouts.push_back(&image);
    const CommonCuts cuts = CommonCuts::between(layouts);

    // Of each element: which boxes have it.
    std::map<std::vector<uint64_t>, std::set<std::string>> holders;
    std::set<std::string> different;
    size_t held_twice = 0;
    for (const std::vector<Box>& copy : copies)
      for (const Box& box : copy) {
        if (box.empty() || !different.insert(box.to_string()).second) continue;
        for_each_element(box, [&](const std::vector<uint64_t>& at) {
          held_twice += !holders[at].empty();
          holders[at].insert(box.to_string());
        });
      }
    if (held_twice == 0) {
      EXPECT_TRUE(cuts.empty()) << "boxes that lie side by side are not cut";
      continue;
    }
    ASSERT_FALSE(cuts.empty());
    std::set<std::vector<uint64_t>> in_cells;
    for (const Box& cell : cuts.of(7)) {
      ASSERT_FALSE(cell.empty());
      std::set<std::set<std::string>> of_cell;
      for_each_element(cell, [&](const std::vector<uint64_t>& at) {
        EXPECT_TRUE(in_cells.insert(at).second) << "two cells have it";
        ASSERT_TRUE(holders.contains(at)) << "no box has it";
        of_cell.insert(holders[at]);
      });
      EXPECT_EQ(of_cell.size(), 1u) << cell.to_string() << " crosses an edge of a box";
    }
    EXPECT_EQ(in_cells.size(), holders.size());
    for (const std::vector<Box>& copy : copies)
      for (const Box& box : copy) {
        uint64_t elements = 0;
        for (const Box* cell : cuts.of(7, box)) elements += cell->volume();
        EXPECT_EQ(elements, box.volume());
      }
    EXPECT_TRUE(cuts.of(8, Box::whole(shape)).empty());
  }
}

TEST(CommonCutsTest, RowsBesideAWholeCopyAreTheCells) {
  std::vector<Box> rows;
  for (uint64_t i = 0; i < 1024; ++i) rows.push_back({{i * 2, 0}, {2, 512}});
  const ImageLayout shards = image_with(0, rows), whole = image_with(0, {{{0, 0}, {2048, 512}}});
  EXPECT_TRUE(CommonCuts::between({&shards, &shards}).empty());
  const CommonCuts cuts = CommonCuts::between({&whole, &shards});
  EXPECT_EQ(cuts.of(0), rows);
  const std::vector<const Box*> one = cuts.of(0, rows[5]);
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(*one.front(), rows[5]);
  EXPECT_EQ(cuts.of(0, {{0, 0}, {2048, 512}}).size(), rows.size());
  EXPECT_TRUE(cuts.of(0, {{0, 0}, {3, 512}}).empty()) << "no cells fill it";
  EXPECT_TRUE(cuts.of(0, {{0}, {2}}).empty()) << "as a damaged request may ask";
  EXPECT_TRUE(CommonCuts::between({&whole, &shards}, rows.size() - 1).empty());
  EXPECT_FALSE(CommonCuts::between({&whole, &shards}, rows.size()).empty());
}

TEST(CommonCutsTest, OfScalars) {
  const ImageLayout one = image_with(0, {{{}, {}}});
  EXPECT_TRUE(CommonCuts::between({&one, &one}).empty());
}

}  // namespace
}  // namespace ptc
