#include "reshard/ptc/slicing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ptc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ResolvedCut cut_of(std::vector<ResolvedCut::Part> parts) { return {.parts = std::move(parts)}; }
ResolvedCut vocabulary(uint64_t multiple, bool pad_single_rank = false) {
  ResolvedCut cut = cut_of({{}});
  cut.vocab_multiple = multiple;
  cut.pad_single_rank = pad_single_rank;
  return cut;
}
std::string error_of(const ResolvedCut& cut, uint64_t extent, uint32_t ranks) {
  const auto slice = slice_axis(cut, extent, 0, ranks);
  return slice ? "accepted" : slice.error().message();
}

TEST(SliceAxis, EqualParts) {
  const AxisSlice slice = slice_axis(cut_of({{}}), 12, 2, 4).value();
  EXPECT_EQ(slice.local_extent, 3u);
  EXPECT_THAT(slice.segments, ElementsAre(AxisSegment{6, 0, 3}));
  EXPECT_THAT(error_of(cut_of({{}}), 10, 4),
              HasSubstr("length 10 of axis 0 is not divisible by tp = 4"));
}

TEST(SliceAxis, WholeHeadsOnly) {
  EXPECT_THAT(slice_axis(cut_of({{.heads = 6}}), 18, 1, 3).value().segments,
              ElementsAre(AxisSegment{6, 0, 6}));
  EXPECT_THAT(error_of(cut_of({{.heads = 25}}), 1600, 2),
              HasSubstr("the 25 heads on axis 0 (length 1600) are not divisible by tp = 2"));
  EXPECT_THAT(error_of(cut_of({{.heads = 7}}), 16, 7), HasSubstr("not divisible into 7 heads"));
  EXPECT_THAT(error_of(cut_of({{.heads = 2}}), 16, 4), HasSubstr("fewer than tp = 4"));
}

TEST(SliceAxis, NeighboursShareAHead) {
  const ResolvedCut cut = cut_of({{.heads = 2, .share = true}});
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const AxisSlice slice = slice_axis(cut, 10, rank, 4).value();
    EXPECT_EQ(slice.local_extent, 5u);
    EXPECT_THAT(slice.segments, ElementsAre(AxisSegment{rank / 2 * uint64_t{5}, 0, 5}));
  }
  EXPECT_THAT(error_of(cut_of({{.heads = 3, .share = true}}), 9, 4),
              HasSubstr("cannot share the 3 heads"));
}

TEST(SliceAxis, EachHeadIsCutOverItsRanks) {
  const ResolvedCut cut = cut_of({{.heads = 2, .split = true}});
  for (uint32_t ranks : {1, 2, 4, 8})
    for (uint32_t rank = 0; rank < ranks; ++rank)
      EXPECT_THAT(slice_axis(cut, 24, rank, ranks).value().segments,
                  ElementsAre(AxisSegment{rank * uint64_t{24} / ranks, 0, uint64_t{24} / ranks}));
  EXPECT_THAT(error_of(cut_of({{.heads = 3, .split = true}}), 36, 4),
              HasSubstr("cannot share the 3 heads"));
  EXPECT_THAT(error_of(cut, 20, 8), HasSubstr("(length 20) cannot be cut over tp = 8 ranks"));
}

TEST(SliceAxis, FusedPartsAreCutOneByOne) {
  const ResolvedCut qkv = cut_of({{.size = 4, .heads = 4},
                                  {.size = 2, .heads = 2, .share = true},
                                  {.size = 2, .heads = 2, .share = true}});
  const AxisSlice slice = slice_axis(qkv, 24, 3, 4).value();  // head size 3
  EXPECT_EQ(slice.local_extent, 9u);
  EXPECT_THAT(slice.segments,
              ElementsAre(AxisSegment{9, 0, 3}, AxisSegment{15, 3, 3}, AxisSegment{21, 6, 3}));
  EXPECT_THAT(error_of(cut_of({{}, {}, {}}), 10, 2), HasSubstr("not divisible into its 3 parts"));
}

TEST(SliceAxis, WhatRanksShareIsOneStretchOnEachOfThem) {
  const ResolvedCut qkv = cut_of({{.size = 2, .heads = 2},
                                  {.size = 1, .heads = 1, .share = true},
                                  {.size = 1, .heads = 1, .share = true}});
  EXPECT_THAT(slice_axis(qkv, 8, 0, 2).value().segments,
              ElementsAre(AxisSegment{0, 0, 2}, AxisSegment{4, 2, 2}, AxisSegment{6, 4, 2}));
  // Its query lies right before the key, but is its own.
  EXPECT_THAT(slice_axis(qkv, 8, 1, 2).value().segments,
              ElementsAre(AxisSegment{2, 0, 2}, AxisSegment{4, 2, 2}, AxisSegment{6, 4, 2}));
}

TEST(SliceAxis, APartOfSizeZeroIsNotThere) {
  EXPECT_THAT(slice_axis(cut_of({{.size = 0}, {.size = 1}}), 8, 1, 2).value().segments,
              ElementsAre(AxisSegment{4, 0, 4}));
  EXPECT_THAT(error_of(cut_of({{.size = 0}}), 8, 2), HasSubstr("no size"));
}

TEST(SliceAxis, AVocabularyIsPaddedOnTheLastRanks) {
  const ResolvedCut cut = vocabulary(4);
  EXPECT_THAT(slice_axis(cut, 17, 0, 3).value().segments, ElementsAre(AxisSegment{0, 0, 8}));
  const AxisSlice last = slice_axis(cut, 17, 2, 3).value();
  EXPECT_EQ(last.local_extent, 8u);
  EXPECT_THAT(last.segments, ElementsAre(AxisSegment{16, 0, 1}));
  const AxisSlice empty = slice_axis(cut, 3, 2, 3).value();
  EXPECT_EQ(empty.local_extent, 4u);
  EXPECT_THAT(empty.segments, IsEmpty());
  EXPECT_EQ(slice_axis(cut, 17, 0, 1).value().local_extent, 17u);
  EXPECT_EQ(slice_axis(vocabulary(4, true), 17, 0, 1).value().local_extent, 20u);
}

TEST(SliceAxis, CutsStayOnBlocks) {
  ResolvedCut cut = cut_of({{}});
  cut.block = 4;
  EXPECT_TRUE(slice_axis(cut, 16, 1, 4).has_value());
  EXPECT_THAT(error_of(cut, 12, 2), HasSubstr("off its blocks of 4 elements"));
}

TEST(GlobalExtent, InvertsTheSlice) {
  for (const ResolvedCut& original :
       {cut_of({{}}), cut_of({{.heads = 12}}), cut_of({{.heads = 2, .share = true}}),
        cut_of({{.heads = 2, .split = true}}),
        cut_of({{.size = 12, .heads = 12},
                {.size = 2, .heads = 2, .share = true},
                {.size = 2, .heads = 2, .share = true}}),
        cut_of({{.heads = 12}, {.heads = 12}, {.heads = 12}}),
        cut_of({{.size = 0}, {.size = 1}})}) {
    for (uint32_t ranks : {1, 2, 4, 6, 12}) {
      const uint64_t extent = 12 * 16 * 3;
      const auto slice = slice_axis(original, extent, 0, ranks);
      if (!slice) continue;
      ResolvedCut cut = original;
      EXPECT_EQ(global_extent(cut, slice.value().local_extent, ranks, 0).value(), extent);
    }
  }
  ResolvedCut cut = cut_of({{.size = 1}, {.size = 2}});
  EXPECT_FALSE(global_extent(cut, UINT64_MAX, 2, 0).has_value());
}

struct Padding {
  uint64_t vocab;  // 0: not known
  uint64_t local;
  uint32_t ranks;
  uint64_t extent;
  uint64_t multiple;
  bool pad_single_rank;
};

TEST(GlobalExtent, FindsThePaddingOfAVocabulary) {
  for (const Padding& each : {
           Padding{1000, 512, 2, 1000, 128, false},   // the rule's multiple
           Padding{1000, 500, 2, 1000, 1, false},     // divisible without padding
           Padding{1000, 1000, 1, 1000, 128, false},  // one rank, no padding
           Padding{1000, 1024, 1, 1000, 128, true},   // one rank, padded
           Padding{1000, 1008, 1, 1000, 16, true},    // by a smaller power of two
           Padding{1000, 1017, 1, 1017, 128, false},  // no padding explains it
           Padding{1000, 334, 3, 1000, 2, false},     // by one row or two
           Padding{0, 512, 2, 1024, 128, false},      // not known: all rows count
           Padding{0, 500, 2, 1000, 1, false},
           Padding{0, 333, 3, 999, 1, false},
       }) {
    ResolvedCut cut = vocabulary(128);
    const auto extent = global_extent(cut, each.local, each.ranks, each.vocab);
    ASSERT_TRUE(extent.has_value()) << extent.error().message();
    EXPECT_EQ(extent.value(), each.extent);
    EXPECT_EQ(cut.vocab_multiple, each.multiple);
    EXPECT_EQ(cut.pad_single_rank, each.pad_single_rank);
    EXPECT_EQ(slice_axis(cut, each.extent, 0, each.ranks).value().local_extent, each.local);
  }
  ResolvedCut cut = vocabulary(128);
  const auto wrong = global_extent(cut, 1000, 2, 1000);  // the whole vocabulary on both
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().message(), HasSubstr("hold 2000 rows on axis 0, which is not"));
}

TEST(GlobalExtent, AnUnpaddedSingleRankOverridesARuleThatPads) {
  ResolvedCut cut = vocabulary(128, true);
  EXPECT_EQ(global_extent(cut, 1000, 1, 0).value(), 1000u);
  EXPECT_FALSE(cut.pad_single_rank);
}

TEST(SliceExperts, ContiguousAndEven) {
  EXPECT_THAT(slice_experts(8, 1, 4).value().segments, ElementsAre(AxisSegment{2, 0, 2}));
  EXPECT_FALSE(slice_experts(6, 0, 4).has_value());
}

TEST(SliceOfBlocks, FollowsTheWeight) {
  const AxisSlice weight = slice_axis(cut_of({{}}), 1024, 1, 4).value();
  const AxisSlice scales = slice_of_blocks(weight, 1024, 128).value();
  EXPECT_EQ(scales.local_extent, 2u);
  EXPECT_THAT(scales.segments, ElementsAre(AxisSegment{2, 0, 2}));
  EXPECT_EQ(slice_of_blocks(AxisSlice::whole(576), 576, 128).value().local_extent, 5u);
  EXPECT_FALSE(slice_of_blocks(slice_axis(cut_of({{}}), 384, 0, 2).value(), 384, 128).has_value());
}

TEST(UnitOf, WordsAndGroups) {
  for (uint64_t bits = 1; bits < 8; ++bits) {
    const AxisUnit unit = unit_of(96, 96 * bits / 32).value();
    EXPECT_EQ(unit.elements * bits, unit.kept * 32) << bits;
  }
  // Of a group's power of two, and of any length, the last group short or not.
  for (uint64_t group = 1; group <= 256; group *= 2) {
    for (uint64_t length = 1; length < 1200; ++length) {
      const uint64_t groups = (length + group - 1) / group;
      const auto unit = unit_of(length, groups);
      ASSERT_TRUE(unit.has_value()) << length << " in groups of " << group;
      if (groups > 1) {
        EXPECT_EQ(unit->elements, group) << length;
      } else {
        EXPECT_GE(unit->elements, length);
      }
      EXPECT_EQ(unit->kept, 1u);
    }
  }
  EXPECT_FALSE(unit_of(96, 5).has_value());  // of 20
  EXPECT_FALSE(unit_of(96, 97).has_value());
  EXPECT_FALSE(unit_of(96, 0).has_value());
}

TEST(SliceOfUnits, CutsThroughNone) {
  const AxisSlice weight = slice_axis(cut_of({{}}), 192, 1, 2).value();
  EXPECT_THAT(slice_of_units(weight, 192, {32, 3}).value().segments,
              ElementsAre(AxisSegment{9, 0, 9}));
  EXPECT_EQ(slice_of_units(weight, 192, {32, 3}).value().local_extent, 9u);
  EXPECT_FALSE(slice_of_units(weight, 192, {64, 1}).has_value());
  // The last group may be short, but only at the end.
  const AxisSlice end{40, {{128, 0, 40}}}, middle{64, {{128, 0, 40}, {0, 40, 24}}};
  EXPECT_THAT(slice_of_units(end, 168, {64, 1}).value().segments,
              ElementsAre(AxisSegment{2, 0, 1}));
  EXPECT_FALSE(slice_of_units(middle, 168, {64, 1}).has_value());
}

TEST(Product, CombinesTheAxes) {
  const AxisSlice rows{4, {{0, 0, 2}, {6, 2, 2}}};
  const AxisSlice columns{3, {{3, 0, 3}}};
  const SubTensor part = product({rows, columns});
  EXPECT_EQ(part.local_shape, (Shape{4, 3}));
  EXPECT_THAT(part.pieces,
              ElementsAre(Piece{Box{{0, 3}, {2, 3}}, {0, 0}}, Piece{Box{{6, 3}, {2, 3}}, {2, 0}}));
  EXPECT_EQ(product({}).local_shape, Shape{});
  EXPECT_EQ(product({}).pieces.size(), 1u);
}

TEST(CutAxis, NothingHeldLeavesNoPieces) {
  SubTensor part = SubTensor::whole({4, 4});
  cut_axis(part, 0, AxisSlice{2, {}});
  EXPECT_EQ(part.local_shape, (Shape{2, 4}));
  EXPECT_THAT(part.pieces, IsEmpty());
}

}  // namespace
}  // namespace ptc
