#include "tests/support/synthetic_model.h"

#include <algorithm>
#include <boost/json/value.hpp>
#include <initializer_list>
#include <utility>

#include "store/base/json.h"

namespace ptc::testing {
namespace {

class Builder {
 public:
  explicit Builder(std::string_view config_text) {
    auto parsed = parse_json(config_text);
    PTC_CHECK(parsed.has_value() && parsed.value().is_object());
    config_ = std::move(parsed.value().as_object());
    type_ = config_.at("model_type").as_string().c_str();
    const json::value* dtype = config_.if_contains("torch_dtype");
    if (dtype && dtype->as_string() == "bfloat16") dtype_ = DType::kBF16;
    if (dtype && dtype->as_string() == "float16") dtype_ = DType::kF16;
    hidden_ = number({"hidden_size", "n_embd"});
    layers_ = number({"num_hidden_layers", "n_layer", "num_layers"});
    heads_ = number({"num_attention_heads", "n_head"});
    kv_heads_ = number({"num_key_value_heads", "num_query_groups"}, heads_);
    PTC_CHECK(hidden_ > 0 && layers_ > 0 && heads_ > 0);
    head_dim_ = number({"head_dim"}, hidden_ / heads_);
    intermediate_ = number({"intermediate_size"}, 4 * hidden_);
    vocab_ = number({"vocab_size"});
  }

  std::vector<TensorInfo> build() {
    if (type_ == "gpt2") {
      gpt2();
    } else if (type_ == "gpt_neox") {
      gpt_neox();
    } else if (type_ == "bert") {
      bert();
    } else if (type_ == "megatron") {
      megatron();
    } else {
      decoder();
    }
    return std::move(tensors_);
  }

 private:
  uint64_t number(std::initializer_list<const char*> keys, uint64_t otherwise = 0) const {
    for (const char* key : keys) {
      const json::value* value = config_.if_contains(key);
      if (value && value->is_int64()) return static_cast<uint64_t>(value->get_int64());
    }
    return otherwise;
  }
  bool flag(const char* key, bool otherwise) const {
    const json::value* value = config_.if_contains(key);
    return value && value->is_bool() ? value->get_bool() : otherwise;
  }

  void add(std::string name, Shape shape) { add(std::move(name), shape, dtype_); }
  void add(std::string name, Shape shape, DType dtype) {
    tensors_.push_back({"model.safetensors", std::move(name), dtype, shape});
  }
  /// A weight [out, in] and its bias.
  void linear(const std::string& name, uint64_t out, uint64_t in, bool bias) {
    add(name + ".weight", {out, in});
    if (bias) add(name + ".bias", {out});
  }
  void layer_norm(const std::string& name, uint64_t size) {
    add(name + ".weight", {size});
    add(name + ".bias", {size});
  }
  /// A weight which DeepSeek stores in FP8 with one scale for each 128×128 block.
  void quantised(const std::string& name, uint64_t out, uint64_t in, bool bias = false) {
    if (!config_.contains("quantization_config")) return linear(name, out, in, bias);
    if (bias) add(name + ".bias", {out});
    add(name + ".weight", {out, in}, DType::kF8E4M3);
    add(name + ".weight_scale_inv", {(out + 127) / 128, (in + 127) / 128}, DType::kF32);
  }

  // Llama and its relatives, with and without experts, and DeepSeek.
  void decoder() {
    const std::string prefix = flag("prefix", true) ? "model." : "";
    add(prefix + "embed_tokens.weight", {vocab_, hidden_});
    const uint64_t all = layers_ + number({"num_nextn_predict_layers"});
    for (uint64_t layer = 0; layer < all; ++layer) {
      const std::string at = fmt::format("{}layers.{}.", prefix, layer);
      if (type_ == "deepseek_v3") {
        latent_attention(at + "self_attn.");
      } else {
        attention(at + "self_attn.");
      }
      mlp_or_experts(at, layer);
      add(at + "input_layernorm.weight", {hidden_});
      add(at + "post_attention_layernorm.weight", {hidden_});
      if (layer < layers_) continue;
      add(at + "embed_tokens.weight", {vocab_, hidden_});
      add(at + "enorm.weight", {hidden_});
      add(at + "hnorm.weight", {hidden_});
      add(at + "eh_proj.weight", {hidden_, 2 * hidden_});
      add(at + "shared_head.norm.weight", {hidden_});
      add(at + "shared_head.head.weight", {vocab_, hidden_});
    }
    add(prefix + "norm.weight", {hidden_});
    if (!flag("tie_word_embeddings", false)) add("lm_head.weight", {vocab_, hidden_});
  }

  void attention(const std::string& at) {
    const bool bias = type_ == "qwen2" || flag("attention_bias", false);
    if (flag("fused", false)) {
      linear(at + "qkv_proj", (heads_ + 2 * kv_heads_) * head_dim_, hidden_, bias);
    } else {
      linear(at + "q_proj", heads_ * head_dim_, hidden_, bias);
      linear(at + "k_proj", kv_heads_ * head_dim_, hidden_, bias);
      linear(at + "v_proj", kv_heads_ * head_dim_, hidden_, bias);
    }
    linear(at + "o_proj", hidden_, heads_ * head_dim_, flag("attention_bias", false));
    if (type_ != "qwen3" && type_ != "qwen3_moe") return;
    add(at + "q_norm.weight", {head_dim_});
    add(at + "k_norm.weight", {head_dim_});
  }

  void latent_attention(const std::string& at) {
    const uint64_t q_rank = number({"q_lora_rank"});
    const uint64_t kv_rank = number({"kv_lora_rank"});
    const uint64_t nope = number({"qk_nope_head_dim"});
    const uint64_t rope = number({"qk_rope_head_dim"});
    const uint64_t value = number({"v_head_dim"});
    const bool bias = flag("attention_bias", false);
    if (q_rank == 0) {
      quantised(at + "q_proj", heads_ * (nope + rope), hidden_);
    } else {
      quantised(at + "q_a_proj", q_rank, hidden_, bias);
      add(at + "q_a_layernorm.weight", {q_rank});
      quantised(at + "q_b_proj", heads_ * (nope + rope), q_rank);
    }
    quantised(at + "kv_a_proj_with_mqa", kv_rank + rope, hidden_, bias);
    add(at + "kv_a_layernorm.weight", {kv_rank});
    quantised(at + "kv_b_proj", heads_ * (nope + value), kv_rank);
    quantised(at + "o_proj", hidden_, heads_ * value, bias);
  }

  void gated_mlp(const std::string& at, uint64_t inner) {
    const bool bias = flag("mlp_bias", false);
    if (flag("fused", false)) {
      linear(at + "gate_up_proj", 2 * inner, hidden_, bias);
    } else {
      quantised(at + "gate_proj", inner, hidden_, bias);
      quantised(at + "up_proj", inner, hidden_, bias);
    }
    quantised(at + "down_proj", hidden_, inner, bias);
  }

  void mlp_or_experts(const std::string& layer_at, uint64_t layer) {
    const uint64_t experts = number({"num_local_experts", "num_experts", "n_routed_experts"});
    if (experts == 0 || layer < number({"first_k_dense_replace"})) {
      return gated_mlp(layer_at + "mlp.", intermediate_);
    }
    const bool mixtral = type_ == "mixtral";
    const std::string at = layer_at + (mixtral ? "block_sparse_moe." : "mlp.");
    const uint64_t inner = number({"moe_intermediate_size"}, intermediate_);
    add(at + "gate.weight", {experts, hidden_});
    if (type_ == "deepseek_v3") add(at + "gate.e_score_correction_bias", {experts}, DType::kF32);
    if (flag("stacked_experts", false)) {
      add(at + "experts.gate_up_proj", {experts, 2 * inner, hidden_});
      add(at + "experts.down_proj", {experts, hidden_, inner});
    }
    for (uint64_t e = 0; e < experts && !flag("stacked_experts", false); ++e) {
      const std::string expert = fmt::format("{}experts.{}.", at, e);
      if (mixtral) {
        add(expert + "w1.weight", {inner, hidden_});
        add(expert + "w2.weight", {hidden_, inner});
        add(expert + "w3.weight", {inner, hidden_});
      } else {
        gated_mlp(expert, inner);
      }
    }
    const uint64_t shared = number({"n_shared_experts"});
    if (shared > 0) gated_mlp(at + "shared_experts.", shared * inner);
    if (type_ != "qwen2_moe") return;
    gated_mlp(at + "shared_expert.", number({"shared_expert_intermediate_size"}, inner));
    add(at + "shared_expert_gate.weight", {1, hidden_});
  }

  void gpt2() {
    const std::string prefix = flag("prefix", true) ? "transformer." : "";
    const uint64_t inner = number({"n_inner"}, 4 * hidden_);
    const uint64_t positions = number({"n_positions"}, 16);
    add(prefix + "wte.weight", {vocab_, hidden_});
    add(prefix + "wpe.weight", {positions, hidden_});
    for (uint64_t layer = 0; layer < layers_; ++layer) {
      const std::string at = fmt::format("{}h.{}.", prefix, layer);
      layer_norm(at + "ln_1", hidden_);
      add(at + "attn.bias", {1, 1, positions, positions}, DType::kBool);
      add(at + "attn.masked_bias", {}, DType::kF32);
      conv1d(at + "attn.c_attn", hidden_, 3 * hidden_);
      conv1d(at + "attn.c_proj", hidden_, hidden_);
      layer_norm(at + "ln_2", hidden_);
      conv1d(at + "mlp.c_fc", hidden_, inner);
      conv1d(at + "mlp.c_proj", inner, hidden_);
    }
    layer_norm(prefix + "ln_f", hidden_);
    if (!flag("tie_word_embeddings", true)) add("lm_head.weight", {vocab_, hidden_});
  }
  void conv1d(const std::string& name, uint64_t in, uint64_t out) {
    add(name + ".weight", {in, out});
    add(name + ".bias", {out});
  }

  void gpt_neox() {
    const std::string prefix = flag("prefix", true) ? "gpt_neox." : "";
    add(prefix + "embed_in.weight", {vocab_, hidden_});
    for (uint64_t layer = 0; layer < layers_; ++layer) {
      const std::string at = fmt::format("{}layers.{}.", prefix, layer);
      layer_norm(at + "input_layernorm", hidden_);
      layer_norm(at + "post_attention_layernorm", hidden_);
      linear(at + "attention.query_key_value", 3 * hidden_, hidden_, true);
      linear(at + "attention.dense", hidden_, hidden_, true);
      linear(at + "mlp.dense_h_to_4h", intermediate_, hidden_, true);
      linear(at + "mlp.dense_4h_to_h", hidden_, intermediate_, true);
    }
    layer_norm(prefix + "final_layer_norm", hidden_);
    if (!flag("tie_word_embeddings", false)) add("embed_out.weight", {vocab_, hidden_});
  }

  void bert() {
    const bool pretraining = flag("prefix", true);
    const std::string prefix = pretraining ? "bert." : "";
    const uint64_t positions = number({"max_position_embeddings"}, 16);
    const std::string embeddings = prefix + "embeddings.";
    if (!pretraining) add(embeddings + "position_ids", {1, positions}, DType::kI64);
    add(embeddings + "word_embeddings.weight", {vocab_, hidden_});
    add(embeddings + "position_embeddings.weight", {positions, hidden_});
    add(embeddings + "token_type_embeddings.weight", {number({"type_vocab_size"}, 2), hidden_});
    layer_norm(embeddings + "LayerNorm", hidden_);
    for (uint64_t layer = 0; layer < layers_; ++layer) {
      const std::string at = fmt::format("{}encoder.layer.{}.", prefix, layer);
      for (const char* name : {"query", "key", "value"}) {
        linear(at + "attention.self." + name, hidden_, hidden_, true);
      }
      linear(at + "attention.output.dense", hidden_, hidden_, true);
      layer_norm(at + "attention.output.LayerNorm", hidden_);
      linear(at + "intermediate.dense", intermediate_, hidden_, true);
      linear(at + "output.dense", hidden_, intermediate_, true);
      layer_norm(at + "output.LayerNorm", hidden_);
    }
    linear(prefix + "pooler.dense", hidden_, hidden_, true);
    if (!pretraining) return;
    add("cls.predictions.bias", {vocab_});
    linear("cls.predictions.transform.dense", hidden_, hidden_, true);
    layer_norm("cls.predictions.transform.LayerNorm", hidden_);
    linear("cls.seq_relationship", 2, hidden_, true);
    if (!flag("tie_word_embeddings", true)) {
      linear("cls.predictions.decoder", vocab_, hidden_, true);
    }
  }

  void megatron() {
    add("embedding.word_embeddings.weight", {vocab_, hidden_});
    if (flag("learned_positions", false))
      add("embedding.position_embeddings.weight", {16, hidden_});
    for (uint64_t layer = 0; layer < layers_; ++layer) {
      const std::string at = fmt::format("decoder.layers.{}.", layer);
      if (number({"mamba_num_heads"}) > 0 && layer % 2 == 1) {
        mamba(at + "mixer.");
        continue;
      }
      linear(at + "self_attention.linear_proj", hidden_, heads_ * head_dim_, true);
      add(at + "self_attention.linear_qkv.layer_norm_weight", {hidden_});
      const uint64_t queries = heads_ * (flag("attention_output_gate", false) ? 2 : 1);
      linear(at + "self_attention.linear_qkv", (queries + 2 * kv_heads_) * head_dim_, hidden_,
             true);
      add(at + "self_attention.q_layernorm.weight", {head_dim_});
      add(at + "self_attention.k_layernorm.weight", {head_dim_});
      megatron_mlp(at);
    }
    add("decoder.final_layernorm.weight", {hidden_});
    if (!flag("tie_word_embeddings", false)) add("output_layer.weight", {vocab_, hidden_});
  }

  void megatron_mlp(const std::string& at) {
    const uint64_t experts = number({"num_moe_experts"});
    const uint64_t gated = flag("swiglu", false) ? 2 : 1;
    if (experts == 0) {
      add(at + "mlp.linear_fc1.layer_norm_weight", {hidden_});
      linear(at + "mlp.linear_fc1", gated * intermediate_, hidden_, true);
      linear(at + "mlp.linear_fc2", hidden_, intermediate_, true);
      return;
    }
    add(at + "pre_mlp_layernorm.weight", {hidden_});
    add(at + "mlp.router.weight", {experts, hidden_});
    add(at + "mlp.router.expert_bias", {experts}, DType::kF32);
    if (flag("folded_experts", false)) {  // in Megatron's own grouped layers
      add(at + "mlp.experts.weight1", {experts, hidden_, gated * intermediate_});
      tensors_.back().folded_into = 1;
      add(at + "mlp.experts.weight2", {experts, intermediate_, hidden_});
      tensors_.back().folded_into = 0;
    }
    for (uint64_t e = 0; e < experts && !flag("folded_experts", false); ++e) {
      if (flag("stacked_experts", false)) {  // in Transformer Engine's grouped linear layers
        add(fmt::format("{}mlp.experts.linear_fc1.weight{}", at, e),
            {gated * intermediate_, hidden_});
        add(fmt::format("{}mlp.experts.linear_fc2.weight{}", at, e), {hidden_, intermediate_});
      } else {
        const std::string expert = fmt::format("{}mlp.experts.local_experts.{}.", at, e);
        linear(expert + "linear_fc1", gated * intermediate_, hidden_, false);
        linear(expert + "linear_fc2", hidden_, intermediate_, false);
      }
    }
    linear(at + "mlp.shared_experts.linear_fc1", gated * intermediate_, hidden_, false);
    linear(at + "mlp.shared_experts.linear_fc2", hidden_, intermediate_, false);
  }

  void mamba(const std::string& at) {
    const uint64_t heads = number({"mamba_num_heads"});
    const uint64_t inner = heads * number({"mamba_head_dim"});
    const uint64_t states = number({"mamba_num_groups"}) * number({"mamba_state_dim"});
    add(at + "in_proj.layer_norm_weight", {hidden_});
    add(at + "in_proj.weight", {2 * inner + 2 * states + heads, hidden_});
    add(at + "conv1d.weight", {inner + 2 * states, 1, 4});
    add(at + "conv1d.bias", {inner + 2 * states});
    for (const char* name : {"A_log", "D", "dt_bias"}) add(at + name, {heads}, DType::kF32);
    add(at + "norm.weight", {inner});
    add(at + "out_proj.weight", {hidden_, inner});
  }

  json::object config_;
  std::string type_;
  DType dtype_ = DType::kF32;
  std::vector<TensorInfo> tensors_;
  uint64_t hidden_ = 0, layers_ = 0, heads_ = 0, kv_heads_ = 0, head_dim_ = 0, intermediate_ = 0,
           vocab_ = 0;
};

/// The model as PEFT wraps it for training: adapters of this rank beside embedding and linear
/// weights of two axes, the head trained as a whole. `alone`: what PEFT saves of it.
std::vector<TensorInfo> with_adapters(const std::vector<TensorInfo>& model, uint64_t rank,
                                      bool alone) {
  std::vector<TensorInfo> tensors;
  auto add = [&](std::string name, Shape shape, DType dtype) {
    tensors.push_back({alone ? "adapter_model.safetensors" : "model.safetensors",
                       "base_model.model." + std::move(name), dtype, shape});
  };
  auto ends_with_any = [](const std::string& text, std::initializer_list<const char*> ends) {
    return std::any_of(ends.begin(), ends.end(),
                       [&](const char* end) { return text.ends_with(end); });
  };
  const char* adapter = alone ? "" : ".default";
  for (const TensorInfo& info : model) {
    const bool embedding =
        ends_with_any(info.name, {"embed_tokens.weight", "wte.weight", "word_embeddings.weight"});
    const bool linear = ends_with_any(
        info.name, {"_proj.weight", ".w1.weight", ".w2.weight", ".c_attn.weight", ".c_fc.weight",
                    ".c_proj.weight", "query_key_value.weight", "dense.weight", "query.weight",
                    "h_to_4h.weight", "4h_to_h.weight"});
    const bool head = ends_with_any(info.name, {"lm_head.weight", "embed_out.weight"});
    const size_t dot = info.name.rfind('.');
    const std::string module = info.name.substr(0, dot), last = info.name.substr(dot);
    if (head) {
      if (!alone) add(module + ".original_module" + last, info.shape, info.dtype);
      add(module + (alone ? "" : ".modules_to_save.default") + last, info.shape, info.dtype);
      continue;
    }
    if (info.shape.size() != 2 || !(embedding || linear)) {
      if (!alone) add(info.name, info.shape, info.dtype);
      continue;
    }
    if (!alone) add(module + ".base_layer" + last, info.shape, info.dtype);
    const bool inputs_first = embedding || module.find(".c_") != std::string::npos;
    const uint64_t in = info.shape[inputs_first ? 0 : 1], out = info.shape[inputs_first ? 1 : 0];
    const std::string lora = embedding ? ".lora_embedding_" : ".lora_";
    const std::string end = adapter + std::string(embedding ? "" : ".weight");
    add(module + lora + "A" + end, {rank, in}, DType::kF32);
    add(module + lora + "B" + end, {out, rank}, DType::kF32);
    if (!embedding) add(module + ".lora_magnitude_vector" + end, {out}, DType::kF32);
  }
  return tensors;
}

}  // namespace

std::vector<TensorInfo> synthetic_tensors(std::string_view config_text) {
  std::vector<TensorInfo> tensors = Builder(config_text).build();
  const json::value config = parse_json(config_text).value();
  const json::value* lora = config.as_object().if_contains("lora_rank");
  if (!lora) return tensors;
  const json::value* alone = config.as_object().if_contains("lora_alone");
  return with_adapters(tensors, lora->to_number<uint64_t>(), alone && alone->as_bool());
}

bool is_buffer(std::string_view name) {
  for (std::string_view end : {".attn.bias", ".attention.bias", "masked_bias", "position_ids",
                               "e_score_correction_bias", "expert_bias", "inv_freq", "_scale_inv"})
    if (name.ends_with(end)) return true;
  return false;
}

std::vector<TensorInfo> optimizer_tensors(const std::vector<TensorInfo>& parameters) {
  std::vector<TensorInfo> state;
  for (const TensorInfo& parameter : parameters) {
    if (is_buffer(parameter.name)) continue;  // not trained
    for (const char* moment : {"exp_avg.", "exp_avg_sq."}) {
      state.push_back({"optim.safetensors", moment + parameter.name, DType::kF32, parameter.shape});
      state.back().folded_into = parameter.folded_into;
    }
    state.push_back({"optim.safetensors", "state." + parameter.name + ".step", DType::kF32, {}});
  }
  return state;
}

Model synthetic_model(std::string_view config_text, bool with_optimizer) {
  std::vector<TensorInfo> tensors = synthetic_tensors(config_text);
  if (with_optimizer) {
    std::vector<TensorInfo> state = optimizer_tensors(tensors);
    tensors.insert(tensors.end(), state.begin(), state.end());
  }
  return synthetic_model(config_text, std::move(tensors));
}

Model synthetic_model(std::string_view config_text, std::vector<TensorInfo> tensors) {
  const auto rules = RuleSet::choose(model_type_of(config_text), {});
  PTC_CHECK(rules != nullptr);
  auto facts = rules->facts(config_text);
  PTC_CHECK(facts.has_value());
  auto model = Model::bind(rules, facts.value(), std::move(tensors));
  PTC_CHECK(model.has_value());
  return std::move(model).value();
}

std::vector<WrittenRank> written_ranks(const Model& model, const LayoutSpec& spec) {
  std::vector<WrittenRank> ranks;
  for (uint64_t global_rank = 0; global_rank < spec.sizes.world_size(); ++global_rank) {
    WrittenRank rank{global_rank, spec.coords(global_rank), {}};
    const auto held = model.hold(spec, state_of(spec, rank.coords));
    PTC_CHECK(held.has_value());
    for (const Model::Held& each : held.value()) {
      const TensorInfo& info = model.tensors()[each.tensor];
      rank.tensors.push_back({info.file, model.local_name(each.tensor, spec, rank.coords.pp),
                              info.dtype, each.part->local_shape});
    }
    ranks.push_back(std::move(rank));
  }
  return ranks;
}

}  // namespace ptc::testing
