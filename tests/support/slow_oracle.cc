#include "tests/support/slow_oracle.h"

#include <initializer_list>
#include <string_view>

namespace ptc::testing {
namespace {

bool has_any(const std::string& name, std::initializer_list<const char*> words) {
  for (const char* word : words) {
    if (name.find(word) != std::string::npos) return true;
  }
  return false;
}
bool ends_with_any(const std::string& name, std::initializer_list<const char*> words) {
  for (const char* word : words) {
    if (name.ends_with(word)) return true;
  }
  return false;
}

/// Where the number behind one of the words is in the name.
std::optional<size_t> place_after(const std::string& name,
                                  std::initializer_list<const char*> words) {
  for (const char* word : words) {
    for (size_t at = name.find(word); at != std::string::npos; at = name.find(word, at + 1)) {
      const size_t begin = at + std::string_view(word).size();
      if (begin < name.size() && name[begin] >= '0' && name[begin] <= '9') return begin;
    }
  }
  return std::nullopt;
}
std::optional<uint64_t> number_after(const std::string& name,
                                     std::initializer_list<const char*> words) {
  const auto place = place_after(name, words);
  if (!place) return std::nullopt;
  return std::stoull(name.substr(*place));
}
constexpr std::initializer_list<const char*> kLayerWords = {"layers.", "h.", "layer."};

bool is_embedding(const std::string& name) {
  return has_any(name, {"embed_tokens", "wte", "embed_in", "word_embeddings"});
}
bool is_vocabulary(const std::string& name) {
  return is_embedding(name) ||
         has_any(name, {"lm_head", "embed_out", "cls.predictions.decoder", "cls.predictions.bias",
                        "shared_head.head", "output_layer"});
}
bool is_buffer(const std::string& name) {
  return has_any(name, {".attn.bias", "masked_bias", "position_ids", "e_score_correction_bias",
                        "expert_bias", "inv_freq"});
}

/// Of Megatron-Core's GroupedMLP: [experts, in, out] in memory, and of two axes in files.
bool is_folded(const std::string& name) {
  return ends_with_any(name, {"experts.weight1", "experts.weight2"});
}
bool is_stacked_experts(const std::string& name) {
  return ends_with_any(name, {"experts.gate_up_proj", "experts.down_proj"}) || is_folded(name);
}

/// The weight beside an adapter's tensor, and whether it runs over the weight's inputs.
struct Adapter {
  std::string weight;
  bool inputs;
};
std::optional<Adapter> adapter_of(const std::string& name) {
  for (const char* word :
       {".lora_A", ".lora_embedding_A", ".lora_B", ".lora_embedding_B", ".lora_magnitude_vector"}) {
    const size_t at = name.find(word);
    if (at != std::string::npos) {
      return Adapter{name.substr(0, at) + ".weight", std::string_view(word).ends_with("_A")};
    }
  }
  return std::nullopt;
}

}  // namespace

RankCoords SlowOracle::place(const LayoutSpec& spec, uint64_t global_rank) {
  const ParallelConfig& sizes = spec.sizes;
  if (sizes.etp == 0) return spec.coords(global_rank);
  RankCoords at;
  // Experts: etp, ep, dp and pp. Context-parallel ranks are data-parallel ones here.
  uint64_t rank = 0;
  for (uint32_t pp = 0; pp < sizes.pp; ++pp)
    for (uint32_t dp = 0; dp < sizes.dp; ++dp)
      for (uint32_t cp = 0; cp < sizes.cp; ++cp)
        for (uint32_t ep = 0; ep < sizes.ep; ++ep)
          for (uint32_t etp = 0; etp < sizes.etp; ++etp)
            if (rank++ == global_rank) at = {.pp = pp, .dp = dp, .ep = ep, .cp = cp, .etp = etp};
  const uint64_t world = rank;
  // All else: tp, cp, dp and pp, with as many dp as the world has room for.
  const uint64_t dense_dp = world / sizes.pp / sizes.cp / sizes.tp;
  rank = 0;
  for (uint32_t pp = 0; pp < sizes.pp; ++pp)
    for (uint64_t dp = 0; dp < dense_dp; ++dp)
      for (uint32_t cp = 0; cp < sizes.cp; ++cp)
        for (uint32_t tp = 0; tp < sizes.tp; ++tp)
          if (rank++ == global_rank) at.tp = tp;
  return at;
}

SlowOracle::Share SlowOracle::share_of(const LayoutSpec& spec, const RankCoords& rank,
                                       bool experts) {
  thread_local LayoutSpec of;
  thread_local std::vector<RankCoords> places;  // by global rank
  if (places.empty() || !(of == spec)) {
    places.clear();
    of = spec;
    for (uint64_t r = 0; r < spec.sizes.world_size(); ++r) places.push_back(place(spec, r));
  }
  const uint32_t neighbours = spec.dp_shard != 0 ? spec.dp_shard : spec.sizes.dp;
  Share share;
  for (const RankCoords& at : places) {
    if (at.pp != rank.pp || at.tp != rank.tp) continue;
    const bool same_experts = at.ep == rank.ep && at.etp == rank.etp;
    if (!same_experts && (experts || !spec.shard_ep)) continue;
    if (at.dp / neighbours != rank.dp / neighbours) continue;
    if (!spec.shard_cp && at.cp != rank.cp) continue;
    if (at == rank) share.before = share.ranks;
    ++share.ranks;
  }
  return share;
}

std::vector<uint64_t> SlowOracle::layers_of_stages(const LayoutSpec& spec) const {
  std::vector<uint64_t> counts(spec.stages.begin(), spec.stages.end());
  if (!counts.empty()) return counts;
  // As if the layers were dealt out one by one.
  const uint64_t count = uint64_t{spec.sizes.pp} * spec.vpp;
  const uint64_t each = number("layers") / count, more = number("layers") % count;
  for (uint64_t s = 0; s < count; ++s) counts.push_back(each + (s < more ? 1 : 0));
  return counts;
}

bool SlowOracle::on_stage(const std::string& name, const LayoutSpec& spec, uint32_t stage) const {
  const uint32_t stages = spec.sizes.pp;
  if (const auto layer = number_after(name, kLayerWords)) {
    uint64_t end = 0;
    const std::vector<uint64_t> counts = layers_of_stages(spec);
    for (size_t s = 0; s < counts.size(); ++s) {  // stretches are dealt out in turn
      end += counts[s];
      if (*layer < end) return s % stages == stage;
    }
    return stage == stages - 1;
  }
  if (is_embedding(name)) {
    const bool copy = number("tied") != 0 && !(family_ == "bert" && number("head") == 0);
    return stage == 0 || (copy && stage == stages - 1);
  }
  if (has_any(name, {"wpe", "embeddings"})) return stage == 0;
  return stage == stages - 1;
}

std::string SlowOracle::local_name(const std::string& name, const LayoutSpec& spec,
                                   uint32_t stage) const {
  if (spec.naming == Naming::kGlobal) return name;
  const auto place = place_after(name, kLayerWords);
  if (!place) return name;
  uint64_t layer = std::stoull(name.substr(*place));
  const std::vector<uint64_t> counts = layers_of_stages(spec);
  for (uint32_t s = 0; s < stage; ++s) layer -= counts[s];
  return name.substr(0, *place) + std::to_string(layer) + name.substr(name.find('.', *place));
}

std::optional<size_t> SlowOracle::cut_axis(const std::string& name) const {
  if (is_vocabulary(name)) return 0;
  if (has_any(name, {"mixer.out_proj"})) return 1;
  if (has_any(name, {"mixer."}) && !has_any(name, {"in_proj.layer_norm"})) return 0;
  if (has_any(name, {"norm", "Norm", "ln_", "mlp.gate.", "moe.gate.", "_a_proj", "kv_a_", "enorm",
                     "eh_proj", "wpe", "position", "token_type", "pooler", "cls.", "masked_bias",
                     ".attn.bias", "shared_expert_gate", "router"})) {
    return std::nullopt;
  }
  const bool bias = has_any(name, {".bias"});
  if (ends_with_any(name, {"experts.gate_up_proj"})) return 1;
  if (ends_with_any(name, {"experts.down_proj", "experts.weight1"})) return 2;
  if (ends_with_any(name, {"experts.weight2"})) return 1;
  if (family_ == "gpt2") {
    if (has_any(name, {"c_attn", "c_fc"})) return bias ? 0 : 1;
    if (has_any(name, {"c_proj"}) && !bias) return 0;
    return std::nullopt;
  }
  if (has_any(name, {"o_proj", "down_proj", ".w2.", "attention.dense", "dense_4h_to_h",
                     "output.dense", "linear_proj", "linear_fc2"})) {
    if (bias) return std::nullopt;
    return 1;
  }
  return 0;
}

bool SlowOracle::holds(const std::string& name, uint64_t index, uint64_t extent, uint32_t rank,
                       uint32_t ranks) const {
  // Element `index` is in unit `unit` of `units`, which are dealt out in order.
  auto owns = [&](uint64_t unit, uint64_t units) { return unit * ranks / units == rank; };
  const uint64_t heads = number("heads");
  const uint64_t head_dim = number("head_dim");
  const uint64_t kv_heads = number("kv_heads");
  auto owns_kv = [&](uint64_t head) {
    if (ranks <= kv_heads) return owns(head, kv_heads);
    return head == rank * kv_heads / ranks;
  };
  if (has_any(name, {"mixer."})) {
    const uint64_t mamba_heads = number("mamba_heads"),
                   inner = mamba_heads * number("mamba_head_dim");
    const uint64_t groups = number("mamba_groups"), states = groups * number("mamba_state");
    struct Block {
      uint64_t length, units;
    };
    std::vector<Block> blocks = {{extent, mamba_heads}};
    if (has_any(name, {"in_proj"})) {
      blocks = {{inner, mamba_heads},
                {inner, mamba_heads},
                {states, groups},
                {states, groups},
                {mamba_heads, mamba_heads}};
    } else if (has_any(name, {"conv1d"})) {
      blocks = {{inner, mamba_heads}, {states, groups}, {states, groups}};
    }
    for (const Block& block : blocks) {
      if (index < block.length) return owns(index / (block.length / block.units), block.units);
      index -= block.length;
    }
  }
  if (has_any(name, {"qkv_proj"})) {
    if (index < heads * head_dim) return owns(index / head_dim, heads);
    return owns_kv((index - heads * head_dim) % (kv_heads * head_dim) / head_dim);
  }
  if (has_any(name, {"c_attn"})) return owns(index % (extent / 3) / head_dim, heads);
  if (has_any(name, {"gate_up_proj"})) return owns(index % (extent / 2), extent / 2);
  if (has_any(name, {"linear_fc1", "experts.weight1"})) {
    return number("gated") != 0 ? owns(index % (extent / 2), extent / 2) : owns(index, extent);
  }
  if (has_any(name, {"linear_qkv"})) {
    const uint64_t queries = heads / kv_heads * (number("attention_gate") != 0 ? 2 : 1);
    return owns(index / ((queries + 2) * head_dim), kv_heads);
  }
  if (has_any(name, {"query_key_value"})) return owns(index / (3 * head_dim), heads);
  if (has_any(name, {"k_proj", "v_proj"})) return owns_kv(index / head_dim);
  if (has_any(name, {"q_b_proj"}) || (family_ == "deepseek_v3" && has_any(name, {".q_proj"}))) {
    return owns(index / (number("nope") + number("rope")), heads);
  }
  if (has_any(name, {"kv_b_proj"})) {
    return owns(index / (number("nope") + number("value")), heads);
  }
  if (has_any(name, {"q_proj", "query", "key", "value", "attn.c_proj", "attention.dense",
                     "attention.output.dense", "linear_proj"})) {
    return owns(index / head_dim, heads);
  }
  if (has_any(name, {"o_proj"})) {
    return owns(index / (family_ == "deepseek_v3" ? number("value") : head_dim), heads);
  }
  return owns(index, extent);
}

std::vector<SlowOracle::AxisIndices> SlowOracle::axes(const std::string& parameter,
                                                      const Shape& shape, const LayoutSpec& spec,
                                                      const RankCoords& rank) const {
  const ParallelConfig& sizes = spec.sizes;
  std::string weight = parameter;
  std::optional<size_t> cut;
  uint64_t block = 1;  // elements of the weight for each of this tensor
  if (const auto adapter = adapter_of(parameter)) {
    weight = adapter->weight;
    const bool inputs_first =
        is_embedding(weight) || (family_ == "gpt2" && has_any(weight, {".c_"}));
    if (const auto axis = cut_axis(weight);
        axis && (*axis == 0) == (adapter->inputs == inputs_first)) {
      cut = adapter->inputs ? 1 : 0;
    }
  } else {
    constexpr std::string_view kScales = "_scale_inv";
    if (weight.ends_with(kScales)) {
      weight.erase(weight.size() - kScales.size());
      block = 128;
    }
    cut = cut_axis(weight);
  }
  const bool stacked = is_stacked_experts(weight);
  std::vector<AxisIndices> axes(shape.size());
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const uint64_t extent = shape[axis];
    if (cut == axis && is_vocabulary(weight)) {
      const bool pads = sizes.tp > 1 || family_ == "megatron";
      const uint64_t step = pads ? uint64_t{128} * sizes.tp : 1;
      uint64_t rows = extent;
      while (rows % step != 0) ++rows;
      for (uint64_t row = 0; row < rows; ++row) {
        if (row * sizes.tp / rows != rank.tp) continue;
        axes[axis].push_back(row < extent ? std::optional<uint64_t>(row) : std::nullopt);
      }
      continue;
    }
    for (uint64_t i = 0; i < extent; ++i) {
      if (stacked && axis == 0 && i * sizes.ep / extent != rank.ep) continue;
      if (cut == axis && !holds(weight, i * block, extent * block, rank.tp, sizes.tp)) continue;
      axes[axis].push_back(i);
    }
  }
  return axes;
}

std::optional<SlowOracle::Held> SlowOracle::held(const std::string& name, const Shape& shape,
                                                 const LayoutSpec& spec,
                                                 const RankCoords& rank) const {
  std::string parameter = name;
  bool moment = false, scalar = false;
  for (const char* prefix : {"exp_avg.", "exp_avg_sq.", "state."}) {
    if (!parameter.starts_with(prefix)) continue;
    parameter.erase(0, std::string_view(prefix).size());
    scalar = parameter.ends_with(".step");
    if (scalar) parameter.erase(parameter.size() - 5);
    moment = true;
    break;
  }
  if (!on_stage(parameter, spec, rank.pp)) return std::nullopt;
  const auto expert = parameter.find("mlp.experts.linear_fc") != std::string::npos
                          ? number_after(parameter, {"weight", "bias"})
                          : number_after(parameter, {"experts."});
  if (expert && *expert * spec.sizes.ep / number("experts") != rank.ep) return std::nullopt;

  std::vector<AxisIndices> indices;
  if (scalar) {
    indices.assign(shape.size(), {0});
  } else {
    LayoutSpec cut = spec;
    RankCoords at = rank;
    if (spec.sizes.etp != 0 && (expert || is_stacked_experts(parameter)))
      cut.sizes.tp = spec.sizes.etp, at.tp = rank.etp;
    indices = axes(parameter, shape, cut, at);
  }
  Held held;
  held.elements = {0};
  for (size_t axis = 0; axis < indices.size(); ++axis) {
    std::vector<std::optional<uint64_t>> next;
    for (const auto& base : held.elements) {
      for (const auto& index : indices[axis]) {
        next.push_back(base && index ? std::optional(*base * shape[axis] + *index) : std::nullopt);
      }
    }
    held.elements = std::move(next);
    held.shape.push_back(indices[axis].size());
  }
  if (scalar || shape.empty()) return held;
  if (is_folded(parameter)) {
    const uint64_t experts = held.shape[0];
    held.shape.erase(held.shape.begin());
    held.shape[parameter.ends_with("1") ? 1 : 0] *= experts;
  }

  // Deal rows (FSDP) or elements (ZeRO-1) out, the same number to each dp rank until none is left.
  // With hybrid sharding to the first so many, and the same to the next.
  const auto [dp, ranks] = share_of(spec, rank, expert || is_stacked_experts(parameter));
  if (spec.optimizer == OptimizerCut::kZero1 && moment) {
    uint64_t each = 0;
    while (each * ranks < held.elements.size()) ++each;
    std::vector<std::optional<uint64_t>> mine;
    for (uint64_t i = dp * each; i < (dp + 1) * each; ++i) {
      mine.push_back(i < held.elements.size() ? held.elements[i] : std::nullopt);
    }
    return Held{{each}, std::move(mine)};
  }
  if (spec.optimizer == OptimizerCut::kFsdp && !is_buffer(parameter)) {
    const uint64_t rows = held.shape[0];
    uint64_t each = 0;
    while (each * ranks < rows) ++each;
    Held mine{held.shape, {}};
    mine.shape[0] = 0;
    for (uint64_t row = 0; row < rows; ++row) {
      if (row / each != dp) continue;
      ++mine.shape[0];
      const uint64_t width = held.elements.size() / rows;
      mine.elements.insert(mine.elements.end(), held.elements.begin() + row * width,
                           held.elements.begin() + (row + 1) * width);
    }
    return mine;
  }
  return held;
}

const SlowOracle::Held* SlowOracle::OfRank::held(const std::string& name, const Shape& shape) {
  const std::optional<size_t> place = place_after(name, kLayerWords);
  if (!place) {
    last_ = oracle_.held(name, shape, spec_, rank_);
    return last_ ? &*last_ : nullptr;
  }
  const uint64_t layer = std::stoull(name.substr(*place));
  auto [on_stage, is_new_layer] = on_stage_.try_emplace(layer);
  if (is_new_layer) on_stage->second = oracle_.on_stage(name, spec_, rank_.pp);
  if (!on_stage->second) return nullptr;
  auto [known, is_new] = known_.try_emplace(
      name.substr(0, *place) + name.substr(name.find_first_not_of("0123456789", *place)));
  if (is_new || !(known->second.first == shape)) {
    std::optional<Held> held = oracle_.held(name, shape, spec_, rank_);
    if (!held) {
      known_.erase(known);
      return nullptr;
    }
    known->second = {shape, *std::move(held)};
  }
  return &known->second.second;
}

}  // namespace ptc::testing
