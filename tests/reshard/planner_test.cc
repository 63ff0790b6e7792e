// The planner as a pure function: what is held, what is wanted, which bytes go where.
#include "reshard/plan/planner.h"

#include <gmock/gmock.h>

#include <random>

namespace ptc {
namespace {

using ::testing::IsEmpty;

/// An image with one array, a box of one tensor, behind a header of 16 bytes.
ImageLayout image(uint32_t node, const Box& box, uint64_t element_bytes, uint32_t tensor = 0) {
  ImageLayout layout;
  layout.node = node;
  layout.literals = std::string(16, 'h');
  layout.bytes = 16 + box.volume() * element_bytes;
  layout.arrays.push_back({tensor, 16, {box.extent, {{box, Dims(box.axes())}}}});
  return layout;
}
Box rows(uint64_t begin, uint64_t end, uint64_t columns) {
  return {{begin, 0}, {end - begin, columns}};
}
Box columns(uint64_t begin, uint64_t end, uint64_t row_count) {
  return {{0, begin}, {row_count, end - begin}};
}

std::vector<Transfer> transfers_of(const TransferPlan& plan, uint32_t target) {
  const SharedVector<Transfer> transfers = plan.transfers_of(target).value();
  return {transfers.begin(), transfers.end()};
}

TEST(Planner, IdentityIsEmpty) {
  std::vector<ImageLayout> held = {image(0, rows(0, 4, 8), 2), image(0, rows(4, 8, 8), 2)};
  SourceIndex source(held, {16});
  TransferPlan plan = plan_transfers(source, held).value();
  for (uint32_t i = 0; i < held.size(); ++i) {
    EXPECT_TRUE(plan.images[i].kept.has_value());
    EXPECT_THAT(transfers_of(plan, i), IsEmpty());
  }
  EXPECT_THAT(plan.pairs, IsEmpty());
  EXPECT_EQ(plan.totals.kept_bytes, plan.totals.total_bytes);
  EXPECT_EQ(plan.totals.moved_bytes + plan.totals.local_bytes + plan.totals.minimum_bytes, 0u);
}

TEST(Planner, ASourceImageIsOneTargetOfThoseThatAreEqual) {
  const ImageLayout one = image(0, rows(0, 4, 8), 2);
  const std::vector<ImageLayout> held = {one, image(0, rows(4, 8, 8), 2), one};
  const std::vector<ImageLayout> wanted = {one, one, one};
  const SourceIndex source(held, {16});
  const TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_EQ(plan.images[0].kept, 0u);
  EXPECT_EQ(plan.images[1].kept, 2u);
  EXPECT_FALSE(plan.images[2].kept.has_value());
  EXPECT_EQ(plan.totals.kept_images, 2u);
  EXPECT_EQ(plan.totals.kept_bytes, 2 * one.bytes);
  EXPECT_EQ(plan.totals.local_bytes, one.bytes - 16);
  EXPECT_EQ(plan.totals.moved_bytes, 0u);
}

TEST(Planner, WhatAFileHasTwiceComesOnce) {
  const std::vector<ImageLayout> held = {image(0, rows(0, 8, 4), 2)};
  ImageLayout twice = image(1, rows(0, 8, 4), 2);
  ArraySlot again = twice.arrays[0];
  again.byte_offset = twice.bytes;
  twice.arrays.push_back(again);
  twice.bytes += 64;
  const std::vector<ImageLayout> wanted = {twice};
  const SourceIndex source(held, {16});
  const TransferPlan plan = plan_transfers(source, wanted).value();
  const std::vector<Transfer> transfers = transfers_of(plan, 0);
  ASSERT_EQ(transfers.size(), 2u);
  EXPECT_EQ(transfers[0].source_image, 0u);
  EXPECT_EQ(transfers[1].source_image, held.size() + 0) << "of itself";
  EXPECT_EQ(transfers[1].copy.source_offset, 16u);
  EXPECT_EQ(transfers[1].copy.target_offset, 16u + 64);
  EXPECT_EQ(plan.totals.moved_bytes, 64u);
  EXPECT_EQ(plan.totals.minimum_bytes, 64u);
}

TEST(Planner, WhatIsInAnotherMemoryOfTheNodeIsCopiedAndNotKept) {
  const std::vector<ImageLayout> held = {image(0, rows(0, 8, 4), 2)};
  std::vector<ImageLayout> wanted = held;
  wanted[0].memory = NodeMemory::cuda(1);
  const SourceIndex source(held, {16});
  const TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_FALSE(plan.images[0].kept.has_value());
  EXPECT_EQ(plan.totals.local_bytes, 64u);
  EXPECT_EQ(plan.totals.moved_bytes + plan.totals.minimum_bytes, 0u);
  EXPECT_EQ(source.missing_on_node(0, 0, {rows(0, 8, 4)}), 0u);
  EXPECT_EQ(source.missing_in_memory(0, 0, NodeMemory::host(), {rows(0, 8, 4)}), 0u);
  EXPECT_EQ(source.missing_in_memory(0, 0, NodeMemory::cuda(1), {rows(0, 4, 4)}), 32u);
  const SourceIndex on_device(wanted, {16});
  EXPECT_TRUE(plan_transfers(on_device, wanted).value().images[0].kept.has_value());
}

TEST(Planner, SplittingRowsIsOneRunEach) {
  std::vector<ImageLayout> held = {image(0, rows(0, 8, 4), 2)};
  std::vector<ImageLayout> wanted = {image(0, rows(0, 4, 4), 2), image(0, rows(4, 8, 4), 2)};
  const SourceIndex source(held, {16});
  TransferPlan plan = plan_transfers(source, wanted).value();
  ASSERT_EQ(transfers_of(plan, 1).size(), 1u);
  const StridedCopy copy = transfers_of(plan, 1)[0].copy;
  EXPECT_EQ(copy.level_count, 0u);
  EXPECT_EQ(copy.run_bytes, 4u * 4 * 2);
  EXPECT_EQ(copy.source_offset, 16u + 4 * 4 * 2);
  EXPECT_EQ(copy.target_offset, 16u);
}

TEST(Planner, SplittingColumnsIsOneRunARow) {
  std::vector<ImageLayout> held = {image(0, rows(0, 8, 4), 2)};
  std::vector<ImageLayout> wanted = {image(0, columns(2, 4, 8), 2)};
  const SourceIndex source(held, {16});
  TransferPlan plan = plan_transfers(source, wanted).value();
  ASSERT_EQ(transfers_of(plan, 0).size(), 1u);
  const StridedCopy copy = transfers_of(plan, 0)[0].copy;
  ASSERT_EQ(copy.level_count, 1u);
  EXPECT_EQ(copy.levels[0].count, 8u);
  EXPECT_EQ(copy.run_bytes, 2u * 2);
}

TEST(Planner, OnlyTheMissingHalfCrossesTheNetwork) {
  // Node 0 holds the first half and shall hold all; node 1 holds the second half.
  std::vector<ImageLayout> held = {image(0, rows(0, 4, 4), 2), image(1, rows(4, 8, 4), 2)};
  std::vector<ImageLayout> wanted = {image(0, rows(0, 8, 4), 2)};
  const SourceIndex source(held, {16});
  TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_EQ(plan.totals.local_bytes, 32u);
  EXPECT_EQ(plan.totals.moved_bytes, 32u);
  EXPECT_EQ(plan.totals.minimum_bytes, 32u);
  ASSERT_EQ(plan.pairs.size(), 2u);
  EXPECT_EQ(plan.pairs[1].source_node, 1u);
  EXPECT_EQ(plan.pairs[1].bytes, 32u);
}

TEST(Planner, ItsOwnNodeFirstThenTheLeastAsked) {
  const Box all = rows(0, 8, 4);
  std::vector<ImageLayout> held = {image(1, all, 2), image(2, all, 2), image(0, all, 2)};
  held[2].literals =
      std::string(held[2].literals.header()) + "other";  // so that it is not simply kept
  std::vector<ImageLayout> wanted = {image(0, all, 2), image(3, all, 2), image(4, all, 2)};
  const SourceIndex source(held, {16});
  TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_EQ(transfers_of(plan, 0)[0].source_image, 2u);
  EXPECT_EQ(transfers_of(plan, 1)[0].source_image, 0u);
  EXPECT_EQ(transfers_of(plan, 2)[0].source_image, 1u);
  EXPECT_EQ(plan.totals.moved_bytes, 2u * 64);
  EXPECT_EQ(plan.totals.minimum_bytes, 2u * 64);
}

TEST(Planner, BoxesThatOverlapAreTakenOnce) {
  // In their order the halves lie side by side; all of it is among them.
  std::vector<ImageLayout> held = {image(0, rows(0, 4, 4), 2), image(1, rows(0, 8, 4), 2),
                                   image(2, rows(4, 8, 4), 2)};
  std::vector<ImageLayout> wanted = {image(3, rows(0, 8, 4), 2)};
  const SourceIndex source(held, {16});
  TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_EQ(plan.totals.moved_bytes, 64u);
  EXPECT_EQ(plan.totals.minimum_bytes, 64u);
}

TEST(Planner, TheMinimumCountsANodeOnce) {
  // Two ranks of one node need the same rows: once over the network would do.
  std::vector<ImageLayout> held = {image(0, rows(0, 8, 4), 2)};
  std::vector<ImageLayout> wanted = {image(1, rows(0, 6, 4), 2), image(1, rows(2, 8, 4), 2)};
  const SourceIndex source(held, {16});
  EXPECT_EQ(plan_transfers(source, wanted).value().totals.minimum_bytes, 64u);
}

TEST(Planner, WhatNobodyHoldsIsNamed) {
  std::vector<ImageLayout> held = {image(0, rows(0, 4, 4), 2)};
  std::vector<ImageLayout> wanted = {image(0, rows(0, 8, 4), 2)};
  const SourceIndex source(held, {16});
  auto plan = plan_transfers(source, wanted);
  ASSERT_TRUE(plan.has_error());
  EXPECT_EQ(plan.error().code(), Code::kCorrupt);
  EXPECT_EQ(plan.error().message(), "tensor 0, [4:8, 0:4] is stored nowhere");
  const SourceIndex named(held, {16}, [](uint32_t) { return "norm.weight"; });
  for (const std::string& why : {plan_transfers(named, wanted).error().message(),
                                 named.plan_image(wanted.front()).error().message()})
    EXPECT_EQ(why, "tensor norm.weight, [4:8, 0:4] is stored nowhere");
}

/// Boxes that tile a shape, at random.
std::vector<Box> random_tiles(std::mt19937_64& random, const Shape& shape) {
  std::vector<Box> tiles{Box::whole(shape)};
  for (int cut = 0; cut < 6; ++cut) {
    size_t victim = random() % tiles.size(), axis = random() % shape.size();
    Box& box = tiles[victim];
    if (box.extent[axis] < 2) continue;
    uint64_t at = 1 + random() % (box.extent[axis] - 1);
    Box second = box;
    second.offset[axis] += at;
    second.extent[axis] -= at;
    box.extent[axis] = at;
    tiles.push_back(second);
  }
  return tiles;
}

TEST(Planner, EveryTargetByteIsWrittenOnceWithTheRightByte) {
  const char* given = std::getenv("PTC_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::cout << "PTC_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    Shape shape;
    for (size_t axis = 0, axes = 1 + random() % 4; axis < axes; ++axis)
      shape.push_back(1 + random() % 7);
    const uint64_t element_bytes = uint64_t{1} << random() % 4;
    // Global byte i of the tensor has the value i, wherever it lies.
    std::vector<ImageLayout> held, wanted;
    for (int copies = 0; copies < 2; ++copies)
      for (const Box& box : random_tiles(random, shape))
        held.push_back(image(random() % 3, box, element_bytes));
    for (int copies = 0; copies < 3; ++copies)
      for (const Box& box : random_tiles(random, shape))
        wanted.push_back(image(2 + random() % 3, box, element_bytes));
    auto content = [&](const ImageLayout& layout) {
      std::vector<uint32_t> bytes(layout.bytes, UINT32_MAX);
      const ArraySlot& slot = layout.arrays[0];
      auto copy = make_strided_copy({0, shape}, slot.part->pieces[0].global.offset,
                                    {slot.byte_offset, slot.part->local_shape},
                                    slot.part->pieces[0].local_offset, slot.part->local_shape,
                                    element_bytes * 8)
                      .value();
      for_each_run(copy, [&](uint64_t from, uint64_t to, uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) bytes[to + i] = from + i;
      });
      return bytes;
    };
    std::vector<std::vector<uint32_t>> sources;
    for (const ImageLayout& layout : held) sources.push_back(content(layout));

    // Targets come behind the sources: later ones may copy from them, on their own node.
    std::vector<ImageLayout> all = held;
    all.insert(all.end(), wanted.begin(), wanted.end());
    SourceIndex source(held, {static_cast<uint8_t>(element_bytes * 8)});
    TransferPlan plan = plan_transfers(source, wanted).value();
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (plan.images[i].kept) {
        sources.push_back(sources[*plan.images[i].kept]);
        continue;
      }
      std::vector<uint32_t> bytes(wanted[i].bytes, UINT32_MAX);
      for (const Transfer& transfer : transfers_of(plan, i)) {
        ASSERT_LT(transfer.source_image, sources.size());
        if (transfer.source_image >= held.size()) {
          ASSERT_EQ(all[transfer.source_image].node, wanted[i].node);
        }
        for_each_run(transfer.copy, [&](uint64_t from, uint64_t to, uint64_t count) {
          for (uint64_t k = 0; k < count; ++k) {
            ASSERT_EQ(bytes[to + k], UINT32_MAX) << "written twice";
            bytes[to + k] = sources[transfer.source_image][from + k];
          }
        });
      }
      ASSERT_EQ(bytes, content(wanted[i])) << "round " << round;
      sources.push_back(std::move(bytes));
    }
    EXPECT_EQ(plan.totals.moved_bytes, plan.totals.minimum_bytes);
  }
}

}  // namespace
}  // namespace ptc
