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


def even(array, axis, rank, ranks):
    return numpy.split(array, ranks, axis)[rank]


class Model:
    """A small Llama or Mixtral of random sizes, and what a worker keeps of it."""

    def __init__(self, rng, experts):
        self.heads, self.kv = rng.choice(((4, 1), (4, 2), (4, 4), (8, 2)))
        self.dim, self.hidden = rng.choice((2, 4)), 8 * rng.randrange(1, 4)
        self.ffn, self.vocabulary, self.layers = 8 * rng.randrange(1, 6), rng.randrange(1, 300), rng.randrange(1, 6)
        self.experts, self.tied, self.biased = experts, not experts and rng.random() < 0.5, not experts and rng.random() < 0.5
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
            if experts:
                add(at + "block_sparse_moe.gate.weight", experts, self.hidden)
            for expert in range(experts or 1):
                mlp, names = (f"{at}block_sparse_moe.experts.{expert}.", "132") if experts else (at + "mlp.", ("gate_proj", "up_proj", "down_proj"))
                gate, up, down = ("w" + n if experts else n for n in names)
                add(f"{mlp}{gate}.weight", self.ffn, self.hidden)
                add(f"{mlp}{up}.weight", self.ffn, self.hidden)
                add(f"{mlp}{down}.weight", self.hidden, self.ffn)

    def config(self):
        kind = "mixtral" if self.experts else "qwen2" if self.biased else "llama"
        return {"model_type": kind, "hidden_size": self.hidden, "num_hidden_layers": self.layers, "intermediate_size": self.ffn,
                "num_attention_heads": self.heads, "num_key_value_heads": self.kv, "head_dim": self.dim, "vocab_size": self.vocabulary,
                "tie_word_embeddings": self.tied, **({"num_local_experts": self.experts} if self.experts else {})}

    def write(self, directory):
        models.write_safetensors(directory + "/model.safetensors",
                                 [models.Tensor(name, "BF16", value.shape, value.tobytes()) for name, value in self.arrays.items()])
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


class Serving(mount.TestCase):
    def job_of(self, name, model):
        job = self.mount.job(name)
        model.write(job.incoming("base") + "/rank/0")
        job.commit("base")
        return job

    def check_file(self, path, expected):
        found = {name: numpy.frombuffer(each.data, numpy.float32 if each.dtype == "F32" else numpy.uint16).reshape(each.shape)
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
