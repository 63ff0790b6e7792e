// The invariants of dataset/README.md for random runs, against plan_oracle.h. PTC_SEED=<seed>
// replays one round; PTC_ROUNDS=<n> runs more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>

#include "dataset/plan/run_plan.h"
#include "tests/dataset/plan_oracle.h"

namespace ptc {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  uint64_t up_to(uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(0, most)(engine_);
  }
  uint64_t between(uint64_t least, uint64_t most) { return least + up_to(most - least); }
  bool one_in(uint64_t n) { return up_to(n - 1) == 0; }

 private:
  std::mt19937_64 engine_;
};

/// An order and a dp that fit together and `samples`.
std::pair<OrderSpec, uint64_t> random_order(Dice& dice, uint64_t samples, uint64_t epochs,
                                            const Run* run) {
  OrderSpec order;
  order.epochs = epochs;
  order.seed = run != nullptr ? run->seed : dice.up_to(UINT64_MAX - 1);
  if (run != nullptr) {
    order.shuffle = run->shuffle;
  } else if (dice.one_in(3)) {
    order.shuffle = {.kind = ShuffleKind::kBlock, .block = dice.between(1, samples + 2)};
  } else if (dice.one_in(5)) {
    order.shuffle = {.kind = ShuffleKind::kNone};
  }
  order.tail = static_cast<Tail>(dice.up_to(3));
  order.round_down = dice.one_in(4);
  const uint64_t dp = dice.between(1, 7);
  switch (dice.up_to(3)) {
    case 0:
      order.assign = {.kind = Assign::Kind::kStride};
      break;
    case 1:
      order.assign = {.kind = Assign::Kind::kMicro, .micro = dice.between(1, 4)};
      break;
    default:
      order.uneven = dice.one_in(2);
  }
  if (order.uneven) {
    order.batch = dice.between(dp, std::max(dp, dice.one_in(3) ? samples * 2 : samples / 2));
  } else {
    const uint64_t unit = dp * std::max<uint64_t>(1, order.assign.micro);
    order.batch = unit * dice.between(1, dice.one_in(3) ? 8 : 3);
  }
  if (order.tail == Tail::kDrop && order.batch > samples) order.tail = Tail::kShort;
  return {order, dp};
}

/// Every number a generation gives, against the oracle.
void check_generation(const Generation& generation, OracleIds& ids, Dice& dice) {
  const Segment& segment = generation.segment();
  SCOPED_TRACE(fmt::format("N={} from={} B={} D={} {} {} epochs={}", generation.run().samples,
                           segment.from, segment.batch, segment.dp, tail_name(segment.tail),
                           segment.assign.name(), segment.epochs));
  const std::vector<OracleStep> steps = oracle_steps(generation.run(), segment);
  std::map<uint64_t, std::vector<const OracleStep*>> by_epoch;
  std::vector<std::vector<uint64_t>> all_ids(segment.dp);
  for (const OracleStep& step : steps) by_epoch[step.epoch].push_back(&step);
  for (uint64_t epoch = 0; epoch < segment.epochs + 2; ++epoch) {
    const auto& expected = by_epoch[epoch];
    ASSERT_EQ(generation.steps(epoch), expected.size()) << "epoch " << epoch;
    ASSERT_TRUE(expected.empty() ||
                (epoch >= generation.first_epoch() && epoch < generation.end_epoch()));
    for (uint64_t rank = 0; rank < segment.dp; ++rank) {
      ASSERT_EQ(generation.local_samples_before(epoch, rank), all_ids[rank].size())
          << "epoch " << epoch;
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      const Step step = generation.step(epoch, i);
      ASSERT_EQ(step.epoch, epoch);
      ASSERT_EQ(step.begin, expected[i]->begin);
      ASSERT_EQ(step.end(), expected[i]->end);
      ASSERT_EQ(step.size(), expected[i]->positions.size());
      ASSERT_EQ(generation.step_at(step.begin), std::pair(epoch, uint64_t{i}));
      std::vector<uint64_t> joined;
      for (uint64_t rank = 0; rank < segment.dp; ++rank) {
        const std::vector<uint64_t>& mine = expected[i]->ranks[rank];
        ASSERT_EQ(generation.local_size(step, rank), mine.size());
        const std::vector<uint64_t> positions = generation.local_positions(step, rank);
        ASSERT_EQ(positions, mine);
        ASSERT_TRUE(step.padded > 0 ||  // I4
                    std::adjacent_find(mine.begin(), mine.end(), std::greater_equal<>()) ==
                        mine.end());
        joined.insert(joined.end(), positions.begin(), positions.end());
        const std::vector<uint64_t> local = generation.local_ids(step, rank);
        for (size_t k = 0; k < mine.size(); ++k) ASSERT_EQ(local[k], ids(mine[k]));
        all_ids[rank].insert(all_ids[rank].end(), local.begin(), local.end());
        if (!mine.empty()) {
          const uint64_t first = dice.up_to(mine.size()), count = dice.up_to(mine.size());
          const auto begin = mine.begin() + static_cast<long>(first);
          ASSERT_EQ(generation.local_positions(step, rank, first, count),
                    std::vector<uint64_t>(
                        begin, begin + static_cast<long>(std::min(count, mine.size() - first))));
        }
      }
      const bool contig = segment.assign.kind == Assign::Kind::kContig;
      ASSERT_TRUE(!contig || joined == expected[i]->positions);  // I2
      std::sort(joined.begin(), joined.end());
      std::vector<uint64_t> whole = expected[i]->positions;
      std::sort(whole.begin(), whole.end());
      ASSERT_EQ(joined, whole);
    }
  }
  for (uint64_t rank = 0; rank < segment.dp; ++rank) {
    ASSERT_EQ(generation.local_samples_before(generation.end_epoch(), rank), all_ids[rank].size());
    for (int i = 0; i < 5; ++i) {
      const uint64_t first = dice.up_to(all_ids[rank].size()),
                     count = dice.up_to(2 * segment.batch);
      const auto begin = all_ids[rank].begin() + static_cast<long>(first);
      ASSERT_EQ(generation.rank_ids(rank, first, count),
                std::vector<uint64_t>(begin, begin + static_cast<long>(std::min(
                                                         count, all_ids[rank].size() - first))))
          << "rank " << rank << " first " << first << " count " << count;
    }
  }
  uint64_t index = 0;
  for (uint64_t epoch = 0; epoch < segment.epochs; ++epoch) {
    std::vector<uint64_t> global;
    for (const OracleStep* step : by_epoch[epoch]) {
      for (uint64_t position : step->positions) {
        global.push_back(ids(position));
        ASSERT_EQ(generation.global_position(index++), position);
      }
    }
    ASSERT_EQ(generation.global_samples(epoch), global.size());
    const uint64_t first = dice.up_to(global.size()), count = dice.up_to(global.size());
    const auto begin = global.begin() + static_cast<long>(first);
    ASSERT_EQ(generation.global_ids(epoch, first, count),
              std::vector<uint64_t>(
                  begin, begin + static_cast<long>(std::min(count, global.size() - first))));
  }
  ASSERT_EQ(generation.global_samples(), index);
  // Ends of steps, and where none is.
  std::vector<uint64_t> ends = {segment.from, generation.end()};
  for (const OracleStep& step : steps) ends.insert(ends.end(), {step.begin, step.end});
  std::sort(ends.begin(), ends.end());
  for (uint64_t p = segment.from; p <= generation.end(); ++p) {
    const auto above = std::lower_bound(ends.begin(), ends.end(), p);
    const uint64_t below = *above == p ? p : *(above - 1);
    ASSERT_EQ(generation.boundaries(p), std::pair(below, *above)) << "position " << p;
    const auto next =
        std::find_if(steps.begin(), steps.end(), [&](const OracleStep& s) { return s.begin >= p; });
    const auto found = generation.step_at(p);
    ASSERT_EQ(found.has_value(), next != steps.end()) << "position " << p;
    ASSERT_TRUE(!found || generation.step(found->first, found->second).begin == next->begin);
  }
}

/// What a job did: steps, each of some ranks' positions. Goes on in a generation from `consumed`,
/// `count` steps.
struct Story {
  struct Read {
    uint64_t position, id;
  };
  std::vector<Read> reads;         // without padding
  std::vector<uint64_t> left_out;  // dropped
  uint64_t consumed = 0;

  void back_to(uint64_t position) {
    std::erase_if(reads, [&](const Read& read) { return read.position >= position; });
    std::erase_if(left_out, [&](uint64_t p) { return p >= position; });
    consumed = position;
  }
  void go_on(const Generation& generation, uint64_t count) {
    const Segment& segment = generation.segment();
    auto at = generation.step_at(consumed);
    for (; at && count > 0; --count) {
      const Step step = generation.step(at->first, at->second);
      for (uint64_t p = consumed; p < step.begin; ++p) left_out.push_back(p);
      for (uint64_t rank = 0; rank < segment.dp; ++rank) {
        const std::vector<uint64_t> positions = generation.local_positions(step, rank);
        const std::vector<uint64_t> ids = generation.local_ids(step, rank);
        uint64_t padding = 0;
        for (size_t i = 0; i < ids.size(); ++i) {
          // Padding is behind everything else in G; under contig, so it is in the last ranks.
          if (segment.tail == Tail::kPad && !counted(step, segment, rank, i)) {
            ++padding;
            continue;
          }
          reads.push_back({positions[i], ids[i]});
        }
        EXPECT_LE(padding, step.padded);
      }
      consumed = step.end();
      at = generation.step_at(consumed);
    }
  }
  static bool counted(const Step& step, const Segment& segment, uint64_t rank, uint64_t local) {
    uint64_t seen = 0;
    for (uint64_t place = 0; place < step.size(); ++place) {
      if (oracle_rank(segment.assign, place, step.size(), segment.dp) != rank) continue;
      if (seen++ == local) return place < step.positions;
    }
    return false;
  }
};

/// I1 and I3: what was read is [0, consumed) without what was dropped, each once, in the run's
/// order.
void check_story(const RunPlan& plan, const Story& story, OracleIds& ids) {
  std::vector<uint64_t> positions = story.left_out;
  for (const Story::Read& read : story.reads) {
    positions.push_back(read.position);
    ASSERT_EQ(read.id, ids(read.position));
  }
  std::sort(positions.begin(), positions.end());
  ASSERT_EQ(positions.size(), story.consumed);
  for (uint64_t p = 0; p < positions.size(); ++p) ASSERT_EQ(positions[p], p);
  for (uint64_t p : story.left_out) {
    const auto segment = std::find_if(plan.segments().rbegin(), plan.segments().rend(),
                                      [&](const Segment& s) { return s.from <= p; });
    ASSERT_EQ(segment->tail, Tail::kDrop) << "position " << p;
  }
}

void one_round(uint64_t seed) {
  SCOPED_TRACE(fmt::format("replay with PTC_SEED={}", seed));
  Dice dice(seed);
  const uint64_t samples = dice.one_in(4) ? dice.between(1, 6) : dice.between(1, 150);
  uint64_t epochs = dice.between(1, 4);
  auto [order, dp] = random_order(dice, samples, epochs, nullptr);
  RunPlan plan = RunPlan::begin(order, samples, seed, dp, dice.between(1, 3)).value();
  OracleIds ids(plan.run());
  Story story;
  std::vector<uint64_t> ends_of_steps = {0};
  for (int event = 0; event < 6; ++event) {
    check_generation(plan.generation(plan.last()), ids, dice);
    if (testing::Test::HasFatalFailure()) return;
    for (uint64_t steps = dice.up_to(4); steps > 0; --steps) {
      story.go_on(plan.generation(plan.last()), 1);
      ends_of_steps.push_back(story.consumed);
    }
    check_story(plan, story, ids);
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_EQ(RunPlan::from_text(plan.to_text()).value(), plan);

    if (dice.one_in(4)) epochs = std::max(epochs, dice.between(1, 4));
    std::tie(order, dp) =
        random_order(dice, samples, epochs, story.consumed > 0 ? &plan.run() : nullptr);
    const RunPlan before = plan;
    if (dice.one_in(3)) {  // back to a checkpoint
      const uint64_t to = ends_of_steps[dice.up_to(ends_of_steps.size() - 1)];
      if (to == 0 || story.consumed == 0) continue;
      order.seed = plan.run().seed;
      order.shuffle = plan.run().shuffle;
      plan = plan.roll_back(order, dp, to).value().plan;
      story.back_to(to);
      std::erase_if(ends_of_steps, [&](uint64_t end) { return end > to; });
    } else if (dice.one_in(3) && story.consumed > 0) {  // in the middle of a step
      const Generation cuts = plan.generation(plan.last());
      const uint64_t c = std::min(story.consumed + dice.up_to(3), plan.end());
      const auto [below, above] = cuts.boundaries(c);
      const auto changed = plan.change(order, dp, c);
      const bool stays = changed && changed.value().plan == before;
      for (auto at = cuts.step_at(story.consumed); at; at = cuts.step_at(story.consumed)) {
        if (cuts.step(at->first, at->second).end() > below) break;
        story.go_on(cuts, 1);
      }
      for (; story.consumed < below; ++story.consumed)
        story.left_out.push_back(story.consumed);  // dropped
      if (below == c || stays) {
        ASSERT_TRUE(changed);
        if (below != c) continue;
        plan = changed.value().plan;
      } else if (order.round_down) {
        ASSERT_EQ(changed.value().consumed, below);
        ASSERT_EQ(changed.value().plan.last().from, below);
        ASSERT_GE(changed.value().plan.last().repeats, c - below);
        plan = changed.value().plan;
        story.back_to(below);
      } else {
        ASSERT_FALSE(changed);
        ASSERT_THAT(changed.error().message(),
                    testing::HasSubstr(fmt::format("{} and {}", below, above)));
        continue;
      }
      ends_of_steps.push_back(story.consumed);
    } else {
      const RunPlan::Changed changed = plan.change(order, dp, story.consumed).value();
      ASSERT_EQ(changed.consumed, story.consumed);
      plan = changed.plan;
      if (story.consumed == 0) ids = OracleIds(plan.run());
    }
    ASSERT_TRUE(before.find(plan.last().generation) != nullptr ||
                plan.last().generation >= before.next_generation());
    // I6: what stays of the plan is as it was.
    for (const Segment& segment : plan.segments()) {
      const Segment* old = before.find(segment.generation);
      ASSERT_TRUE(old == nullptr || *old == segment);
    }
  }
}

TEST(PlanProperty, AgainstTheOracle) {
  if (const char* seed = std::getenv("PTC_SEED"))
    return one_round(std::strtoull(seed, nullptr, 10));
  const char* given = std::getenv("PTC_ROUNDS");
  const uint64_t rounds = given != nullptr ? std::strtoull(given, nullptr, 10) : 300;
  const uint64_t first = std::random_device()();
  std::cout << "PTC_SEED=" << first << " and the next " << rounds << "\n";
  for (uint64_t seed = first; seed < first + rounds && !testing::Test::HasFailure(); ++seed)
    one_round(seed);
}

}  // namespace
}  // namespace ptc
