"""Families of models, each cut by transformers' own plan, against what a real mount gives its ranks.

    python3 test_families.py                      # those that a rule set names must be cut as their plan does
    python3 test_families.py --table              # all of them: cut so, or why not, as reshard/rules/MODELS.md has it
    python3 test_families.py --only gemma3 phi3   # some, with what differs, or what their plan does not cut
"""
import json
import os
import random
import re
import subprocess
import sys

import mount

torch = mount.require("torch")
mount.require("transformers")
import families  # noqa: E402  pylint: disable=wrong-import-position
from safetensors.torch import load_file, save_file  # noqa: E402  pylint: disable=wrong-import-position

LAYOUT = f"tp{families.TP}-pp1-dp1"


#: What tp cuts here and plans keep whole: kinds of names, of all models.
ALWAYS_MORE = (
    r"(.*\.)?(embed_tokens|embed_tokens_per_layer|embeddings|lm_head)\.weight",
    r".*\.(mamba|mixer|linear_attn)\.(A_log|D|dt_bias|conv1d\.(weight|bias)|dt_proj\.(weight|bias)|(in|out|x)_proj\.weight|norm\.weight)",
)
#: The same, and whose plans keep it whole. What is not here is compared.
MORE = {
    r".*\.self_attn\.(q|q_b|kv_b|o)_proj\.weight": "axk1 deepseek_v3 kimi_k25 mistral4 mistral_large4 mistral_large4_text sarvam_mla youtu",
    r".*\.self_attn\.softmax_scaling\.(scale|bias)": "mistral_large4 mistral_large4_text",
    r".*\.self_attn\.(q_b_proj\.weight|o_a_proj\.weight|o_b_proj\.weight|sinks)": "deepseek_v4",
    r".*\.self_attn\.((q|k|v|o|gate)_proj\.(weight|bias)|sinks)":
        "afmoe falcon_h1 flint gpt_oss granitemoe granitemoeshared phimoe qwen3_vl qwen3_vl_text",
    r".*\.self_attn\.((q|k|v|o|b|g|g_b)_proj\.weight|conv1d\.weight|forget_gate\.(dt_bias|f_proj\.weight|f_b_proj\.weight))":
        "bailing_hybrid kimi_linear",
    r".*\.self_attn\.(qkv_proj|out_proj|output_gate)\.weight": "minimax",
    r".*\.(self_attn\.(q|k|v|out)_proj|feed_forward\.w[123])\.weight": "lfm2 lfm2_vl lfm3 lfm3_vl",
    r".*\.conv\.(conv|in_proj|out_proj)\.weight": "lfm3 lfm3_vl",
    r".*\.mlp\.shared_experts?\.(gate|up|gate_up|down)_proj\.weight":
        "afmoe deepseek_v4 exaone_moe glm4_moe_lite minimax_m3_vl minimax_m3_vl_text qwen2_moe solar_open",
    r".*\.mixer\.shared_experts\.(up|down)_proj\.weight": "nemotron_h nemotron_h_omni",
    r".*\.mlp\.experts\.(gate_up_proj|gate_up_proj_bias|down_proj)": "gpt_oss",
    r".*\.mlp\.(gate|up|down)_proj\.weight": "afmoe qwen3_vl qwen3_vl_text step3p7",
    r".*\.feed_forward\.(gate|up|down)_proj\.weight": "bamba falcon_h1 jamba",
    r".*\.shared_mlp\.(input|output)_linear\.weight": "granitemoehybrid",
}


#: The list for people; what it says of each type is compared.
MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "reshard", "rules", "MODELS.md")
NOT_MADE = "-"


def kept_list():
    """type → (mark, why)"""
    kept, mark, inside = {}, None, False
    with open(MODELS, encoding="utf-8") as file:
        for line in file:
            if re.fullmatch(r"\*\*(.)\*\*\n", line):
                mark = line[2]
            elif line.startswith("Not compared"):
                mark = NOT_MADE
            elif line == "```\n":
                inside = not inside
            elif inside:
                types, _, why = line.strip().partition(": ")
                kept.update({each: (mark, why) for each in re.split(r",\s*", types) if each})
    return kept


def short(why):
    """Of a refusal, or of what transformers says, as much as the list has room for."""
    names = re.fullmatch(r"no rule of family '(.*)' says how to cut (.*?)( \(.*|: save .*)", why)
    if names:
        kinds = list(dict.fromkeys(families.kind(name) for name in names[2].split(", ") if name != "…"))
        why = f"no rule of {names[1]}, the nearest, is for {', '.join(kinds)}" if names[1] != "none" else \
            f"no set knows all of its names: not {', '.join(kinds)}"
    return why.replace("`", "'")[:110]


def is_in_a_layer(kind):
    return ".#." in kind and not any(re.fullmatch(pattern, kind) for pattern in ALWAYS_MORE)


def listed_types(ptc):
    listed = json.loads(subprocess.run([ptc, "rules", "list", "--json"], check=True, capture_output=True).stdout)
    return {model_type: family["family"] for family in listed for model_type in family["model_types"]}


def write(directory, config, tensors):
    os.makedirs(directory)
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    save_file(tensors, os.path.join(directory, "model.safetensors"))


class Outcome:
    def __init__(self):
        self.family = ""
        self.refused = ""      # why it is not cut
        self.same = []         # kinds of names that are cut as the plan does
        self.wrong = []        # kinds of names that are cut in another way
        self.otherwise = []    # the same, where the plan brings the output together: any cut is right
        self.more = []         # cut by us, whole by the plan


def try_family(daemon, name, model, rules=None):
    outcome = Outcome()
    job = daemon.job(name)
    if rules is not None:
        with open(job.file("rules.json"), "w", encoding="utf-8") as file:
            json.dump(rules, file)
    write(job.incoming("base") + "/rank/0", model.config, model.tensors)
    job.commit("base")
    report = json.loads(daemon.ptc("rules", "check", f"{name}/base", "--layout", LAYOUT, "--json", check=False).stdout)
    outcome.family = report["family"]
    if report["fits"] is not True:
        outcome.refused = report["fits"]
        return outcome
    for rank in range(families.TP):
        ours = load_file(job.rank_file("base", LAYOUT, rank))
        assert ours.keys() == model.tensors.keys()
        for tensor, value in ours.items():
            plan, kind = model.part(tensor, rank), families.kind(tensor)
            if value.shape == plan.shape and torch.equal(value, plan):
                if plan.shape == model.tensors[tensor].shape:
                    continue
                where = outcome.same
            elif plan.shape == model.tensors[tensor].shape:
                where = outcome.more
            else:
                where = outcome.otherwise if tensor in model.gathered else outcome.wrong
            if kind not in where:
                where.append(kind)
    return outcome


def unexpected(model_type, outcome):
    """Of what its plan keeps whole, what is not known to be kept whole by it."""
    known = [pattern for pattern, types in MORE.items() if model_type in types.split()]
    return [kind for kind in outcome.more if not any(re.fullmatch(pattern, kind) for pattern in (*ALWAYS_MORE, *known))]


def as_saved(daemon, directory, model):
    """By the names and stacks of save_pretrained(), which are those of the hub: why it cannot be cut, or nothing."""
    write(directory, model.config, {key: value.contiguous() for key, value in model.saved.items()})
    done = daemon.ptc("rules", "check", directory, "--layout", LAYOUT, "--json", check=False)
    report = json.loads(done.stdout)
    return "" if report["fits"] is True else report["fits"]


def cuts(report):
    """What ranks have of a tensor, by its kind of name and its shape."""
    kinds = {}
    for entry in report["tensors"]:
        kind = families.kind(re.sub(r"\{[^}]*\}", "0", entry["names"]))
        kinds[kind, str(entry["shape"])] = [part["shape"] for part in entry["ranks"]]
    return kinds


class Families(mount.TestCase):
    mount_options = ("--memory", "8G")

    def test_each_is_cut_as_its_plan_does(self):
        listed, tried = listed_types(os.path.join(mount.bin_dir(), "ptc")), 0
        for model_type in sorted(listed):  # of those without a plan only that all names are known
            if model_type not in families.configuration_auto.CONFIG_MAPPING_NAMES:
                continue
            with self.subTest(model_type):
                try:
                    model = families.tiny(model_type)
                except Exception:  # pylint: disable=broad-except
                    continue  # not so small; the table says so
                tried += 1
                outcome = try_family(self.mount, model_type.replace("_", "-"), model)
                self.assertEqual((outcome.refused, outcome.wrong), ("", []))
                if model.planned:
                    self.check_list((model_type, *judged(outcome)))
                    self.assertEqual(unexpected(model_type, outcome), [])
                    kept = {pattern for pattern, types in MORE.items() if model_type in types.split()}
                    stale = {pattern for pattern in kept if not any(re.fullmatch(pattern, kind) for kind in outcome.more)}
                    self.assertEqual(stale, set())
                if model_type in families.SAVED_OTHERWISE:
                    continue
                self.assertEqual(as_saved(self.mount, self.temporary(model_type), model), "")
        self.assertGreater(tried, 150)

    def test_layers_that_predict_further_tokens_are_cut_as_others(self):
        listed, tried = listed_types(os.path.join(mount.bin_dir(), "ptc")), set()
        for model_type in sorted(listed):
            if model_type not in families.configuration_auto.CONFIG_MAPPING_NAMES or model_type in families.SAVED_OTHERWISE:
                continue
            with self.subTest(model_type):
                try:
                    if not families.says_mtp(families.made_tiny(model_type)):
                        continue
                    model = families.tiny(model_type)
                except Exception:  # pylint: disable=broad-except
                    continue
                more, directory = families.with_mtp(model), self.temporary("mtp-" + model_type)
                self.assertTrue(more, "files of this type have layers that transformers ignores: say in families.py how they "
                                f"are called, with {model.ignored}")
                tried.add(model_type)
                write(directory, model.config, {name: value.clone().contiguous() for name, value in
                                                {**model.saved, **{name: value for name, (value, _) in more.items()}}.items()})
                for layout in (LAYOUT, f"tp{families.TP}-pp2-dp1"):
                    done = self.mount.ptc("rules", "check", directory, "--layout", layout, "--json", check=False)
                    report = json.loads(done.stdout)
                    self.assertIs(report["fits"], True)
                found = cuts(report)
                for name, (value, like) in more.items():
                    shape = str(list(value.shape))
                    if like is not None:
                        self.assertEqual(found[families.kind(name), shape], found[families.kind(like), shape], name)
        self.assertGreaterEqual(tried, set("glm4_moe glm4v_moe hy_v3 glm_ocr deepseek_v4 nemotron_h exaone_moe exaone4_5 "
                                           "ernie4_5_moe mellum granite_docling minimax_m3_vl mimo_v2_flash hy_v4 "
                                           "mistral_large4 deepseek_v3 qwen3_next".split()))

    def check_list(self, row):
        """That MODELS.md says this of a type."""
        model_type, mark, _, why = row
        kept_mark, kept_why = kept_list().get(model_type, (None, ""))
        paste = f"{model_type}: {short(why)}" if mark in ("○", NOT_MADE) else model_type
        text = (f"MODELS.md has {model_type} under {kept_mark}, and with transformers {families.transformers.__version__} "
                f"it belongs under {mark}, as\n{paste}")
        self.assertEqual(kept_mark, mark, text)
        if mark in ("○", NOT_MADE):
            self.assertTrue(kept_why, text)

    def test_the_list_of_models_is_true(self):
        """Of types that no set has: of the others it is compared where they are tried."""
        listed, tried = listed_types(os.path.join(mount.bin_dir(), "ptc")), set()
        for model_type in families.types_with_plan():
            tried.add(model_type)
            if model_type in listed and is_made(model_type):
                continue
            with self.subTest(model_type):
                self.check_list(row_of(self.mount, model_type))
        self.assertEqual(sorted(kept_list().keys() - tried), [], "transformers has no such types with a plan: take them out")

    def test_rules_are_suggested_by_transformers_own_plan(self):
        """Of types of whose names some are not known: what is cut by guesses is cut as the plan does."""
        listed, tried = listed_types(os.path.join(mount.bin_dir(), "ptc")), []
        for model_type in families.types_with_plan():
            if len(tried) == 3:
                break
            if model_type in listed:
                continue
            try:
                model = families.tiny(model_type)
            except Exception:  # pylint: disable=broad-except
                continue
            name, directory = model_type.replace("_", "-"), self.temporary("suggest-" + model_type)
            write(directory, model.config, model.tensors)
            done = self.mount.ptc("rules", "suggest", directory, "--python", sys.executable)
            rules = json.loads(done.stdout)
            if not rules["rules"] or not try_family(self.mount, "none-" + name, model).refused:
                continue
            with self.subTest(model_type):
                tried.append(model_type)
                outcome = try_family(self.mount, "suggest-" + name, model, rules)
                self.assertEqual((outcome.refused, outcome.wrong), ("", []))
                self.assertTrue(outcome.same)
                if model_type == "diffllama":  # its names are a Llama's, its heads are not
                    self.assertIn("guess: transformers' plan does not cut", rules["description"])
                    self.assertIn("model.layers.{layer}.self_attn.q_proj.weight", rules["description"])
        self.assertEqual(len(tried), 3)

    def test_rules_are_suggested_of_a_type_that_transformers_do_not_know(self):
        """By guesses alone; so, too, where a type is no text at all."""
        model = families.tiny("llama")
        for name, told in (("nobodys", {"model_type": "nobodys"}), ("list", {"model_type": ["llama"], "vision": {"model_type": 1}})):
            directory = self.temporary("unknown-" + name)
            tensors = {"model.layers.0.odd.weight": model.tensors["model.norm.weight"].clone(), **model.tensors}
            write(directory, {**model.config, **told}, tensors)
            done = self.mount.ptc("rules", "suggest", directory, "--python", sys.executable)
            self.assertIn("do not know this type: guessed", done.stderr)
            self.assertEqual([rule["names"] for rule in json.loads(done.stdout)["rules"]], [["model.layers.{layer}.odd.weight"]])

    def test_falcon_in_each_of_its_forms(self):
        """What the model itself takes for q, k and v in a rank's part of the fused weight are that rank's heads."""
        from transformers.models.falcon import FalconConfig, modeling_falcon
        forms = {"grouped": {"new_decoder_architecture": True, "num_kv_heads": 4, "multi_query": True},
                 "one-key": {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1},
                 "each-head": {"new_decoder_architecture": False, "multi_query": False}}

        def split(weight, ranks, form):
            config = FalconConfig(hidden_size=64 // ranks, num_attention_heads=8 // ranks, num_hidden_layers=1,
                                  **{**form, "num_kv_heads": max(form.get("num_kv_heads", 8) // ranks, 1)})
            with torch.device("meta"):
                attention = modeling_falcon.FalconAttention(config, layer_idx=0)
            return attention._split_heads(weight.T[None])
        for name, form in forms.items():
            with self.subTest(name):
                job, tensor = self.mount.job("falcon-" + name), "transformer.h.0.self_attention.query_key_value.weight"
                rows = {"grouped": 4 * (2 + 2) * 8, "one-key": (8 + 2) * 8, "each-head": 8 * 3 * 8}[name]
                whole = torch.randn(rows, 64)
                config = FalconConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=1, **form).to_dict()
                write(job.incoming("base") + "/rank/0", config, {tensor: whole})
                job.commit("base")
                for rank in range(families.TP):
                    ours = load_file(job.rank_file("base", LAYOUT, rank))[tensor]
                    for mine, all_heads in zip(split(ours, families.TP, form), split(whole, 1, form)):
                        heads = all_heads.shape[2]
                        local = all_heads.chunk(families.TP, dim=2)[rank] if heads > 1 else all_heads
                        self.assertTrue(torch.equal(mine, local[:, :, :mine.shape[2]]))

    def test_a_head_is_tied_where_the_configuration_does_not_say_as_in_transformers(self):
        for model_type in listed_types(os.path.join(mount.bin_dir(), "ptc")):
            if model_type not in families.configuration_auto.CONFIG_MAPPING_NAMES:
                continue
            with self.subTest(model_type):
                directory = self.temporary("tied-" + model_type)
                write(directory, {"model_type": model_type}, {"lm_head.weight": torch.zeros(4, 4)})
                report = json.loads(self.mount.ptc("rules", "check", directory, "--json", check=False).stdout)
                self.assertEqual(bool(report["tied"]), families.is_tied_by_default(model_type))

    def test_a_head_is_not_said_to_be_tied_of_types_that_go_by_their_names(self):
        """Or that it is not: what they are by default would be a guess. Of a hundred and fifty; PTC_TEST_SEED repeats a run."""
        seed = int(os.environ.get("PTC_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
        print(f"PTC_TEST_SEED={seed}", flush=True)
        listed, tensors = listed_types(os.path.join(mount.bin_dir(), "ptc")), {
            "model.embed_tokens.weight": torch.zeros(4, 4), "model.layers.0.input_layernorm.weight": torch.zeros(4),
            "model.layers.1.input_layernorm.weight": torch.zeros(4)}
        told, always = set(), ["ernie4_5_vl_moe", "hunyuan_vl", "hunyuan_vl_text", "zaya"]
        others = sorted(set(families.configuration_auto.CONFIG_MAPPING_NAMES) - set(listed) - set(always))
        for model_type in always + random.Random(seed).sample(others, 150):
            try:
                tied = families.is_tied_by_default(model_type)
            except Exception:  # pylint: disable=broad-except
                continue
            with self.subTest(model_type):
                directory = self.temporary("names-" + model_type)
                write(directory, {"model_type": model_type, "num_hidden_layers": 2}, tensors)
                report = json.loads(self.mount.ptc("rules", "check", directory, "--layout", "tp1-pp2-dp1", "--json",
                                                   check=False).stdout)
                if report["tied"] is None:
                    self.assertIn("does not say whether model.embed_tokens.weight is the head too", report["fits"])
                    continue
                told.add(model_type)
                self.assertEqual((report["tied"], report["fits"]), (tied, True))
        self.assertGreaterEqual(told, set(always))


def marked(outcome):
    """How much of its layers is compared, and what is not, or where any cut is right."""
    kept_whole = [kind for kind in outcome.more if is_in_a_layer(kind)]
    if not any(is_in_a_layer(kind) for kind in outcome.same + outcome.otherwise):
        return "◌", kept_whole
    if kept_whole:
        return "◔", kept_whole
    return ("◐" if outcome.otherwise else "●"), outcome.otherwise


def judged(outcome):
    """(mark, rule set, why)"""
    if outcome.refused:
        return "○", outcome.family, outcome.refused
    if outcome.wrong:
        return "✗", outcome.family, "cut otherwise: " + ", ".join(outcome.wrong)
    mark, kinds = marked(outcome)
    return mark, outcome.family, ", ".join(kinds)


def is_made(model_type):
    try:
        families.made_tiny(model_type)
    except Exception:  # pylint: disable=broad-except
        return False
    return True


def row_of(daemon, model_type):
    """What became of a type: (type, mark, rule set, why)."""
    try:
        model = families.tiny(model_type)
    except Exception as error:  # pylint: disable=broad-except
        return model_type, NOT_MADE, "", repr(error).split("\n", maxsplit=1)[0]
    return model_type, *judged(try_family(daemon, model_type.replace("_", "-"), model))


def rows(types):
    with mount.Mount(*Families.mount_options) as daemon:
        for model_type in types:
            yield row_of(daemon, model_type)


if __name__ == "__main__":
    if "--table" in sys.argv or "--only" in sys.argv:
        chosen = sys.argv[sys.argv.index("--only") + 1:] if "--only" in sys.argv else families.types_with_plan()
        for each in rows(chosen):
            print(*each, sep=" | ", flush=True)
    else:
        mount.main()
