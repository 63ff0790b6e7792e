#include "tests/support/slow_slicer.h"

#include <cstdlib>

namespace ptc::testing {
namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

// The number behind `marker` in a name: layer_after("h.12.attn", "h.") is 12.
std::optional<uint64_t> number_after(const std::string& name, const std::string& marker) {
  size_t at = name.rfind(marker);
  if (at == std::string::npos || (at > 0 && name[at - 1] != '.')) return std::nullopt;
  return std::strtoull(name.c_str() + at + marker.size(), nullptr, 10);
}

// Which stage a layer is on, by dealing layers out one by one.
uint64_t stage_of_layer(const LayoutSpec& spec, uint64_t layers, uint64_t layer) {
  uint64_t next = 0;
  for (uint64_t stage = 0; stage < spec.sizes.pp; ++stage) {
    uint64_t count = layers / spec.sizes.pp + (stage < layers % spec.sizes.pp ? 1 : 0);
    if (!spec.stages.empty()) count = spec.stages[stage];
    for (uint64_t i = 0; i < count; ++i)
      if (next++ == layer) return stage;
  }
  std::abort();
}

bool on_stage(const SlowModel& model, const std::string& name, const LayoutSpec& spec,
              uint64_t stage) {
  const uint64_t last = spec.sizes.pp - 1;
  std::optional<uint64_t> layer;
  if (model.family == "gpt2") layer = number_after(name, "h.");
  else if (model.family == "bert") layer = number_after(name, "layer.");
  else layer = number_after(name, "layers.");
  if (layer) return stage_of_layer(spec, model.layers, *layer) == stage;
  const bool embedding = has(name, "embed_tokens.weight") || has(name, "wte.weight") ||
                         has(name, "word_embeddings.weight");
  if (embedding && model.tied) return stage == 0 || stage == last;
  if (embedding || has(name, "wpe.weight") || has(name, "embeddings.")) return stage == 0;
  return stage == last;
}

// Global indices that a tp rank holds along the axis that is cut; −1 is padding.
std::vector<int64_t> even(uint64_t n, uint64_t tp, uint64_t rank) {
  std::vector<int64_t> held;
  for (uint64_t i = 0; i < n; ++i)
    if (i / (n / tp) == rank) held.push_back(i);
  return held;
}

std::vector<int64_t> by_heads(uint64_t begin, uint64_t n, uint64_t heads, uint64_t tp,
                              uint64_t rank) {
  std::vector<int64_t> held;
  for (uint64_t i = 0; i < n; ++i) {
    uint64_t head = i / (n / heads);
    bool mine = heads >= tp ? head / (heads / tp) == rank : head == rank * heads / tp;
    if (mine) held.push_back(begin + i);
  }
  return held;
}

std::vector<int64_t> vocabulary(uint64_t n, uint64_t tp, uint64_t rank) {
  uint64_t padded = n;
  if (tp > 1)
    while (padded % (128 * tp) != 0) ++padded;
  std::vector<int64_t> held;
  for (uint64_t i = 0; i < padded; ++i)
    if (i / (padded / tp) == rank) held.push_back(i < n ? static_cast<int64_t>(i) : -1);
  return held;
}

struct AxisCut {
  size_t axis;
  std::vector<int64_t> held;
};

std::optional<AxisCut> tensor_cut(const SlowModel& m, const TensorInfo& tensor, uint64_t tp,
                                  uint64_t r) {
  const std::string& name = tensor.name;
  const Shape& shape = tensor.shape;
  const bool weight = name.ends_with("weight");
  if (m.family == "llama" || m.family == "mixtral") {
    if (has(name, "embed_tokens.weight") || has(name, "lm_head.weight"))
      return AxisCut{0, vocabulary(shape[0], tp, r)};
    if (has(name, "q_norm") || has(name, "k_norm")) return std::nullopt;
    if (has(name, ".q_proj.")) return AxisCut{0, by_heads(0, shape[0], m.heads, tp, r)};
    if (has(name, ".k_proj.") || has(name, ".v_proj."))
      return AxisCut{0, by_heads(0, shape[0], m.kv_heads, tp, r)};
    if (has(name, ".o_proj.weight")) return AxisCut{1, by_heads(0, shape[1], m.heads, tp, r)};
    if (has(name, ".gate_proj.") || has(name, ".up_proj.") || has(name, ".w1.") || has(name, ".w3."))
      return AxisCut{0, even(shape[0], tp, r)};
    if (has(name, ".down_proj.weight") || has(name, ".w2.")) return AxisCut{1, even(shape[1], tp, r)};
    return std::nullopt;
  }
  if (m.family == "gpt2") {
    if (has(name, "wte.weight")) return AxisCut{0, vocabulary(shape[0], tp, r)};
    if (has(name, "attn.c_attn.")) {
      size_t axis = weight ? 1 : 0;
      std::vector<int64_t> held;
      for (uint64_t part = 0; part < 3; ++part)
        for (int64_t i : by_heads(part * shape[axis] / 3, shape[axis] / 3, m.heads, tp, r))
          held.push_back(i);
      return AxisCut{axis, held};
    }
    if (has(name, "mlp.c_fc.")) {
      size_t axis = weight ? 1 : 0;
      return AxisCut{axis, even(shape[axis], tp, r)};
    }
    if (has(name, "attn.c_proj.weight")) return AxisCut{0, by_heads(0, shape[0], m.heads, tp, r)};
    if (has(name, "mlp.c_proj.weight")) return AxisCut{0, even(shape[0], tp, r)};
    return std::nullopt;
  }
  // bert
  if (has(name, "word_embeddings.weight") || has(name, "cls.predictions.bias") ||
      has(name, "cls.predictions.decoder."))
    return AxisCut{0, vocabulary(shape[0], tp, r)};
  if (has(name, "attention.self.query.") || has(name, "attention.self.key.") ||
      has(name, "attention.self.value."))
    return AxisCut{0, by_heads(0, shape[0], m.heads, tp, r)};
  if (has(name, "intermediate.dense.")) return AxisCut{0, even(shape[0], tp, r)};
  if (has(name, "attention.output.dense.weight"))
    return AxisCut{1, by_heads(0, shape[1], m.heads, tp, r)};
  if (has(name, "output.dense.weight")) return AxisCut{1, even(shape[1], tp, r)};
  return std::nullopt;
}

}  // namespace

std::optional<SlowPart> slow_part(const SlowModel& model, const TensorInfo& tensor,
                                  const std::string& bytes, const LayoutSpec& spec,
                                  const RankCoords& rank) {
  if (!on_stage(model, tensor.name, spec, rank.pp)) return std::nullopt;
  if (std::optional<uint64_t> expert = number_after(tensor.name, "experts."))
    if (*expert * spec.sizes.ep / model.experts != rank.ep) return std::nullopt;

  // For every axis the global indices held, in local order.
  std::vector<std::vector<int64_t>> held;
  for (uint64_t extent : tensor.shape) {
    held.emplace_back();
    for (uint64_t i = 0; i < extent; ++i) held.back().push_back(i);
  }
  if (!tensor.shape.empty())
    if (auto cut = tensor_cut(model, tensor, spec.sizes.tp, rank.tp)) held[cut->axis] = cut->held;

  SlowPart part;
  uint64_t elements = 1;
  for (const auto& indices : held) {
    part.shape.push_back(indices.size());
    elements *= indices.size();
  }
  const size_t element_bytes = dtype_bits(tensor.dtype) / 8;
  for (uint64_t i = 0; i < elements; ++i) {
    // Local index i, digit by digit from the last axis, to the global one.
    uint64_t rest = i, global = 0, stride = 1;
    bool padding = false;
    for (size_t axis = held.size(); axis-- > 0;) {
      int64_t index = held[axis][rest % held[axis].size()];
      rest /= held[axis].size();
      if (index < 0) padding = true;
      else global += index * stride;
      stride *= tensor.shape[axis];
    }
    part.bytes += padding ? std::string(element_bytes, '\0')
                          : bytes.substr(global * element_bytes, element_bytes);
  }
  return part;
}

}  // namespace ptc::testing
