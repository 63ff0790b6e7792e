// Models of true structure: the tensors that a config.json implies, and what ranks write of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reshard/ptc/model.h"

namespace ptc::testing {

/// The tensors of the model of a config.json, as Hugging Face names and shapes them, in the order
/// of a state_dict, all in file "model.safetensors". model_type: llama, mistral, qwen2, qwen3,
/// mixtral, qwen3_moe, deepseek_v3, gpt2, gpt_neox, bert; or megatron (Megatron-Core's GPTModel).
/// Keys beyond Hugging Face's: "stacked_experts": true stores a layer's experts as one tensor;
/// "prefix": false leaves out the model's prefix ("bert."). Aborts on a config it cannot use.
std::vector<TensorInfo> synthetic_tensors(std::string_view config_text);

/// Adam's state of every parameter, as float32 in file "optim.safetensors": exp_avg.<name>,
/// exp_avg_sq.<name>, and state.<name>.step of one element.
std::vector<TensorInfo> optimizer_tensors(const std::vector<TensorInfo>& parameters);

/// The model of a config.json bound to its family's rules, with Adam's state if wanted. Aborts if
/// that fails.
Model synthetic_model(std::string_view config_text, bool with_optimizer = false);

/// What every rank of the layout writes of the model, global ranks in order.
std::vector<WrittenRank> written_ranks(const Model& model, const LayoutSpec& spec);

}  // namespace ptc::testing
