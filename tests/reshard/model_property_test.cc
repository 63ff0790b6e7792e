// Random models of every family under random layouts, against an oracle that goes element by
// element. PTC_SEED=<seed> replays one round; PTC_ROUNDS=<n> runs more.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "tests/support/random_model.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

constexpr uint64_t kPadding = UINT64_MAX;

/// The local array with the global number of every element.
std::vector<uint64_t> paint(const SubTensor& part, const Shape& global) {
  const Shape& shape = part.flat ? part.flat->of : part.local_shape;
  const uint64_t first = part.flat ? part.flat->begin : 0;
  std::vector<uint64_t> local(num_elements(part.local_shape).value(), kPadding);
  for (const Piece& piece : part.pieces) {
    const uint64_t volume = piece.global.volume();
    for (uint64_t i = 0; i < volume; ++i) {
      uint64_t rest = i;
      uint64_t global_index = 0, local_index = 0, global_step = 1, local_step = 1;
      for (size_t axis = global.size(); axis-- > 0;) {
        const uint64_t at = rest % piece.global.extent[axis];
        rest /= piece.global.extent[axis];
        global_index += (piece.global.offset[axis] + at) * global_step;
        local_index += (piece.local_offset[axis] + at) * local_step;
        global_step *= global[axis];
        local_step *= shape[axis];
      }
      local_index -= first;
      EXPECT_LT(local_index, local.size());
      if (local_index >= local.size()) return local;
      EXPECT_EQ(local[local_index], kPadding) << "pieces overlap";
      local[local_index] = global_index;
    }
  }
  return local;
}

void expect_as_oracle(const Model& model, const LayoutSpec& spec, const SlowOracle& oracle) {
  std::vector<std::vector<bool>> covered;
  for (const TensorInfo& info : model.tensors()) {
    covered.emplace_back(num_elements(info.shape).value());
  }
  const Model::Holdings holdings(model, spec);
  const std::jthread another([&] {  // asks for the same parts at the same time
    for (uint32_t index = state_count(spec); index-- > 0;)
      EXPECT_TRUE(holdings.of(state_at(spec, index)).has_value());
  });
  for (uint32_t index = 0; index < state_count(spec); ++index) {
    const StateCoords state = state_at(spec, index);
    ASSERT_EQ(state_index(spec, state), index);
    const std::vector<Model::Held> all = model.hold(spec, state).value();
    const std::vector<Model::Held> same = holdings.of(state).value();
    ASSERT_EQ(same.size(), all.size());
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(same[i].tensor, all[i].tensor);
      ASSERT_EQ(same[i].part, all[i].part);
    }
    const RankCoords rank = spec.coords(rank_of(spec, state));
    ASSERT_EQ(state_of(spec, rank), state);
    for (uint32_t tensor = 0; tensor < model.tensors().size(); ++tensor) {
      const uint32_t part = model.dp_part(tensor, spec, state);
      const StateCoords again = model.with_dp_part(tensor, spec, state, part);
      ASSERT_EQ(again, state) << model.tensors()[tensor].name;
    }
    for (uint32_t tensor = 0; tensor < model.tensors().size(); ++tensor) {
      const TensorInfo& info = model.tensors()[tensor];
      SCOPED_TRACE(fmt::format("{} tp {} pp {} ep {} etp {} dp {}", info.name, state.tp, state.pp,
                               state.ep, state.etp, state.dp));
      const auto expected = oracle.held(info.name, info.shape, spec, rank);
      const auto part = model.slice(tensor, spec, state);
      ASSERT_TRUE(part.has_value()) << part.error().message();
      ASSERT_EQ(part.value().has_value(), expected.has_value());
      if (!expected) continue;
      const Shape& shape = part.value()->local_shape;
      ASSERT_EQ(std::vector<uint64_t>(shape.begin(), shape.end()), expected->shape);
      ASSERT_EQ(model.local_name(tensor, spec, state.pp),
                oracle.local_name(info.name, spec, state.pp));
      const std::vector<uint64_t> painted = paint(*part.value(), info.shape);
      ASSERT_EQ(painted.size(), expected->elements.size());
      for (size_t i = 0; i < painted.size(); ++i) {
        ASSERT_EQ(painted[i], expected->elements[i].value_or(kPadding)) << "element " << i;
        if (painted[i] != kPadding) covered[tensor][painted[i]] = true;
      }
    }
  }
  for (size_t tensor = 0; tensor < covered.size(); ++tensor) {
    for (bool element : covered[tensor]) {
      ASSERT_TRUE(element) << model.tensors()[tensor].name << " is not covered";
    }
  }
}

/// Each rank has the state that it has by the oracle's count.
void expect_ranks_as_oracle(const LayoutSpec& spec) {
  std::vector<bool> seen(state_count(spec));
  for (uint64_t rank = 0; rank < spec.sizes.world_size(); ++rank) {
    const RankCoords at = spec.coords(rank), expected = SlowOracle::place(spec, rank);
    ASSERT_EQ(spec.order.rank_at(spec.sizes, at), rank);
    ASSERT_EQ((std::array{at.tp, at.pp, at.ep, at.etp}),
              (std::array{expected.tp, expected.pp, expected.ep, expected.etp}))
        << rank;
    if (spec.dp_parts() > 1) {
      ASSERT_EQ(at.dp, expected.dp) << rank;
      ASSERT_EQ(at.cp, expected.cp) << rank;
    }
    const StateCoords state = state_of(spec, at);
    if (spec.dp_parts() > 1) {
      ASSERT_EQ(state.dp, SlowOracle::share_of(spec, at, true).before) << rank;
      ASSERT_EQ(spec.dp_parts(), SlowOracle::share_of(spec, at, true).ranks) << rank;
      ASSERT_EQ(spec.dense_parts(), SlowOracle::share_of(spec, at, false).ranks) << rank;
    }
    ASSERT_EQ(state_at(spec, state_index(spec, state)), state) << rank;
    seen[state_index(spec, state)] = true;
  }
  ASSERT_EQ(std::count(seen.begin(), seen.end(), false), 0);
}

void expect_infer_inverts(const Model& model, const LayoutSpec& spec) {
  const std::vector<WrittenRank> ranks = written_ranks(model, spec);
  const auto inferred = Model::infer(model.rules_ptr(), model.facts(), spec, ranks);
  ASSERT_TRUE(inferred.has_value()) << inferred.error().message();
  const Model& found = inferred.value().model;
  std::map<std::pair<std::string, std::string>, const TensorInfo*> originals;
  for (const TensorInfo& info : model.tensors()) originals[{info.file, info.name}] = &info;
  ASSERT_EQ(found.tensors().size(), originals.size());
  for (const TensorInfo& info : found.tensors()) {
    const auto original = originals.find({info.file, info.name});
    ASSERT_NE(original, originals.end()) << info.name;
    EXPECT_EQ(info.shape, original->second->shape) << info.name;
    EXPECT_EQ(info.folded_into, original->second->folded_into) << info.name;
    EXPECT_EQ(info.dtype, original->second->dtype) << info.name;
  }
  EXPECT_EQ(found.layers(), model.layers());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t i = 0; i < ranks[rank].tensors.size(); ++i) {
      const uint32_t tensor = inferred.value().tensor_of[rank][i];
      ASSERT_EQ(found.local_name(tensor, spec, ranks[rank].coords.pp), ranks[rank].tensors[i].name);
      const auto part = found.slice(tensor, spec, state_of(spec, ranks[rank].coords));
      ASSERT_TRUE(part.has_value() && part.value().has_value());
      ASSERT_EQ(part.value()->local_shape, ranks[rank].tensors[i].shape);
    }
  }
}

void run_round(uint64_t seed) {
  SCOPED_TRACE(fmt::format("replay with PTC_SEED={}", seed));
  std::mt19937_64 random(seed);
  const RandomModel sample = random_model(random, random() % 2 == 0);
  SCOPED_TRACE(sample.config);
  const Model model = synthetic_model(sample.config, sample.tensors);
  for (int i = 0; i < 2 && !::testing::Test::HasFailure(); ++i) {
    const LayoutSpec spec = random_layout(random, sample, model, 200);
    SCOPED_TRACE(layout_json(spec));
    expect_ranks_as_oracle(spec);
    expect_as_oracle(model, spec, sample.oracle);
    expect_infer_inverts(model, spec);
  }
}

TEST(ModelProperty, EveryRankHoldsWhatTheOracleSays) {
  if (const char* seed = std::getenv("PTC_SEED")) {
    run_round(std::strtoull(seed, nullptr, 10));
    return;
  }
  const char* rounds_text = std::getenv("PTC_ROUNDS");
  const uint64_t rounds = rounds_text ? std::strtoull(rounds_text, nullptr, 10) : 150;
  const uint64_t first = std::random_device()();
  std::cout << "seeds " << first << " to " << first + rounds - 1 << std::endl;
  for (uint64_t seed = first; seed < first + rounds && !HasFailure(); ++seed) run_round(seed);
}

}  // namespace
}  // namespace ptc::testing
