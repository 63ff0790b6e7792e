#include "tests/support/random_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <numeric>

#include "store/base/json.h"
#include "tests/support/synthetic_model.h"

namespace ptc::testing {
namespace {

constexpr const char* kFamilies[] = {
    "llama", "mistral",  "qwen2", "qwen3",    "mixtral",     "qwen2_moe", "qwen3_moe",  "gpt2",
    "gpt2",  "gpt_neox", "bert",  "megatron", "deepseek_v3", "megatron",  "deepseek_v3"};

uint64_t between(std::mt19937_64& random, uint64_t low, uint64_t high) {
  return std::uniform_int_distribution<uint64_t>(low, high)(random);
}
bool one_in(std::mt19937_64& random, uint64_t n) { return between(random, 1, n) == 1; }
template <class T>
T one_of(std::mt19937_64& random, const std::vector<T>& values) {
  return values[between(random, 0, values.size() - 1)];
}

/// A config.json that grows, and the numbers that the oracle needs.
class Maker {
 public:
  explicit Maker(std::mt19937_64& random)
      : random_(random),
        type_(kFamilies[between(random, 0, std::size(kFamilies) - 1)]),
        tp_(one_of<uint64_t>(random, {1, 2, 3, 4, 6})),
        grouped_(type_ != "gpt2" && type_ != "gpt_neox" && type_ != "bert" &&
                 type_ != "deepseek_v3") {}

  RandomModel make(bool with_optimizer) {
    attention();
    sizes();
    experts();
    if (type_ == "deepseek_v3") deepseek();
    if (type_ == "megatron") megatron();
    variants();
    RandomModel model;
    model.config = json::serialize(config_);
    model.tensors = synthetic_tensors(model.config);
    if (with_optimizer) {
      const std::vector<TensorInfo> state = optimizer_tensors(model.tensors);
      model.tensors.insert(model.tensors.end(), state.begin(), state.end());
    }
    model.oracle = SlowOracle(type_, numbers_);
    model.widest = {.tp = static_cast<uint32_t>(tp_), .ep = static_cast<uint32_t>(ep_)};
    return model;
  }

 private:
  bool coin() { return one_in(random_, 2); }
  void put(const char* key, uint64_t value) { config_[key] = value; }

  void attention() {
    // Key-value heads: a multiple of tp, or (where they may be shared) a divisor of it.
    uint64_t kv_heads = tp_ * between(random_, 1, 2);
    if (grouped_ && type_ != "megatron" && coin()) {
      do {
        kv_heads = between(random_, 1, tp_);
      } while (tp_ % kv_heads != 0);
    }
    uint64_t heads = kv_heads;
    if (grouped_) heads *= between(random_, 1, 3);
    while (heads % tp_ != 0) heads += kv_heads;
    numbers_["heads"] = heads;
    numbers_["kv_heads"] = grouped_ ? kv_heads : heads;
    numbers_["head_dim"] = between(random_, 1, 3);
    numbers_["hidden"] = grouped_ && coin() ? between(random_, 1, 9) : heads * numbers_["head_dim"];
  }

  void sizes() {
    const bool gpt2 = type_ == "gpt2";
    numbers_["layers"] = between(random_, 1, 5);
    numbers_["tied"] = coin();
    numbers_["head"] = coin();
    numbers_["gated"] = coin();
    numbers_["attention_gate"] = coin();
    config_["model_type"] = type_;
    config_["torch_dtype"] = one_of<std::string>(random_, {"float32", "bfloat16", "float16"});
    config_["tie_word_embeddings"] = numbers_["tied"] != 0;
    put("vocab_size", one_of<uint64_t>(random_, {between(random_, 2, 700), 128 * tp_, 256, 384}));
    put(gpt2 ? "n_embd" : "hidden_size", numbers_["hidden"]);
    put(gpt2 ? "n_layer" : "num_hidden_layers", numbers_["layers"]);
    put(gpt2 ? "n_head" : "num_attention_heads", numbers_["heads"]);
    put(gpt2 ? "n_inner" : "intermediate_size", tp_ * between(random_, 1, 4));
    if (!grouped_) return;
    put(type_ == "megatron" ? "num_query_groups" : "num_key_value_heads", numbers_["kv_heads"]);
    put("head_dim", numbers_["head_dim"]);
  }

  void experts() {
    const bool always = type_ == "mixtral" || type_ == "qwen2_moe" || type_ == "qwen3_moe" ||
                        type_ == "deepseek_v3";
    if (!always && !(type_ == "megatron" && coin())) return;
    ep_ = between(random_, 1, 3);
    const uint64_t count = numbers_["experts"] = ep_ * between(random_, 1, 2);
    put(type_ == "mixtral"       ? "num_local_experts"
        : type_ == "deepseek_v3" ? "n_routed_experts"
        : type_ == "megatron"    ? "num_moe_experts"
                                 : "num_experts",
        count);
    put("moe_intermediate_size", tp_ * between(random_, 1, 3));
    if (type_ == "qwen2_moe") put("shared_expert_intermediate_size", tp_ * between(random_, 1, 3));
    if (coin()) config_["stacked_experts"] = true;
    if (type_ == "megatron" && one_in(random_, 3)) config_["folded_experts"] = true;
  }

  void deepseek() {
    numbers_["nope"] = between(random_, 1, 3);
    numbers_["rope"] = between(random_, 1, 2);
    numbers_["value"] = between(random_, 1, 3);
    put("q_lora_rank", between(random_, 0, 5));
    put("kv_lora_rank", between(random_, 1, 5));
    put("n_shared_experts", between(random_, 0, 1));
    put("first_k_dense_replace", between(random_, 0, numbers_["layers"]));
    put("num_nextn_predict_layers", between(random_, 0, 1));
    config_["attention_bias"] = coin();
    if (one_in(random_, 4)) {
      // FP8 with scales: heads and inner sizes are whole blocks of 128.
      numbers_["nope"] = numbers_["value"] = 128;
      numbers_["rope"] = one_of<uint64_t>(random_, {0, 128});
      put("intermediate_size", 128 * tp_);
      put("moe_intermediate_size", 128 * tp_);
      config_["quantization_config"] = json::object();
      config_["mlp_bias"] = false;
    }
    put("qk_nope_head_dim", numbers_["nope"]);
    put("qk_rope_head_dim", numbers_["rope"]);
    put("v_head_dim", numbers_["value"]);
  }

  void megatron() {
    config_["swiglu"] = numbers_["gated"] != 0;
    config_["attention_output_gate"] = numbers_["attention_gate"] != 0;
    config_["learned_positions"] = coin();
    if (coin()) return;
    put("mamba_num_heads", numbers_["mamba_heads"] = tp_ * between(random_, 1, 2));
    put("mamba_head_dim", numbers_["mamba_head_dim"] = between(random_, 1, 3));
    put("mamba_num_groups", numbers_["mamba_groups"] = tp_);
    put("mamba_state_dim", numbers_["mamba_state"] = between(random_, 1, 3));
  }

  void variants() {
    const bool llama = type_ == "llama" || type_ == "mistral";
    if (llama) {
      config_["attention_bias"] = coin();
      config_["mlp_bias"] = coin();
      config_["fused"] = one_in(random_, 3);
    }
    if (type_ == "bert") config_["prefix"] = numbers_["head"] != 0;
    if (type_ != "bert" && coin()) config_["prefix"] = false;
    if (type_ != "megatron" && !config_.contains("quantization_config") && one_in(random_, 4)) {
      put("lora_rank", between(random_, 1, 3));
      config_["lora_alone"] = coin();
      config_["stacked_experts"] = false;
    }
  }

  std::mt19937_64& random_;
  std::string type_;
  uint64_t tp_, ep_ = 1;
  bool grouped_;
  json::object config_;
  std::map<std::string, uint64_t> numbers_{{"experts", 0}};
};

}  // namespace

RandomModel random_model(std::mt19937_64& random, bool with_optimizer) {
  return Maker(random).make(with_optimizer);
}

LayoutSpec random_layout(std::mt19937_64& random, const RandomModel& model, const Model& bound,
                         uint64_t max_ranks) {
  auto divisor = [&](uint32_t number) {
    for (;;) {
      const auto found = static_cast<uint32_t>(between(random, 1, number));
      if (number % found == 0) return found;
    }
  };
  for (;;) {
    LayoutSpec spec;
    ParallelConfig& sizes = spec.sizes;
    sizes.tp = divisor(model.widest.tp);
    sizes.ep = divisor(model.widest.ep);
    const auto layers = static_cast<uint32_t>(model.oracle.number("layers"));
    sizes.pp = static_cast<uint32_t>(
        between(random, 1, std::clamp(layers, 1u, 4u)));  // each stage has layers
    sizes.dp = one_of<uint32_t>(random, {1, 1, 2, 3, 5});
    sizes.cp = static_cast<uint32_t>(between(random, 1, 2));
    if (model.oracle.number("experts") > 0 && one_in(random, 2)) {
      sizes.etp = divisor(model.widest.tp);
      if (sizes.etp == sizes.tp) sizes.etp = 0;
      else if (one_in(random, 2)) sizes.dp = sizes.tp / std::gcd(sizes.tp, sizes.etp * sizes.ep);
    }
    if (sizes.world_size() > max_ranks) continue;
    if (sizes.etp == 0 && one_in(random, 2)) {
      std::vector<std::string> order = {"tp", "cp", "ep", "dp", "pp"};
      std::shuffle(order.begin(), order.end(), random);
      spec.order = RankOrder::parse(fmt::format("{}", fmt::join(order, "-"))).value();
    }
    if (sizes.pp > 1 && 2 * sizes.pp <= layers && one_in(random, 3))
      spec.vpp = static_cast<uint32_t>(between(random, 2, layers / sizes.pp));
    if (sizes.pp > 1 && sizes.pp <= layers && one_in(random, 2)) {
      const uint32_t least = one_in(random, 3) ? 0 : 1;
      spec.stages.assign(spec.chunks(), least);
      for (uint32_t rest = layers - least * spec.chunks(); rest > 0; --rest) {
        ++spec.stages[between(random, 0, spec.chunks() - 1)];
      }
    }
    if (sizes.pp <= layers && spec.vpp == 1 && one_in(random, 2)) spec.naming = Naming::kStage;
    spec.optimizer = one_of<OptimizerCut>(
        random, {OptimizerCut::kReplicated, OptimizerCut::kZero1, OptimizerCut::kFsdp});
    const bool cut = spec.optimizer != OptimizerCut::kReplicated;
    for (uint32_t parts = 1; cut && parts < sizes.dp; ++parts)
      if (sizes.dp % parts == 0 && one_in(random, 3)) spec.dp_shard = parts;
    spec.shard_cp = cut && sizes.cp > 1 && one_in(random, 2);
    const bool divides = sizes.etp == 0 || sizes.etp * sizes.ep % sizes.tp == 0;
    spec.shard_ep = cut && divides && spec.ep_copies() > 1 && one_in(random, 2);
    if (LayoutSpec::from_json(spec.to_json()).has_error()) continue;  // ranks do not divide
    const Result<> fits = bound.check(spec);
    if (fits.has_value()) return spec;
    // Some divisors of the widest tp do not divide the heads that are shared.
    if (sizes.tp == model.widest.tp && sizes.ep == model.widest.ep) {
      ADD_FAILURE() << "refused: " << fits.error().message();
      return {};
    }
  }
}

std::string layout_json(const LayoutSpec& spec) { return json::serialize(spec.to_json()) + "\n"; }

}  // namespace ptc::testing
