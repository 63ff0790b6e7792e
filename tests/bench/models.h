// config.json of the large models that benches are about.
#pragma once

#include <fmt/format.h>

#include <string>

namespace ptc::bench {

inline std::string deepseek_v3(int layers) {
  return fmt::format(R"({{"model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": {}, "num_nextn_predict_layers": 1, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16"}})",
                     layers);
}

}  // namespace ptc::bench
