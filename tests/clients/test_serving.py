"""layouts/<engine>-tp<N>…/: what the workers of an inference engine keep, against a slow and obvious account of it.

PTC_TEST_SEED repeats a run. What real engines load is in test_vllm.py.
"""
import json
import os
import random

import models
import mount

numpy = mount.require("numpy")

SEED = int(os.environ.get("PTC_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
BLOCK = 128


def even(array, axis, rank, ranks):
    return numpy.split(array, ranks, axis)[rank]


class Model:
    """A small Llama, Qwen or Mixtral of random sizes, and what a worker of vLLM keeps of it."""

    def __init__(self, rng, experts, kind=None, tied=None, layers=None):
        self.heads, self.kv = rng.choice(((4, 1), (4, 2), (4, 4), (8, 2)))
        self.dim, self.hidden = rng.choice((2, 4)), 8 * rng.randrange(1, 4)
        self.ffn, self.vocabulary, self.layers = 8 * rng.randrange(1, 6), rng.randrange(1, 300), rng.randrange(1, 6)
        self.layers = layers or self.layers
        self.experts, self.tied, self.biased = experts, not experts and rng.random() < 0.5, not experts and rng.random() < 0.5
        if kind:
            self.biased = kind == "qwen2"
        self.tied = self.tied if tied is None else tied
        self.kind = kind or ("mixtral" if experts else "qwen2" if self.biased else "llama")
        self.arrays = {}
        numbers = numpy.random.default_rng(rng.randrange(1 << 32))

        def add(name, *shape):
            self.arrays[name] = numbers.integers(1, 1 << 16, shape, numpy.uint16)

        add("model.embed_tokens.weight", self.vocabulary, self.hidden)
        add("model.norm.weight", self.hidden)
        if not self.tied:
            add("lm_head.weight", self.vocabulary, self.hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            for name, rows in (("q", self.heads), ("k", self.kv), ("v", self.kv)):
                add(f"{at}self_attn.{name}_proj.weight", rows * self.dim, self.hidden)
                if self.biased:
                    add(f"{at}self_attn.{name}_proj.bias", rows * self.dim)
            add(at + "self_attn.o_proj.weight", self.hidden, self.heads * self.dim)
            add(at + "input_layernorm.weight", self.hidden)
            for name in ("q_norm", "k_norm") if self.kind.startswith("qwen3") else ():
                add(f"{at}self_attn.{name}.weight", self.dim)
            block, gate, up, down = EXPERTS.get(self.kind, ("mlp", "gate_proj", "up_proj", "down_proj"))
            if experts:
                add(f"{at}{block}.gate.weight", experts, self.hidden)
            for expert in range(experts or 1):
                mlp = f"{at}{block}.experts.{expert}." if experts else at + "mlp."
                add(f"{mlp}{gate}.weight", self.ffn, self.hidden)
                add(f"{mlp}{up}.weight", self.ffn, self.hidden)
                add(f"{mlp}{down}.weight", self.hidden, self.ffn)

    def config(self):
        return {"model_type": self.kind, "hidden_size": self.hidden, "num_hidden_layers": self.layers, "intermediate_size": self.ffn,
                "num_attention_heads": self.heads, "num_key_value_heads": self.kv, "head_dim": self.dim, "vocab_size": self.vocabulary,
                "tie_word_embeddings": self.tied,
                **({"num_experts" if self.kind == "qwen3_moe" else "num_local_experts": self.experts, "moe_intermediate_size": self.ffn}
                   if self.experts else {})}

    def write(self, directory):
        kinds = {numpy.uint16: "BF16", numpy.uint8: "F8_E4M3", numpy.float32: "F32"}
        models.write_safetensors(directory + "/model.safetensors",
                                 [models.Tensor(name, kinds[value.dtype.type], value.shape, value.tobytes())
                                  for name, value in self.arrays.items()])
        models.write_file(directory + "/config.json", json.dumps(self.config()))
        models.write_file(directory + "/tokenizer.json", "{}")

    def rows_of_vocabulary(self, name, rank, ranks):
        found = self.arrays[name]
        padded = numpy.zeros((-(-self.vocabulary // 64) * 64, self.hidden), numpy.uint16)
        padded[:self.vocabulary] = found
        return even(padded, 0, rank, ranks)

    def keys(self, array, rank, ranks):
        if ranks <= self.kv:
            return even(array, 0, rank, ranks)
        return even(array, 0, rank * self.kv // ranks, self.kv)

    def stage_of(self, layer, stages):
        """As vLLM counts: what is left over goes one each to those before the last."""
        each = [self.layers // stages] * stages
        for i in range(self.layers % stages):
            each[-2 - i] += 1
        return next(stage for stage in range(stages) if layer < sum(each[:stage + 1]))

    def worker(self, tp, pp, rank, stage, expert_ranks=1, expert_rank=0):
        """name → array, of uint16, or float32"""
        kept, first, last = {}, stage == 0 or self.experts, stage == pp - 1 or self.experts  # of Mixtral on each stage
        if first and not (last and self.tied):
            kept["model.embed_tokens.weight"] = self.rows_of_vocabulary("model.embed_tokens.weight", rank, tp)
        if last:
            kept["lm_head.weight"] = self.rows_of_vocabulary("model.embed_tokens.weight" if self.tied else "lm_head.weight", rank, tp)
            kept["model.norm.weight"] = self.arrays["model.norm.weight"]
        for layer in range(self.layers):
            if self.stage_of(layer, pp) == stage:
                self.add_layer(kept, f"model.layers.{layer}.", tp, rank, expert_ranks, expert_rank)
        return kept

    def add_layer(self, kept, at, tp, rank, expert_ranks, expert_rank):
        for end in ("weight", "bias") if self.biased else ("weight",):
            query, key, value = (self.arrays[f"{at}self_attn.{name}_proj.{end}"] for name in "qkv")
            kept[f"{at}self_attn.qkv_proj.{end}"] = numpy.concatenate(
                [even(query, 0, rank, tp), self.keys(key, rank, tp), self.keys(value, rank, tp)])
        kept[at + "self_attn.o_proj.weight"] = even(self.arrays[at + "self_attn.o_proj.weight"], 1, rank, tp)
        kept[at + "input_layernorm.weight"] = self.arrays[at + "input_layernorm.weight"]
        for name in SCALES:
            kept[at + "self_attn.attn." + name] = numpy.ones((), numpy.float32)
        if not self.experts:
            gate, up, down = (self.arrays[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            kept[at + "mlp.gate_up_proj.weight"] = numpy.concatenate([even(gate, 0, rank, tp), even(up, 0, rank, tp)])
            kept[at + "mlp.down_proj.weight"] = even(down, 1, rank, tp)
            return
        mine = range(self.experts * expert_rank // expert_ranks, self.experts * (expert_rank + 1) // expert_ranks)
        cut, of = (0, 1) if expert_ranks > 1 else (rank, tp)
        inputs, outputs = [], []
        for expert in mine:
            gate, down, up = (self.arrays[f"{at}block_sparse_moe.experts.{expert}.w{name}.weight"] for name in "123")
            inputs.append(numpy.concatenate([even(gate, 0, cut, of), even(up, 0, cut, of)]))
            outputs.append(even(down, 1, cut, of))
        kept[at + "block_sparse_moe.experts.routed_experts.w13_weight"] = numpy.stack(inputs)
        kept[at + "block_sparse_moe.experts.routed_experts.w2_weight"] = numpy.stack(outputs)
        kept[at + "block_sparse_moe.gate.weight"] = self.arrays[at + "block_sparse_moe.gate.weight"]


class Sglang(Model):
    """What a worker of SGLang keeps: tp workers a stage, of which dp groups have an attention of their own and ep ranks their experts."""

    def vocabulary_of(self, name, rank, ranks):
        rows = -(-self.vocabulary // 64) * 64
        if rows % ranks:
            rows = -(-self.vocabulary // (64 * ranks)) * 64 * ranks
        padded = numpy.zeros((rows, self.hidden), numpy.uint16)
        padded[:self.vocabulary] = self.arrays[name]
        return even(padded, 0, rank, ranks)

    def first_layer(self, stage, stages):
        """The last stages have one more of those that are left over."""
        return self.layers // stages * stage + max(0, stage - (stages - self.layers % stages))

    def served(self, tp, pp=1, dp=1, ep=1, worker=0):
        rank, stage, group = worker % tp, worker // tp, tp // dp
        embedding, head, kept = "model.embed_tokens.weight", "lm_head.weight", {}
        last = stage == pp - 1
        if stage == 0 and not (last and self.tied):
            kept[embedding] = self.vocabulary_of(embedding, rank % group, group)
        if self.tied and last:
            kept[head] = self.vocabulary_of(embedding, rank % group, group) if pp == 1 else self.vocabulary_of(embedding, rank, tp)
        elif not self.tied and (last or self.kind not in ("qwen2", "qwen3")):
            kept[head] = self.vocabulary_of(head, rank, tp)
        if last:
            kept["model.norm.weight"] = self.arrays["model.norm.weight"]
        for layer in range(self.first_layer(stage, pp), self.first_layer(stage + 1, pp)):
            at = f"model.layers.{layer}."
            self.attention_of(kept, at + "self_attn.", rank % group, group)
            kept[at + "input_layernorm.weight"] = self.arrays[at + "input_layernorm.weight"]
            if self.experts:
                self.experts_of(kept, at + EXPERTS[self.kind][0] + ".", rank // (tp // ep), ep, rank % (tp // ep), tp // ep)
            else:
                self.joined(kept, at + "mlp.gate_up_proj", (at + "mlp.gate_proj", at + "mlp.up_proj"),
                            lambda array: even(array, 0, rank, tp))
                self.joined(kept, at + "mlp.down_proj", (at + "mlp.down_proj",), lambda array: even(array, 1, rank, tp))
        return kept

    def joined(self, kept, to, of, cut):
        """Their weights, biases and scales, whichever there are."""
        for end in ("weight", "bias", "weight_scale_inv"):
            if f"{of[0]}.{end}" in self.arrays:
                kept[f"{to}.{end}"] = numpy.concatenate([cut(self.arrays[f"{each}.{end}"]) for each in of])

    def attention_of(self, kept, at, rank, ranks):
        for end in ("weight", "bias", "weight_scale_inv"):
            if f"{at}q_proj.{end}" in self.arrays:
                query, key, value = (self.arrays[f"{at}{name}_proj.{end}"] for name in "qkv")
                kept[f"{at}qkv_proj.{end}"] = numpy.concatenate(
                    [even(query, 0, rank, ranks), self.keys(key, rank, ranks), self.keys(value, rank, ranks)])
        self.joined(kept, at + "o_proj", (at + "o_proj",), lambda array: even(array, 1, rank, ranks))
        for name in ("q_norm.weight", "k_norm.weight"):
            if at + name in self.arrays:
                kept[at + name] = self.arrays[at + name]
        if at + "q_proj.weight_scale_inv" in self.arrays:
            kept[at + "attn.k_scale"] = kept[at + "attn.v_scale"] = numpy.ones((), numpy.float32)

    def experts_of(self, kept, at, expert_rank, expert_ranks, cut, of):
        _, gate, up, down = EXPERTS[self.kind]
        mine = range(self.experts * expert_rank // expert_ranks, self.experts * (expert_rank + 1) // expert_ranks)
        for end in ("weight", "weight_scale_inv"):
            def part(expert, name, axis, end=end):
                return even(self.arrays[f"{at}experts.{expert}.{name}.{end}"], axis, cut, of)
            if f"{at}experts.0.{up}.{end}" in self.arrays:
                kept[f"{at}experts.w13_{end}"] = numpy.stack([numpy.concatenate([part(one, gate, 0), part(one, up, 0)]) for one in mine])
                kept[f"{at}experts.w2_{end}"] = numpy.stack([part(one, down, 1) for one in mine])
        kept[at + "gate.weight"] = self.arrays[at + "gate.weight"]


class InBlocks(Sglang):
    """The same with projections of FP8, which have a scale for each 128 × 128 of them."""

    def __init__(self, kind, experts=0):
        super().__init__(random.Random(SEED), experts, kind, tied=False)
        self.heads, self.kv, self.dim, self.hidden, self.ffn, self.layers = 4, 2, BLOCK, 2 * BLOCK, 2 * BLOCK, 1
        numbers, names, self.arrays = numpy.random.default_rng(SEED), list(self.arrays), {}
        rows = {"q_proj": self.heads * self.dim, "k_proj": self.kv * self.dim, "v_proj": self.kv * self.dim, "o_proj": self.hidden,
                EXPERTS[kind][1] if experts else "gate_proj": self.ffn, EXPERTS[kind][2] if experts else "up_proj": self.ffn,
                EXPERTS[kind][3] if experts else "down_proj": self.hidden}
        for name in names:
            projection = name.split(".")[-2]
            if not name.startswith("model.layers.0.") and "layers" in name:
                continue
            if projection not in rows:
                shape = {"embed_tokens": (self.vocabulary, self.hidden), "lm_head": (self.vocabulary, self.hidden),
                         "gate": (experts, self.hidden), "q_norm": (self.dim,), "k_norm": (self.dim,)}.get(projection, (self.hidden,))
                self.arrays[name] = numbers.integers(1, 1 << 16, shape, numpy.uint16)
                continue
            columns = {"o_proj": self.heads * self.dim, "down_proj": self.ffn, "w2": self.ffn}.get(projection, self.hidden)
            self.arrays[name] = numbers.integers(1, 100, (rows[projection], columns), numpy.uint8)
            self.arrays[name + "_scale_inv"] = numbers.random((rows[projection] // BLOCK, columns // BLOCK), numpy.float32)

    def config(self):
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        return {**super().config(), "quantization_config": said}


class Serving(mount.TestCase):
    def job_of(self, name, model):
        job = self.mount.job(name)
        model.write(job.incoming("base") + "/rank/0")
        job.commit("base")
        return job

    def check_file(self, path, expected):
        kinds = {"F32": numpy.float32, "F8_E4M3": numpy.uint8, "BF16": numpy.uint16}
        found = {name: numpy.frombuffer(each.data, kinds[each.dtype]).reshape(each.shape)
                 for name, each in models.read_safetensors(path).items()}
        self.assertEqual(sorted(found), sorted(expected))
        for name, value in expected.items():
            self.assertTrue(numpy.array_equal(found[name], value) and found[name].dtype == value.dtype, name)

    def test_each_worker_has_its_arrays(self):
        for case in range(24):
            seed = f"{SEED} {case}"
            rng = random.Random(seed)
            model = Model(rng, rng.choice((0, 0, 4, 8)))
            job = self.job_of(f"random-{case}", model)
            for tp, pp in {(1, 1), (2, 1), (4, 1), (2, rng.randrange(1, min(4, model.layers) + 1))}:
                name = f"vllm-tp{tp}" + (f"-pp{pp}" if pp > 1 else "")
                with self.subTest(PTC_TEST_SEED=SEED, case=seed, name=name, **model.config()):
                    top = job.checkpoint("base", "layouts", name)
                    files = sorted(os.listdir(top + "/serve"))
                    self.assertEqual(len(files), tp * pp + 2, files)
                    for worker in range(tp * pp):
                        rank, stage = worker % tp, worker // tp
                        file = f"model-rank-{rank}-part-0.safetensors" if pp == 1 else f"model-pp-{stage}-tp-{rank}-part-0.safetensors"
                        expected = model.worker(tp, pp, rank, stage)
                        self.check_file(f"{top}/serve/{file}", expected)
                        self.assertEqual(sorted(os.listdir(f"{top}/rank/{worker}")), sorted([file, "config.json", "tokenizer.json"]))
                        self.check_file(f"{top}/rank/{worker}/{file}", expected)

    def test_experts_are_spread_whole(self):
        rng = random.Random(SEED)
        model = Model(rng, 8)
        job = self.job_of("experts", model)
        for name, tp, dp in (("vllm-tp4-ep", 4, 1), ("vllm-tp1-dp4-ep", 1, 4), ("vllm-tp2-dp2-ep", 2, 2)):
            top = job.checkpoint("base", "layouts", name)
            self.assertEqual(sorted(os.listdir(top)), ["rank", "serve"] if dp == 1 else ["rank"])
            self.assertEqual(len(os.listdir(top + "/rank")), tp * dp)
            for worker in range(tp * dp):
                with self.subTest(PTC_TEST_SEED=SEED, name=name, worker=worker):
                    rank = worker % tp
                    self.check_file(f"{top}/rank/{worker}/model-rank-{rank}-part-0.safetensors",
                                    model.worker(tp, 1, rank, 0, tp * dp, worker))

    def check_sglang(self, job, model, tp, pp=1, dp=1, ep=1):
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep}
        name = "sglang-" + "-".join(f"{key}{size}" for key, size in sizes.items() if key == "tp" or size > 1)
        top = job.checkpoint("base", "layouts", name)
        with self.subTest(PTC_TEST_SEED=SEED, name=name, **model.config()):
            # Its file has no stage in its name, so that the stages are in directories of their own.
            self.assertEqual(sorted(os.listdir(top)), ["rank", "serve"] if pp == 1 else ["rank"])
            self.assertEqual(len(os.listdir(top + "/rank")), tp * pp)
            for worker in range(tp * pp):
                expected, file = model.served(**sizes, worker=worker), f"model-rank-{worker % tp}-part-0.safetensors"
                self.assertEqual(sorted(os.listdir(f"{top}/rank/{worker}")), sorted([file, "config.json", "tokenizer.json"]))
                self.check_file(f"{top}/rank/{worker}/{file}", expected)
                if pp == 1:
                    self.check_file(f"{top}/serve/{file}", expected)

    def test_sglang(self):
        for case in range(20):
            rng = random.Random(f"{SEED} {case}")
            kind = rng.choice(("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"))
            model = Sglang(rng, 8 if kind in EXPERTS else 0, kind)
            job = self.job_of(f"sglang-{case}", model)
            self.check_sglang(job, model, rng.choice((1, 2, 4)))
            if model.layers > 1 and not (model.tied and kind == "llama"):
                self.check_sglang(job, model, rng.choice((1, 2)), pp=rng.randrange(2, model.layers + 1))
            if model.experts:
                self.check_sglang(job, model, 4, ep=rng.choice((2, 4)))
            if kind.startswith("qwen3"):
                self.check_sglang(job, model, 4, dp=rng.choice((2, 4)))
                self.check_sglang(job, model, 4, pp=model.layers, dp=2, ep=rng.choice((1, 2, 4)) if model.experts else 1)

    def test_a_vocabulary_that_tp_does_not_divide_is_padded_further(self):
        model = Sglang(random.Random(6), 0, "llama", tied=True)
        model.heads = model.kv = 3
        model.ffn = 24
        for name, array in list(model.arrays.items()):
            rows, columns = array.shape if array.ndim == 2 else (0, 0)
            end = name.split(".")[-2]
            if end in ("q_proj", "k_proj", "v_proj"):
                model.arrays[name] = numpy.resize(array, (3 * model.dim, columns))
            elif end == "o_proj":
                model.arrays[name] = numpy.resize(array, (rows, 3 * model.dim))
            elif end in ("gate_proj", "up_proj"):
                model.arrays[name] = numpy.resize(array, (24, columns))
            elif end == "down_proj":
                model.arrays[name] = numpy.resize(array, (rows, 24))
        self.check_sglang(self.job_of("thirds", model), model, 3)

    def test_sglang_keeps_fp8_in_blocks(self):
        for model, sizes in ((InBlocks("llama"), ({"tp": 1}, {"tp": 2})),
                             (InBlocks("qwen3_moe", 4), ({"tp": 2}, {"tp": 4, "ep": 2, "dp": 2}))):
            job = self.job_of("blocks-" + model.kind.replace("_", "-"), model)
            for each in sizes:
                self.check_sglang(job, model, **each)
            text = mount.read_text(job.checkpoint("base", "layouts", "sglang-tp4", "serve", "LEFT_OUT.txt"))
            self.assertRegex(text, r"weight_scale_inv: its weight is cut at \[0:64\], off the grid of blocks of 128; tp = 2 would do")
            text = mount.read_text(job.checkpoint("base", "layouts", "vllm-tp2", "serve", "LEFT_OUT.txt"))
            self.assertIn("vllm keeps of a quantised model is not known", text)

    def test_what_sglang_does_not_serve_is_said(self):
        dense, tied = Sglang(random.Random(7), 0, "llama", tied=False), Sglang(random.Random(8), 0, "llama", tied=True, layers=2)
        mixed = Sglang(random.Random(9), 8, "mixtral", tied=True)
        quantised = [Sglang(random.Random(10), 0, "llama", tied=False) for _ in range(3)]
        methods = ({"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 128]})
        for model, said in zip(quantised, methods):
            model.config = lambda said=said, known=model.config(): {**known, "quantization_config": said}
        for name, model, layout, reason in (
                ("dense", dense, "sglang-tp4-dp2", "no data-parallel attention for such models; it has for: qwen2_moe, qwen3, qwen3_moe"),
                ("tied", tied, "sglang-tp1-pp2", "its last stage would have no head"),
                ("mixed", mixed, "sglang-tp1", "the head of this one is its embedding"),
                ("awq", quantised[0], "sglang-tp1", "'awq' otherwise than files have them"),
                ("fp8", quantised[1], "sglang-tp1", "'fp8' without blocks otherwise than files"),
                ("odd-blocks", quantised[2], "sglang-tp1", "'fp8' in such blocks otherwise than files")):
            job = self.job_of(name, model)
            top = job.checkpoint("base", "layouts", layout, "rank", "0")
            self.assertEqual(os.listdir(top), ["LEFT_OUT.txt"], name)
            self.assertIn(reason, mount.read_text(top + "/LEFT_OUT.txt"))
        job = mount.Job(self.mount, "dense")
        for layout, reason in (("sglang-tp6-dp4", "the 6 workers of a stage of sglang are no 4 groups of as many; dp = 1, 2, 3, 6 would do"),
                               ("sglang-tp4-ep3", "no 3 groups of as many; ep = 1, 2, 4 would do"),
                               ("sglang-tp2-ep", "no name of a layout of sglang: that is sglang-tp<N>, behind which -pp<N>, -dp<N> and -ep<N>"),
                               ("sglang-tp2-ep2-dp2", "in this order"), ("sglang-tp0", "in this order"), ("sglang-", "in this order"),
                               ("sglang-tp2-pp1", "is sglang-tp2, since a size of 1 is left out"),
                               ("sglang-tp1048576-pp2", "more than 1048576 workers"),
                               ("vllm-tp2-dp2", "vllm has -dp only with -ep"), ("vllm-tp1-ep", "one worker has all experts without -ep")):
            self.assertFalse(os.path.exists(job.checkpoint("base", "layouts", layout)), layout)
            done = self.mount.ptc("export", job.name, self.temporary("out"), "--layout", layout, check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn(reason, done.stderr)
        done = self.mount.ptc("rules", "check", job.name, "--layout", "sglang-tp2", check=False)
        self.assertIn("sglang-tp2 is what the workers of sglang load, and no layout of a job's", done.stderr)

    def test_what_cannot_be_is_said(self):
        model = Model(random.Random(1), 0)
        job = self.job_of("said", model)
        for name in ("vllm-tp0", "vllm-tp02", "vllm", "vllm-", "vllm-tp2-pp1", "vllm-tp2-dp2", "vllm-tp1-ep", "vllm-tp2-ep-pp2", "nollm-tp2",
                     "vllm-tp2000000", "vllm-tp1048576-pp2"):
            self.assertFalse(os.path.exists(job.checkpoint("base", "layouts", name)), name)
        self.assertFalse(os.path.exists(job.checkpoint("base", "layouts", "vllm-tp2", "rank", "2")))
        # 5 divides neither heads nor a vocabulary of whole 64.
        top = job.checkpoint("base", "layouts", "vllm-tp5", "serve")
        self.assertEqual(os.listdir(top), ["LEFT_OUT.txt"])
        self.assertIn("tp = 5 does not divide", mount.read_text(top + "/LEFT_OUT.txt"))

        top = job.checkpoint("base", "layouts", "vllm-tp1-pp1048576", "serve")  # at once
        self.assertIn(f"1048576 stages, and the model has {model.layers} layers", mount.read_text(top + "/LEFT_OUT.txt"))

        quantised = {**model.config(), "quantization_config": {"quant_method": "fp8"}}
        for name, config, reason in (("untyped", {}, "no config.json"), ("odd", {"model_type": "frobnicator"}, "'frobnicator' are not known"),
                                     ("quantised", quantised, "a quantised model is not known")):
            job = self.mount.job(name)
            model.write(job.incoming("base") + "/rank/0")
            models.write_file(job.incoming("base") + "/rank/0/config.json", json.dumps(config))
            job.commit("base")
            top = job.checkpoint("base", "layouts", "vllm-tp1", "serve")
            self.assertEqual(os.listdir(top), ["LEFT_OUT.txt"])
            self.assertIn(reason, mount.read_text(top + "/LEFT_OUT.txt"))

    def test_a_part_that_is_missing_is_named(self):
        model = Model(random.Random(2), 0)
        del model.arrays["model.layers.0.mlp.up_proj.weight"]
        job = self.job_of("missing", model)
        text = mount.read_text(job.checkpoint("base", "layouts", "vllm-tp1", "serve", "LEFT_OUT.txt"))
        self.assertIn("model.layers.0.mlp.gate_up_proj.weight of vllm is made of model.layers.0.mlp.gate_proj.weight", text)

    def test_an_expert_that_is_missing_is_named(self):
        model = Model(random.Random(4), 4)
        for name in "123":
            del model.arrays[f"model.layers.0.block_sparse_moe.experts.1.w{name}.weight"]
        job = self.job_of("missing-expert", model)
        text = mount.read_text(job.checkpoint("base", "layouts", "vllm-tp1", "serve", "LEFT_OUT.txt"))
        self.assertIn("has a place for expert 1, and model.layers.0.block_sparse_moe.experts.2.w", text)

    def test_layers_behind_the_model_s_are_no_part_of_it(self):
        model = Model(random.Random(5), 0)
        expected = model.worker(1, 1, 0, 0)
        for name in [name for name in model.arrays if name.startswith("model.layers.0.")]:
            model.arrays[name.replace("layers.0.", f"layers.{model.layers}.")] = model.arrays[name]
        model.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = model.arrays["model.norm.weight"]
        job = self.job_of("behind", model)
        self.check_file(job.checkpoint("base", "layouts", "vllm-tp1", "serve", "model-rank-0-part-0.safetensors"), expected)

    def test_it_follows_the_rights_of_what_it_is_made_of(self):
        model = Model(random.Random(3), 0)
        job = self.mount.job("private")
        model.write(job.incoming("base") + "/rank/0")
        os.chmod(job.incoming("base") + "/rank/0/model.safetensors", 0o600)
        job.commit("base")
        mode = os.stat(job.checkpoint("base", "layouts", "vllm-tp1", "serve", "model-rank-0-part-0.safetensors")).st_mode
        self.assertEqual(mode & 0o777, 0o400)


if __name__ == "__main__":
    print(f"PTC_TEST_SEED={SEED}")
    mount.main()
