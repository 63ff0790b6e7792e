#include "reshard/intake/torch_dist_buckets.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <unordered_map>

#include "reshard/checkpoint/megatron_optimizer.h"
#include "reshard/checkpoint/name_parts.h"
#include "reshard/intake/master_copies.h"
#include "store/codec/torch_file.h"

namespace ptc {
namespace {

constexpr std::string_view kChained = "chained_";
constexpr std::string_view kDistributed = "optimizer.distributed.dp_group_idx_";
constexpr std::string_view kBuffer = ".gbuf_idx_", kTypes = ".dtype_(", kBucket = ".bucket_idx_";
constexpr std::string_view kMaster = "param";
constexpr std::string_view kPerBucket = "per_bucket_numel";  // and _unpadded
constexpr uint64_t kAligned = 64;  // elements: where a parameter begins in its bucket
constexpr uint64_t kMostRanks = 1 << 20;
constexpr uint64_t kMostElements = uint64_t{1} << 50;

/// "chained_1.": 1; of one alone it is not there.
uint32_t take_optimizer(std::string_view& name) {
  std::string_view rest = name;
  if (!take_text(rest, kChained)) return 0;
  const auto number = take_digits(rest);
  if (!number || !take_text(rest, ".")) return 0;
  name = rest;
  return *number;
}

struct BucketName {
  uint32_t optimizer = 0, group = 0, buffer = 0, bucket = 0;
  std::string_view types, kind;  // "torch.bfloat16, torch.float32", "exp_avg"
};
std::optional<BucketName> bucket_name(std::string_view name) {
  const uint32_t optimizer = take_optimizer(name);
  if (!take_text(name, kDistributed)) return std::nullopt;
  const auto group = take_digits(name);
  if (!group || !take_text(name, kBuffer)) return std::nullopt;
  const auto buffer = take_digits(name);
  const size_t end = name.find(')');
  if (!buffer || !take_text(name, kTypes) || end == name.npos) return std::nullopt;
  const std::string_view types = name.substr(0, name.find(')'));
  name.remove_prefix(types.size() + 1);
  if (!take_text(name, kBucket)) return std::nullopt;
  const auto bucket = take_digits(name);
  if (!bucket || !take_text(name, ".") || name.empty()) return std::nullopt;
  return BucketName{optimizer, *group, *buffer, *bucket, types, name};
}

/// A tensor of a bucket.
struct State {
  uint32_t tensor = 0;           // number in the metadata
  std::vector<uint32_t> chunks;  // by their places
};

/// A stretch of layers of one model-parallel rank: the arrays of its parameters' gradients.
struct Buffer {
  struct Bucket {
    uint64_t elements = 0;
    std::map<std::string_view, State> states;  // by kind
  };
  std::vector<Bucket> buckets;
};

uint64_t aligned(uint64_t at) { return (at + kAligned - 1) / kAligned * kAligned; }

/// What a rank has of one.
struct Parameter {
  uint32_t tensor = 0;                // number in the metadata
  std::vector<uint32_t> pieces = {};  // its chunks, one behind the other
  uint64_t elements = 0;
  bool copy = false;  // another rank or stage has it, too
};

/// Where one lies.
struct Placed {
  Parameter parameter;
  uint32_t bucket = 0;
  uint64_t offset = 0;
};

/// The order in which a layer makes its modules.
constexpr std::string_view kOfLayer[] = {
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
    "mlp.router.",
    "mlp.experts.experts.linear_fc1.",
    "mlp.experts.experts.linear_fc2.",
    "mlp.shared_experts.gate_",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
};
constexpr uint64_t kFirstOfExperts = 11;
static_assert(kOfLayer[kFirstOfExperts] == "mlp.experts.experts.linear_fc1.");
constexpr std::string_view kNormOfAttention = "self_attention.linear_qkv.layer_norm_";
/// What differs between its kinds of layers.
struct Order {
  bool norm_first;        // before attention: a module of the layer's; else of the projection
  bool experts_together;  // all first matrices, then all second; else each expert's own
};
constexpr Order kOrders[] = {{true, false}, {false, false}, {true, true}, {false, true}};
constexpr std::string_view kFirst[] = {"embedding.word_embeddings.weight",
                                       "embedding.position_embeddings.weight"};
constexpr std::string_view kLast[] = {"decoder.final_layernorm.weight",
                                      "decoder.final_layernorm.bias", kMegatronHead};
constexpr std::string_view kDecoderLayers = "decoder.layers.";

/// By row of kOfLayer, bias and expert.
using Place = std::array<uint64_t, 3>;
std::optional<Place> place_in_layer(std::string_view name, uint64_t expert, Order order) {
  for (uint64_t row = 0; row < std::size(kOfLayer); ++row) {
    if (!name.starts_with(kOfLayer[row])) continue;
    const std::string_view rest = name.substr(kOfLayer[row].size());
    if (rest != "weight" && rest != "bias") return std::nullopt;
    const uint64_t bias = rest == "bias" ? 1 : 0;
    if (order.norm_first && kOfLayer[row] == kNormOfAttention) return Place{0, 0, bias};
    if (!is_megatron_expert(name)) return Place{row, 0, bias};
    return order.experts_together
               ? Place{row, bias, expert}
               : Place{kFirstOfExperts, expert, 2 * (row - kFirstOfExperts) + bias};
  }
  return std::nullopt;
}

/// Which part of a model's parameters an optimizer has.
enum class Has : uint8_t { kAll, kDense, kExperts };

/// The buckets of one optimizer: of all parameters, of experts alone, or of all others.
class Unbucketing {
 public:
  Unbucketing(const DcpMetadata& metadata, const MegatronFile& said, const ReadChunks& read,
              Has has, std::string prefix)
      : metadata_(metadata), read_(read), has_(has), prefix_(std::move(prefix)) {
    const auto size = [&](std::string_view name, int64_t otherwise) {
      const int64_t said_size = said.argument(name).value_or(otherwise);
      return static_cast<uint64_t>(std::clamp<int64_t>(said_size, 1, kMostRanks));
    };
    stages_ = size("pipeline_model_parallel_size", 1);
    tensor_ranks_ = size("tensor_model_parallel_size", 1);
    if (has == Has::kDense) return;
    expert_ranks_ = size("expert_model_parallel_size", 1);
    if (has == Has::kExperts)
      tensor_ranks_ = size("expert_tensor_parallel_size", static_cast<int64_t>(tensor_ranks_));
    else if (expert_ranks_ > 1) stages_ = 0;  // they would be apart
  }

  /// False: nobody knows.
  Result<bool> run() {
    if (!find_buckets() || !find_parameters()) return false;
    for (const Order order : kOrders) {
      if (!place_all(order)) continue;
      PTC_TRY(const bool masters, masters_are_parameters());
      if (masters) return make_tensors();
    }
    return false;
  }
  std::vector<DcpTensor>& made() { return new_; }

 private:
  bool find_buckets() {
    std::map<std::array<uint32_t, 3>, Buffer::Bucket> found;  // by group, buffer and bucket
    for (uint32_t t = 0; t < metadata_.tensors.size(); ++t) {
      const DcpTensor& tensor = metadata_.tensors[t];
      if (!is_optimizer_bucket(tensor.name) || !tensor.name.starts_with(prefix_)) continue;
      const auto name = bucket_name(tensor.name);
      if (!name || tensor.shape.size() != 1 || dtype_bits(tensor.dtype) % 8 != 0) return false;
      if (types_.empty()) types_ = name->types;
      // Of each type there is a buffer of its own, of which it is not known where it begins.
      if (name->types != types_ || tensor.shape[0] > kMostElements) return false;
      Buffer::Bucket& bucket = found[{name->group, name->buffer, name->bucket}];
      if (!bucket.states.empty() && bucket.elements != tensor.shape[0]) return false;
      bucket.elements = tensor.shape[0];
      bucket.states[name->kind] = {t, in_order(tensor)};
    }
    if (found.empty()) return false;
    for (const auto& [kind, state] : found.begin()->second.states) kinds_.emplace_back(kind);
    // All have the same, and none is missing.
    for (auto& [number, bucket] : found) {
      if (!std::equal(bucket.states.begin(), bucket.states.end(), kinds_.begin(), kinds_.end(),
                      [](const auto& has, std::string_view kind) { return has.first == kind; }))
        return false;
      if (number[0] == buffers_.size()) buffers_.emplace_back();
      if (number[0] != buffers_.size() - 1) return false;
      std::vector<Buffer>& of_group = buffers_.back();
      if (number[1] == of_group.size()) of_group.emplace_back();
      if (number[1] != of_group.size() - 1) return false;
      std::vector<Buffer::Bucket>& buckets = of_group.back().buckets;
      if (number[2] != buckets.size()) return false;
      buckets.push_back(std::move(bucket));
    }
    return buffers_.size() == groups() &&
           std::all_of(buffers_.begin(), buffers_.end(), [&](const std::vector<Buffer>& group) {
             return group.size() == buffers_[0].size();
           });
  }
  uint64_t groups() const { return stages_ * expert_ranks_ * tensor_ranks_; }

  /// The model's, by what they are: all must be known, and of the buckets' type.
  bool find_parameters() {
    for (uint32_t t = 0; t < metadata_.tensors.size(); ++t) {
      const DcpTensor& tensor = metadata_.tensors[t];
      std::string_view name = tensor.name;
      if (is_optimizer_bucket(name) || !is_megatron_parameter(name, tensor.dtype)) continue;
      const bool stack = take_text(name, kDecoderLayers);
      if (stack) {
        const auto number = take_digits(name);
        if (number && (!take_text(name, ".") || *number >= kMostRanks)) return false;
        // Each layer was saved apart, so there are no more than chunks.
        if (!number && (tensor.shape.empty() || tensor.shape[0] > tensor.chunks.size()))
          return false;
        const uint64_t first = number ? *number : 0, end = number ? first + 1 : tensor.shape[0];
        for (uint64_t layer = first; layer < end; ++layer) {
          std::vector<OfLayer>& of_layer = layers_[layer];
          if (is_mine(name)) of_layer.push_back({name, t});
        }
      } else if (std::find(std::begin(kFirst), std::end(kFirst), name) != std::end(kFirst) ||
                 std::find(std::begin(kLast), std::end(kLast), name) != std::end(kLast)) {
        if (is_mine(name)) others_.emplace(name, t);
      } else {
        return false;
      }
      if (is_mine(name) &&
          !types_.starts_with(fmt::format("torch.{},", torch_dtype_name(tensor.dtype))))
        return false;
    }
    return !layers_.empty() && layers_.rbegin()->first == layers_.size() - 1;
  }
  bool is_mine(std::string_view name) const {
    return has_ == Has::kAll || is_megatron_expert(name) == (has_ == Has::kExperts);
  }

  struct Rank {
    uint64_t stage = 0, expert = 0, tensor = 0;
  };

  /// What a rank has of a tensor, by the boxes in which it was saved.
  std::optional<Parameter> parameter_of(uint32_t number, uint64_t layer, uint64_t expert,
                                        const Rank& rank) {
    const DcpTensor& tensor = metadata_.tensors[number];
    const auto& known = chunks_of(number);
    const auto found = known.find({layer, expert});
    if (found == known.end()) return std::nullopt;
    const std::vector<uint32_t>& chunks = found->second;
    Parameter parameter{number};
    if (chunks.size() == 1) {  // each tensor-parallel rank has it whole
      parameter.pieces = {chunks[0]};
      parameter.copy = rank.tensor > 0;
    } else if (chunks.size() == tensor_ranks_) {
      parameter.pieces = {chunks[rank.tensor]};
    } else if (chunks.size() == 2 * tensor_ranks_ &&
               tensor.name.find("linear_fc1.") != std::string::npos) {
      // Gated: one behind the other, along the first axis of the rank's own.
      parameter.pieces = {chunks[rank.tensor], chunks[tensor_ranks_ + rank.tensor]};
      const Dims& first = tensor.chunks[chunks[0]].box.offset;
      const Dims& second = tensor.chunks[chunks[1]].box.offset;
      for (size_t axis = 0; axis < first.size(); ++axis)
        if (first[axis] != second[axis] && axis != axes_before(tensor)) return std::nullopt;
    } else {
      return std::nullopt;
    }
    for (const uint32_t piece : parameter.pieces)
      parameter.elements += tensor.chunks[piece].box.volume();
    return parameter;
  }

  /// Of a stack: its layers; and of experts: these.
  static bool is_stack(const DcpTensor& tensor) {
    std::string_view name = tensor.name;
    return take_text(name, kDecoderLayers) && !take_digits(name);
  }
  static size_t axes_before(const DcpTensor& tensor) {
    return (is_stack(tensor) ? 1 : 0) + (is_megatron_expert(tensor.name) ? 1 : 0);
  }

  /// By layer and expert; in the order of their elements.
  using ChunksOf = std::map<std::pair<uint64_t, uint64_t>, std::vector<uint32_t>>;
  const ChunksOf& chunks_of(uint32_t number) {
    const auto [known, is_new] = chunks_.try_emplace(number);
    if (!is_new) return known->second;
    const DcpTensor& tensor = metadata_.tensors[number];
    const bool stack = is_stack(tensor);
    const size_t before = axes_before(tensor);
    uint64_t of_layer = 0;
    std::string_view name = tensor.name;
    if (take_text(name, kDecoderLayers) && !stack) of_layer = take_digits(name).value_or(0);
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c) {
      const Box& box = tensor.chunks[c].box;
      if (box.empty()) continue;  // and may be in no file
      if (box.axes() < before) return known->second = {};
      for (size_t axis = 0; axis < before; ++axis)
        if (box.extent[axis] != 1) return known->second = {};
      const uint64_t layer = stack ? box.offset[0] : of_layer;
      const uint64_t expert = before > (stack ? 1u : 0u) ? box.offset[before - 1] : 0;
      known->second[{layer, expert}].push_back(c);
    }
    for (auto& [row, chunks] : known->second)
      std::sort(chunks.begin(), chunks.end(), [&](uint32_t a, uint32_t b) {
        const Dims& x = tensor.chunks[a].box.offset;
        const Dims& y = tensor.chunks[b].box.offset;
        return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end());
      });
    return known->second;
  }

  struct OfLayer {
    std::string_view name;  // behind its number
    uint32_t tensor;
  };

  struct Stretch {
    const Buffer& buffer;
    bool begins, ends;
    Order order;
    Rank rank;
  };

  bool place_all(Order order) {
    placed_.clear();
    const size_t stretches = buffers_[0].size();
    uint64_t first_layer = 0;
    for (uint32_t stretch = 0; stretch < stretches; ++stretch) {
      for (uint64_t stage = 0; stage < stages_; ++stage) {
        std::optional<uint64_t> next_layer;
        for (uint64_t rank = 0; rank < expert_ranks_ * tensor_ranks_; ++rank) {
          const uint64_t group = stage * expert_ranks_ * tensor_ranks_ + rank;
          const Stretch at{buffers_[group][stretch],
                           stretch == 0 && stage == 0,
                           stretch + 1 == stretches && stage + 1 == stages_,
                           order,
                           {stage, rank / tensor_ranks_, rank % tensor_ranks_}};
          uint64_t layer = first_layer;
          const auto parameters = parameters_of(at, layer);
          if (!parameters || layer != next_layer.value_or(layer) || !place(at, *parameters))
            return false;
          next_layer = layer;
        }
        first_layer = *next_layer;
      }
    }
    return first_layer == layers_.size();
  }

  /// In their order; `layer` is the first of the stretch, and becomes the one behind it. Each
  /// takes a multiple of 64 elements, and so do buckets: that says how many layers there are.
  std::optional<std::vector<Parameter>> parameters_of(const Stretch& at, uint64_t& layer) {
    std::vector<Parameter> parameters, last;
    uint64_t left = 0;
    for (const Buffer::Bucket& bucket : at.buffer.buckets) left += aligned(bucket.elements);
    const auto add = [&](std::vector<Parameter>& to, std::optional<Parameter> one) {
      if (!one || one->elements > kMostElements || aligned(one->elements) > left) return false;
      left -= aligned(one->elements);
      to.push_back(*std::move(one));
      return true;
    };
    const auto add_other = [&](std::vector<Parameter>& to, std::string_view name, bool copy) {
      const auto found = others_.find(name);
      if (found == others_.end()) return true;
      auto parameter = parameter_of(found->second, 0, 0, at.rank);
      if (parameter) parameter->copy |= copy;
      return add(to, std::move(parameter));
    };
    if (at.begins)
      for (const std::string_view name : kFirst)
        if (!add_other(parameters, name, false)) return std::nullopt;
    if (at.ends) {
      for (const std::string_view name : kLast)
        if (!add_other(last, name, false)) return std::nullopt;
      // A head that is the embedding: the last stage has a copy of that, if it is not the first.
      if (!others_.contains(kMegatronHead) && !at.begins &&
          !add_other(last, kMegatronEmbedding, true))
        return std::nullopt;
    }
    for (; layer < layers_.size() && (left > 0 || at.ends); ++layer) {
      const auto of_layer = in_order(layers_[layer], at);
      if (!of_layer) return std::nullopt;
      for (const auto& [tensor, expert] : *of_layer)
        if (!add(parameters, parameter_of(tensor, layer, expert, at.rank))) return std::nullopt;
    }
    if (left > 0) return std::nullopt;
    std::move(last.begin(), last.end(), std::back_inserter(parameters));
    return parameters;
  }

  /// A layer's tensors and experts. nullopt: one's place is not known.
  std::optional<std::vector<std::pair<uint32_t, uint64_t>>> in_order(
      const std::vector<OfLayer>& layer, const Stretch& at) const {
    std::map<Place, std::pair<uint32_t, uint64_t>> by_place;
    for (const OfLayer& one : layer) {
      const DcpTensor& tensor = metadata_.tensors[one.tensor];
      uint64_t first = 0, end = 1;
      if (is_megatron_expert(one.name)) {
        const size_t axis = axes_before(tensor) - 1;
        if (tensor.shape.size() <= axis || tensor.shape[axis] > tensor.chunks.size() ||
            tensor.shape[axis] % expert_ranks_ != 0)
          return std::nullopt;
        const uint64_t each = tensor.shape[axis] / expert_ranks_;
        first = at.rank.expert * each, end = first + each;
      }
      for (uint64_t expert = first; expert < end; ++expert) {
        const auto place = place_in_layer(one.name, expert, at.order);
        if (!place || !by_place.try_emplace(*place, one.tensor, expert).second) return std::nullopt;
      }
    }
    std::vector<std::pair<uint32_t, uint64_t>> order;
    for (const auto& [place, one] : by_place) order.push_back(one);
    return order;
  }

  /// Puts them into the buckets, from the last to the first. Chunks are parameters' parts, or
  /// padding: false where one of them does not begin and end where a chunk does.
  bool place(const Stretch& at, const std::vector<Parameter>& parameters) {
    const std::vector<Buffer::Bucket>& buckets = at.buffer.buckets;
    std::vector<Placed> placed;
    uint32_t bucket = 0;
    uint64_t end = 0;
    for (auto one = parameters.rbegin(); one != parameters.rend(); ++one) {
      if (bucket == buckets.size()) return false;
      const uint64_t begin = aligned(end), all = buckets[bucket].elements;
      end = begin + one->elements;
      if (end > all) return false;
      for (const auto& [kind, state] : buckets[bucket].states)
        if (!begins_at(state, begin) || (end != all && !begins_at(state, end))) return false;
      placed.push_back({*one, bucket, begin});
      // A bucket ends with a parameter, or where the next one would have begun in it.
      if (end == all || aligned(end) == all) ++bucket, end = 0;
    }
    if (bucket != buckets.size()) return false;
    placed_.push_back({&at.buffer, std::move(placed)});
    return true;
  }

  bool begins_at(const State& state, uint64_t place) const {
    return chunk_at(state, place).has_value();
  }
  std::optional<uint32_t> chunk_at(const State& state, uint64_t place) const {
    const std::vector<DcpChunk>& chunks = metadata_.tensors[state.tensor].chunks;
    const auto at = std::lower_bound(
        state.chunks.begin(), state.chunks.end(), place,
        [&](uint32_t chunk, uint64_t wanted) { return chunks[chunk].box.offset[0] < wanted; });
    if (at == state.chunks.end() || chunks[*at].box.offset[0] != place) return std::nullopt;
    return *at;
  }

  /// By the first elements of each.
  Result<bool> masters_are_parameters() {
    constexpr uint64_t kLooked = 16;  // elements
    if (std::find(kinds_.begin(), kinds_.end(), kMaster) == kinds_.end()) return false;
    std::vector<ChunkRead> reads;  // of each a master copy and the weight
    for (const auto& [buffer, placed] : placed_)
      for (const Placed& one : placed) {
        const State& state = buffer->buckets[one.bucket].states.at(kMaster);
        const DcpTensor& masters = metadata_.tensors[state.tensor];
        const DcpTensor& weights = metadata_.tensors[one.parameter.tensor];
        const std::optional<uint32_t> master = chunk_at(state, one.offset);
        const uint32_t weight = one.parameter.pieces[0];
        if (masters.dtype != DType::kF32 || !master) return false;
        const auto count = static_cast<uint32_t>(std::min(
            {kLooked, masters.chunks[*master].box.extent[0], weights.chunks[weight].box.volume()}));
        reads.push_back({state.tensor, *master, count * 4});
        reads.push_back({one.parameter.tensor, weight, count * dtype_bits(weights.dtype) / 8});
      }
    PTC_TRY(const auto held, read_(reads));
    for (size_t i = 0; i < reads.size(); i += 2) {
      std::array<float, kLooked> master{};
      std::memcpy(master.data(), held[i].data(), reads[i].bytes);
      if (!is_master_of(std::span(master).first(reads[i].bytes / 4),
                        metadata_.tensors[reads[i + 1].tensor].dtype,
                        std::as_bytes(std::span(held[i + 1]))))
        return false;
    }
    return true;
  }

  /// Each parameter's state, of all ranks together.
  bool make_tensors() {
    for (const std::string_view kind : kinds_) {
      std::map<uint32_t, std::pair<DcpTensor, uint64_t>> made;  // by parameter's: and its elements
      for (const auto& [buffer, placed] : placed_) {
        for (const Placed& one : placed) {
          if (one.parameter.copy) continue;
          const State& state = buffer->buckets[one.bucket].states.at(kind);
          const DcpTensor& from = metadata_.tensors[state.tensor];
          const DcpTensor& parameter = metadata_.tensors[one.parameter.tensor];
          auto& [tensor, elements] = made[one.parameter.tensor];
          if (tensor.name.empty()) {
            tensor.name = fmt::format("{}optimizer.state.{}.{}", prefix_, kind, parameter.name);
            tensor.dtype = from.dtype;
            tensor.shape = parameter.shape;
          }
          if (tensor.dtype != from.dtype) return false;
          elements += one.parameter.elements;
          add_runs(from, state.chunks, parameter, one, tensor);
        }
      }
      for (auto& [number, tensor] : made) {
        const auto all = num_elements(metadata_.tensors[number].shape);
        if (all.has_error() || all.value() != tensor.second) return false;
        new_.push_back(std::move(tensor.first));
      }
    }
    return true;
  }

  /// Chunks by their places.
  static std::vector<uint32_t> in_order(const DcpTensor& tensor) {
    std::vector<uint32_t> order;
    for (uint32_t c = 0; c < tensor.chunks.size(); ++c)
      if (!tensor.chunks[c].box.empty()) order.push_back(c);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return tensor.chunks[a].box.offset[0] < tensor.chunks[b].box.offset[0];
    });
    return order;
  }

  static void add_runs(const DcpTensor& from, const std::vector<uint32_t>& order,
                       const DcpTensor& parameter, const Placed& placed, DcpTensor& into) {
    const uint64_t end = placed.offset + placed.parameter.elements;
    auto at = std::upper_bound(
        order.begin(), order.end(), placed.offset,
        [&](uint64_t place, uint32_t chunk) { return place < from.chunks[chunk].box.offset[0]; });
    for (--at; at != order.end() && from.chunks[*at].box.offset[0] < end; ++at) {
      const DcpChunk& chunk = from.chunks[*at];
      const uint64_t chunk_begin = chunk.box.offset[0], elements = chunk.box.extent[0];
      uint64_t piece_begin = placed.offset;
      for (const uint32_t number : placed.parameter.pieces) {
        const Box& piece = parameter.chunks[number].box;
        const uint64_t piece_end = piece_begin + piece.volume();
        const uint64_t run_begin = std::max(piece_begin, chunk_begin);
        const uint64_t run_end = std::min(piece_end, chunk_begin + elements);
        if (run_begin < run_end) {
          uint64_t first = run_begin - chunk_begin;
          for (Box box :
               boxes_of_run(piece.extent, run_begin - piece_begin, run_end - piece_begin)) {
            for (size_t axis = 0; axis < box.axes(); ++axis) box.offset[axis] += piece.offset[axis];
            into.runs.push_back({elements, first});
            first += box.volume();
            into.chunks.push_back({std::move(box), chunk.item});
          }
        }
        piece_begin = piece_end;
      }
    }
  }

  const DcpMetadata& metadata_;
  const ReadChunks& read_;
  const Has has_;
  const std::string prefix_;  // of its names
  uint64_t tensor_ranks_ = 1, expert_ranks_ = 1, stages_ = 1;
  std::vector<std::vector<Buffer>> buffers_;  // by group and stretch
  std::string types_;                         // of all buffers
  std::vector<std::string> kinds_;            // of state
  std::map<uint64_t, std::vector<OfLayer>> layers_;
  std::map<std::string_view, uint32_t> others_;  // by name; of no layer
  std::unordered_map<uint32_t, ChunksOf> chunks_;
  std::vector<std::pair<const Buffer*, std::vector<Placed>>> placed_;
  std::vector<DcpTensor> new_;
};

}  // namespace

bool is_optimizer_bucket(std::string_view name) {
  return name.find("optimizer.distributed.") != name.npos && name.find(kBucket) != name.npos;
}

Result<std::optional<TakenApart>> take_buckets_apart(const DcpMetadata& metadata,
                                                     const MegatronFile& said,
                                                     const ReadChunks& read) {
  std::map<uint32_t, std::string> optimizers;  // by number: the prefix of its names
  for (const DcpTensor& tensor : metadata.tensors) {
    if (!is_optimizer_bucket(tensor.name)) continue;
    std::string_view rest = tensor.name;
    const uint32_t number = take_optimizer(rest);
    optimizers.emplace(number, tensor.name.substr(0, tensor.name.size() - rest.size()));
  }
  // Experts have one of their own.
  const bool apart = optimizers.size() == 2 && optimizers.contains(0) && optimizers.contains(1);
  if (optimizers.size() != 1 && !apart) return std::optional<TakenApart>();
  TakenApart done;
  done.experts_apart = apart;
  for (const auto& [number, prefix] : optimizers) {
    Unbucketing one(metadata, said, read,
                    !apart        ? Has::kAll
                    : number == 0 ? Has::kDense
                                  : Has::kExperts,
                    prefix);
    PTC_TRY(const bool known, one.run());
    if (!known) return std::optional<TakenApart>();
    std::move(one.made().begin(), one.made().end(), std::back_inserter(done.tensors));
  }
  const std::string first = fmt::format("{}0.", kDistributed);
  for (const DcpValue& value : metadata.values) {
    std::string_view rest = value.name;
    const uint32_t number = take_optimizer(rest);
    if (!take_text(rest, first) || rest.starts_with(kPerBucket)) continue;
    done.settings.push_back({number, std::string(rest.substr(0, rest.find('/'))), value.item});
  }
  return std::optional(std::move(done));
}

void put_in_place(TakenApart apart, DcpMetadata& metadata) {
  std::erase_if(metadata.values, [](const DcpValue& value) {
    std::string_view rest = value.name;
    take_optimizer(rest);
    return rest.starts_with(kDistributed);
  });
  std::erase_if(metadata.tensors,
                [](const DcpTensor& tensor) { return is_optimizer_bucket(tensor.name); });
  std::move(apart.tensors.begin(), apart.tensors.end(), std::back_inserter(metadata.tensors));
}

}  // namespace ptc
