"""Quantised checkpoints: what a rank's tensors stand for is the rank's part of what the model's stand for.

PTC_TEST_SEED repeats a run. QUANTISED_CASES: how many models of random sizes of each scheme, 2 without.
"""
import os
import random

import models
import mount

numpy = mount.require("numpy")
import quantised  # noqa: E402  pylint: disable=wrong-import-position

SEED = int(os.environ.get("PTC_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
CASES = int(os.environ.get("QUANTISED_CASES") or 2)
NUMPY = {"I32": numpy.int32, "I64": numpy.int64, "U8": numpy.uint8, "I8": numpy.int8, "F8_E4M3": numpy.uint8,
         "F8_E8M0": numpy.uint8, "F16": numpy.float16, "BF16": numpy.uint16, "F32": numpy.float32}


def numbers(rng):
    return numpy.random.default_rng(rng.randrange(1 << 32))


def tensor(name, dtype, array):
    return models.Tensor(name, dtype, array.shape, numpy.ascontiguousarray(array).tobytes())


def as_tensors(found):
    return [tensor(name, dtype, value) for name, (dtype, value) in found.items()]


def array(found):
    return numpy.frombuffer(found.data, NUMPY[found.dtype]).reshape(found.shape)


class Llama:
    """Sizes, and which rows and columns of each weight a rank has."""

    def __init__(self, rng, scheme):
        self.fused = rng.random() < 0.4
        self.heads, self.kv = rng.choice(((4, 1), (4, 2), (4, 4), (8, 2)))
        self.dim = rng.choice(scheme.heads)
        self.hidden, self.ffn = scheme.step * rng.randrange(1, 5), scheme.step * rng.randrange(1, 9)

    def weights(self):
        """name → (outputs, inputs)"""
        queries, keys = self.heads * self.dim, self.kv * self.dim
        attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
        found = {attention + "o_proj": (self.hidden, queries), mlp + "down_proj": (self.hidden, self.ffn)}
        if self.fused:
            found[attention + "qkv_proj"] = (queries + 2 * keys, self.hidden)
            found[mlp + "gate_up_proj"] = (2 * self.ffn, self.hidden)
        else:
            found[attention + "q_proj"] = (queries, self.hidden)
            found[attention + "k_proj"] = found[attention + "v_proj"] = (keys, self.hidden)
            found[mlp + "gate_proj"] = found[mlp + "up_proj"] = (self.ffn, self.hidden)
        return found

    def part(self, name, rank, ranks):
        """(rows, columns) of the weight."""
        out, inputs = self.weights()[name]

        def even(extent, begin=0):
            return [begin + place for place in range(extent) if place * ranks // extent == rank]

        def keys(begin=0):
            if ranks <= self.kv:
                return even(self.kv * self.dim, begin)
            head = rank * self.kv // ranks
            return [begin + head * self.dim + place for place in range(self.dim)]

        queries = self.heads * self.dim
        kind = name.rsplit(".", 1)[1]
        if kind in ("o_proj", "down_proj"):
            return list(range(out)), even(inputs)
        if kind in ("k_proj", "v_proj"):
            rows = keys()
        elif kind == "qkv_proj":
            rows = even(queries) + keys(queries) + keys(queries + self.kv * self.dim)
        elif kind == "gate_up_proj":
            rows = even(self.ffn) + even(self.ffn, self.ffn)
        else:
            rows = even(out)
        return rows, list(range(inputs))

    def refused(self, scheme, ranks):
        """The weights that cannot be cut."""
        return [name for name, (out, inputs) in self.weights().items() for rank in range(ranks)
                if not self.part_fits(scheme, name, out, inputs, rank, ranks)]

    def part_fits(self, scheme, name, out, inputs, rank, ranks):
        rows, columns = self.part(name, rank, ranks)
        bounds = [0, self.heads * self.dim, (self.heads + self.kv) * self.dim] if name.endswith("qkv_proj") else [0]
        if name.endswith("gate_up_proj"):
            bounds = [0, self.ffn]
        # Each fused part is cut by itself.
        parts = [[row for row in rows if begin <= row < end] for begin, end in zip(bounds, bounds[1:] + [out])]
        return all(scheme.fits(part if len(bounds) > 1 else rows, columns, out, inputs) for part in parts)

    def tensors(self, rng, scheme):
        def plain(*shape):
            return "F16", quantised.scales(rng, *shape)

        found = {"model.embed_tokens.weight": plain(256, self.hidden), "lm_head.weight": plain(256, self.hidden),
                 "model.norm.weight": plain(self.hidden), "model.layers.0.input_layernorm.weight": plain(self.hidden),
                 "model.layers.0.self_attn.k_scale": ("F32", numpy.ones((), numpy.float32))}
        for name, (out, inputs) in self.weights().items():
            found.update({f"{name}.{end}": value for end, value in scheme.quantise(rng, out, inputs).items()})
        return as_tensors(found)

    def config(self, scheme):
        return {"model_type": "phi3" if self.fused else "llama", "hidden_size": self.hidden, "num_hidden_layers": 1,
                "intermediate_size": self.ffn, "num_attention_heads": self.heads, "num_key_value_heads": self.kv,
                "head_dim": self.dim, "vocab_size": 256, "tie_word_embeddings": False,
                "quantization_config": scheme.config}


def of_weight(tensors, name):
    """end of the name → array"""
    return {each[len(name) + 1:]: array(found) for each, found in tensors.items() if each.startswith(name + ".")}


class TestCase(mount.TestCase):
    def write(self, directory, config, tensors):
        models.write_safetensors(directory + "/model.safetensors", tensors)
        models.write_file(directory + "/config.json", models.json.dumps(config))

    def job_of(self, name, config, tensors):
        job = self.mount.job(name)
        self.write(job.incoming("base") + "/rank/0", config, tensors)
        job.commit("base")
        return job

    def report(self, directory, layout, code=0):
        done = self.mount.ptc("rules", "check", directory, "--layout", layout, "--json", check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return models.json.loads(done.stdout)

    def check_weight(self, scheme, whole, mine, name, size, part):
        """That MINE has these rows and columns of the weight, all words and scales of it."""
        out, inputs = size
        rows, columns = part
        expected = scheme.dequantise(of_weight(whole, name), out, inputs)[rows][:, columns]
        found = scheme.dequantise(of_weight(mine, name), len(rows), len(columns))
        self.assertTrue(numpy.array_equal(found, expected), name)


class Quantised(TestCase):
    def check_ranks(self, job, model, scheme, whole, ranks):
        for rank in range(ranks):
            mine = models.read_safetensors(job.rank_file("base", f"tp{ranks}-pp1-dp1", rank))
            self.assertEqual(mine.keys(), whole.keys())
            for name, size in model.weights().items():
                with self.subTest(rank=rank):
                    self.check_weight(scheme, whole, mine, name, size, model.part(name, rank, ranks))

    def check_committed_again(self, name, job, model, scheme, whole, ranks):
        """What the ranks have, saved by them, is the model."""
        again, layout = self.mount.job(name), f"tp{ranks}-pp1-dp1"
        models.write_file(again.incoming("base") + "/layout.json", '{"tp": %d, "pp": 1, "dp": 1}' % ranks)
        for rank in range(ranks):
            directory = again.incoming("base") + f"/rank/{rank}"
            models.write_file(directory + "/model.safetensors", mount.read_bytes(job.rank_file("base", layout, rank)))
            models.write_file(directory + "/config.json", models.json.dumps(model.config(scheme)))
        again.commit("base")
        again.set_layout(tp=1)
        self.assertEqual(models.read_safetensors(again.rank_file("base", "tp1-pp1-dp1", 0)), whole)

    def test_parts_stand_for_parts(self):
        refused = 0
        for label, scheme in quantised.SCHEMES.items():
            fitted = 0
            for case in range(CASES * 50):
                if fitted == CASES:
                    break
                seed = f"{SEED} {label} {case}"
                rng = random.Random(seed)
                model, ranks = Llama(rng, scheme), rng.choice((2, 4))
                with self.subTest(PTC_TEST_SEED=SEED, case=seed, ranks=ranks, **model.__dict__):
                    tensors = model.tensors(numbers(rng), scheme)
                    name = "".join(c if c.isalnum() else "-" for c in f"{label}-{case}")
                    directory = self.temporary(name)
                    self.write(directory, model.config(scheme), tensors)
                    bad = model.refused(scheme, ranks)
                    fits = self.report(directory, f"tp{ranks}-pp1-dp1", code=1 if bad else 0)["fits"]
                    self.assertEqual(fits is True, not bad, fits)
                    if bad:
                        refused += 1
                        self.assertTrue(any(fits.startswith(weight + ".") for weight in bad), fits)
                        continue
                    fitted += 1
                    whole = {each.name: each for each in tensors}
                    job = self.job_of(name, model.config(scheme), tensors)
                    job.set_layout(tp=ranks)
                    self.check_ranks(job, model, scheme, whole, ranks)
                    if fitted == 1 and scheme.says_groups:
                        self.check_committed_again(name + "-again", job, model, scheme, whole, ranks)
            self.assertGreater(fitted, 0, label)
        self.assertGreater(refused, 0)


AWQ = quantised.SCHEMES["awq"]


def weights_of(rng, scheme, sizes):
    """The tensors of these weights, (outputs, inputs) by name."""
    return {f"{name}.{end}": value for name, size in sizes.items() for end, value in scheme.quantise(rng, *size).items()}


def half(extent, rank):
    return [place for place in range(extent) if place * 2 // extent == rank]


class OfOtherFamilies(TestCase):
    def setUp(self):
        super().setUp()
        self.rng = numpy.random.default_rng(SEED)

    def test_experts_and_stages(self):
        at, sizes = "model.layers.{}.block_sparse_moe.experts.{}.{}", {}
        for layer in range(2):
            for expert in range(4):
                sizes.update({at.format(layer, expert, "w1"): (64, 32), at.format(layer, expert, "w3"): (64, 32),
                              at.format(layer, expert, "w2"): (32, 64)})
        whole = {each.name: each for each in as_tensors(weights_of(self.rng, AWQ, sizes))}
        config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "num_attention_heads": 4,
                  "quantization_config": AWQ.config}
        job = self.job_of("experts", config, list(whole.values()))
        job.set_layout(tp=2, pp=2, ep=2)
        for rank in range(8):
            mine = models.read_safetensors(job.rank_file("base", "tp2-pp2-dp1-ep2", rank))
            tp, ep, pp = rank % 2, rank // 2 % 2, rank // 4
            names = [at.format(pp, expert, name) for expert in (2 * ep, 2 * ep + 1) for name in ("w1", "w2", "w3")]
            self.assertEqual({name.rsplit(".", 1)[0] for name in mine}, set(names))
            for name in names:
                out, inputs = sizes[name]
                part = (range(out), half(inputs, tp)) if name.endswith("w2") else (half(out, tp), range(inputs))
                self.check_weight(AWQ, whole, mine, name, sizes[name], part)

    def test_experts_of_llama_4_one_after_the_other(self):
        """As transformers saves them quantised: its own class keeps them stacked."""
        at, sizes = "language_model.model.layers.0.feed_forward.experts.{}.{}", {}
        for expert in range(4):
            sizes.update({at.format(expert, "gate_proj"): (64, 32), at.format(expert, "up_proj"): (64, 32),
                          at.format(expert, "down_proj"): (32, 64)})
        whole = {each.name: each for each in as_tensors(weights_of(self.rng, AWQ, sizes))}
        config = {"model_type": "llama4", "text_config": {"num_hidden_layers": 1, "num_local_experts": 4,
                                                          "num_attention_heads": 4}, "quantization_config": AWQ.config}
        job = self.job_of("llama-4", config, list(whole.values()))
        job.set_layout(tp=2, ep=2)
        for rank in range(4):
            mine = models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1-ep2", rank))
            tp, ep = rank % 2, rank // 2
            names = [at.format(expert, name) for expert in (2 * ep, 2 * ep + 1) for name in ("gate_proj", "up_proj", "down_proj")]
            self.assertEqual({name.rsplit(".", 1)[0] for name in mine}, set(names))
            for name in names:
                out, inputs = sizes[name]
                part = (range(out), half(inputs, tp)) if name.endswith("down_proj") else (half(out, tp), range(inputs))
                self.check_weight(AWQ, whole, mine, name, sizes[name], part)

    def test_scales_of_a_cache_by_head(self):
        """One for each key-value head; what the ranks have, saved by them, is the model."""
        at = "model.layers.0.self_attn."
        found = {at + "k_proj.weight": ("F16", quantised.scales(self.rng, 4 * 24, 32)),
                 at + "k_proj.k_scale": ("F32", numpy.arange(4, dtype=numpy.float32)),
                 at + "v_scale": ("F32", numpy.arange(4, dtype=numpy.float32).reshape(4, 1, 1)),
                 at + "k_scale": ("F32", numpy.ones((), numpy.float32))}
        whole = {each.name: each for each in as_tensors(found)}
        config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4}
        job = self.job_of("cache", config, list(whole.values()))
        job.set_layout(tp=2)
        again = self.mount.job("cache-again")
        models.write_file(again.incoming("base") + "/layout.json", '{"tp": 2, "pp": 1, "dp": 1}')
        for rank in range(2):
            path = job.rank_file("base", "tp2-pp1-dp1", rank)
            mine = {name[len(at):]: array(value) for name, value in models.read_safetensors(path).items()}
            self.assertEqual(mine["k_proj.k_scale"].tolist(), [2 * rank, 2 * rank + 1])
            self.assertEqual(mine["v_scale"].ravel().tolist(), [2 * rank, 2 * rank + 1])
            self.assertEqual(mine["k_scale"].shape, ())
            models.write_file(again.incoming("base") + f"/rank/{rank}/model.safetensors", mount.read_bytes(path))
            models.write_file(again.incoming("base") + f"/rank/{rank}/config.json", models.json.dumps(config))
        again.commit("base")
        again.set_layout(tp=1)
        self.assertEqual(models.read_safetensors(again.rank_file("base", "tp1-pp1-dp1", 0)), whole)

    def test_a_weight_that_has_its_inputs_first(self):
        """GPT-2's own is [in, out], of GPTQ as of any other model's: [in, out] too."""
        scheme, at = quantised.SCHEMES["gptq"], "transformer.h.0."
        sizes = {at + "attn.c_attn": (96, 32), at + "attn.c_proj": (32, 32), at + "mlp.c_fc": (64, 32),
                 at + "mlp.c_proj": (32, 64)}
        whole = {each.name: each for each in as_tensors(weights_of(self.rng, scheme, sizes))}
        config = {"model_type": "gpt2", "n_layer": 1, "n_head": 4, "quantization_config": scheme.config}
        job = self.job_of("gpt2", config, list(whole.values()))
        job.set_layout(tp=2)
        for rank in range(2):
            mine = models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1", rank))
            for name, (out, inputs) in sizes.items():
                rows, columns = half(out, rank), range(inputs)
                if name.endswith("c_attn"):
                    rows = [begin + row for begin in (0, 32, 64) for row in half(32, rank)]
                elif name.endswith("c_proj"):
                    rows, columns = range(out), half(inputs, rank)
                self.check_weight(scheme, whole, mine, name, sizes[name], (rows, columns))

    def test_adapters_beside(self):
        """As PEFT names them: the weight is base_layer's."""
        at = "base_model.model.model.layers.0.mlp.down_proj."
        found = weights_of(self.rng, AWQ, {at + "base_layer": (32, 64)})
        found[at + "lora_A.default.weight"] = "F16", quantised.scales(self.rng, 4, 64)
        found[at + "lora_B.default.weight"] = "F16", quantised.scales(self.rng, 32, 4)
        config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4}
        job = self.job_of("peft", config, as_tensors(found))
        job.set_layout(tp=2)
        mine = models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1", 1))
        self.assertEqual({name[len(at):]: each.shape for name, each in mine.items()},
                         {"base_layer.qweight": (32, 4), "base_layer.qzeros": (2, 4), "base_layer.scales": (2, 32),
                          "lora_A.default.weight": (4, 32), "lora_B.default.weight": (32, 4)})
        whole = {each.name: each for each in as_tensors(found)}
        self.check_weight(AWQ, whole, mine, at + "base_layer", (32, 64), (range(32), half(64, 1)))

    def test_stacked_experts_of_four_bits(self):
        """gpt-oss: blocks of 32 elements in 16 bytes, gate and up by turns."""
        experts, hidden, ffn, at = 4, 64, 128, "model.layers.0.mlp.experts."
        found = {}
        for name, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            shape = (experts, rows, columns // 32)
            found[at + name + "_blocks"] = "U8", self.rng.integers(0, 256, (*shape, 16)).astype(numpy.uint8)
            found[at + name + "_scales"] = "U8", self.rng.integers(100, 140, shape).astype(numpy.uint8)

        def dequantised(tensors, name):
            blocks, scales = (array(tensors[at + name + end]) for end in ("_blocks", "_scales"))
            values = numpy.array(quantised.FP4)[numpy.stack((blocks & 15, blocks >> 4), -1)]
            values = values.reshape(*blocks.shape[:-1], 32) * 2.0 ** (scales[..., None].astype(int) - 127)
            return values.reshape(*scales.shape[:-1], -1)

        whole = {each.name: each for each in as_tensors(found)}
        config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": experts, "num_attention_heads": 4}
        job = self.job_of("gpt-oss", config, list(whole.values()))
        job.set_layout(tp=2, ep=2)
        for rank in range(4):
            mine = models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1-ep2", rank))
            tp, mine_of = rank % 2, half(experts, rank // 2)
            self.assertTrue(numpy.array_equal(dequantised(mine, "gate_up_proj"),
                                              dequantised(whole, "gate_up_proj")[mine_of][:, half(2 * ffn, tp)]))
            self.assertTrue(numpy.array_equal(dequantised(mine, "down_proj"),
                                              dequantised(whole, "down_proj")[mine_of][:, :, half(ffn, tp)]))


class Refused(TestCase):
    def llama(self, ffn, hidden=64, **config):
        sizes = {"model.layers.0.mlp.down_proj": (hidden, ffn), "model.layers.0.mlp.up_proj": (ffn, hidden)}
        return ({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, **config},
                as_tensors(weights_of(numpy.random.default_rng(SEED), AWQ, sizes)))

    def test_through_a_group(self):
        """Of 96 inputs in groups of 16, two ranks have three groups each, and four have one and a half."""
        config, tensors = self.llama(96)
        job, why = self.job_of("group", config, tensors), "model.layers.0.mlp.down_proj.qzeros: tp = 4 gives a rank 24 " \
            "of the 96 elements that its weight has on the axis that is cut, and 16 of them are one group here that " \
            "cannot be cut; tp = 2, 3, 6 would do"
        self.assertEqual(mount.error_of(lambda: job.save_layout(tp=4)), "EINVAL")
        self.assertIn(why, job.error())
        directory = self.temporary("group")
        self.write(directory, config, tensors)
        self.assertEqual(self.report(directory, "tp4-pp1-dp1", code=1)["fits"], why)
        self.assertIs(self.report(directory, "tp2-pp1-dp1")["fits"], True)
        job.set_layout(tp=2)
        done = self.mount.ptc("rules", "check", directory, "down_proj", "--layout", "tp2-pp1-dp1", env={"COLUMNS": "100"})
        self.assertRegex(done.stdout, r"down_proj\.qweight +\[96, 8\] (→|->) \[48, 8\]")
        self.assertRegex(done.stdout, r"down_proj\.scales +\[6, 64\] (→|->) \[3, 64\]")
        self.assertIn("of a quantised weight: tp cuts axis 0", " ".join(done.stdout.split()))

    def test_through_a_word(self):
        """Two ranks of 24 outputs would have a word and a half each."""
        config, tensors = self.llama(32)
        tensors = [each for each in tensors if "up_proj" not in each.name]
        tensors += as_tensors(weights_of(numpy.random.default_rng(SEED), AWQ, {"model.layers.0.mlp.up_proj": (24, 64)}))
        job = self.job_of("word", config, tensors)
        self.assertEqual(mount.error_of(lambda: job.save_layout(tp=2)), "EINVAL")
        self.assertIn("model.layers.0.mlp.up_proj.qweight: tp = 2 gives a rank 12 of the 24 elements that its weight has "
                      "on the axis that is cut, and 8 of them are one packed word here that cannot be cut; tp = 3 "
                      "would do", job.error())

    def test_what_has_another_shape(self):
        config, tensors = self.llama(64)
        tensors += as_tensors({"model.layers.0.mlp.up_proj.input_scale": ("F32", numpy.ones(64, numpy.float32))})
        job = self.job_of("shape", config, tensors)
        self.assertEqual(mount.error_of(lambda: job.save_layout(tp=2)), "EINVAL")
        self.assertIn("no rule of family 'llama' says how to cut model.layers.0.mlp.up_proj.input_scale", job.error())
        job.set_layout(dp=2)


class AsOthersDo(mount.unittest.TestCase):
    def test_words_are_those_of_compressed_tensors(self):
        try:
            import torch
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
        except ImportError as error:
            print("skipped: no compressed_tensors here:", error)
            self.skipTest(str(error))
        rng = numpy.random.default_rng(SEED)
        for bits in (2, 3, 4, 8):
            values = rng.integers(0, 1 << bits, (64, 96))
            signed = torch.from_numpy((values - (1 << (bits - 1))).astype(numpy.int8))
            self.assertTrue(numpy.array_equal(pack_to_int32(signed, bits).numpy(), quantised.pack_rows(values.T, bits).T))
            self.assertTrue(numpy.array_equal(pack_to_int32(signed, bits, packed_dim=0).numpy(),
                                              quantised.pack_rows(values, bits)))


if __name__ == "__main__":
    print(f"PTC_TEST_SEED={SEED}")
    mount.main()
