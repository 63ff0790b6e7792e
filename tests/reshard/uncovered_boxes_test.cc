// What of a local array no piece covers.
#include "reshard/intake/uncovered_boxes.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <random>
#include <vector>

namespace ptc {
namespace {

constexpr double kSoon = 60;  // seconds of a processor; n² takes many minutes

double own_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

/// An element's number in C order.
size_t number_of(const Dims& at, const Shape& shape) {
  size_t number = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) number = number * shape[axis] + at[axis];
  return number;
}

/// visit(element's place) of all in the box, some of which may lie outside the array.
template <class Visit>
void for_each_element(const Box& box, const Visit& visit) {
  if (box.empty()) return;
  Dims at = box.offset;
  for (;;) {
    visit(at);
    size_t axis = box.axes();
    while (axis > 0 && ++at[axis - 1] == box.offset[axis - 1] + box.extent[axis - 1]) {
      at[axis - 1] = box.offset[axis - 1];
      --axis;
    }
    if (axis == 0) return;
  }
}

struct Random {
  std::mt19937_64 engine;
  uint64_t below(uint64_t end) { return engine() % end; }
};

Piece piece_at(const Dims& offset, const Dims& extent) {
  return {{Dims(offset.size()), extent}, offset};
}

Piece any_piece(Random& random, const Shape& shape, uint64_t longest) {
  Dims offset, extent;
  for (const uint64_t size : shape) {
    offset.push_back(random.below(size));
    extent.push_back(std::min(random.below(longest), size - offset[offset.size() - 1]));
  }
  return piece_at(offset, extent);
}

/// By element how often the boxes have it.
std::vector<int> counted(const std::vector<Box>& boxes, const Shape& shape) {
  std::vector<int> counts(Box::whole(shape).volume());
  for (const Box& box : boxes)
    for_each_element(box, [&](const Dims& at) { ++counts[number_of(at, shape)]; });
  return counts;
}

std::vector<int> not_in_pieces(const std::vector<Piece>& pieces, const Shape& shape) {
  std::vector<int> uncovered(Box::whole(shape).volume(), 1);
  for (const Piece& piece : pieces)
    for_each_element({piece.local_offset, piece.global.extent},
                     [&](const Dims& at) { uncovered[number_of(at, shape)] = 0; });
  return uncovered;
}

TEST(UncoveredBoxes, AreWhatTheElementsSay) {
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random random{std::mt19937_64(seed)};
  const Shape shapes[] = {{1000}, {40, 50}, {1, 900}, {9, 11, 12}, {5, 6, 7, 5}, {}};
  for (int round = 0; round < 200; ++round) {
    const Shape& shape = shapes[random.below(std::size(shapes))];
    SubTensor part{shape, {}};
    const uint64_t longest = 1 + random.below(12), pieces = random.below(500);
    for (uint64_t i = 0; i < pieces; ++i) part.pieces.push_back(any_piece(random, shape, longest));
    const auto uncovered = uncovered_boxes(part);
    ASSERT_TRUE(uncovered.has_value()) << uncovered.error().message();
    ASSERT_EQ(counted(uncovered.value(), shape), not_in_pieces(part.pieces, shape)) << round;
    if (shape.empty()) continue;
    const uint64_t elements = Box::whole(shape).volume(), begin = random.below(elements + 1);
    part.flat = SubTensor::Flat{shape, begin};
    part.local_shape = Shape{random.below(elements + 3)};
    std::vector<int> behind = not_in_pieces(part.pieces, shape);
    behind.erase(behind.begin(), behind.begin() + static_cast<std::ptrdiff_t>(begin));
    std::vector<int> wanted = behind;
    wanted.resize(part.local_shape[0], 1);
    const auto runs = uncovered_boxes(part);
    ASSERT_TRUE(runs.has_value()) << runs.error().message();
    ASSERT_EQ(counted(runs.value(), part.local_shape), wanted) << round;
    // Of the same elements, and other axes.
    const uint64_t rows = 1 + random.below(9);
    part.local_shape = Shape{rows, random.below((elements - begin) / rows + 1)};
    wanted = behind;
    wanted.resize(Box::whole(part.local_shape).volume(), 1);
    const auto boxes = uncovered_boxes(part);
    ASSERT_TRUE(boxes.has_value()) << boxes.error().message();
    ASSERT_EQ(counted(boxes.value(), part.local_shape), wanted) << round;
  }
}

SubTensor grid(uint64_t rows, uint64_t columns, uint64_t left_out) {
  SubTensor part{Shape{rows * 3, columns * 5 + 7}, {}};
  for (uint64_t row = 0; row < rows; ++row)
    for (uint64_t column = 0; column < columns; ++column)
      if ((row * columns + column) % left_out != 1)
        part.pieces.push_back(piece_at({row * 3, column * 5}, {3, 5}));
  return part;
}

uint64_t volume_of(const std::vector<Box>& boxes) {
  uint64_t volume = 0;
  for (const Box& box : boxes) volume += box.volume();
  return volume;
}

TEST(UncoveredBoxes, OfManyPiecesAreFoundSoon) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 engine(seed);
  for (const auto& [rows, columns] :
       {std::pair<uint64_t, uint64_t>{447, 448}, {200'000, 1}, {1, 200'000}}) {
    SubTensor part = grid(rows, columns, 1000);
    ASSERT_GT(part.pieces.size(), 199'000u);
    std::shuffle(part.pieces.begin(), part.pieces.end(), engine);
    uint64_t covered = 0;
    for (const Piece& piece : part.pieces) covered += piece.global.volume();
    const double begin = own_seconds();
    const auto uncovered = uncovered_boxes(part);
    const double took = own_seconds() - begin;
    ASSERT_TRUE(uncovered.has_value()) << uncovered.error().message();
    EXPECT_EQ(volume_of(uncovered.value()), Box::whole(part.local_shape).volume() - covered);
    EXPECT_LT(took, kSoon);
    fmt::print("{}x{} pieces: {} boxes in {:.1f} s\n", rows, columns, uncovered.value().size(),
               took);
  }
}

/// What is left between those that cross each other is as many as a quarter of n².
TEST(UncoveredBoxes, TooManyAreAnErrorSoon) {
  constexpr uint64_t kCount = 100'000;
  SubTensor part{Shape{2 * kCount, 2 * kCount}, {}};
  for (uint64_t i = 0; i < kCount; ++i) {
    part.pieces.push_back(piece_at({2 * i, 0}, {1, 2 * kCount}));
    part.pieces.push_back(piece_at({0, 2 * i}, {2 * kCount, 1}));
  }
  const double begin = own_seconds();
  const auto uncovered = uncovered_boxes(part);
  EXPECT_LT(own_seconds() - begin, kSoon);
  ASSERT_TRUE(uncovered.has_error());
  EXPECT_EQ(uncovered.error().code(), Code::kInvalidArgument);
  EXPECT_EQ(uncovered.error().message(), "its 200000 pieces leave too many parts of it uncovered");
  // A column of a flat cut: as many runs as there are rows.
  const uint64_t rows = uint64_t{1} << 40;
  const SubTensor flat{
      Shape{2 * rows}, {piece_at({0, 0}, {rows, 1})}, SubTensor::Flat{{rows, 2}, 0}};
  const auto runs = uncovered_boxes(flat);
  ASSERT_TRUE(runs.has_error());
  EXPECT_EQ(runs.error().message(), "its 1 pieces leave too many parts of it uncovered");
}

}  // namespace
}  // namespace ptc
