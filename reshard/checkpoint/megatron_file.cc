#include "reshard/checkpoint/megatron_file.h"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <charconv>

#include "store/base/json.h"

namespace ptc {
namespace {

/// Says where each layer is; of the value nothing is read but that there is one.
constexpr std::string_view kPipelineLayout = "pipeline_model_parallel_layout";

/// Of a hostile file others are not kept.
constexpr std::string_view kArguments[] = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "data_parallel_size",
    "context_parallel_size",
    "overlap_grad_reduce",
    "ddp_bucket_size",
    "ddp_num_buckets",
    "num_layers",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "standalone_embedding_stage",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "swiglu",
    "quick_geglu",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_state_dim",
};

bool is_at(const std::vector<TorchStep>& path, std::string_view key) {
  return path.size() == 1 && path[0].kind == TorchStep::Kind::kKey && path[0].key == key;
}

void take_arguments(const Pickle& pickle, PickleId state, MegatronFile& file) {
  if (!pickle.is(state, PickleKind::kDict)) return;
  (void)pickle.for_pairs(state, [&](PickleId key, PickleId value) -> Result<> {
    if (!pickle.is(key, PickleKind::kText)) return ok();
    const std::string_view name = pickle.text(key);
    if (name == kPipelineLayout && !pickle.is(value, PickleKind::kNone))
      file.arguments.insert_or_assign(std::string(name), 1);
    if (name == "rank" && pickle.is(value, PickleKind::kInt)) file.rank = pickle.integer(value);
    if (std::find(std::begin(kArguments), std::end(kArguments), name) == std::end(kArguments))
      return ok();
    switch (pickle.kind(value)) {
      case PickleKind::kInt:
        file.arguments.insert_or_assign(std::string(name), pickle.integer(value));
        break;
      case PickleKind::kTrue:
      case PickleKind::kFalse:
        file.arguments.insert_or_assign(std::string(name), pickle.is(value, PickleKind::kTrue));
        break;
      default:
        return ok();
    }
    if (file.nodes.size() < 4 * std::size(kArguments)) file.nodes.emplace_back(name, value);
    return ok();
  });
}

}  // namespace

std::optional<uint32_t> megatron_chunk(std::string_view key) {
  constexpr std::string_view kModel = "model";
  constexpr size_t kMostDigits = 5;
  if (!key.starts_with(kModel)) return std::nullopt;
  key.remove_prefix(kModel.size());
  uint32_t number = 0;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
  const bool all = error == std::errc() && end == key.data() + key.size();
  if (!all || key.size() > kMostDigits || (key.size() > 1 && key[0] == '0')) return std::nullopt;
  return number;
}

size_t megatron_chunk_bytes(std::string_view name) {
  const size_t dot = name.find('.');
  return dot != name.npos && megatron_chunk(name.substr(0, dot)) ? dot + 1 : 0;
}

std::optional<int64_t> MegatronFile::argument(std::string_view name) const {
  const auto found = arguments.find(name);
  return found == arguments.end() ? std::nullopt : std::optional(found->second);
}

std::string MegatronFile::config_text() const {
  json::object config{{"model_type", "megatron"}};
  auto copy = [&](std::string_view name) {
    const auto value = argument(name);
    if (value && *value > 0) config[name] = *value;
  };
  for (const char* name :
       {"num_layers", "num_attention_heads", "vocab_size", "num_experts", "mamba_num_heads",
        "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"})
    copy(name);
  // Without it num_query_groups means nothing, and has a default.
  if (flag("group_query_attention")) copy("num_query_groups");
  if (argument("swiglu") || flag("quick_geglu"))
    config["gated_linear_unit"] = flag("swiglu") || flag("quick_geglu");
  if (argument("untie_embeddings_and_output_weights"))
    config["tie_word_embeddings"] = !flag("untie_embeddings_and_output_weights");
  return json::serialize(config);
}

std::optional<MegatronFile> megatron_file(const TorchFile& file) {
  MegatronFile found;
  const Pickle& pickle = file.pickle();
  bool has_arguments = false, has_version = false;
  for (const TorchLiteral& literal : file.literals()) {
    const std::vector<TorchStep> path = file.path(literal.place);
    if (path.size() == 2 && path[0].kind == TorchStep::Kind::kKey &&
        (path[0].key == "model" || megatron_chunk(path[0].key)) &&
        !pickle.is(literal.node, PickleKind::kNone) &&
        path[1].key.find("layers.") != std::string::npos && found.of_layer.empty())
      found.of_layer = torch_name(path);
    if (path.size() != 1) continue;
    if (is_at(path, "args") && pickle.is(literal.node, PickleKind::kObject)) {
      has_arguments = true;
      (void)pickle.for_states(literal.node, [&](PickleId state) -> Result<> {
        take_arguments(pickle, state, found);
        return ok();
      });
    }
    has_version = has_version || is_at(path, "checkpoint_version");
    if (is_at(path, "iteration") && pickle.is(literal.node, PickleKind::kInt))
      found.iteration = pickle.integer(literal.node);
  }
  if (!has_arguments || !has_version) return std::nullopt;
  for (const TorchTensor& tensor : file.tensors()) {
    const std::vector<TorchStep> path = file.path(tensor.place);
    if (path.size() < 2 || path[0].kind != TorchStep::Kind::kKey) continue;
    found.has_model = found.has_model || path[0].key == "model";
    if (const auto chunk = megatron_chunk(path[0].key)) found.chunks.insert(*chunk);
  }
  return found;
}

}  // namespace ptc
