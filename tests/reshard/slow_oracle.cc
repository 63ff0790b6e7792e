#include "tests/reshard/slow_oracle.h"

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

/// The number behind `word` in the name.
std::optional<uint64_t> number_after(const std::string& name,
                                     std::initializer_list<const char*> words) {
  for (const char* word : words) {
    const size_t at = name.find(word);
    if (at == std::string::npos) continue;
    const size_t begin = at + std::string_view(word).size();
    if (begin < name.size() && name[begin] >= '0' && name[begin] <= '9') {
      return std::stoull(name.substr(begin));
    }
  }
  return std::nullopt;
}

bool is_vocabulary(const std::string& name) {
  return has_any(name, {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out",
                        "word_embeddings", "cls.predictions.decoder", "cls.predictions.bias",
                        "shared_head.head", "output_layer"});
}

}  // namespace

bool SlowOracle::on_stage(const std::string& name, const LayoutSpec& spec, uint32_t stage) const {
  const uint32_t stages = spec.sizes.pp;
  const auto layer = number_after(name, {"layers.", "h.", "layer."});
  if (layer) {
    // Deal the layers out one by one.
    std::vector<uint64_t> counts(stages);
    for (uint32_t s = 0; s < stages && !spec.stages.empty(); ++s) counts[s] = spec.stages[s];
    for (uint64_t i = 0; i < number("layers") && spec.stages.empty(); ++i) ++counts[i % stages];
    uint64_t end = 0;
    for (uint32_t s = 0; s < stages; ++s) {
      end += counts[s];
      if (*layer < end) return s == stage;
    }
    return stage == stages - 1;
  }
  if (has_any(name, {"embed_tokens", "wte", "embed_in", "word_embeddings"})) {
    const bool copy = number("tied") != 0 && !(family_ == "bert" && number("head") == 0);
    return stage == 0 || (copy && stage == stages - 1);
  }
  if (has_any(name, {"wpe", "embeddings"})) return stage == 0;
  return stage == stages - 1;
}

std::optional<size_t> SlowOracle::cut_axis(const std::string& name) const {
  if (is_vocabulary(name)) return 0;
  if (has_any(name, {"norm", "Norm", "ln_", "mlp.gate.", "moe.gate.", "_a_proj", "kv_a_", "enorm",
                     "eh_proj", "wpe", "position", "token_type", "pooler", "cls.", "masked_bias",
                     ".attn.bias"})) {
    return std::nullopt;
  }
  const bool bias = name.ends_with(".bias");
  if (ends_with_any(name, {"experts.gate_up_proj"})) return 1;
  if (ends_with_any(name, {"experts.down_proj"})) return 2;
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
  if (has_any(name, {"c_attn"})) return owns(index % (extent / 3) / head_dim, heads);
  if (has_any(name, {"gate_up_proj"})) return owns(index % (extent / 2), extent / 2);
  if (has_any(name, {"linear_fc1"})) {
    return number("gated") != 0 ? owns(index % (extent / 2), extent / 2) : owns(index, extent);
  }
  if (has_any(name, {"linear_qkv"})) {
    return owns(index / ((heads / kv_heads + 2) * head_dim), kv_heads);
  }
  if (has_any(name, {"query_key_value"})) return owns(index / (3 * head_dim), heads);
  if (has_any(name, {"k_proj", "v_proj"})) return owns_kv(index / head_dim);
  if (has_any(name, {"q_b_proj"})) {
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

std::optional<std::vector<SlowOracle::AxisIndices>> SlowOracle::held(
    const std::string& parameter, const Shape& shape, const LayoutSpec& spec,
    const StateCoords& state) const {
  const ParallelConfig& sizes = spec.sizes;
  if (!on_stage(parameter, spec, state.pp)) return std::nullopt;
  const bool stacked = ends_with_any(parameter, {"experts.gate_up_proj", "experts.down_proj"});
  if (const auto expert = number_after(parameter, {"experts."})) {
    if (*expert * sizes.ep / number("experts") != state.ep) return std::nullopt;
  }
  const auto cut = cut_axis(parameter);
  std::vector<AxisIndices> axes(shape.size());
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const uint64_t extent = shape[axis];
    if (cut == axis && is_vocabulary(parameter)) {
      const bool pads = sizes.tp > 1 || family_ == "megatron";
      const uint64_t step = pads ? uint64_t{128} * sizes.tp : 1;
      uint64_t rows = extent;
      while (rows % step != 0) ++rows;
      for (uint64_t row = 0; row < rows; ++row) {
        if (row * sizes.tp / rows != state.tp) continue;
        axes[axis].push_back(row < extent ? std::optional<uint64_t>(row) : std::nullopt);
      }
      continue;
    }
    for (uint64_t i = 0; i < extent; ++i) {
      if (stacked && axis == 0 && i * sizes.ep / extent != state.ep) continue;
      if (cut == axis && !holds(parameter, i, extent, state.tp, sizes.tp)) continue;
      axes[axis].push_back(i);
    }
  }
  return axes;
}

}  // namespace ptc::testing
