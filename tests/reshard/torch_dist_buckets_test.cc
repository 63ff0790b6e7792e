// Against an oracle (saved_buckets.h).
#include "reshard/intake/torch_dist_buckets.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "tests/reshard/saved_buckets.h"
#include "tests/support/job_fixture.h"

namespace ptc {
namespace {

using testing::Saved;
using testing::World;

bool taken_apart(Saved& saved) {
  auto apart = take_buckets_apart(saved.metadata, saved.said, saved.reader());
  EXPECT_TRUE(apart.has_value()) << apart.error().message();
  if (!apart.has_value() || !apart.value().has_value()) return false;
  put_in_place(*std::move(apart).value(), saved.metadata);
  return true;
}

TEST(TorchDistBuckets, EachParameterGetsItsOwnState) {
  const uint64_t seed = testing::test_seed();
  std::cout << "PTC_SEED=" << seed << "\n";
  for (uint64_t n = 0; n < 60; ++n) {
    std::mt19937_64 random(seed + n);
    const auto one_of = [&](std::initializer_list<uint64_t> values) {
      return values.begin()[random() % values.size()];
    };
    World world;
    world.tensor_ranks = one_of({1, 2, 4});
    world.stages = one_of({1, 2, 3});
    world.stretches = world.stages > 1 ? one_of({1, 2}) : 1;
    world.layers = world.stages * world.stretches * one_of({1, 2}) + one_of({0, 1});
    world.data_ranks = one_of({1, 2, 3});
    world.gated = one_of({0, 1}) == 1, world.tied = one_of({0, 1}) == 1;
    world.norm_first = one_of({0, 1}) == 1;
    world.bucket = one_of({UINT64_MAX, 300, 100});
    SCOPED_TRACE(fmt::format("PTC_SEED={} {}", seed + n, world.to_string()));
    Saved saved(world, seed + n);
    ASSERT_TRUE(taken_apart(saved));
    saved.expect_state();
    if (HasFatalFailure()) return;
    for (const DcpTensor& tensor : saved.metadata.tensors)
      EXPECT_FALSE(is_optimizer_bucket(tensor.name));
    ASSERT_EQ(saved.metadata.values.size(), 1u);
    EXPECT_EQ(saved.metadata.values[0].name, "rng_state/shard_0_1");
  }
}

TEST(TorchDistBuckets, TheFirstRanksSettingsAreHandedOver) {
  Saved saved({}, 1);
  saved.metadata.values.push_back(
      {"optimizer.distributed.dp_group_idx_0.grad_scaler/shard_0_1", {}, {0, 5, 1}});
  const auto apart = take_buckets_apart(saved.metadata, saved.said, saved.reader());
  ASSERT_TRUE(apart.has_value() && apart.value().has_value());
  const std::vector<TakenApart::Value>& settings = apart.value()->settings;
  ASSERT_EQ(settings.size(), 2u);
  EXPECT_EQ(settings[0].key, "optimizer");
  EXPECT_EQ(settings[0].item.offset, 9u);
  EXPECT_EQ(settings[1].key, "grad_scaler");
  EXPECT_EQ(settings[1].item.offset, 5u);
  EXPECT_FALSE(apart.value()->experts_apart);
}

/// An empty chunk may be in no file, and is where another one begins.
TEST(TorchDistBuckets, EmptyChunksAreNoOnes) {
  Saved saved({.tensor_ranks = 2}, 5);
  for (DcpTensor& tensor : saved.metadata.tensors) {
    DcpChunk empty = tensor.chunks.front();
    empty.box.extent[empty.box.axes() - 1] = 0;
    empty.item = {};
    tensor.chunks.insert(tensor.chunks.begin(), empty);
  }
  ASSERT_TRUE(taken_apart(saved));
  saved.expect_state();
}

/// What is not certain stays as it was, all of it.
TEST(TorchDistBuckets, WhatDoesNotComeOutStays) {
  const World world{.tensor_ranks = 2, .stages = 2, .data_ranks = 2};
  const auto expect_stays = [&](const std::string& what, auto&& spoil) {
    Saved saved(world, 7);
    spoil(saved);
    const size_t tensors = saved.metadata.tensors.size(), values = saved.metadata.values.size();
    EXPECT_FALSE(taken_apart(saved)) << what;
    EXPECT_EQ(saved.metadata.tensors.size(), tensors) << what;
    EXPECT_EQ(saved.metadata.values.size(), values) << what;
  };
  const auto tensor_of = [](Saved& saved, std::string_view name) -> DcpTensor& {
    for (DcpTensor& tensor : saved.metadata.tensors)
      if (tensor.name.find(name) != std::string::npos) return tensor;
    ADD_FAILURE() << name;
    return saved.metadata.tensors[0];
  };
  expect_stays("other sizes than args say",
               [](Saved& saved) { saved.said.arguments["tensor_model_parallel_size"] = 4; });
  expect_stays("a stage that is missing", [](Saved& saved) {
    std::erase_if(saved.metadata.tensors, [](const DcpTensor& tensor) {
      return tensor.name.find("dp_group_idx_3") != std::string::npos;
    });
  });
  expect_stays("a bucket without a moment", [](Saved& saved) {
    std::erase_if(saved.metadata.tensors, [](const DcpTensor& tensor) {
      return tensor.name.ends_with("exp_avg") &&
             tensor.name.find("dp_group_idx_2") != std::string::npos;
    });
  });
  expect_stays("a parameter that nobody knows", [](Saved& saved) {
    DcpTensor other = saved.metadata.tensors[0];
    other.name = "decoder.layers.0.mlp.new_idea.weight";
    saved.metadata.tensors.push_back(std::move(other));
  });
  expect_stays("a parameter of another type",
               [&](Saved& saved) { tensor_of(saved, "linear_fc2").dtype = DType::kBF16; });
  expect_stays("a bucket that is longer", [&](Saved& saved) {
    for (std::string_view kind : testing::kSavedKinds) {
      DcpTensor& tensor = tensor_of(saved, fmt::format("dp_group_idx_1.gbuf_idx_0.dtype_("
                                                       "torch.float32, torch.float32)."
                                                       "bucket_idx_0.{}",
                                                       kind));
      const uint64_t end = tensor.shape[0];
      tensor.shape = {end + 64};
      tensor.chunks.push_back({{{end}, {64}}, tensor.chunks[0].item});
    }
  });
  expect_stays("masters that are not the parameters'", [](Saved& saved) {
    for (const DcpTensor& tensor : saved.metadata.tensors)
      if (tensor.name.ends_with(".param"))
        for (const DcpChunk& chunk : tensor.chunks)
          for (float& value : saved.arrays.at(chunk.item.offset)) value += 1;
  });
  expect_stays("a hundred million layers",
               [&](Saved& saved) { tensor_of(saved, "linear_fc2").shape[0] = 100'000'000; });
  expect_stays("layers that were saved together", [&](Saved& saved) {
    DcpTensor& tensor = tensor_of(saved, "linear_proj");
    tensor.chunks = {{Box::whole(tensor.shape), tensor.chunks[0].item}};
  });
  expect_stays("parameters without elements", [&](Saved& saved) {
    DcpTensor& tensor = tensor_of(saved, "linear_proj");
    tensor.shape[1] = 0;
    tensor.chunks.clear();
  });
  expect_stays("buckets in three optimizers", [&](Saved& saved) {
    DcpTensor other = tensor_of(saved, "bucket_idx_0.param");
    for (const char* prefix : {"chained_1.", "chained_2."}) {
      saved.metadata.tensors.push_back(other);
      saved.metadata.tensors.back().name = prefix + other.name;
    }
  });
}

TEST(TorchDistBuckets, WhatCannotBeReadIsAnError) {
  Saved saved({}, 3);
  const ReadChunks fails = [](std::span<const ChunkRead>) -> Result<std::vector<std::string>> {
    return make_error(Code::kCorrupt, "cut short");
  };
  EXPECT_TRUE(take_buckets_apart(saved.metadata, saved.said, fails).has_error());
}

}  // namespace
}  // namespace ptc
