#include "store/tensor/strided_copy.h"

#include <random>
#include <vector>

#include "expect_error.h"

namespace ptc {
namespace {

std::vector<std::byte> random_bytes(size_t count, std::mt19937_64& random) {
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Element by element, straight from the definition.
void slow_copy(const std::vector<std::byte>& source, const ArrayAt& from, const Dims& source_index,
               std::vector<std::byte>& target, const ArrayAt& to, const Dims& target_index,
               const Dims& extent, uint64_t element_bytes) {
  uint64_t volume = Box{source_index, extent}.volume();
  for (uint64_t i = 0; i < volume; ++i) {
    uint64_t rest = i, s = 0, t = 0, s_stride = 1, t_stride = 1;
    for (size_t axis = extent.size(); axis-- > 0;) {
      uint64_t at = rest % extent[axis];
      rest /= extent[axis];
      s += (source_index[axis] + at) * s_stride;
      t += (target_index[axis] + at) * t_stride;
      s_stride *= from.shape[axis];
      t_stride *= to.shape[axis];
    }
    for (uint64_t k = 0; k < element_bytes; ++k)
      target[to.byte_offset + t * element_bytes + k] =
          source[from.byte_offset + s * element_bytes + k];
  }
}

struct Case {
  ArrayAt source, target;
  Dims source_index, target_index, extent;
  uint32_t element_bytes;
};

Case random_case(std::mt19937_64& random) {
  Case c;
  size_t axes = random() % 5;
  c.element_bytes = std::array{1, 2, 4, 8, 3}[random() % 5];
  c.source.byte_offset = random() % 20;
  c.target.byte_offset = random() % 20;
  for (size_t axis = 0; axis < axes; ++axis) {
    uint64_t extent = random() % 12 == 0 ? 0 : 1 + random() % 6;
    auto slack = [&] { return random() % 2 == 0 ? 0 : random() % 3; };  // 0: axes merge
    uint64_t s_before = slack(), t_before = slack();
    c.extent.push_back(extent);
    c.source_index.push_back(s_before);
    c.target_index.push_back(t_before);
    c.source.shape.push_back(s_before + extent + slack());
    c.target.shape.push_back(t_before + extent + slack());
  }
  return c;
}

uint64_t image_bytes(const ArrayAt& array, uint64_t element_bytes) {
  return array.byte_offset + Box::whole(array.shape).volume() * element_bytes;
}

TEST(StridedCopy, AgreesWithElementByElementInEveryWindow) {
  std::mt19937_64 random(11);
  for (int trial = 0; trial < 3000; ++trial) {
    Case c = random_case(random);
    auto made = make_strided_copy(c.source, c.source_index, c.target, c.target_index, c.extent,
                                  8 * c.element_bytes);
    ASSERT_TRUE(is_ok(made));
    const StridedCopy& copy = made.value();
    std::vector<std::byte> source = random_bytes(image_bytes(c.source, c.element_bytes), random);
    std::vector<std::byte> before = random_bytes(image_bytes(c.target, c.element_bytes), random);
    std::vector<std::byte> expected = before;
    slow_copy(source, c.source, c.source_index, expected, c.target, c.target_index, c.extent,
              c.element_bytes);
    EXPECT_EQ(copy.total_bytes(), Box({c.source_index, c.extent}).volume() * c.element_bytes);
    if (copy.total_bytes() > 0) {
      EXPECT_LE(copy.source_end(), source.size());
      EXPECT_LE(copy.target_end(), before.size());
    }

    std::vector<std::byte> whole = before;
    run_strided_copy(copy, source.data(), 0, UINT64_MAX, whole.data());
    EXPECT_EQ(whole, expected);

    uint64_t begin = random() % (before.size() + 1);
    uint64_t end = begin + random() % (before.size() + 1 - begin);
    std::vector<std::byte> window(before.begin() + static_cast<ptrdiff_t>(begin),
                                  before.begin() + static_cast<ptrdiff_t>(end));
    run_strided_copy(copy, source.data(), begin, end, window.data());
    EXPECT_TRUE(
        std::equal(window.begin(), window.end(), expected.begin() + static_cast<ptrdiff_t>(begin)))
        << "trial " << trial << " window " << begin << ":" << end;

    std::vector<std::byte> by_runs = before;
    uint64_t last_end = 0, bytes_seen = 0;
    for_each_run(copy, [&](uint64_t s, uint64_t t, uint64_t bytes) {
      EXPECT_GE(t, last_end);
      last_end = t + bytes;
      bytes_seen += bytes;
      std::copy_n(source.begin() + static_cast<ptrdiff_t>(s), bytes,
                  by_runs.begin() + static_cast<ptrdiff_t>(t));
    });
    EXPECT_EQ(by_runs, expected);
    EXPECT_EQ(bytes_seen, copy.total_bytes());
  }
}

TEST(StridedCopy, MergesWhatIsContiguousInBoth) {
  ArrayAt whole{0, {4, 5, 6}};
  StridedCopy same = make_strided_copy(whole, {0, 0, 0}, whole, {0, 0, 0}, {4, 5, 6}, 16).value();
  EXPECT_EQ(same.level_count, 0u);
  EXPECT_EQ(same.run_bytes, 240u);

  ArrayAt half{0, {4, 5, 3}};  // the last axis cut: one loop over 20 rows
  StridedCopy column = make_strided_copy(whole, {0, 0, 3}, half, {0, 0, 0}, {4, 5, 3}, 16).value();
  EXPECT_EQ(column.level_count, 1u);
  EXPECT_EQ(column.run_bytes, 6u);
  EXPECT_EQ(column.levels[0].count, 20u);
  EXPECT_EQ(column.source_offset, 6u);
  EXPECT_EQ(column.target_end(), 120u);
  EXPECT_EQ(column.source_end(), 240u);
}

TEST(StridedCopy, ScalarsAndEmptyBoxes) {
  StridedCopy scalar = make_strided_copy({8, {}}, {}, {16, {}}, {}, {}, 32).value();
  EXPECT_EQ(scalar.total_bytes(), 4u);
  EXPECT_EQ(scalar.source_offset, 8u);
  StridedCopy empty =
      make_strided_copy({0, {0, 5}}, {0, 0}, {7, {3, 5}}, {3, 0}, {0, 5}, 32).value();
  EXPECT_EQ(empty.total_bytes(), 0u);
  EXPECT_EQ(empty.target_end(), 7u);
  for_each_run(empty, [](uint64_t, uint64_t, uint64_t) { FAIL(); });
  run_strided_copy(empty, nullptr, 0, UINT64_MAX, nullptr);
}

TEST(StridedCopy, SubByteTypesNeedCutsAtWholeBytes) {
  ArrayAt array{0, {4, 6}};
  StridedCopy halves = make_strided_copy(array, {0, 2}, {0, {4, 2}}, {0, 0}, {4, 2}, 4).value();
  EXPECT_EQ(halves.run_bytes, 1u);
  EXPECT_EQ(halves.levels[0].source_stride, 3u);
  EXPECT_TRUE(has_error(make_strided_copy(array, {0, 1}, {0, {4, 2}}, {0, 0}, {4, 2}, 4),
                        Code::kInvalidArgument, "whole bytes"));
  EXPECT_TRUE(has_error(make_strided_copy({0, {4, 3}}, {1, 0}, {0, {1, 3}}, {0, 0}, {1, 3}, 4),
                        Code::kInvalidArgument, "whole bytes"));
  EXPECT_EQ(
      make_strided_copy({0, {4, 4}}, {1, 0}, {0, {2, 4}}, {0, 0}, {2, 4}, 6).value().run_bytes, 6u);
}

TEST(StridedCopy, RefusesWhatLeavesAnArray) {
  ArrayAt a{0, {4, 4}};
  EXPECT_TRUE(has_error(make_strided_copy(a, {0}, a, {0, 0}, {1, 1}, 8), Code::kInvalidArgument));
  EXPECT_TRUE(has_error(make_strided_copy(a, {1, 0}, a, {0, 0}, {4, 4}, 8), Code::kInvalidArgument,
                        "source"));
  EXPECT_TRUE(has_error(make_strided_copy(a, {0, 0}, a, {0, 5}, {1, 0}, 8), Code::kInvalidArgument,
                        "target"));
  EXPECT_TRUE(has_error(make_strided_copy(a, {0, UINT64_MAX}, a, {0, 0}, {1, 2}, 8),
                        Code::kInvalidArgument));
  ArrayAt huge{0, {uint64_t{1} << 62, 2}};
  EXPECT_TRUE(
      has_error(make_strided_copy(huge, {0, 0}, a, {0, 0}, {1, 1}, 32), Code::kInvalidArgument));
  ArrayAt far{UINT64_MAX - 3, {4, 4}};
  EXPECT_TRUE(has_error(make_strided_copy(far, {0, 0}, a, {0, 0}, {1, 1}, 8),
                        Code::kInvalidArgument, "beyond"));
}

TEST(StridedCopy, StartsFarIntoAVirtualFileWithoutWalking) {
  // 2⁴⁰ rows of 2 bytes: only division finds the window in time.
  ArrayAt source{0, {uint64_t{1} << 40, 4}}, target{0, {uint64_t{1} << 40, 1}};
  StridedCopy copy =
      make_strided_copy(source, {0, 1}, target, {0, 0}, {uint64_t{1} << 40, 1}, 16).value();
  uint64_t begin = (uint64_t{1} << 40) + 1, runs = 0;
  for_each_run(copy, begin, begin + 4096, [&](uint64_t s, uint64_t t, uint64_t bytes) {
    EXPECT_EQ(s / 8, t / 2);
    EXPECT_LE(bytes, 2u);
    ++runs;
  });
  EXPECT_EQ(runs, 2049u);
}

}  // namespace
}  // namespace ptc
