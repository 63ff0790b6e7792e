"""A rank's part of a model is enough for its part of what the model computes: of every family, by a real forward pass.

    python3 test_rank_parts.py --only opt bloom      # of these types, with what was compared

An oracle without plans. Where the inputs of a weight are cut (an attention's output, the second half of an MLP), ranks add up
what they compute, and each must have made its own inputs of its own weights. So what other ranks have in a layer is replaced by
noise: a rank's inputs of such weights stay as they are, to a last bit or two. Wrong heads, wrong parts of what is fused and cuts
that do not belong together change them.
"""
import json
import os
import re
import sys

import mount

torch = mount.require("torch")
mount.require("transformers")
import transformers  # noqa: E402  pylint: disable=wrong-import-position
import families  # noqa: E402  pylint: disable=wrong-import-position
from safetensors.torch import load_file, save_file  # noqa: E402  pylint: disable=wrong-import-position

ONLY = []  # types
#: The families' tiny models have two key-value heads and four others: with four ranks two have the same.
RANKS = (families.TP, 2 * families.TP)
TRIED = {2: (0, 1), 4: (1, 2)}  # of four one of each two that share a head
TOKENS = 7
#: Norms over the heads of all ranks, which have to bring them together before: of these types, and of what the inputs are.
JOINT_NORMS = ("flex_olmo", "minimax", "minimax_m2", "olmo2", "olmo3", "olmoe")
NORMS = {"q_norm": "q_proj.weight", "k_norm": "k_proj.weight", "norm": "out_proj.weight"}
#: Types whose forward pass wants more than what inputs_of() makes, or cannot be made to run so small.
NOT_RUN = {
    "deepseek_v2": "argument 'k' must be int",
    "gemma3n": "requires the timm library",
    "gemma3n_text": "layer types producing a cache",
    "lfm2_moe": "object is not subscriptable",
    "llama4": "no attribute 'image_outputs'",
    "siglip2": "object has no attribute 'to'",
    "step3p7": "Could not find a `sliding_window`",
    "unlimited_ocr": "must match the size of tensor b",
    "voxtral_realtime": "exactly one of input_features",
}


#: State spaces whose norm is over a group, of which tiny models have two: among more ranks they have to bring it together.
NOT_AMONG_MORE = ("bamba", "granitemoehybrid", "mamba2")


def commit_numbered(daemon, name, config, tensors, rules):
    """A job of a checkpoint "base" with the model's tensors, of numbered elements: a mount's own files say which they are."""
    job = daemon.job(name)
    if rules is not None:
        with open(job.file("rules.json"), "w", encoding="utf-8") as file:
            json.dump(rules, file)
    directory = job.incoming("base") + "/rank/0"
    os.makedirs(directory)
    with open(directory + "/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    save_file({key: torch.arange(value.numel(), dtype=torch.int32).reshape(value.shape) for key, value in tensors.items()},
              directory + "/model.safetensors")
    job.commit("base")
    return job


def parts_of(job, tensors, ranks):
    """By name the elements that each rank has, as masks."""
    masks = []
    for rank in range(ranks):
        mask = {}
        for key, numbers in load_file(job.rank_file("base", f"tp{ranks}-pp1-dp1", rank)).items():
            mask[key] = torch.zeros(tensors[key].numel(), dtype=torch.bool)
            mask[key][numbers.flatten().long()] = True
            mask[key] = mask[key].reshape(tensors[key].shape)
        masks.append(mask)
    return masks


def inputs_of(model):
    """What its forward pass takes, at random."""
    config = model.config
    text = getattr(config, "text_config", None) or config
    ids = torch.randint(2, min(families.VOCABULARY, getattr(text, "vocab_size", None) or families.VOCABULARY), (1, TOKENS))
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or 32
    pixels = torch.randn(1, getattr(vision, "num_channels", 3), *(size if isinstance(size, (list, tuple)) else (size, size)))
    wanted = model.main_input_name
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(1, config.num_mel_bins, 2 * config.max_source_positions), "decoder_input_ids": ids}
    if wanted == "pixel_values":
        return {"pixel_values": pixels}
    if model.config.model_type in ("clip", "siglip"):
        return {"input_ids": ids, "pixel_values": pixels}
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids}
    return {"input_ids": ids}


def layer_of(name):
    """The part of its name that all of a layer have: "model.decoder.layers.0"; nothing for what is in none."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word.isdigit() and place + 2 < len(words):
            return ".".join(words[:place + 1])
    return None


class Watched:
    """A model whose inputs of certain modules are kept, and whose outputs of them can be what they were."""

    def __init__(self, model, modules):
        self.model, self.seen, self.kept, self.answer = model, {}, {}, False
        self.hooks = [model.get_submodule(name).register_forward_hook(
            lambda module, given, out, name=name: self.passed(name, given, out)) for name in modules]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def passed(self, name, given, out):
        count = len(self.seen.setdefault(name, []))
        self.seen[name].append(given[0].detach().clone())
        if not self.answer:
            self.kept.setdefault(name, []).append(out.clone())
            return None
        return self.kept[name][count].clone()  # some add to it

    def run(self, inputs, answer):
        """The inputs of each module, in order. `answer`: their outputs are those of the first run, as the sum of all ranks."""
        self.seen, self.answer = {}, answer
        with torch.no_grad():
            self.model(**inputs, use_cache=False)
        return self.seen


def along_inputs(model, name, mask):
    """Of a module's weight whose inputs alone are cut: which inputs are in the mask; else nothing."""
    module, _, last = name.rpartition(".")
    if last != "weight" or mask.dim() != 2 or mask.all():
        return None
    owner = model.get_submodule(module)
    if not isinstance(owner, (torch.nn.Linear, transformers.pytorch_utils.Conv1D)):
        return None
    columns = mask if isinstance(owner, torch.nn.Linear) else mask.T  # [out, in]
    return columns[0] if bool((columns == columns[0]).all()) and not bool(columns[0].all()) else None


def joint_norms(masks, inputs_cut):
    """By name which of their inputs each rank makes."""
    found = {}
    for name in masks[0]:
        module, _, last = name.rpartition(".")
        parent, _, called = module.rpartition(".")
        weight = f"{parent}.{NORMS.get(called)}"
        if last == "weight" and weight in masks[0] and ".layers." in name:
            found[module] = inputs_cut.get(weight.rpartition(".")[0]) or [mask[weight][:, 0] for mask in masks]
    return found


def class_of(made):
    """The whole of an encoder and a decoder; of others the one that could be made."""
    for name in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        found = getattr(families.modeling_auto, f"MODEL_FOR_{name}_MAPPING").get(type(made.config), None)
        if found is not None:
            made.config.is_encoder_decoder, made.config.is_decoder = True, False  # as a decoder alone changed it
            return found
    return type(made)


def adjust(config):
    """So that a model so small runs, not only is made."""
    config._attn_implementation = "eager"
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "kv_lora_rank", None):
        config.head_dim, config.num_key_value_heads = config.qk_rope_head_dim, config.num_attention_heads
        rope.pop("partial_rotary_factor", None)
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("mrope_section") or re.match(r"(glm(4v|46v|_image|_ocr|ga)|qwen2_(5_)?(vl|omni)|paddleocr)", config.model_type):
            if not getattr(config, "hidden_size", None):
                continue  # of a model of several
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            half = int(head * each.get("partial_rotary_factor", 1)) // 2
            each["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    for key, size in (("rotary_dim", 16), ("projection_size", 64), ("projection_dim", 64)):
        if getattr(config, key, None):
            setattr(config, key, size)


def try_type(daemon, model_type, rules=None):
    """How many inputs of how many modules were compared, and where a rank's changed."""
    torch.manual_seed(len(model_type))
    made = families.made_tiny(model_type)
    config = made.config
    for each in (config, *(getattr(config, key, None) for key in config.sub_configs or ())):
        if each is not None:
            adjust(each)
    model = class_of(made)(config).eval()
    for value in (each for each in model.parameters() if each.dim() > 0):
        value.data = torch.randn_like(value) / max(1, value.shape[-1]) ** 0.5
    state = {name: value for name, value in model.state_dict().items() if value.dim() > 0}
    name = ("ruled-" if rules else "parts-") + model_type.replace("_", "-")
    job = commit_numbered(daemon, name, json.loads(config.to_json_string(use_diff=False)),
                          {name: value.contiguous() for name, value in state.items()}, rules)
    compared, wrong, never = 0, [], set()
    for ranks in RANKS[:1] if model_type in NOT_AMONG_MORE else RANKS:
        found = try_ranks(model, parts_of(job, state, ranks))
        compared, wrong, never = compared + found[0], wrong + found[1], never | found[2]
    return compared, wrong, sorted(never)


def try_ranks(model, masks):
    """The same of one model, of which ranks have what is in the masks."""
    state, model_type = {name: value for name, value in model.state_dict().items() if value.dim() > 0}, model.config.model_type
    inputs_cut = {}
    for name in state:
        columns = [along_inputs(model, name, mask[name]) for mask in masks]
        if columns[0] is not None:
            inputs_cut[name.rpartition(".")[0]] = columns
    if model_type in JOINT_NORMS:
        inputs_cut.update(joint_norms(masks, inputs_cut))
    with Watched(model, inputs_cut) as watched:
        return compare_ranks(watched, state, masks, inputs_cut, inputs_of(model))


def compare_ranks(watched, state, masks, inputs_cut, inputs):
    """… by the inputs that each rank makes."""
    whole = watched.run(inputs, False)
    wrong, compared = [], 0
    for layer in sorted({layer_of(name + ".weight") or "" for name in inputs_cut}):
        mine = [name for name in state if (layer_of(name) or "") == layer and name.rpartition(".")[0] not in inputs_cut
                and not masks[0][name].all()]
        for rank in TRIED[len(masks)]:
            mask = masks[rank]
            before = {name: state[name].clone() for name in mine}
            for name in mine:
                state[name].copy_(torch.where(mask[name], state[name], torch.randn_like(state[name].float()).to(state[name].dtype)))
            seen = watched.run(inputs, True)
            for name in mine:
                state[name].copy_(before[name])
            for name, columns in inputs_cut.items():
                if (layer_of(name + ".weight") or "") != layer or name not in whole:
                    continue
                for now, then in zip(seen[name], whole[name]):
                    compared += 1
                    now, then = now[..., columns[rank]], then[..., columns[rank]]
                    if not torch.allclose(now, then, rtol=1e-4, atol=1e-5):
                        wrong.append(f"{name} of rank {rank} of {len(masks)}: {(now - then).abs().max().item():.3g}")
    return compared, wrong, set(inputs_cut) - set(whole)


class RankParts(mount.TestCase):
    mount_options = ("--memory", "8G")

    def test_each_family(self):
        listed, tried = json.loads(self.mount.ptc("rules", "list", "--json").stdout), 0
        for model_type in ONLY or sorted(each for family in listed for each in family["model_types"]):
            if model_type not in families.configuration_auto.CONFIG_MAPPING_NAMES:
                continue
            with self.subTest(model_type):
                try:
                    compared, wrong, never = try_type(self.mount, model_type)
                except Exception as error:  # pylint: disable=broad-except
                    self.assertIn(NOT_RUN.get(model_type, "nothing: it should run"), repr(error))
                    continue
                self.assertNotIn(model_type, NOT_RUN, "it runs now")
                if ONLY:
                    print(f"{model_type}: {compared} inputs of weights compared")
                self.assertEqual((wrong, never), ([], []))
                self.assertGreaterEqual(compared, 2 * families.TP)
                tried += 1
        self.assertGreater(tried, 0 if ONLY else 150)

    def test_wrong_cuts_are_seen(self):
        """Of heads that lie one behind the other, each with its query, key and value, as if all queries came first."""
        rules = {"format": "ptc-rules/1", "extends": "bloom", "rules": [
            {"names": ["h.{layer}.self_attention.query_key_value.{weight,bias}"], "cut": {"axis": 0, "parts": [{}, {}, {}]}}]}
        _, wrong, _ = try_type(self.mount, "bloom", rules)
        self.assertIn("transformer.h.0.self_attention.dense of rank 0", wrong[0])
        self.assertEqual(len(wrong), 2 * sum(map(len, TRIED.values())))


if __name__ == "__main__":
    if "--only" in sys.argv:
        place = sys.argv.index("--only")
        ONLY = sys.argv[place + 1:]
        del sys.argv[place:]
    mount.main()
