// Models of true structure: the tensors that a config.json implies, and what ranks write of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reshard/ptc/model.h"

namespace ptc::testing {

/// The tensors of the model of a config.json, as Hugging Face names and shapes them, in the order
/// of a state_dict, all in file "model.safetensors". model_type: llama, mistral, qwen2, qwen3,
/// mixtral, qwen2_moe, qwen3_moe, deepseek_v3, gpt2, gpt_neox, bert; or megatron (Megatron-Core's
/// GPTModel, with "mamba_num_heads" every second layer is one of its MambaModel). Keys beyond those
/// of the model's own config: "stacked_experts": true stores a layer's experts as one tensor
/// (Megatron: grouped; "folded_experts": true: in Megatron's own grouped layers); "fused": true
/// stores q, k, v and gate, up as one; "prefix": false leaves out the model's prefix ("bert.");
/// "lora_rank": 8 adds adapters as PEFT names them, and "lora_alone": true leaves them alone, in
/// "adapter_model.safetensors". Aborts on a config it cannot use.
std::vector<TensorInfo> synthetic_tensors(std::string_view config_text);

/// Whether the tensor is one of a module's buffers: no optimizer has state of it.
bool is_buffer(std::string_view name);

/// Adam's state of every parameter, as float32 in file "optim.safetensors": exp_avg.<name>,
/// exp_avg_sq.<name>, and state.<name>.step of one element.
std::vector<TensorInfo> optimizer_tensors(const std::vector<TensorInfo>& parameters);

/// The model of a config.json bound to its family's rules, with Adam's state if wanted. Aborts if
/// that fails.
Model synthetic_model(std::string_view config_text, bool with_optimizer = false);
Model synthetic_model(std::string_view config_text, std::vector<TensorInfo> tensors);

/// What every rank of the layout writes of the model, global ranks in order.
std::vector<WrittenRank> written_ranks(const Model& model, const LayoutSpec& spec);

}  // namespace ptc::testing
