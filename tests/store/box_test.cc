#include "store/tensor/box.h"

#include <random>

#include "expect_error.h"
#include "store/tensor/dtype.h"

namespace ptc {
namespace {

TEST(DType, NamesGoBothWays) {
  for (int i = 0; i <= static_cast<int>(DType::kF6E3M2); ++i) {
    auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(dtype_name(dtype)).value(), dtype);
  }
  EXPECT_EQ(dtype_name(DType::kF8E4M3Fnuz), "F8_E4M3FNUZ");
  EXPECT_EQ(dtype_bits(DType::kF4), 4u);
  EXPECT_EQ(dtype_bits(DType::kC64), 64u);
  EXPECT_TRUE(has_error(parse_dtype("bf16"), Code::kInvalidArgument, "unknown dtype 'bf16'"));
}

TEST(DType, NumPyNames) {
  EXPECT_EQ(dtype_of_npy_descr("<f4").value(), DType::kF32);
  EXPECT_EQ(dtype_of_npy_descr("=i8").value(), DType::kI64);
  EXPECT_EQ(dtype_of_npy_descr(">u1").value(), DType::kU8);
  EXPECT_EQ(dtype_of_npy_descr("|b1").value(), DType::kBool);
  EXPECT_EQ(dtype_of_npy_descr("<V2").value(), DType::kBF16);
  EXPECT_EQ(dtype_of_npy_descr("|V2").value(), DType::kBF16);
  EXPECT_TRUE(has_error(dtype_of_npy_descr(">f4"), Code::kInvalidArgument, "big-endian"));
  EXPECT_TRUE(has_error(dtype_of_npy_descr("|O"), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(dtype_of_npy_descr("|O8"), Code::kInvalidArgument, "Python objects"));
  EXPECT_TRUE(has_error(dtype_of_npy_descr("<U7"), Code::kInvalidArgument, "text"));
  EXPECT_TRUE(has_error(dtype_of_npy_descr("|V1"), Code::kInvalidArgument, "user.ptc.dtype"));
  for (const char* bad : {"", "<", "f4", "<c16", "<M8[ns]", "<f3", "<f4x"})
    EXPECT_TRUE(has_error(dtype_of_npy_descr(bad), Code::kInvalidArgument)) << bad;
}

TEST(Shape, CountsElements) {
  EXPECT_EQ(num_elements({}).value(), 1u);
  EXPECT_EQ(num_elements({3, 4}).value(), 12u);
  EXPECT_EQ(num_elements({3, 0, 4}).value(), 0u);
  EXPECT_TRUE(has_error(num_elements({UINT64_MAX, 2}), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(num_elements({0, UINT64_MAX, 2}), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(num_bits({uint64_t{1} << 60}, 32), Code::kInvalidArgument));
  EXPECT_EQ(num_bits({2, 3}, 6).value(), 36u);
}

TEST(Box, WritesItself) {
  EXPECT_EQ((Box{{0, 8}, {4, 8}}).to_string(), "[0:4, 8:16]");
  EXPECT_EQ(Dims({4, 8}).to_string(), "[4, 8]");
  EXPECT_EQ(Box{}.to_string(), "[]");
}

TEST(Box, ScalarsAndEmptyOnes) {
  EXPECT_EQ(Box{}.volume(), 1u);
  EXPECT_FALSE(Box{}.empty());
  EXPECT_EQ(intersect(Box{}, Box{}), Box{});
  EXPECT_TRUE(subtract(Box{}, Box{}).empty());
  Box none{{2}, {0}};
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(intersect(none, Box{{0}, {4}}), std::nullopt);
  EXPECT_EQ(subtract(Box{{0}, {4}}, none).size(), 1u);
  EXPECT_TRUE(subtract(none, Box{{0}, {4}}).empty());
}

bool contains(const Box& box, uint64_t x, uint64_t y, uint64_t z) {
  uint64_t at[3] = {x, y, z};
  for (size_t axis = 0; axis < 3; ++axis)
    if (at[axis] < box.offset[axis] || at[axis] >= box.offset[axis] + box.extent[axis])
      return false;
  return true;
}

TEST(Box, SetOperationsAgreeWithPointByPoint) {
  constexpr uint64_t kSide = 6;
  std::mt19937_64 random(7);
  auto random_box = [&] {
    Box box{Dims(3), Dims(3)};
    for (size_t axis = 0; axis < 3; ++axis) {
      box.offset[axis] = random() % kSide;
      box.extent[axis] = random() % (kSide - box.offset[axis] + 1);
    }
    return box;
  };
  for (int trial = 0; trial < 500; ++trial) {
    Box a = random_box(), b = random_box();
    std::optional<Box> common = intersect(a, b);
    std::vector<Box> rest = subtract(a, b);
    EXPECT_LE(rest.size(), 6u);
    for (uint64_t i = 0; i < kSide * kSide * kSide; ++i) {
      uint64_t x = i / (kSide * kSide), y = i / kSide % kSide, z = i % kSide;
      bool in_a = contains(a, x, y, z), in_b = contains(b, x, y, z);
      EXPECT_EQ(common && contains(*common, x, y, z), in_a && in_b);
      int times = 0;
      for (const Box& part : rest) times += contains(part, x, y, z) ? 1 : 0;
      EXPECT_EQ(times, in_a && !in_b ? 1 : 0) << a.to_string() << " - " << b.to_string();
    }
  }
}

}  // namespace
}  // namespace ptc
