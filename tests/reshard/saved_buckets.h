// What Megatron-Core's distributed optimizer saves in buckets, made by an oracle that puts each
// rank's parameters into its buckets one by one, as Megatron does.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "reshard/intake/torch_dist_buckets.h"

namespace ptc::testing {

inline constexpr uint64_t kSavedHidden = 8, kSavedFfn = 12;
inline constexpr std::string_view kSavedKinds[] = {"param", "exp_avg", "exp_avg_sq"};

inline uint64_t up_to_next(uint64_t at, uint64_t to) { return (at + to - 1) / to * to; }

/// How the run was cut that saved.
struct World {
  uint64_t tensor_ranks = 1, stages = 1, data_ranks = 1, stretches = 1, layers = 4;
  bool gated = false, tied = false, norm_first = false;
  uint64_t bucket = UINT64_MAX;  // elements that make one full

  std::string to_string() const {
    return fmt::format("tp{} pp{} dp{} vpp{} layers {} gated {} tied {} norm first {} bucket {}",
                       tensor_ranks, stages, data_ranks, stretches, layers, gated, tied, norm_first,
                       bucket);
  }
};

/// A tensor of the whole model; of a stack one layer's.
struct Whole {
  std::string name;
  Shape shape;
  std::optional<size_t> cut;  // over tensor ranks
  bool gated = false;
  bool stack = false;
};

class Saved {
 public:
  explicit Saved(const World& world, uint64_t seed) : world_(world), random_(seed) {
    said.arguments = {{"tensor_model_parallel_size", static_cast<int64_t>(world.tensor_ranks)},
                      {"pipeline_model_parallel_size", static_cast<int64_t>(world.stages)}};
    const std::string at = "decoder.layers.";
    whole_ = {
        {"embedding.word_embeddings.weight", {16, kSavedHidden}, 0},
        {at + "self_attention.linear_qkv.layer_norm_weight", {kSavedHidden}, {}, false, true},
        {at + "self_attention.linear_proj.weight", {kSavedHidden, kSavedHidden}, 1, false, true},
        {at + "self_attention.linear_qkv.weight", {3 * kSavedHidden, kSavedHidden}, 0, false, true},
        {at + "self_attention.linear_qkv.bias", {3 * kSavedHidden}, 0, false, true},
        {at + "mlp.linear_fc1.layer_norm_weight", {kSavedHidden}, {}, false, true},
        {at + "mlp.linear_fc1.weight",
         {world.gated ? 2 * kSavedFfn : kSavedFfn, kSavedHidden},
         0,
         world.gated,
         true},
        {at + "mlp.linear_fc2.weight", {kSavedHidden, kSavedFfn}, 1, false, true},
        {"decoder.final_layernorm.weight", {kSavedHidden}, {}},
        {"output_layer.weight", {16, kSavedHidden}, 0}};
    if (!world.norm_first) std::swap(whole_[1], whole_[2]);
    if (world.tied) whole_.pop_back();
    for (const Whole& whole : whole_) add_weight(whole);
    add_buckets();
    metadata.values.push_back(
        {"optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", {}, {0, 9, 1}});
    metadata.values.push_back(
        {"optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1", {}, {0, 7, 1}});
    metadata.values.push_back({"rng_state/shard_0_1", {}, {0, 8, 1}});
  }

  ReadChunks reader() {
    return [this](std::span<const ChunkRead> reads) -> Result<std::vector<std::string>> {
      std::vector<std::string> held;
      for (const ChunkRead& one : reads) {
        const DcpTensor& tensor = metadata.tensors[one.tensor];
        const auto& array = arrays.at(tensor.chunks[one.chunk].item.offset);
        if (one.bytes > array.size() * sizeof(float))
          return make_error(Code::kInternal, "read behind its end");
        held.emplace_back(reinterpret_cast<const char*>(array.data()), one.bytes);
      }
      return held;
    };
  }

  /// Element number `at` of the whole tensor.
  static float value(size_t tensor, uint64_t at, size_t kind) {
    return static_cast<float>(tensor * 100'000 + at * 3 + kind);
  }

  /// What each tensor of state has, read where its chunks say.
  void expect_state() const {
    for (size_t w = 0; w < whole_.size(); ++w)
      for (size_t k = 0; k < std::size(kSavedKinds); ++k) {
        const std::string name =
            fmt::format("optimizer.state.{}.{}", kSavedKinds[k], whole_[w].name);
        const auto tensor = std::find_if(metadata.tensors.begin(), metadata.tensors.end(),
                                         [&](const DcpTensor& one) { return one.name == name; });
        ASSERT_NE(tensor, metadata.tensors.end()) << name;
        ASSERT_EQ(tensor->shape, shape_of(whole_[w])) << name;
        ASSERT_EQ(tensor->runs.size(), tensor->chunks.size());
        std::vector<int> seen(num_elements(tensor->shape).value());
        for (size_t c = 0; c < tensor->chunks.size(); ++c) {
          const DcpChunk& chunk = tensor->chunks[c];
          const auto& array = arrays.at(chunk.item.offset);
          ASSERT_EQ(tensor->runs[c].elements, array.size());
          uint64_t from = tensor->runs[c].first;
          for_each(tensor->shape, chunk.box, [&](uint64_t element) {
            ++seen[element];
            ASSERT_LT(from, array.size());
            ASSERT_EQ(array[from++], value(w, element, k)) << name << " " << element;
          });
        }
        for (const int times : seen) ASSERT_EQ(times, 1) << name;
      }
  }

  DcpMetadata metadata;
  MegatronFile said;
  std::map<uint64_t, std::vector<float>> arrays;  // by offset of the item

 private:
  Shape shape_of(const Whole& whole) const {
    if (!whole.stack) return whole.shape;
    Shape shape{world_.layers};
    for (const uint64_t extent : whole.shape) shape.push_back(extent);
    return shape;
  }

  template <class F>
  static void for_each(const Shape& shape, const Box& box, F f) {
    for (uint64_t at = 0; at < num_elements(shape).value(); ++at) {
      uint64_t rest = at;
      bool inside = true;
      for (size_t axis = shape.size(); axis-- > 0;) {
        const uint64_t index = rest % shape[axis];
        rest /= shape[axis];
        inside = inside && index >= box.offset[axis] && index < box.offset[axis] + box.extent[axis];
      }
      if (inside) f(at);
    }
  }

  /// The boxes of one rank, of one layer.
  std::vector<Box> boxes(const Whole& whole, uint64_t layer, uint64_t rank) const {
    Box box = Box::whole(shape_of(whole));
    if (whole.stack) box.offset[0] = layer, box.extent[0] = 1;
    if (!whole.cut) return {box};
    const size_t axis = *whole.cut + (whole.stack ? 1 : 0);
    const uint64_t parts = world_.tensor_ranks * (whole.gated ? 2 : 1);
    const uint64_t each = box.extent[axis] / parts;
    box.extent[axis] = each;
    box.offset[axis] = rank * each;
    if (!whole.gated) return {box};
    Box second = box;
    second.offset[axis] += world_.tensor_ranks * each;
    return {box, second};
  }

  uint64_t add_array(std::vector<float> array) {
    const uint64_t number = 100 + arrays.size();
    arrays.emplace(number, std::move(array));
    return number;
  }

  void add_weight(const Whole& whole) {
    const size_t w = static_cast<size_t>(&whole - whole_.data());
    DcpTensor tensor;
    tensor.name = whole.name;
    tensor.dtype = DType::kF32;
    tensor.shape = shape_of(whole);
    for (uint64_t layer = 0; layer < (whole.stack ? world_.layers : 1); ++layer)
      for (uint64_t rank = 0; rank < (whole.cut ? world_.tensor_ranks : 1); ++rank)
        for (const Box& box : boxes(whole, layer, rank)) {
          std::vector<float> array;
          for_each(tensor.shape, box, [&](uint64_t at) { array.push_back(value(w, at, 0)); });
          tensor.chunks.push_back({box, {0, add_array(std::move(array)), 1}});
        }
    std::shuffle(tensor.chunks.begin(), tensor.chunks.end(), random_);
    metadata.tensors.push_back(std::move(tensor));
  }

  struct Local {
    size_t whole;
    uint64_t layer;
    bool shared;  // an embedding that several stages have has a bucket of its own
  };

  void add_buckets() {
    const uint64_t chunks = world_.stages * world_.stretches, each = world_.layers / chunks;
    for (uint64_t stage = 0; stage < world_.stages; ++stage)
      for (uint64_t rank = 0; rank < world_.tensor_ranks; ++rank)
        for (uint64_t stretch = 0; stretch < world_.stretches; ++stretch) {
          const uint64_t chunk = stretch * world_.stages + stage;
          // The last has what does not come out even.
          const uint64_t end = chunk + 1 == chunks ? world_.layers : (chunk + 1) * each;
          const bool shared = world_.tied && world_.stages > 1;
          std::vector<Local> locals;
          if (chunk == 0) locals.push_back({0, 0, shared});
          for (uint64_t layer = chunk * each; layer < end; ++layer)
            for (size_t w = 0; w < whole_.size(); ++w)
              if (whole_[w].stack) locals.push_back({w, layer, false});
          if (chunk + 1 == chunks) {
            locals.push_back({8, 0, false});
            if (!world_.tied) locals.push_back({9, 0, false});
            else if (chunks > 1) locals.push_back({0, 0, shared});
          }
          fill(stage * world_.tensor_ranks + rank, stretch, rank, std::move(locals));
        }
  }

  void fill(uint64_t group, uint64_t buffer, uint64_t rank, std::vector<Local> locals) {
    std::reverse(locals.begin(), locals.end());
    uint64_t bucket = 0;
    for (size_t first = 0, last = 0; first < locals.size(); first = last, ++bucket) {
      std::vector<float> flat[std::size(kSavedKinds)];
      std::vector<std::pair<uint64_t, uint64_t>> parts;  // parameters' begins and ends
      for (; last < locals.size(); ++last) {
        if (last > first && locals[last].shared) break;
        const Whole& whole = whole_[locals[last].whole];
        const uint64_t begin = up_to_next(flat[0].size(), 64);
        for (size_t k = 0; k < std::size(kSavedKinds); ++k) {
          flat[k].resize(begin, -1);
          for (const Box& box : boxes(whole, locals[last].layer, rank))
            for_each(shape_of(whole), box,
                     [&](uint64_t at) { flat[k].push_back(value(locals[last].whole, at, k)); });
        }
        parts.emplace_back(begin, flat[0].size());
        if (flat[0].size() >= world_.bucket || locals[last].shared) {
          ++last;
          break;
        }
      }
      // But for the last one they end where the next would have begun.
      const uint64_t unpadded =
          last < locals.size() ? up_to_next(flat[0].size(), 64) : flat[0].size();
      const uint64_t of_rank = up_to_next(unpadded, world_.data_ranks * 128) / world_.data_ranks;
      std::vector<uint64_t> cuts{0, unpadded};
      for (const auto& [begin, end] : parts) cuts.push_back(begin), cuts.push_back(end);
      for (uint64_t at = of_rank; at < unpadded; at += of_rank) cuts.push_back(at);
      std::sort(cuts.begin(), cuts.end());
      cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
      for (size_t k = 0; k < std::size(kSavedKinds); ++k) {
        flat[k].resize(unpadded, -1);
        DcpTensor tensor;
        tensor.name = fmt::format(
            "optimizer.distributed.dp_group_idx_{}.gbuf_idx_{}.dtype_(torch.float32, "
            "torch.float32).bucket_idx_{}.{}",
            group, buffer, bucket, kSavedKinds[k]);
        tensor.dtype = DType::kF32;
        tensor.shape = {unpadded};
        for (size_t c = 0; c + 1 < cuts.size(); ++c)
          tensor.chunks.push_back(
              {{{cuts[c]}, {cuts[c + 1] - cuts[c]}},
               {0,
                add_array({flat[k].begin() + static_cast<ptrdiff_t>(cuts[c]),
                           flat[k].begin() + static_cast<ptrdiff_t>(cuts[c + 1])}),
                1}});
        std::shuffle(tensor.chunks.begin(), tensor.chunks.end(), random_);
        metadata.tensors.push_back(std::move(tensor));
      }
    }
  }

  const World world_;
  std::mt19937_64 random_;
  std::vector<Whole> whole_;
};

}  // namespace ptc::testing
