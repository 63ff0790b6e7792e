// Whole plans against the obvious way to make them: one target after the other, box by box, with
// all holders of each box looked at each time; and what moves at least, element by element.
#include <gtest/gtest.h>
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "reshard/plan/planner.h"
#include "reshard/ptc/slicing.h"

namespace ptc {
namespace {

struct Holding {  // a piece of an array of an image
  uint32_t image, slot, piece;
};

/// The plan without relays, of everything written out.
class SlowPlan {
 public:
  SlowPlan(const std::vector<ImageLayout>& held, const std::vector<ImageLayout>& wanted,
           std::vector<uint8_t> bits)
      : held_(held), wanted_(wanted), bits_(std::move(bits)) {
    kept.resize(wanted.size());
    std::set<uint32_t> stay;  // each is one target
    transfers.resize(wanted.size());
    for (uint32_t i = 0; i < wanted.size(); ++i) {
      for (uint32_t image = held.size(); image-- > 0;)
        if (held[image].node == wanted[i].node && held[image].bytes == wanted[i].bytes &&
            held[image].literals == wanted[i].literals && held[image].arrays == wanted[i].arrays &&
            !stay.contains(image))
          kept[i] = image;
      if (kept[i]) {
        stay.insert(*kept[i]);
        continue;
      }
      for (uint32_t slot = 0; slot < wanted[i].arrays.size(); ++slot) {
        const auto before = arrivals_;
        for (const Piece& piece : wanted[i].arrays[slot].part->pieces) plan(i, slot, piece, before);
      }
      std::sort(transfers[i].begin(), transfers[i].end(), [](const auto& a, const auto& b) {
        return a.copy.target_offset < b.copy.target_offset;
      });
    }
  }

  std::vector<std::optional<uint32_t>> kept;
  std::vector<std::vector<Transfer>> transfers;

 private:
  using Place = std::pair<uint32_t, uint32_t>;  // node, tensor
  struct Arrival {
    uint32_t target;
    ArraySlot array;
    Piece piece;
  };
  using Arrivals = std::map<Place, std::vector<Arrival>>;

  void plan(uint32_t target, uint32_t slot_number, const Piece& piece, const Arrivals& before) {
    if (piece.global.empty()) return;
    const ArraySlot& slot = wanted_[target].arrays[slot_number];
    const uint32_t node = wanted_[target].node;
    // By box, in C order: who has it.
    auto order = [](const Box& box) {
      return std::pair(std::vector(box.offset.begin(), box.offset.end()),
                       std::vector(box.extent.begin(), box.extent.end()));
    };
    std::map<decltype(order(piece.global)), std::vector<Holding>> boxes;
    for (uint32_t image = 0; image < held_.size(); ++image)
      for (uint32_t s = 0; s < held_[image].arrays.size(); ++s)
        for (uint32_t p = 0; p < held_[image].arrays[s].part->pieces.size(); ++p) {
          const Box& box = held_[image].arrays[s].part->pieces[p].global;
          if (held_[image].arrays[s].tensor == slot.tensor && !box.empty() &&
              intersect(box, piece.global))
            boxes[order(box)].push_back({image, s, p});
        }
    std::vector<Box> rest{piece.global};
    auto take = [&](uint32_t source_image, const ArraySlot& source, const Piece& from) {
      std::vector<Box> taken, left;
      for (const Box& box : rest) {
        const auto common = intersect(box, from.global);
        if (!common) {
          left.push_back(box);
          continue;
        }
        taken.push_back(*common);
        transfers[target].push_back(
            {source_image,
             copy_between(source, from, slot, piece, *common, bits_[slot.tensor]).value()});
        for (const Box& outside : subtract(box, *common)) left.push_back(outside);
      }
      rest = left;
      return taken;
    };
    auto is_here = [&](const Holding& one) { return held_[one.image].node == node; };
    auto take_all = [&](bool here) {
      for (const auto& [at, holders] : boxes) {
        if (rest.empty() || std::any_of(holders.begin(), holders.end(), is_here) != here) continue;
        const Holding best =
            *std::min_element(holders.begin(), holders.end(), [&](const auto& a, const auto& b) {
              auto load = [&](const Holding& one) {
                const uint32_t of = held_[one.image].node;
                return std::tuple(of != node, of != node ? node_load_[of] : 0,
                                  image_load_[one.image]);
              };
              return load(a) < load(b);
            });
        const ArraySlot& source = held_[best.image].arrays[best.slot];
        for (const Box& common : take(best.image, source, source.part->pieces[best.piece])) {
          const uint64_t bytes = common.volume() * bits_[slot.tensor] / 8;
          image_load_[best.image] += bytes;
          if (here) continue;
          node_load_[held_[best.image].node] += bytes;
          arrivals_[{node, slot.tensor}].push_back({target, slot, part_of(piece, common)});
        }
      }
    };
    take_all(true);
    if (const auto known = before.find({node, slot.tensor}); known != before.end())
      for (const Arrival& arrival : known->second)
        take(held_.size() + arrival.target, arrival.array, arrival.piece);
    take_all(false);
    ASSERT_TRUE(rest.empty());
  }

  const std::vector<ImageLayout>&held_, &wanted_;
  const std::vector<uint8_t> bits_;
  std::map<uint32_t, uint64_t> image_load_, node_load_;
  Arrivals arrivals_;
};

/// Bytes that nodes need for what is not kept, and do not hold.
uint64_t least_moved(const std::vector<ImageLayout>& held, const std::vector<ImageLayout>& wanted,
                     const SlowPlan& plan, const std::vector<uint8_t>& bits,
                     const std::vector<Shape>& shapes) {
  using Element = std::tuple<uint32_t, uint32_t, uint64_t>;  // node, tensor, number
  auto elements = [&](const ImageLayout& image, std::set<Element>& all) {
    for (const ArraySlot& slot : image.arrays)
      for (const Piece& piece : slot.part->pieces)
        for (uint64_t i = 0; i < piece.global.volume(); ++i) {
          uint64_t number = 0, rest = i;
          Dims at(piece.global.axes());
          for (size_t axis = at.size(); axis-- > 0; rest /= piece.global.extent[axis])
            at[axis] = piece.global.offset[axis] + rest % piece.global.extent[axis];
          for (size_t axis = 0; axis < at.size(); ++axis)
            number = number * shapes[slot.tensor][axis] + at[axis];
          all.emplace(image.node, slot.tensor, number);
        }
  };
  std::set<Element> there, needed;
  for (const ImageLayout& image : held) elements(image, there);
  for (size_t i = 0; i < wanted.size(); ++i)
    if (!plan.kept[i]) elements(wanted[i], needed);
  uint64_t bits_missing = 0;
  for (const Element& one : needed)
    if (!there.contains(one)) bits_missing += bits[std::get<1>(one)];
  return bits_missing / 8;
}

class RandomFiles {
 public:
  explicit RandomFiles(std::mt19937_64& random) : random_(random) {
    for (uint64_t tensor = 0, count = 1 + below(4); tensor < count; ++tensor) {
      Shape shape;
      for (uint64_t axis = 0, axes = below(4); axis < axes; ++axis) shape.push_back(1 + below(6));
      bits.push_back(8u << below(3));
      if (below(4) == 0 && !shape.empty()) {  // of half a byte: rows are of whole bytes
        shape[shape.size() - 1] = 2 * (1 + below(3));
        bits.back() = 4;
      }
      shapes.push_back(shape);
    }
    for (uint64_t count = below(3); count > 0; --count) {
      like_.emplace(shapes.size(), below(shapes.size()));
      bits.push_back(bits[like_[shapes.size()]]);
      shapes.push_back(Shape(shapes[like_[shapes.size()]]));
    }
  }

  /// All of every tensor in files, each cut in one way, and each file on some nodes of `nodes`.
  std::vector<ImageLayout> files(uint32_t first_node, uint32_t nodes, uint32_t copies) {
    std::vector<std::vector<SharedPart>> parts;  // by tensor
    size_t most = 1;
    for (uint32_t tensor = 0; tensor < shapes.size(); ++tensor) {
      const auto like = like_.find(tensor);
      if (like != like_.end() && below(4) > 0) parts.emplace_back(parts[like->second]);
      else parts.push_back(cut(tensor));
      most = std::max(most, parts.back().size());
    }
    std::vector<ImageLayout> all;
    const bool shared = below(2) == 0;  // copies share their arrays
    const bool parts_shared = below(4) > 0;
    for (size_t number = 0; number < most; ++number) {
      std::vector<ArraySlot> slots;
      uint64_t bytes = 16;
      for (uint32_t tensor = 0; tensor < shapes.size(); ++tensor) {
        // Those that have fewer parts are in several files.
        SharedPart part = parts[tensor][number % parts[tensor].size()];
        if (!parts_shared) part = SubTensor(*part);
        slots.push_back({tensor, bytes, part});
        bytes += Box::whole(part->local_shape).volume() * bits[tensor] / 8 + below(2);
        if (below(8) > 0) continue;
        slots.push_back({tensor, bytes, part});  // a file may have it twice
        bytes += Box::whole(part->local_shape).volume() * bits[tensor] / 8;
      }
      const SharedVector<ArraySlot> arrays(slots);
      for (uint64_t copy = 0, count = 1 + below(copies); copy < count; ++copy) {
        ImageLayout image;
        image.node = first_node + (number + copy) % nodes;
        image.bytes = bytes;
        image.literals = std::string(16, 'h');
        image.arrays = shared ? arrays : SharedVector<ArraySlot>(slots);
        all.push_back(image);
      }
    }
    return all;
  }

  std::vector<Shape> shapes;
  std::vector<uint8_t> bits;

 private:
  uint64_t below(uint64_t end) { return random_() % end; }

  std::vector<SharedPart> cut(uint32_t tensor) {
    const Shape& shape = shapes[tensor];
    std::vector<SharedPart> parts{SubTensor::whole(shape)};
    if (shape.empty() || below(4) == 0) return parts;
    const uint64_t ranks = 1 + below(5), elements = Box::whole(shape).volume();
    const uint64_t way = bits[tensor] < 8 ? 0 : below(3);
    parts.clear();
    for (uint64_t rank = 0; rank < ranks; ++rank) {
      SubTensor part = SubTensor::whole(shape);
      if (way == 0 && (shape.size() > 1 || bits[tensor] >= 8)) {
        cut_rows(part, rank * (shape[0] / ranks + 1), shape[0] / ranks + 1);
      } else if (way == 1) {
        const uint32_t axis = shape.size() - 1;  // columns, of one axis: rows
        const uint64_t each = shape[axis] / ranks + 1;
        const uint64_t begin = std::min(rank * each, shape[axis]);
        const uint64_t count = std::min(each, shape[axis] - begin);
        if (count > 0) cut_axis(part, axis, {count, {{begin, 0, count}}});
        else cut_rows(part, shape[0], 0);
      } else if (way == 2) {
        cut_flat(part, rank * (elements / ranks + 1), elements / ranks + 1);
      }
      parts.push_back(part);
    }
    return parts;
  }

  std::mt19937_64& random_;
  std::map<size_t, size_t> like_;  // tensors, of the same shape as another
};

void expect_as_made_slowly(const std::vector<ImageLayout>& held,
                           const std::vector<ImageLayout>& wanted, const std::vector<uint8_t>& bits,
                           const std::vector<Shape>& shapes) {
  const SourceIndex source(held, bits);
  const TransferPlan plan = plan_transfers(source, wanted).value();
  const SlowPlan slow(held, wanted, bits);
  TransferPlan::Totals totals;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> pairs;
  for (uint32_t i = 0; i < wanted.size(); ++i) {
    SCOPED_TRACE(i);
    totals.total_bytes += wanted[i].bytes;
    if (slow.kept[i]) totals.kept_bytes += wanted[i].bytes;
    ASSERT_EQ(plan.images[i].kept, slow.kept[i]);
    const SharedVector<Transfer> made = plan.transfers_of(i).value();
    const std::vector<Transfer>& expected = slow.transfers[i];
    std::vector<std::pair<uint32_t, uint64_t>> sources;
    plan.for_each_source(
        i, [&](uint32_t image, uint64_t bytes) { sources.emplace_back(image, bytes); });
    std::vector<std::pair<uint32_t, uint64_t>> expected_sources;
    size_t next = 0;
    for (const Transfer& transfer : expected) {
      expected_sources.emplace_back(transfer.source_image, transfer.bytes());
      // Images of some bytes have one window: it is there whole, whoever passes it on.
      ASSERT_LT(next, made.size());
      EXPECT_EQ(made[next].source_image, transfer.source_image);
      EXPECT_EQ(made[next].bytes(), transfer.bytes());
      const StridedCopy &a = made[next].copy, &b = transfer.copy;
      EXPECT_EQ(std::tie(a.source_offset, a.target_offset, a.run_bytes, a.level_count),
                std::tie(b.source_offset, b.target_offset, b.run_bytes, b.level_count));
      for (uint32_t level = 0; level < a.level_count; ++level)
        EXPECT_EQ(std::tie(a.levels[level].count, a.levels[level].source_stride,
                           a.levels[level].target_stride),
                  std::tie(b.levels[level].count, b.levels[level].source_stride,
                           b.levels[level].target_stride));
      const uint32_t from = made[next].relay                      ? wanted[*made[next].relay].node
                            : transfer.source_image < held.size() ? held[transfer.source_image].node
                                                                  : wanted[i].node;
      pairs[{from, wanted[i].node}] += transfer.bytes();
      (from == wanted[i].node ? totals.local_bytes : totals.moved_bytes) += transfer.bytes();
      ++next;
    }
    EXPECT_EQ(next, made.size());
    std::sort(sources.begin(), sources.end());
    std::sort(expected_sources.begin(), expected_sources.end());
    EXPECT_EQ(sources, expected_sources);
  }
  EXPECT_EQ(plan.totals.total_bytes, totals.total_bytes);
  EXPECT_EQ(plan.totals.kept_bytes, totals.kept_bytes);
  EXPECT_EQ(plan.totals.local_bytes, totals.local_bytes);
  EXPECT_EQ(plan.totals.moved_bytes, totals.moved_bytes);
  EXPECT_EQ(plan.totals.minimum_bytes, least_moved(held, wanted, slow, bits, shapes));
  EXPECT_EQ(plan.totals.moved_bytes, plan.totals.minimum_bytes);
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> made_pairs;
  for (const TransferPlan::Pair& pair : plan.pairs)
    made_pairs[{pair.source_node, pair.target_node}] = pair.bytes;
  EXPECT_EQ(made_pairs, pairs);
}

TEST(PlanOracle, PlansAreAsMadeSlowly) {
  const char* given = std::getenv("PTC_SEED");
  const uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::cout << "PTC_SEED=" << seed << "\n";
  std::mt19937_64 random(seed);
  for (int round = 0; round < 400; ++round) {
    SCOPED_TRACE(round);
    RandomFiles files(random);
    std::vector<ImageLayout> held, wanted;
    const uint32_t copies = random() % 8 > 0 ? 3 : 20;  // of many the least is found otherwise
    for (uint64_t set = 0, sets = 1 + random() % 3; set < sets; ++set) {
      const auto more = files.files(random() % 3, 1 + random() % 4, copies);
      held.insert(held.end(), more.begin(), more.end());
    }
    for (uint64_t set = 0, sets = 1 + random() % 2; set < sets; ++set) {
      const auto more = files.files(random() % 4, 1 + random() % 5, 5);
      wanted.insert(wanted.end(), more.begin(), more.end());
    }
    for (int stays = 0; stays < 2; ++stays) wanted.push_back(held[random() % held.size()]);

    expect_as_made_slowly(held, wanted, files.bits, files.shapes);
    if (HasFailure()) return;
  }
}

double seconds() {  // of this thread
  timespec time;
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

/// Rows of each of 512 ranks, 8 on a node, become columns of which each node has all: half a
/// million choices. Looked for among all that has come to a node, each would cost that much.
TEST(PlanOracle, WhatHasComeToANodeIsFoundWithoutALookAtAllOfIt) {
  constexpr uint64_t kRanks = 512, kRows = 2 * kRanks, kColumns = 64;
  auto image = [](uint64_t rank, const Box& box) {
    ImageLayout layout;
    layout.node = rank / 8;
    layout.bytes = box.volume() * 2;
    layout.arrays.push_back({0, 0, {box.extent, {{box, Dims(2)}}}});
    return layout;
  };
  std::vector<ImageLayout> held, wanted;
  for (uint64_t rank = 0; rank < kRanks; ++rank) {
    held.push_back(image(rank, {{2 * rank, 0}, {2, kColumns}}));
    wanted.push_back(image(rank, {{0, rank % 8 * kColumns / 8}, {kRows, kColumns / 8}}));
  }
  const SourceIndex source(held, {16});
  const double before = seconds();
  const TransferPlan plan = plan_transfers(source, wanted).value();
  EXPECT_LT(seconds() - before, 3);
  EXPECT_EQ(plan.totals.moved_bytes, plan.totals.minimum_bytes);
  EXPECT_EQ(plan.totals.minimum_bytes, kRanks / 8 * (kRanks - 8) * 2 * kColumns * 2);
}

/// An image with boxes of tensor 0, of which each is an array.
ImageLayout image_of(uint32_t node, const std::vector<Box>& boxes) {
  ImageLayout layout;
  layout.node = node;
  for (const Box& box : boxes) {
    layout.arrays.push_back({0, layout.bytes, {box.extent, {{box, Dims(box.axes())}}}});
    layout.bytes += box.volume() * 2;
  }
  return layout;
}

/// A node wants as many different boxes of one tensor as are looked at one by one, or more, each
/// twice, and at the end one that has something of several; another node has them.
TEST(PlanOracle, OfOneTensorANodeMayWantManyBoxes) {
  const Shape shape{200, 4};
  for (const uint64_t rows : {uint64_t{7}, uint64_t{31}, uint64_t{32}, uint64_t{33}, uint64_t{90}})
    for (const bool overlap : {false, true}) {
      SCOPED_TRACE(rows);
      SCOPED_TRACE(overlap);
      std::vector<ImageLayout> held, wanted;
      for (uint64_t row = 0; row < 200; row += 2)
        for (uint32_t copy = 0; copy < 2; ++copy)
          held.push_back(image_of(1 + copy, {{{row, 0}, {2, 4}}}));
      for (uint32_t copy = 0; copy < 2; ++copy)
        for (uint64_t row = 0; row < rows; ++row)
          wanted.push_back(image_of(0, {{{2 * row, 0}, {2, 4}}}));
      if (overlap) wanted.push_back(image_of(0, {{{3, 1}, {8, 2}}}));
      wanted.push_back(image_of(0, {{{0, 0}, {2, 4}}}));
      expect_as_made_slowly(held, wanted, {16}, {shape});
    }
}

/// What flat cuts of 512 ranks, 8 on a node, left, which ends inside rows, becomes rows or columns
/// of 8, of which each node has all: some 100 000 choices, and no more is kept of each than what is
/// chosen. The same where each is held in rows, too, and so in an order.
TEST(PlanOracle, OfWhatIsTakenNoMoreIsKeptThanOfWhom) {
  constexpr uint64_t kRanks = 512, kRows = 8191, kColumns = 64;
  const Shape shape{kRows, kColumns};
  for (const bool columns : {false, true})
    for (const bool in_order : {false, true}) {
      SCOPED_TRACE(columns);
      SCOPED_TRACE(in_order);
      std::vector<ImageLayout> held, wanted, targets;
      for (uint64_t rank = 0; rank < 8; ++rank)
        targets.push_back(image_of(
            0, {columns ? Box{{0, rank * kColumns / 8}, {kRows, kColumns / 8}}
                        : Box{{rank * 1024, 0}, {rank < 7 ? uint64_t{1024} : 1023, kColumns}}}));
      for (uint64_t rank = 0; rank < kRanks; ++rank) {
        constexpr uint64_t kElements = kRows * kColumns, kEach = kElements / kRanks + 1;
        const uint64_t begin = std::min(rank * kEach, kElements);
        const uint64_t end = std::min(begin + kEach, kElements);
        held.push_back(image_of(rank / 8, boxes_of_run(shape, begin, end)));
        if (in_order)
          held.push_back(image_of(
              rank / 8, {{{rank * 16, 0}, {rank + 1 < kRanks ? uint64_t{16} : 15, kColumns}}}));
        wanted.push_back(targets[rank % 8]);
        wanted.back().node = rank / 8;
      }
      const SourceIndex source(held, {16});
      const size_t bytes_before = ::mallinfo2().uordblks;
      const double before = seconds();
      const auto choices = Choices::make(source, wanted, std::vector<bool>(wanted.size())).value();
      EXPECT_LT(seconds() - before, 2);
      // Elsewhere than in glibc's heap nothing is seen of it.
      EXPECT_LT(::mallinfo2().uordblks - std::min(bytes_before, ::mallinfo2().uordblks), 20u << 20);
      for (const uint32_t target : {0u, 77u, 511u}) {
        uint64_t bytes = 0, of_sources = 0;
        const std::vector<Transfer> transfers = choices->transfers(target).value();
        for (const Transfer& transfer : transfers) bytes += transfer.bytes();
        choices->for_each_source(target, [&](uint32_t, uint64_t some) { of_sources += some; });
        EXPECT_EQ(bytes, wanted[target].bytes);
        EXPECT_EQ(of_sources, wanted[target].bytes);
      }
    }
}

}  // namespace
}  // namespace ptc
