// Who passes on what: every byte of a target once, from a source or from one that has it from
// there.
#include "reshard/plan/relay.h"

#include <gmock/gmock.h>

#include <map>

#include "reshard/plan/planner.h"

namespace ptc {
namespace {

constexpr uint64_t kRow = 4096, kRows = 4096;  // 32 MiB of two-byte elements

ImageLayout image(uint32_t node, const Box& box) {
  ImageLayout layout;
  layout.node = node;
  layout.literals = std::string(16, 'h');
  layout.bytes = 16 + box.volume() * 2;
  layout.arrays.push_back({0, 16, {box.extent, {{box, Dims(box.axes())}}}});
  return layout;
}
Box rows(uint64_t begin, uint64_t end) { return {{begin, 0}, {end - begin, kRow}}; }
Box columns(uint64_t begin, uint64_t end) { return {{0, begin}, {kRows, end - begin}}; }

/// Bytes that each node sends; and that everything is as the header of relay.h says.
std::map<uint32_t, uint64_t> sent(const std::vector<ImageLayout>& held,
                                  const std::vector<ImageLayout>& wanted) {
  const SourceIndex source(held, {16});
  const TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_EQ(plan.totals.moved_bytes, plan.totals.minimum_bytes);
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> pairs, said;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    if (plan.images[i].kept) continue;
    uint64_t bytes = 16;
    const SharedVector<Transfer> transfers = plan.transfers_of(i).value();
    for (const Transfer& transfer : transfers) {
      bytes += transfer.bytes();
      const uint32_t from = transfer.relay                        ? wanted[*transfer.relay].node
                            : transfer.source_image < held.size() ? held[transfer.source_image].node
                                                                  : wanted[i].node;
      pairs[{from, wanted[i].node}] += transfer.bytes();
      if (!transfer.relay) continue;
      EXPECT_NE(wanted[*transfer.relay].node, wanted[i].node);
      const SharedVector<Transfer> theirs = plan.transfers_of(*transfer.relay).value();
      EXPECT_TRUE(std::any_of(theirs.begin(), theirs.end(), [&](const Transfer& other) {
        return !other.relay && other.begin == transfer.begin && other.end == transfer.end &&
               other.copy.target_offset == transfer.copy.target_offset &&
               other.source_image == transfer.source_image;
      }));
    }
    EXPECT_EQ(bytes, wanted[i].bytes);
  }
  std::map<uint32_t, uint64_t> bytes;
  for (const TransferPlan::Pair& pair : plan.pairs) {
    said[{pair.source_node, pair.target_node}] = pair.bytes;
    if (pair.source_node != pair.target_node) bytes[pair.source_node] += pair.bytes;
  }
  EXPECT_EQ(said, pairs);
  return bytes;
}

TEST(Relay, OneHolderSendsOnceAndTheOthersPassOn) {
  const Box all = rows(0, kRows);
  const uint64_t bytes = all.volume() * 2;
  const auto out = sent({image(0, all)}, {image(1, all), image(2, all), image(3, all)});
  EXPECT_EQ(out.at(0), bytes);
  for (uint32_t node : {1, 2, 3}) EXPECT_NEAR(out.at(node), bytes * 2 / 3, bytes / 6) << node;
}

TEST(Relay, OfColumnsToo) {
  const Box half = columns(0, kRow / 2);
  const auto out = sent({image(0, rows(0, kRows))}, {image(1, half), image(2, half)});
  EXPECT_EQ(out.at(0), half.volume() * 2);
  EXPECT_NEAR(out.at(1), half.volume(), half.volume() / 2);
}

TEST(Relay, SmallImagesTakeTurns) {
  std::vector<ImageLayout> wanted;
  for (uint64_t i = 0; i < 30; ++i)
    for (uint32_t node : {1, 2, 3}) wanted.push_back(image(node, rows(i * 10, i * 10 + 10)));
  const auto out = sent({image(0, rows(0, kRows))}, wanted);
  EXPECT_EQ(out.at(0), 300 * kRow * 2);
  for (uint32_t node : {1, 2, 3}) EXPECT_EQ(out.at(node), 200 * kRow * 2);
}

TEST(Relay, NotWhereTheHoldersSendNoMoreThanOneReceives) {
  const Box all = rows(0, kRows);
  const auto out = sent({image(0, all), image(1, all)},
                        {image(0, all), image(1, all), image(2, all), image(3, all)});
  EXPECT_EQ(out.size(), 2u);
}

TEST(Relay, OfVeryManyReceiversSomeShare) {
  const Box all = rows(0, kRows);
  std::vector<ImageLayout> wanted;
  for (uint32_t node = 1; node <= 40; ++node) wanted.push_back(image(node, all));
  EXPECT_EQ(sent({image(0, all)}, wanted).at(0), all.volume() * 2 * 2);
}

TEST(Relay, TwoHoldersOfSixReceivers) {
  const Box all = rows(0, kRows);
  std::vector<ImageLayout> held, wanted;
  for (uint32_t node : {0, 1}) held.push_back(image(node, all));
  for (uint32_t node = 2; node < 8; ++node) wanted.push_back(image(node, all));
  for (const auto& [node, bytes] : sent(held, wanted)) EXPECT_LE(bytes, all.volume() * 2) << node;
}

}  // namespace
}  // namespace ptc
