"""Tiny random models of the families that transformers can cut, each cut by its own plan.

Two oracles: transformers' tensor-parallel plan, carried out by transformers itself on a process group that does not
communicate (what each parameter becomes is asked of its DTensor), and its own renaming of what it saves.
"""
import copy
import dataclasses
import json
import os
import random
import re
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402

transformers.logging.set_verbosity_error()

TP = 2
VOCABULARY = 256
#: Numbers of a configuration, at most; of those with an exclamation mark exactly.
SIZES = {
    "vocab_size text_vocab_size vocab_size_per_layer_input": VOCABULARY,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth "
    "num_encoder_layers": 2,
    "hidden_size d_model n_embd dim embed_dim hidden_dim projection_dim out_hidden_size output_size": 64,
    "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size ff_dim": 128,
    "moe_intermediate_size shared_expert_intermediate_size expert_hidden_dim moe_ffn_hidden_size "
    "expert_ffn_hidden_size": 32,
    "num_attention_heads n_heads n_head num_heads encoder_attention_heads decoder_attention_heads attention_heads": 4,
    "!num_key_value_heads !multi_query_group_num !num_kv_heads": 2,
    "head_dim kv_channels attention_head_dim d_kv v_head_dim qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank kv_lora_rank": 16,
    "num_experts n_routed_experts num_local_experts moe_num_experts": 4,
    "num_experts_per_tok moe_k num_selected_experts moe_topk num_experts_per_token": 2,
    "n_group topk_group first_k_dense_replace": 1,
}
SIZE_OF = {key: size for keys, size in SIZES.items() for key in keys.split()}
#: Random numbers. So many that no row of a matrix ends where they begin anew.
POOL = torch.randint(0, 1 << 15, (4194301,), generator=torch.Generator().manual_seed(1)).to(torch.int16)
#: What a plan does so that the cut of a parameter does not matter: its output is brought together.
GATHERS = ("gather_output", "split_input", "_rep")


@dataclasses.dataclass
class Model:
    """What a tiny model consists of, and how its plan cuts that for TP ranks."""
    type: str
    config: dict
    tensors: dict          # name → tensor, by the names of the module
    saved: dict            # the same as save_pretrained() names and stacks it
    placements: dict       # name → DTensor placement; what is not here is whole on each rank
    gathered: set          # of these names the plan brings the output together again
    planned: bool          # whether there is a plan at all
    ignored: list          # patterns of names in files that transformers does not load

    def part(self, name, rank):
        """What the plan gives this rank."""
        tensor, placement = self.tensors[name], self.placements.get(name)
        if placement is None or placement.is_replicate():
            return tensor
        blocks = tensor.chunk(getattr(placement, "split_factor", 1), dim=placement.dim)
        return torch.cat([block.chunk(TP, dim=placement.dim)[rank] for block in blocks], dim=placement.dim)


def has_plan(config):
    if getattr(config, "base_model_tp_plan", None) or getattr(config, "base_model_ep_plan", None):
        return True
    inner = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
    return any(has_plan(each) for each in inner if each is not None)


#: What cannot be as small as the rest, since it follows from other numbers.
OTHERWISE = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16},
    # The first of their layers are all alike.
    "deepseek_v32": {"mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}


#: What transformers' own table of names turns into others than those of the hub: "blocks" of the text model, too.
SAVED_OTHERWISE = ("kimi_k25",)


def shrunk(config):
    small, layers = {}, config.get("num_hidden_layers")
    for key, value in config.items():
        if isinstance(value, dict) and not key.startswith("rope_"):
            value = shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            value = SIZE_OF["!" + key] if "!" + key in SIZE_OF else min(value, SIZE_OF.get(key, value))
            if key.endswith("token_id") and value >= VOCABULARY:
                value = 1
        elif isinstance(value, list) and (len(value) == layers or key.endswith(("layer_types", "layers_block_type"))):
            value = value[:2]
        small[key] = value
    if "tie_word_embeddings" in small:
        small["tie_word_embeddings"] = False  # so that the head is a parameter of its own
    if isinstance(small.get("per_layer_config"), dict):
        small["per_layer_config"] = {layer: each for layer, each in small["per_layer_config"].items() if int(layer) < 2}
    return small


def classes_of(config):
    """Those with a head first."""
    for name in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MULTIMODAL_LM", None):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING" if name else "MODEL_MAPPING", {})
        try:
            found = mapping[type(config)]
        except (KeyError, ValueError):
            continue
        yield found[0] if isinstance(found, tuple) else found


def made_tiny(model_type):
    """A model of two layers without memory; whatever transformers raises where it cannot be made."""
    cls = configuration_auto.CONFIG_MAPPING[model_type]
    config = cls.from_dict({**shrunk(cls().to_dict()), **OTHERWISE.get(model_type, {})})
    wrong = LookupError(f"no class of models for {model_type}")
    for model_class in classes_of(config):
        try:
            with torch.device("meta"):
                return model_class(config)
        except Exception as error:  # pylint: disable=broad-except
            wrong = error
    raise wrong


def types_with_plan():
    """Model types of transformers, those of parts of other models too, that can be cut by a plan."""
    for model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        try:
            config = configuration_auto.CONFIG_MAPPING[model_type]()
        except Exception:  # pylint: disable=broad-except
            continue  # it cannot be made without being told more
        if has_plan(config) and any(True for _ in classes_of(config)):
            yield model_type


def is_tied_by_default(model_type):
    config = configuration_auto.CONFIG_MAPPING[model_type]()
    tied = getattr(config, "tie_word_embeddings", None)
    if tied is None:
        tied = getattr(getattr(config, "text_config", None), "tie_word_embeddings", None)
    return bool(tied)


def start_group():
    """One process as if it were of TP: nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)


def random_tensor(draw, shape):
    """Of the pool from some place in it on, which is much faster than numbers that nobody else has."""
    count, at = shape.numel(), draw.randrange(len(POOL))
    several = POOL.repeat((at + count - 1) // len(POOL) + 1) if at + count > len(POOL) else POOL
    return several[at:at + count].clone().reshape(shape)


def tiny(model_type):
    """A Model; whatever transformers raises where it cannot be made so small."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    model = made_tiny(model_type)
    draw = random.Random(model_type)
    tensors = {}
    for name, value in model.state_dict().items():
        if value.numel() > 1 << 26:
            raise ValueError(f"{name} has {value.numel()} elements")
        tensors[name] = random_tensor(draw, value.shape)
    saved = revert_weight_conversion(model, copy.copy(tensors))
    placements, style = {}, {}
    if has_plan(model.config):
        start_group()
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=TP))
        apply_tensor_parallelism(model, init_device_mesh("cpu", (TP,)), plan)
        placements = {name: value.placements[0] for name, value in model.named_parameters(remove_duplicate=False)
                      if hasattr(value, "placements")}
        style = {name: plan.get(name) or plan.get(name.rpartition(".")[0]) or "" for name in tensors}
    gathered = {name for name, each in style.items() if any(word in each for word in GATHERS)}
    return Model(model_type, json.loads(model.config.to_json_string(use_diff=False)), tensors, saved, placements,
                 gathered, has_plan(model.config), sorted(model._keys_to_ignore_on_load_unexpected or ()))


def kind(name):
    """A name without its numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".#", name)


#: Files of the hub have layers that predict further tokens, and no class of transformers does: it ignores them on loading.
#: By type: what stands in the names in place of "model.layers.1", and which names there are beside those of a layer, with
#: "/" within it. As vLLM's and SGLang's loaders expect them.
MTP = {
    "qwen3_next qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text minicpm_ocr minicpmv4_6 minicpmv4_7 exaone_moe exaone4_5 mellum":
        ("mtp.layers.0", "mtp.fc mtp.norm mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden"),
    "nemotron_h minimax_m3_vl minimax_m3_vl_text": ("mtp.layers.0", "/enorm /hnorm /eh_proj /final_layernorm"),
    "nemotron_h_omni": ("language_model.mtp.layers.0", "/enorm /hnorm /eh_proj /final_layernorm"),
    "mimo_v2_flash": ("model.mtp.layers.0", "/enorm /hnorm /eh_proj /pre_mlp_layernorm /final_layernorm"),
    "hy_v4": ("model.mtp_layers.0", "/enorm /hnorm /eh_proj /final_layernorm"),
    "ernie4_5_moe": ("model.mtp_block.0", "model.mtp_emb_norm.0 model.mtp_hidden_norm.0 model.mtp_linear_proj.0"),
    "deepseek_v4": ("mtp.0", "/enorm /hnorm /e_proj /h_proj /norm /emb.tok_emb /head /main_proj /main_norm"),
}
#: A layer more, by its number.
MTP_NUMBERED = "/embed_tokens /enorm /hnorm /eh_proj /shared_head.norm /shared_head.head /final_layernorm"
#: Not of the form of a layer of the model, or not known to be: whole on each rank.
MTP_WHOLE = {"granite_docling": "mtp.blocks.0",
             "mistral_large4 mistral_large4_text": "mtp_dspark.layers.0"}


def of_type(table, model_type):
    return next((entry for types, entry in table.items() if model_type in types.split()), None)


def says_mtp(model):
    """Whether transformers, whose model this is, knows files of its type to have such layers."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    return any("mtp" in pattern or re.search(r"layers\W+\d", pattern) for pattern in ignored)


def with_mtp(model):
    """What a file of this type has beside `model.saved`, for each name that of a layer's tensor that it is cut as (none: it
    has no such): a copy of the last layer under other names. None where no sample says how they are called."""
    pattern = r"((?:language_model\.|model\.|backbone\.|text_model\.)*)layers\.(\d+)\.(.*)"
    of_layers = {name: match for name in model.saved if (match := re.fullmatch(pattern, name))}
    layers = 1 + max(int(match[2]) for match in of_layers.values())
    layer = {name: match[3] for name, match in of_layers.items() if int(match[2]) == layers - 1}
    root = next(iter(of_layers.values()))[1]
    place, others = of_type(MTP, model.type) or (f"{root}layers.{layers}", MTP_NUMBERED)
    if place.startswith(root + "layers") and any("mtp" in pattern for pattern in model.ignored):
        whole = of_type(MTP_WHOLE, model.type)
        return whole and {f"{whole}.{rest}": (model.saved[name], None) for name, rest in layer.items()}
    more = {f"{place}.{rest}": (model.saved[name], name) for name, rest in layer.items()}
    hidden = next(value.shape[1] for name, value in model.saved.items() if re.search(r"emb[a-z_]*\.weight$", name))
    for other in others.split():
        rows, name = (VOCABULARY, hidden), place + other.replace("/", ".") if other.startswith("/") else other
        if not other.endswith(("embed_tokens", "head", "tok_emb")):
            rows = (hidden, 2 * hidden) if other.endswith(("proj", "proj.0", "fc")) else (hidden,)
        more[name + ".weight"] = (torch.zeros(rows, dtype=torch.int16), None)
    return more
