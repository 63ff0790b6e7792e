"""Trees that Megatron-LM wrote (`--ckpt-format torch`), committed as they are: read under other layouts by torch, compared
with a whole model that is cut here by hand."""
import argparse
import copy
import itertools
import math
import os
import random
import shutil
import sys
from collections import OrderedDict

import mount
import ranks

torch = mount.require("torch")
sys.path.insert(0, ranks.PACKAGE)
import ptc  # noqa: E402  pylint: disable=wrong-import-position
import torch.distributed.checkpoint as dcp  # noqa: E402  pylint: disable=wrong-import-position

HIDDEN, HEADS, GROUPS, FFN, VOCAB, POSITIONS = 16, 4, 2, 24, 300, 12
HEAD = HIDDEN // HEADS


def padded(tp):
    return -(-VOCAB // (128 * tp)) * 128 * tp


def fill(name, *shape):
    """Numbers that depend on the name alone."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
    return torch.randn(shape, generator=generator)


def expert_shapes(experts, grouped):
    """(name, shape, expert) of `experts`, numbers; grouped: in one module."""
    shapes = {"linear_fc1": (2 * FFN, HIDDEN), "linear_fc2": (HIDDEN, FFN)}
    if grouped:
        found = [(f"mlp.experts.{module}.weight{{}}", shape, expert) for module, shape in shapes.items() for expert in experts]
        return found + [(f"mlp.experts.{module}._extra_state", None, 0) for module in shapes]
    return [(f"mlp.experts.local_experts.{{}}.{module}.{kind}", shape if kind == "weight" else None, expert)
            for expert in experts for module, shape in shapes.items() for kind in ("weight", "_extra_state")]


def layer_shapes(bias):
    """In the order of Megatron-Core's modules."""
    qkv, gate_up = (HEADS + 2 * GROUPS) * HEAD, 2 * FFN
    shapes = [("input_layernorm.weight", (HIDDEN,)), ("input_layernorm.bias", (HIDDEN,)),
              ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN)), ("self_attention.linear_proj.bias", (HIDDEN,)),
              ("self_attention.linear_proj._extra_state", None),
              ("self_attention.linear_qkv.weight", (qkv, HIDDEN)), ("self_attention.linear_qkv.bias", (qkv,)),
              ("self_attention.linear_qkv._extra_state", None),
              ("pre_mlp_layernorm.weight", (HIDDEN,)), ("pre_mlp_layernorm.bias", (HIDDEN,)),
              ("mlp.linear_fc1.weight", (gate_up, HIDDEN)), ("mlp.linear_fc1.bias", (gate_up,)), ("mlp.linear_fc1._extra_state", None),
              ("mlp.linear_fc2.weight", (HIDDEN, FFN)), ("mlp.linear_fc2.bias", (HIDDEN,)), ("mlp.linear_fc2._extra_state", None)]
    return [(name, shape) for name, shape in shapes if bias or not name.startswith(("self_attention", "mlp")) or not name.endswith("bias")]


class Model:
    """A GPT: what each rank of each layout has of it, under Megatron's names, which count layers from the stage's first."""

    def __init__(self, layers=4, tied=False, bias=False, dtype=torch.float32, experts=0, grouped=False, apart=False):
        """`grouped`: True, as Transformer Engine's layers have a rank's experts, or "folded", as Megatron's own have, of which a rank has
        two parameters. `apart`: its experts have an optimizer of their own, as where they are cut over ranks."""
        self.layers, self.tied, self.bias, self.dtype = layers, tied, bias, dtype
        self.experts, self.grouped, self.apart = experts, grouped, apart

    def cut(self, name, whole, tp_rank, tp, ep_rank=0, ep=1):
        if name.endswith("experts.weight1"):  # [experts, in, gate and up], which a file has as [in, …]
            halves = [half.chunk(tp, 2)[tp_rank] for half in whole.chunk(ep)[ep_rank].chunk(2, 2)]
            return torch.cat(halves, 2).reshape(HIDDEN, -1)
        if name.endswith("experts.weight2"):
            return whole.chunk(ep)[ep_rank].chunk(tp, 1)[tp_rank].reshape(-1, HIDDEN)
        if "word_embeddings" in name or name == "output_layer.weight":
            rows = padded(tp) // tp
            full = torch.zeros(padded(tp), *whole.shape[1:], dtype=whole.dtype)
            full[:VOCAB] = whole
            return full[tp_rank * rows:(tp_rank + 1) * rows]
        if "linear_qkv." in name:
            return whole.chunk(tp)[tp_rank]
        if "linear_fc1." in name:
            return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
        if "linear_fc1.weight" in name:
            return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
        if name.endswith("linear_proj.weight") or "linear_fc2.weight" in name:
            return whole.chunk(tp, dim=1)[tp_rank]
        return whole

    def layer(self, ep_rank, ep):
        """(name in the file, name of what fills it, shape) in one layer."""
        if not self.experts:
            return [(name, name, shape) for name, shape in layer_shapes(self.bias)]
        each = self.experts // ep
        shapes = [(name, name, shape) for name, shape in layer_shapes(self.bias) if not name.startswith("mlp.")]
        shapes += [("mlp.router.weight", "mlp.router.weight", (self.experts, HIDDEN))]
        if self.grouped == "folded":
            return shapes + [(name, name, (self.experts, *shape)) for name, shape in (("mlp.experts.weight1", (HIDDEN, 2 * FFN)),
                                                                                      ("mlp.experts.weight2", (FFN, HIDDEN)))]
        return shapes + [(name.format(expert), name.format(ep_rank * each + expert), shape)
                         for name, shape, expert in expert_shapes(range(each), self.grouped)]

    def stage(self, pp_rank, pp, stages=None, ep_rank=0, ep=1):
        """(name in the file, name of what fills it, shape of the whole) of a stage, or of a stretch of layers where stages have
        several: that is what a stage would have of a pipeline of as many stages as there are stretches."""
        counts = stages or [self.layers // pp] * pp
        begin = sum(counts[:pp_rank])
        items = []
        if pp_rank == 0:
            items += [(name, name, shape) for name, shape in (("embedding.word_embeddings.weight", (VOCAB, HIDDEN)),
                                                              ("embedding.position_embeddings.weight", (POSITIONS, HIDDEN)))]
        for layer in range(counts[pp_rank]):
            items += [(f"decoder.layers.{layer}.{name}", f"decoder.layers.{begin + layer}.{whole}", shape)
                      for name, whole, shape in self.layer(ep_rank, ep)]
        if pp_rank == pp - 1:
            items += [(name, name, (HIDDEN,)) for name in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")]
            if not self.tied:
                items.append(("output_layer.weight", "output_layer.weight", (VOCAB, HIDDEN)))
            elif pp > 1:
                items.append(("output_layer.weight", "embedding.word_embeddings.weight", (VOCAB, HIDDEN)))
            items.append(("output_layer._extra_state", "", None))
        return items

    def rank(self, tp_rank, tp, pp_rank, pp, stages=None, kind="", dtype=None, ep_rank=0, ep=1):
        """`kind`: of the optimizer's state, "exp_avg"."""
        made = OrderedDict()
        for local, name, shape in self.stage(pp_rank, pp, stages, ep_rank, ep):
            whole = None if shape is None else fill(kind + name, *shape).to(dtype or self.dtype)
            made[local] = None if whole is None else self.cut(local, whole, tp_rank, tp, ep_rank, ep).clone()
        return made

    def arguments(self, tp, pp, rank, **more):
        return argparse.Namespace(**{
            "num_layers": self.layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
            "group_query_attention": True, "swiglu": True, "ffn_hidden_size": FFN, "vocab_size": VOCAB, "padded_vocab_size": padded(tp),
            "untie_embeddings_and_output_weights": not self.tied, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "data_parallel_size": 1,
            "num_experts": self.experts or None, "expert_tensor_parallel_size": tp, "world_size": tp * pp, "rank": rank, "params_dtype": self.dtype, "lr": 1.5e-4, "data_path": ["a", "b"], **more})

    def stretches(self, coords, stages=None, kind="", dtype=None, vpp=1, experts=(0, 1)):
        """What a rank has, by stretch of layers: one, or model0, model1 …"""
        tp_rank, tp, pp_rank, pp = coords
        return [self.rank(tp_rank, tp, chunk * pp + pp_rank, pp * vpp, stages, kind, dtype, *experts) for chunk in range(vpp)]

    def numbered(self, *arguments, **options):
        """The same as one dict, in the order of an optimizer's parameters."""
        return {(chunk, name): tensor for chunk, made in enumerate(self.stretches(*arguments, **options)) for name, tensor in made.items()}

    def groups(self, weights, of_experts=None):
        """Parameters by group: what decays, and biases and norms."""
        names = [name for name, tensor in weights.items()
                 if tensor is not None and of_experts in (None, ".experts." in name[1])]
        kept = [name for name in names if weights[name].dim() == 1 or name[1].endswith(".bias")]
        groups = [[name for name in names if name not in kept], kept]
        return [group for group in groups if group or not of_experts]

    def optimizer(self, coords, mixed, stages=None, **options):
        if not self.apart:
            return self.one_optimizer(coords, mixed, stages, None, **options)
        return [self.one_optimizer(coords, mixed, stages, of_experts, **options) for of_experts in (False, True)]

    def one_optimizer(self, coords, mixed, stages, of_experts, **options):
        """As torch's Adam, or Megatron's wrapper of it for a model of 16 bits, numbers its parameters."""
        weights = self.numbered(coords, stages, **options)
        moments = {kind: self.numbered(coords, stages, kind, torch.float32, **options) for kind in ("exp_avg", "exp_avg_sq")}
        groups = self.groups(weights, of_experts)
        order = [name for group in groups for name in group]
        state = {number: {"step": torch.tensor(100.), **{kind: moments[kind][name] for kind in moments}} for number, name in enumerate(order)}
        begin, lists = 0, []
        for wd_mult, group in zip((1.0, 0.0), groups):
            lists.append({"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": bool(of_experts), "is_decoupled_lr": False, "lr": 1e-4,
                          "betas": (0.9, 0.95), "params": list(range(begin, begin + len(group)))})
            begin += len(group)
        inner = {"state": state, "param_groups": lists}
        if not mixed:
            return inner
        masters = self.numbered(coords, stages, "master", torch.float32, **options)
        return {"optimizer": inner, "grad_scaler": {"scale": torch.tensor([65536.]), "growth_tracker": 3},
                "fp32_from_fp16_params": [[masters[name] for name in group] for group in groups]}

    def distributed(self, coords, bucket=None, dp=1, stages=None, vpp=1, experts=(0, 1)):
        """What the distributed optimizer saves beside it: by optimizer, by buffer of gradients (a stretch of layers' parameters of
        one type) flat arrays. `bucket`: how many elements a bucket shall have, of what overlaps."""
        pp_rank, pp = coords[2:]
        options = {"stages": stages, "vpp": vpp, "experts": experts}
        weights = self.numbered(coords, **options)
        kinds = {key: self.numbered(coords, kind=kind, dtype=torch.float32, **options)
                 for key, kind in (("param", ""), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"))}

        def buffer(names, size):
            """As _ParamAndGradBuffer has it: with padding, of which the file has none at the ends of buckets."""
            start, begin, places, ends, has = 0, 0, {}, [], False

            def end_bucket(end):
                nonlocal begin, has
                ends.append((begin, end))
                begin, has = math.ceil(end / math.lcm(dp, 128)) * math.lcm(dp, 128), False
                return begin
            for name in reversed(names):
                alone = self.tied and pp > 1 and name[1] in ("embedding.word_embeddings.weight", "output_layer.weight")
                start = math.ceil(start / 64) * 64
                if alone and has:
                    start = end_bucket(start)
                places[name], has = start, True
                start += weights[name].numel()
                if alone or (size is not None and start - begin >= size):
                    start = end_bucket(start)
            if has:
                end_bucket(start)
            made = {}
            for key, state in kinds.items():
                padded_buffer = torch.zeros(begin)
                for name, place in places.items():
                    padded_buffer[place:place + weights[name].numel()] = state[name].flatten()
                made[key] = torch.cat([padded_buffer[first:last] for first, last in ends])
            return {**made, "numel_unpadded": len(made["param"])}

        optimizers = []
        for of_experts in ((False, True) if experts[1] > 1 else (None,)):
            names = [name for name, tensor in weights.items() if tensor is not None and of_experts in (None, ".experts." in name[1])]
            buffers = []
            for chunk in range(vpp):
                here = [name for name in names if name[0] == chunk]
                for dtype in dict.fromkeys(weights[name].dtype for name in here):
                    size = bucket if chunk == 0 and pp_rank == 0 else None
                    buffers.append({(dtype, torch.float32): buffer([name for name in here if weights[name].dtype == dtype], size)})
            optimizers.append({"buckets_coalesced": True, **dict(enumerate(buffers))})
        return optimizers if len(optimizers) > 1 else optimizers[0]

    def state(self, coords, mixed=None, stages=None, vpp=1, experts=(0, 1), **arguments):
        """What a rank saves; `mixed`: with an optimizer, of 16 bits or not; `experts`: which of how many expert ranks it is."""
        tp_rank, tp, pp_rank, pp = coords
        if vpp > 1:
            arguments = {"virtual_pipeline_model_parallel_size": vpp, **arguments}
        arguments = {"expert_model_parallel_size": experts[1], **arguments}
        stretches = self.stretches(coords, stages, vpp=vpp, experts=experts)
        models = {"model": stretches[0]} if vpp == 1 else {f"model{chunk}": made for chunk, made in enumerate(stretches)}
        rank = pp_rank * tp + tp_rank
        torch.manual_seed(rank)
        random.seed(rank)
        made = {"args": self.arguments(tp, pp, rank, **arguments), "checkpoint_version": 3.0, "iteration": 100,
                "num_floating_point_operations_so_far": 1e15, **models,
                "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 100},
                "rng_state": [{"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state(),
                               "cuda_rng_state": None, "rng_tracker_states": {}}]}
        if mixed is not None:
            made["optimizer"] = self.optimizer(coords, mixed, stages, vpp=vpp, experts=experts)
        return made


def directory(tp_rank, pp_rank, pp, ep_rank=0, ep=1):
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "") + (f"_{ep_rank:03d}" if ep > 1 else "")


def save_tree(top, model, tp, pp, mixed=None, stages=None, iteration="iter_0000100", change=lambda coords, state: state, ep=1,
              distributed=None, **arguments):
    """`distributed`: with the distributed optimizer's state, made with these options."""
    for pp_rank, ep_rank, tp_rank in itertools.product(range(pp), range(ep), range(tp)):
        coords = (tp_rank, tp, pp_rank, pp)
        path = os.path.join(top, iteration, directory(tp_rank, pp_rank, pp, ep_rank, ep))
        os.makedirs(path)
        state = model.state(coords, mixed, stages, experts=(ep_rank, ep), **arguments)
        if distributed is not None:
            options = {"stages": stages, "vpp": arguments.get("vpp", 1), "experts": (ep_rank, ep), **distributed}
            buffers = model.distributed(coords, **options)
            if ep_rank > 0:
                buffers[0] = None  # of what is no expert's the first expert rank writes all
            torch.save(buffers, os.path.join(path, "distrib_optim.pt"))
            groups = [{"wd_mult": 1.0, "lr": 1e-4, "step": 100}, {"wd_mult": 0.0, "lr": 1e-4, "step": 100}]
            state["optimizer"] = {"optimizer": {"param_groups": groups}}
            state["args"].overlap_grad_reduce = "bucket" in distributed
            state["args"].ddp_bucket_size = distributed.get("bucket")
            state["args"].data_parallel_size = distributed.get("dp", 1)
        torch.save(change(coords if ep == 1 else (*coords, ep_rank, ep), state), os.path.join(path, "model_optim_rng.pt"))
    with open(os.path.join(top, "latest_checkpointed_iteration.txt"), "w", encoding="utf-8") as file:
        file.write("100")


class Trees(mount.TestCase):
    def load(self, job, layout, rank):
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(job.rank_file("base", layout, rank, "model_optim_rng.pt"), mmap=True, weights_only=True)

    def expect_same(self, found, wanted, at=""):
        self.assertEqual(type(found) if not isinstance(wanted, dict) else dict, type(wanted) if not isinstance(wanted, dict) else dict, at)
        if isinstance(wanted, dict):
            self.assertEqual(sorted(found, key=str), sorted(wanted, key=str), at)
            for key, value in wanted.items():
                self.expect_same(found[key], value, f"{at}.{key}")
        elif isinstance(wanted, (list, tuple)):
            self.assertEqual(len(found), len(wanted), at)
            for number, value in enumerate(wanted):
                self.expect_same(found[number], value, f"{at}.{number}")
        elif isinstance(wanted, torch.Tensor):
            self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape), at)
            self.assertTrue(torch.equal(found, wanted), at)
        else:
            self.assertEqual(found, wanted, at)

    def expect_layout(self, job, model, layout, tp, pp, mixed=None, stages=None, ep=1, vpp=1):
        for pp_rank, ep_rank, tp_rank in itertools.product(range(pp), range(ep), range(tp)):
            coords = (tp_rank, tp, pp_rank, pp)
            rank = (pp_rank * ep + ep_rank) * tp + tp_rank
            found = self.load(job, layout, rank)
            tree = job.checkpoint("base", "layouts", layout, "megatron", "iter_0000100", directory(tp_rank, pp_rank, pp, ep_rank, ep))
            self.assertEqual(mount.read_bytes(tree + "/model_optim_rng.pt"),
                             mount.read_bytes(job.rank_file("base", layout, rank, "model_optim_rng.pt")))
            wanted = model.state(coords, mixed, stages, vpp=vpp, experts=(ep_rank, ep))
            at = f"{layout} {coords} {ep_rank}"
            self.assertEqual([key for key in found if key.startswith("model")], [key for key in wanted if key.startswith("model")], at)
            for key in wanted:
                if key.startswith("model"):
                    self.expect_same(found[key], wanted[key], f"{at} {key}")
                    order = [name for name, tensor in wanted[key].items() if tensor is not None]
                    self.assertEqual([name for name, tensor in found[key].items() if tensor is not None], order, at)
            if mixed is not None:
                self.expect_same(found["optimizer"], wanted["optimizer"], f"{at} optimizer")
            for key in ("iteration", "checkpoint_version", "opt_param_scheduler"):
                self.assertEqual(found[key], wanted[key])
            for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
                        "padded_vocab_size", "num_layers", "lr", "data_path"):
                self.assertEqual(getattr(found["args"], key), getattr(wanted["args"], key), key)
            if getattr(found["args"], "virtual_pipeline_model_parallel_size") is not None:
                self.assertEqual(getattr(found["args"], "virtual_pipeline_model_parallel_size"), vpp if vpp > 1 else None)

    def expect_layouts(self, job, model, mixed=None):
        for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
            self.expect_layout(job, model, f"tp{tp}-pp{pp}-dp1", tp, pp, mixed)


class Taken(Trees):
    def test_a_tree_of_tensor_and_pipeline_ranks(self):
        job, model = self.new_job(), Model()
        save_tree(job.incoming("base"), model, 2, 2)
        written = {(tp, pp): mount.read_bytes(os.path.join(job.incoming("base"), "iter_0000100", directory(tp, pp, 2), "model_optim_rng.pt"))
                   for tp in range(2) for pp in range(2)}
        job.commit("base")
        for (tp, pp), content in written.items():  # under the writer's layout what was written
            self.assertEqual(mount.read_bytes(job.rank_file("base", "tp2-pp2-dp1", pp * 2 + tp, "model_optim_rng.pt")), content)
        self.expect_layouts(job, model)
        self.assertEqual(mount.read_bytes(job.rank_file("base", "tp2-pp2-dp1", 0, "latest_checkpointed_iteration.txt")), b"100")
        names = os.listdir(job.checkpoint("base", "model", "decoder", "layers"))
        self.assertEqual(sorted(names), ["0", "1", "2", "3"])  # of the whole model
        self.mount.ptc("verify", job.name)

    def test_a_layout_in_force(self):
        job, model = self.new_job(), Model(tied=True)
        save_tree(job.incoming("base"), model, 1, 2, mixed=False)
        job.commit("base")
        job.set_layout(tp=2, pp=4)
        self.expect_layout(job, model, "tp2-pp4-dp1", 2, 4, mixed=False)
        job.set_layout(tp=1, pp=1)
        self.expect_layouts(job, model, mixed=False)
        self.mount.ptc("verify", job.name)

    def test_one_rank(self):
        job, model = self.new_job(), Model(bias=True)
        save_tree(job.incoming("base"), model, 1, 1, iteration="release")
        job.commit("base")
        self.expect_layouts(job, model)

    def test_the_iteration_alone(self):
        job, model = self.new_job(), Model()
        save_tree(self.temporary("run"), model, 2, 1)
        shutil.copytree(self.temporary("run/iter_0000100"), job.incoming("base"))
        job.commit("base")
        self.expect_layouts(job, model)

    def test_below_ranks(self):
        job, model = self.new_job(), Model()
        save_tree(self.temporary("run"), model, 2, 2)
        for rank in range(4):
            name = directory(rank % 2, rank // 2, 2)
            shutil.copytree(self.temporary("run/iter_0000100/" + name), job.incoming("base") + f"/rank/{rank}/iter_0000100/{name}")
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("rank", job.commit_error("base"))
        job.set_layout(tp=2, pp=2)
        job.commit("base")
        self.expect_layouts(job, model)

    def test_import(self):
        model = Model()
        save_tree(self.temporary("run"), model, 1, 2)
        save_tree(self.temporary("older"), model, 1, 2)
        os.rename(self.temporary("older/iter_0000100"), self.temporary("run/iter_0000050"))
        name = "imported"
        done = self.mount.ptc("import", name, self.temporary("run"))
        self.assertIn("iter_0000100 is what latest_checkpointed_iteration.txt names; left out: iter_0000050", done.stderr)
        self.assertIn(f"{name}: in layout tp1-pp2-dp1, as it was written", done.stdout)  # it is new
        self.expect_layouts(mount.Job(self.mount, name), model)
        os.remove(self.temporary("run/latest_checkpointed_iteration.txt"))
        done = self.mount.ptc("import", name, self.temporary("run"), "--name", "other", check=False)
        self.assertIn("2 iterations", done.stderr)
        os.makedirs(self.temporary("above"))
        os.rename(self.temporary("run/iter_0000050"), self.temporary("above/before"))
        done = self.mount.ptc("import", name, self.temporary("above"), "--name", "third", check=False)
        self.assertIn(f"{self.temporary('above/before')} is a tree of Megatron-LM's: import that", done.stderr)
        self.mount.ptc(*done.stderr.strip().splitlines()[-1].split()[1:])
        mount.Job(self.mount, name).set_layout(pp=2)
        os.rename(self.temporary("run/iter_0000100/mp_rank_00_001"), self.temporary("elsewhere"))
        done = self.mount.ptc("import", name, self.temporary("run"), "--name", "fourth", check=False)
        self.assertIn("there is no mp_rank_00_001/model_optim_rng.pt", done.stderr)
        self.assertNotIn("whole model", done.stderr)  # whose layout would be another

    def test_stages_of_other_sizes(self):
        job, model = self.new_job(), Model()
        save_tree(job.incoming("base"), model, 1, 2, stages=[1, 3], decoder_first_pipeline_num_layers=1)
        job.commit("base")
        job.save_layout(pp=2, stages=[3, 1])
        job.wait()
        self.expect_layout(job, model, os.path.basename(os.readlink(job.file("current"))), 1, 2, stages=[3, 1])
        self.expect_layouts(job, model)
        save_tree(self.temporary("run"), model, 1, 2, stages=[1, 3], decoder_first_pipeline_num_layers=1)
        done = self.mount.ptc("import", "of_other_sizes", self.temporary("run"))
        self.assertRegex(done.stderr, r"of_other_sizes stays in layout tp1-pp1-dp1, not in that it was written in: 'tp1-pp2-dp1\+")

    def test_an_even_tree_where_the_layout_in_force_names_places(self):
        job, model = self.new_job(), Model()
        save_tree(job.incoming("base"), model, 1, 2)
        job.commit("base")
        for name, stages in (("uneven", [["embedding", 3, "head"], [1]]), ("even", [["embedding", 2, "head"], [2]])):
            job.save_layout(pp=2, stages=stages)
            job.wait()
            save_tree(job.incoming(name), model, 1, 2)  # Megatron's own places: the head is last
            job.commit(name)
            for stage in range(2):
                with torch.serialization.safe_globals([argparse.Namespace]):
                    found = torch.load(job.rank_file(name, "tp1-pp2-dp1", stage, "model_optim_rng.pt"), weights_only=True)
                self.expect_same(found["model"], model.state((0, 1, stage, 2))["model"], f"{name} {stage}")
            self.mount.ptc("verify", job.name)

    def test_a_tied_embedding(self):
        for pp in (1, 2):
            with self.subTest(pp=pp):
                job, model = self.mount.job(f"tied{pp}"), Model(tied=True)
                save_tree(job.incoming("base"), model, 1, pp)
                job.commit("base")
                self.expect_layouts(job, model)


    def test_gated_by_another_name(self):
        job, model = self.new_job(), Model()
        save_tree(job.incoming("base"), model, 2, 1, swiglu=False, quick_geglu=True)
        job.commit("base")
        self.expect_layouts(job, model)

    def test_directories_of_a_users_own(self):
        job = self.new_job()
        for rank in range(2):
            path = job.incoming("base") + f"/rank/0/mp_rank_{rank:02}/part.pt"
            os.makedirs(os.path.dirname(path))
            torch.save({f"w{rank}": torch.ones(3)}, path)
        job.commit("base")
        for rank in range(2):
            self.assertTrue(torch.load(job.rank_file("base", "tp1-pp1-dp1", 0, f"mp_rank_{rank:02}/part.pt"))[f"w{rank}"].equal(torch.ones(3)))

    def test_what_layers_have_beside_tensors(self):
        """None is where its module is; anything else goes to no other layer."""
        def beside(value):
            def change(_, state):
                state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = value
                state["model"]["decoder.layers.1.mlp.router.weight"] = torch.ones(3, HIDDEN)
                state["model"]["decoder.layers.1.mlp.router._extra_state"] = None
                return state
            return change
        for name, value in (("none", None), ("scales", b"scales")):
            with self.subTest(name):
                job = self.mount.job(name)
                save_tree(self.temporary(name), Model(), 1, 1, change=beside(value))
                shutil.copytree(self.temporary(name + "/iter_0000100/mp_rank_00"), job.incoming("base") + "/rank/0")
                job.commit("base")
                if value is not None:
                    self.assertEqual(self.load(job, "tp2-pp1-dp1", 1)["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"], value)
                    self.assertFalse(os.path.exists(job.rank_file("base", "tp1-pp2-dp1", 0, "model_optim_rng.pt")))
                    continue
                for stage in range(2):
                    found = self.load(job, "tp1-pp2-dp1", stage)["model"]
                    self.assertEqual([key for key in found if "router." in key],
                                     [f"decoder.layers.1.mlp.router.{key}" for key in ("weight", "_extra_state")] if stage == 0 else [])


    def test_fewer_groups_of_heads_than_ranks(self):
        """Ranks cut a group: Megatron puts it together again when it computes."""
        job, model = self.new_job(), Model(bias=True)
        save_tree(job.incoming("base"), model, 2 * GROUPS, 1, mixed=False)
        job.commit("base")
        for tp in (1, GROUPS, 2 * GROUPS):
            self.expect_layout(job, model, f"tp{tp}-pp1-dp1", tp, 1, mixed=False)
        again = self.mount.job("groups-again")
        save_tree(again.incoming("base"), model, 1, 2, mixed=False)
        again.commit("base")
        again.set_layout(tp=2 * GROUPS)
        self.expect_layout(again, model, f"tp{2 * GROUPS}-pp1-dp1", 2 * GROUPS, 1, mixed=False)


class TreesOut(Trees):
    """layouts/<layout>/megatron/, for --load."""

    def copied(self, job, layout, name):
        again = self.mount.job(name)
        shutil.copytree(job.checkpoint("base", "layouts", layout, "megatron"), again.incoming("base"), dirs_exist_ok=True)
        again.commit("base")
        return again

    def test_its_names_and_no_others(self):
        job, model = self.new_job(), Model()
        save_tree(job.incoming("base"), model, 1, 1)
        job.commit("base")
        for layout, names in (("tp1-pp1-dp2", ["mp_rank_00"]), ("tp2-pp1-dp1", ["mp_rank_00", "mp_rank_01"]),
                              ("tp2-pp2-dp2", ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"])):
            top = job.checkpoint("base", "layouts", layout)
            self.assertEqual(sorted(os.listdir(top)), ["deepspeed", "megatron", "rank"])
            self.assertEqual(sorted(os.listdir(top + "/megatron")), ["iter_0000100", "latest_checkpointed_iteration.txt"])
            self.assertEqual(mount.read_bytes(top + "/megatron/latest_checkpointed_iteration.txt"), b"100")
            self.assertEqual(sorted(os.listdir(top + "/megatron/iter_0000100")), names)
            self.assertEqual(os.stat(top + "/megatron/iter_0000100").st_nlink, 2 + len(names))
            self.assertEqual(os.listdir(top + "/megatron/iter_0000100/" + names[0]), ["model_optim_rng.pt"])
            for other in ("mp_rank_0", "mp_rank_000", "mp_rank_02", "mp_rank_00_002", "mp_rank_00_000_000", "x", "iter_0000101"):
                self.assertFalse(os.path.exists(f"{top}/megatron/iter_0000100/{other}"), other)
        self.assertFalse(os.path.exists(job.checkpoint("base", "layouts", "tp1-pp1-dp2", "megatron", "iter_0000100", "mp_rank_00_000")))
        self.assertEqual(mount.error_of(open, job.file("current", "megatron", "latest_checkpointed_iteration.txt"), "w"), "EROFS")
        shutil.rmtree(job.checkpoint("base"))
        self.assertEqual(os.listdir(job.file("checkpoints")), [])

    def test_iterations(self):
        for iteration, name, text in ((0, "iter_0000000", b"0"), (12345678, "iter_12345678", b"12345678"), (None, "release", b"release")):
            with self.subTest(iteration=iteration):
                def change(_, state, iteration=iteration):
                    if iteration is None:
                        del state["iteration"]
                    return {**state, **({} if iteration is None else {"iteration": iteration})}
                job = self.mount.job(f"iteration-{name}")
                save_tree(job.incoming("base"), Model(), 1, 1, change=change, iteration=name)
                job.commit("base")
                self.assertEqual(sorted(os.listdir(job.file("current", "megatron"))), sorted([name, "latest_checkpointed_iteration.txt"]))
                self.assertEqual(mount.read_bytes(job.file("current", "megatron", "latest_checkpointed_iteration.txt")), text)

    def test_a_copy_comes_in_again(self):
        job, model = self.new_job(), Model(tied=True, layers=4, dtype=torch.bfloat16)
        save_tree(job.incoming("base"), model, 2, 2, mixed=True)
        job.commit("base")
        again = self.copied(job, "tp1-pp4-dp1", "tree-again")
        self.assertEqual(mount.read_json(again.checkpoint("base", "meta.json"))["written_as"], "tp1-pp4-dp1")
        self.expect_layouts(again, model, mixed=True)

    def test_files_below_a_rank_s_directory(self):
        job, model = self.new_job(), Model()
        save_tree(self.temporary("below"), model, 1, 1)
        shutil.copytree(self.temporary("below/iter_0000100/mp_rank_00"), job.incoming("base") + "/rank/0/saved")
        with open(job.incoming("base") + "/rank/0/notes", "w", encoding="utf-8") as notes:
            notes.write("of the rank")
        job.commit("base")
        tree = job.checkpoint("base", "layouts", "tp1-pp1-dp1", "megatron", "iter_0000100", "mp_rank_00")
        self.assertEqual(os.listdir(tree), ["model_optim_rng.pt"])
        self.assertEqual(mount.read_bytes(tree + "/model_optim_rng.pt"),
                         mount.read_bytes(job.rank_file("base", "tp1-pp1-dp1", 0, "saved/model_optim_rng.pt")))

    def test_what_is_cut_over_data_parallel_ranks_is_whole_there(self):
        job, model = self.new_job(), Model(dtype=torch.bfloat16)
        save_tree(job.incoming("base"), model, 2, 1, distributed={})
        job.commit("base")
        whole = mount.digests(job.checkpoint("base", "layouts", "tp1-pp2-dp2", "megatron"))
        self.assertEqual(len(whole), 5)
        for optimizer in ("zero1", "fsdp"):
            with self.subTest(optimizer):
                job.set_layout(pp=2, dp=2, optimizer=optimizer)
                self.assertEqual(mount.digests(job.file("current", "megatron")), whole)
                again = self.mount.job(f"whole-{optimizer}")
                shutil.copytree(job.file("current", "megatron"), again.incoming("base"), dirs_exist_ok=True)
                again.commit("base")

    def test_what_is_not_megatron_s_has_none(self):
        job = self.new_job()
        os.makedirs(job.incoming("base") + "/rank/0")
        torch.save({"model": {"decoder.layers.0.mlp.linear_fc1.weight": torch.ones(4, 4)}}, job.incoming("base") + "/rank/0/model_optim_rng.pt")
        job.commit("base")
        self.assertEqual(sorted(os.listdir(job.checkpoint("base", "layouts", "tp1-pp1-dp1"))), ["deepspeed", "rank"])
        self.assertFalse(os.path.exists(job.file("current", "megatron")))


class Optimizers(Trees):
    def test_adam(self):
        job, model = self.new_job(), Model(bias=True)
        save_tree(job.incoming("base"), model, 2, 2, mixed=False)
        job.commit("base")
        self.expect_layouts(job, model, mixed=False)

    def test_master_copies(self):
        job, model = self.new_job(), Model(tied=True, dtype=torch.bfloat16)
        save_tree(job.incoming("base"), model, 2, 2, mixed=True)
        job.commit("base")
        self.expect_layouts(job, model, mixed=True)
        name = "optimizer.optimizer.state.decoder.layers.3.mlp.linear_fc1.weight.exp_avg"
        self.assertTrue(os.path.exists(job.checkpoint("base", "model", name.replace(".", "/") + ".npy")))

    def test_what_was_laid_out_comes_in_again(self):
        job, model = self.new_job(), Model(layers=8)
        save_tree(job.incoming("base"), model, 1, 2, mixed=False)
        job.commit("base")
        job.set_layout(pp=3)  # the second stage has tensors of both
        stages = [3, 3, 2]
        self.expect_layout(job, model, "tp1-pp3-dp1", 1, 3, False, stages)
        again = self.mount.job("again")
        again.set_layout(pp=3)
        for rank in range(3):
            os.makedirs(again.incoming("base") + f"/rank/{rank}")
            shutil.copy(job.rank_file("base", "tp1-pp3-dp1", rank, "model_optim_rng.pt"), again.incoming("base") + f"/rank/{rank}")
        again.commit("base")
        self.expect_layouts(again, model, mixed=False)

    def test_whose_state_it_is_is_not_guessed(self):
        def shorter(_, state):
            state["optimizer"]["param_groups"][1]["params"].pop()
            return state

        def swapped(_, state):
            all_state = state["optimizer"]["state"]
            all_state[1], all_state[3] = all_state[3], all_state[1]
            return state

        def counted(_, state):
            state["optimizer"]["state"][0]["step"] = 7
            return state

        def many(_, state):
            state["optimizer"]["param_groups"] += [{"params": [], "wd_mult": 1.0} for _ in range(300)]
            return state

        for change, why in ((shorter, "cannot be told"), (swapped, "has another shape"), (counted, "no tensor"), (many, "has 302 groups")):
            with self.subTest(change=change.__name__):
                job, model = self.mount.job(change.__name__), Model()
                save_tree(job.incoming("base"), model, 1, 1, mixed=False, change=change)
                self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
                self.assertIn(why, job.commit_error("base"))


class DistributedOptimizer(Trees):
    """Its state has no names: it lies in the order in which gradients are summed up."""

    def expect_state(self, job, model, layouts, stages=None, written=None, **how):
        """`written`: under this layout the files are the writer's."""
        for tp, pp, dp, ep, vpp in layouts:
            layout = f"tp{tp}-pp{pp}-dp{dp}" + (f"-ep{ep}" if ep > 1 else "") + (f"-vpp{vpp}" if vpp > 1 else "")
            for pp_rank, ep_rank, tp_rank in itertools.product(range(pp), range(ep), range(tp)):
                path = job.checkpoint("base", "layouts", layout, "megatron", "iter_0000100", directory(tp_rank, pp_rank, pp, ep_rank, ep))
                found = torch.load(path + "/distrib_optim.pt", mmap=True, weights_only=True)
                wanted = model.distributed((tp_rank, tp, pp_rank, pp), stages=stages, vpp=vpp, experts=(ep_rank, ep), dp=dp * ep, **how)
                if (tp, pp, dp, ep, vpp) == written and ep_rank > 0:
                    wanted[0] = None
                self.expect_same(found, wanted, f"{layout} {pp_rank} {ep_rank} {tp_rank}")

    DENSE = ((2, 2, 1, 1, 1), (1, 1, 1, 1, 1), (1, 1, 3, 1, 1), (4, 1, 1, 1, 1), (1, 4, 2, 1, 1), (2, 2, 1, 1, 2))

    def test_buffers_of_one_bucket(self):
        for name, model in (("plain", Model(layers=4)), ("bias", Model(layers=4, bias=True)), ("tied", Model(layers=4, tied=True)),
                            ("bf16", Model(layers=4, tied=True, dtype=torch.bfloat16))):
            with self.subTest(name):
                job = self.mount.job(f"distributed-{name}")
                save_tree(job.incoming("base"), model, 2, 2, distributed={"dp": 6})
                written = mount.read_bytes(job.incoming("base") + "/iter_0000100/mp_rank_01_001/distrib_optim.pt")
                job.commit("base")
                self.assertEqual(mount.read_bytes(job.rank_file("base", "tp2-pp2-dp1", 3, "distrib_optim.pt")), written)
                self.expect_state(job, model, self.DENSE)
                self.expect_layouts(job, model)
                name = "exp_avg.decoder.layers.3.mlp.linear_fc1.weight"
                whole = fill("exp_avg" + name.removeprefix("exp_avg."), 2 * FFN, HIDDEN)
                found = mount.require("numpy").load(job.checkpoint("base", "model", name.replace(".", "/") + ".npy"))
                self.assertTrue(torch.equal(torch.from_numpy(found), whole))
                self.mount.ptc("verify", job.name)

    def test_several_buckets(self):
        for bucket in (1, 300, 3000):
            with self.subTest(bucket=bucket):
                job, model = self.mount.job(f"bucket-{bucket}"), Model(layers=4, tied=bucket == 300, bias=True)
                save_tree(job.incoming("base"), model, 1, 2, distributed={"dp": 3, "bucket": bucket})
                job.commit("base")
                self.expect_state(job, model, self.DENSE, bucket=bucket)

    def test_virtual_pipelines_and_experts(self):
        job, model = self.mount.job("distributed-vpp"), Model(layers=8, dtype=torch.bfloat16)
        save_tree(job.incoming("base"), model, 1, 2, vpp=2, distributed={"bucket": 700})
        job.commit("base")
        self.expect_state(job, model, (*self.DENSE, (1, 2, 1, 1, 4)), bucket=700)
        job, model = self.mount.job("distributed-experts"), Model(layers=2, experts=4, grouped=True)
        save_tree(job.incoming("base"), model, 1, 1, ep=2, distributed={})
        job.commit("base")
        layouts = ((1, 1, 1, 2, 1), (2, 1, 1, 2, 1), (1, 2, 1, 4, 1))
        self.expect_state(job, model, layouts, written=layouts[0])
        name = "exp_avg.decoder.layers.1.self_attention.linear_proj.weight"  # is in the first expert rank's file alone
        found = mount.require("numpy").load(job.checkpoint("base", "layouts", "tp1-pp1-dp1-ep2", "rank", 1, "tensors", name.replace(".", "/") + ".npy"))
        self.assertTrue(torch.equal(torch.from_numpy(found), fill("exp_avg" + name.removeprefix("exp_avg."), HIDDEN, HIDDEN)))
        self.mount.ptc("verify", job.name)
        job.set_layout(tp=2, ep=2, dp=1)
        self.expect_state(job, model, layouts, written=layouts[0])
        job.set_layout(ep=2, dp=1)
        self.expect_state(job, model, layouts, written=layouts[0])
        model = Model(layers=2, experts=4, grouped="folded")
        folded = self.mount.job("distributed-folded")
        save_tree(folded.incoming("base"), model, 1, 1, ep=2, distributed={})
        folded.commit("base")
        self.expect_state(folded, model, layouts, written=layouts[0])
        model = Model(layers=2, experts=4, grouped=True)
        again = self.mount.job("distributed-experts-again")
        shutil.copytree(job.checkpoint("base", "layouts", "tp2-pp1-dp1-ep2", "megatron"), again.incoming("base"), dirs_exist_ok=True)
        again.commit("base")
        self.expect_state(again, model, layouts)
        self.mount.ptc("verify", job.name)

    def test_a_layout_in_force_and_a_copy_of_it(self):
        job, model = self.mount.job("distributed-force"), Model(layers=4, tied=True, dtype=torch.bfloat16)
        save_tree(job.incoming("base"), model, 2, 1, distributed={"bucket": 500})
        job.commit("base")
        job.set_layout(tp=1, pp=2)
        self.expect_state(job, model, self.DENSE, bucket=500)
        again = self.mount.job("distributed-again")
        shutil.copytree(job.file("current", "megatron"), again.incoming("base"), dirs_exist_ok=True)
        again.commit("base")
        self.expect_state(again, model, self.DENSE, bucket=500)

    def test_what_a_layout_cuts_over_data_parallel_ranks_is_whole_in_a_tree(self):
        job, model = self.mount.job("distributed-zero"), Model(layers=4)
        save_tree(job.incoming("base"), model, 2, 1, distributed={})
        job.commit("base")
        for optimizer in ("zero1", "fsdp"):
            job.set_layout(tp=1, pp=2, dp=2, optimizer=optimizer)
            for pp_rank in range(2):
                path = job.file("current", "megatron", "iter_0000100", directory(0, pp_rank, 2))
                found = torch.load(path + "/distrib_optim.pt", mmap=True, weights_only=True)
                self.expect_same(found, model.distributed((0, 1, pp_rank, 2), dp=2))
                with torch.serialization.safe_globals([argparse.Namespace]):
                    found = torch.load(path + "/model_optim_rng.pt", mmap=True, weights_only=True)
                self.expect_same(found["model"], model.state((0, 1, pp_rank, 2))["model"])

    def test_what_does_not_come_out_is_refused(self):
        def spoil(change, name="distrib_optim.pt"):
            def spoils(top):
                path = f"{top}/mp_rank_01/{name}"
                with torch.serialization.safe_globals([argparse.Namespace]):
                    state = torch.load(path, weights_only=True)
                torch.save(change(state), path)
            return spoils

        def types(state):
            state[0] = {(torch.float16, torch.float32): next(iter(state[0].values()))}
            return state

        def cut(state):
            of = next(iter(state[0].values()))
            for key in ("param", "exp_avg", "exp_avg_sq"):
                of[key] = of[key][:-64].clone()
            of["numel_unpadded"] -= 64
            return state

        def moved(state):
            next(iter(state[0].values()))["param"].add_(1)
            return state

        def other_size(state):
            state["args"].overlap_grad_reduce, state["args"].ddp_bucket_size = True, 16
            return state

        def renamed(name, of=None):
            def change(state):
                found = next(iter(state[0].values()))
                found[name] = found.pop("exp_avg") if of is None else found[of]
                return state
            return spoil(change)

        def many(state):
            found = next(iter(state[0].values()))
            found.update({f"a{number}": found["param"].clone() for number in range(14)})
            return state

        for name, why, spoils in (
                ("dot", ("exp.avg", "torch_dist"), renamed("exp.avg")),
                ("shared", ("share some of their bytes", "clone"), renamed("exp_avg_sq", "exp_avg")),
                ("many", ("a13", "torch_dist"), spoil(many)),
                ("one", ("there is no distrib_optim.pt beside", "mp_rank_01"), lambda top: os.remove(top + "/mp_rank_01/distrib_optim.pt")),
                ("gone", ("model_optim_rng.pt",), lambda top: os.remove(top + "/mp_rank_01/model_optim_rng.pt")),
                ("types", ("torch.float16", "torch_dist"), spoil(types)),
                ("cut", ("elements", "torch_dist"), spoil(cut)),
                ("size", ("elements", "torch_dist"), spoil(other_size, "model_optim_rng.pt")),
                ("moved", ("master copy of", "torch_dist"), spoil(moved)),
                ("old", ("one by one", "February 2024"), spoil(lambda state: {0: state[0]})),
                ("more", ("0.torch.float32,torch.float32.step",), spoil(lambda state: {
                    **state, 0: {key: {**of, "step": 3} for key, of in state[0].items()}})),
                ("second", ("buffers",), spoil(lambda state: {**state, 1: copy.deepcopy(state[0])}))):
            with self.subTest(name):
                job = self.mount.job(f"spoilt-{name}")
                save_tree(job.incoming("base"), Model(), 2, 1, distributed={})
                spoils(os.path.join(job.incoming("base"), "iter_0000100"))
                self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
                for words in ("distrib_optim.pt", *why):
                    self.assertIn(words, job.commit_error("base"))
                self.assertEqual(os.path.exists(job.incoming("base") + "/iter_0000100/mp_rank_01/distrib_optim.pt"), name != "one")

    def test_state_that_a_stage_lacks(self):
        """Nothing else tells that it should be there."""
        job = self.mount.job("distributed-stage")
        save_tree(job.incoming("base"), Model(), 1, 2, distributed={})
        os.remove(job.incoming("base") + "/iter_0000100/mp_rank_00_001/distrib_optim.pt")
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("there is no distrib_optim.pt beside", job.commit_error("base"))

    def test_what_the_first_expert_rank_lacks(self):
        job = self.mount.job("distributed-none")
        save_tree(job.incoming("base"), Model(layers=2, experts=4, grouped=True), 1, 1, ep=2, distributed={})
        path = job.incoming("base") + "/iter_0000100/mp_rank_00_000/distrib_optim.pt"
        torch.save([None, torch.load(path, weights_only=True)[1]], path)
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("which the first expert rank has", job.commit_error("base"))


class VirtualPipelines(Trees):
    """Stages with model0, model1 …: with layers 0, 1, 4, 5 on the first of two, and 2, 3, 6, 7 on the second."""

    def expect_stretches(self, job, model, mixed=None):
        for tp, pp, vpp in ((1, 2, 2), (2, 2, 4), (1, 4, 2)):
            self.expect_layout(job, model, f"tp{tp}-pp{pp}-dp1-vpp{vpp}", tp, pp, mixed, vpp=vpp)

    def test_a_tree_of_two_stretches_of_layers(self):
        job, model = self.new_job(), Model(layers=8)
        save_tree(job.incoming("base"), model, 2, 2, vpp=2)
        written = mount.read_bytes(job.incoming("base") + "/iter_0000100/mp_rank_01_001/model_optim_rng.pt")
        job.commit("base")
        self.assertEqual(mount.read_bytes(job.rank_file("base", "tp2-pp2-dp1-vpp2", 3, "model_optim_rng.pt")), written)
        self.assertEqual(sorted(os.listdir(job.checkpoint("base", "model", "decoder", "layers"))), [str(layer) for layer in range(8)])
        self.expect_layouts(job, model)
        self.expect_stretches(job, model)
        self.mount.ptc("verify", job.name)

    def test_optimizers(self):
        job, model = self.new_job(), Model(layers=8, tied=True, dtype=torch.bfloat16)
        save_tree(job.incoming("base"), model, 1, 2, mixed=True, vpp=2)
        job.commit("base")
        name = "optimizer.optimizer.state.decoder.layers.5.mlp.linear_fc1.weight.exp_avg"
        self.assertTrue(os.path.exists(job.checkpoint("base", "model", name.replace(".", "/") + ".npy")))
        self.expect_layouts(job, model, mixed=True)
        self.expect_stretches(job, model, mixed=True)

    def test_a_layout_in_force(self):
        job, model = self.new_job(), Model(layers=8)
        save_tree(job.incoming("base"), model, 1, 1, mixed=False)
        job.commit("base")
        job.set_layout(pp=2, vpp=2)
        self.assertEqual(os.path.basename(os.readlink(job.file("current"))), "tp1-pp2-dp1-vpp2")
        self.expect_stretches(job, model, mixed=False)
        job.set_layout(tp=2, pp=4)
        self.expect_stretches(job, model, mixed=False)
        self.expect_layouts(job, model, mixed=False)
        self.mount.ptc("verify", job.name)

    def test_what_was_laid_out_comes_in_again(self):
        job, model = self.new_job(), Model(layers=8)
        save_tree(job.incoming("base"), model, 1, 4, mixed=False)
        job.commit("base")
        again = self.mount.job("stretches-again")
        again.set_layout(pp=2, vpp=2)
        for rank in range(2):
            os.makedirs(again.incoming("base") + f"/rank/{rank}")
            shutil.copy(job.rank_file("base", "tp1-pp2-dp1-vpp2", rank, "model_optim_rng.pt"), again.incoming("base") + f"/rank/{rank}")
        again.commit("base")
        self.expect_layouts(again, model, mixed=False)
        self.expect_stretches(again, model, mixed=False)

    def test_stretches_of_other_sizes(self):
        job, model = self.new_job(), Model(layers=8)
        save_tree(job.incoming("base"), model, 1, 2, stages=[1, 3, 1, 3], vpp=2, decoder_first_pipeline_num_layers=2)
        job.commit("base")
        self.expect_layouts(job, model)
        job.save_layout(pp=2, vpp=2, stages=[3, 1, 3, 1])
        job.wait()
        self.expect_layout(job, model, os.path.basename(os.readlink(job.file("current"))), 1, 2, stages=[3, 1, 3, 1], vpp=2)


class Experts(Trees):
    """Ranks that have some of the experts each, which every rank counts from 0."""

    def expect_experts(self, job, model, mixed=None):
        for tp, pp, ep in ((1, 1, 1), (1, 1, 2), (2, 2, 2), (1, 2, 4), (2, 1, 4)):
            name = f"tp{tp}-pp{pp}-dp1" + (f"-ep{ep}" if ep > 1 else "")
            self.expect_layout(job, model, name, tp, pp, mixed, ep=ep)

    def test_a_tree_of_expert_ranks(self):
        for tp, pp, ep, grouped in ((1, 1, 2, False), (2, 2, 2, True), (2, 1, 4, False)):
            with self.subTest(tp=tp, pp=pp, ep=ep):
                job, model = self.mount.job(f"experts{tp}{pp}{ep}"), Model(experts=4, grouped=grouped)
                save_tree(job.incoming("base"), model, tp, pp, ep=ep)
                last = directory(tp - 1, pp - 1, pp, ep - 1, ep)
                written = mount.read_bytes(job.incoming("base") + f"/iter_0000100/{last}/model_optim_rng.pt")
                job.commit("base")
                self.assertEqual(mount.read_bytes(job.rank_file("base", f"tp{tp}-pp{pp}-dp1-ep{ep}", tp * pp * ep - 1, "model_optim_rng.pt")),
                                 written)
                self.expect_experts(job, model)
                self.mount.ptc("verify", job.name)

    def test_optimizers(self):
        """That of the experts is another than that of all else."""
        job, model = self.new_job(), Model(experts=4, dtype=torch.bfloat16, apart=True)
        save_tree(job.incoming("base"), model, 1, 2, mixed=True, ep=2)
        job.commit("base")
        self.expect_experts(job, model, mixed=True)
        job.set_layout(ep=4)
        self.expect_experts(job, model, mixed=True)
        self.mount.ptc("verify", job.name)

    def test_folded_into_two_axes(self):
        """What a rank of Megatron's own GroupedMLP has of its experts, with moments and master copies: from any sizes to any."""
        for tp, pp, ep in ((1, 1, 1), (2, 1, 2), (1, 2, 4), (2, 2, 1)):
            with self.subTest(tp=tp, pp=pp, ep=ep):
                job, model = self.mount.job(f"folded{tp}{pp}{ep}"), Model(experts=4, grouped="folded", dtype=torch.bfloat16, apart=ep > 1)
                save_tree(job.incoming("base"), model, tp, pp, mixed=True, ep=ep)
                job.commit("base")
                for layout in ((1, 1, 2), (2, 2, 2), (1, 2, 4), (2, 1, 4)) if ep > 1 else ((1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1)):
                    name = "tp{}-pp{}-dp1".format(*layout) + (f"-ep{layout[2]}" if layout[2] > 1 else "")
                    self.expect_layout(job, model, name, *layout[:2], True, ep=layout[2])
                self.expect_whole(job)
                job.set_layout(tp=2, pp=2, ep=2)  # its bytes lie in other images from here on
                self.expect_whole(job)
                self.expect_experts(job, Model(experts=4, grouped="folded", dtype=torch.bfloat16))
                for optimizer in ("zero1", "fsdp"):
                    job.set_layout(tp=2, ep=2, dp=3, optimizer=optimizer)
                    self.expect_whole(job)
                job.set_layout(tp=tp, pp=pp, ep=ep, dp=1)
                self.expect_whole(job)
                self.mount.ptc("verify", job.name)

    def expect_whole(self, job):
        """All of it is in two axes, too, in each view of the checkpoint."""
        numpy = mount.require("numpy")
        layers = range(4)
        names = [f"{state}decoder.layers.{layer}.mlp.experts.weight{number}" for state in ("", "optimizer.state.exp_avg.")
                 for layer in layers for number in (1, 2)]
        state = {}
        for name in [name for name in names if os.path.exists(job.checkpoint("base", "model", name.replace(".", "/") + ".npy"))]:
            number = int(name[-1])
            kind = "exp_avg" if "exp_avg" in name else ""
            whole = fill(kind + name[name.index("decoder"):], 4, *((HIDDEN, 2 * FFN) if number == 1 else (FFN, HIDDEN)))
            whole = whole.reshape((HIDDEN, -1) if number == 1 else (-1, HIDDEN))
            if not kind:
                whole = whole.to(torch.bfloat16)
            found = numpy.load(job.checkpoint("base", "model", name.replace(".", "/") + ".npy"))
            self.assertEqual(found.shape, tuple(whole.shape), name)
            self.assertEqual(found.tobytes(), whole.view(torch.uint8).numpy().tobytes(), name)
            if not kind:
                state[name] = whole
        self.assertEqual(len(state), 2 * len(layers))
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load({"model": found}, checkpoint_id=job.checkpoint("base", "dcp"), no_dist=True)
        self.expect_same(found, state)

    def test_folded_parts_compute_what_the_whole_does(self):
        """GroupedMLP's forward, said once more: of each expert, what the ranks of tp have computed adds up to what one rank computes."""
        job, model = self.new_job(), Model(layers=1, experts=4, grouped="folded")
        save_tree(job.incoming("base"), model, 1, 1)
        job.commit("base")
        tokens = torch.randn(4, 5, HIDDEN, generator=torch.Generator().manual_seed(7))  # by expert

        def computed(layout, tp, ep):
            outputs, each = torch.zeros(tokens.shape), 4 // ep
            for ep_rank, tp_rank in itertools.product(range(ep), range(tp)):
                found = self.load(job, layout, ep_rank * tp + tp_rank)["model"]
                first = found["decoder.layers.0.mlp.experts.weight1"].view(each, HIDDEN, -1)
                second = found["decoder.layers.0.mlp.experts.weight2"].view(each, -1, HIDDEN)
                for expert in range(each):
                    gate, up = (tokens[ep_rank * each + expert] @ first[expert]).chunk(2, -1)
                    outputs[ep_rank * each + expert] += (torch.nn.functional.silu(gate) * up) @ second[expert]
            return outputs
        wanted = computed("tp1-pp1-dp1", 1, 1)
        for layout, tp, ep in (("tp1-pp1-dp1-ep2", 1, 2), ("tp2-pp1-dp1", 2, 1), ("tp4-pp1-dp1-ep2", 4, 2), ("tp2-pp1-dp1-ep4", 2, 4)):
            self.assertTrue(torch.allclose(computed(layout, tp, ep), wanted, atol=1e-4), layout)

    def test_with_stretches_of_layers(self):
        job, model = self.new_job(), Model(layers=8, experts=4, grouped=True, apart=True)
        save_tree(job.incoming("base"), model, 1, 2, mixed=False, ep=2, vpp=2)
        job.commit("base")
        self.expect_experts(job, model, mixed=False)
        self.expect_layout(job, model, "tp1-pp2-dp1-ep4-vpp4", 1, 2, False, ep=4, vpp=4)


class LoadedByPython(Trees):
    def test_args_are_left_out(self):
        """tools/python has the rest of a rank's files, and all of the model by its names, without running code."""
        job = self.new_job()
        save_tree(job.incoming("base"), Model(), 2, 1, mixed=False)
        job.commit("base")
        job.wait()
        with self.assertWarnsRegex(UserWarning, r"is loaded without args \(argparse.Namespace\)"):
            state = ptc.load(job.checkpoint("base"), rank=1)
        self.assertNotIn("args", state)
        self.assertEqual(state["iteration"], 100)
        expected = {name: tensor for name, tensor in Model().rank(1, 2, 0, 1).items() if tensor is not None}
        self.expect_same({name: state["model"][name] for name in expected}, expected)
        state = {"model": {"output_layer.weight": torch.zeros(padded(1), HIDDEN)[:VOCAB]}, "iteration": 0}
        with self.assertWarns(UserWarning):
            dcp.load(state, storage_reader=ptc.Reader(job.checkpoint("base")), no_dist=True)
        self.assertEqual(state["iteration"], 100)
        self.assertTrue(torch.equal(state["model"]["output_layer.weight"], fill("output_layer.weight", VOCAB, HIDDEN)))


class Refused(Trees):
    def refuse(self, name, why, spoil=lambda top: None, tp=2, pp=2, model=None, **options):
        job = self.mount.job(name)
        save_tree(job.incoming("base"), model or Model(), tp, pp, **options)
        spoil(os.path.join(job.incoming("base"), "iter_0000100"))
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for words in why if isinstance(why, tuple) else (why,):
            self.assertIn(words, job.commit_error("base"))
        self.assertTrue(os.path.exists(job.incoming("base") + "/iter_0000100"))  # nothing is lost

    def test_a_rank_that_is_missing(self):
        self.refuse("missing", "mp_rank_01_001", lambda top: shutil.rmtree(top + "/mp_rank_01_001"))
        self.refuse("missing-tp", "mp_rank_01_000", lambda top: [shutil.rmtree(f"{top}/mp_rank_01_00{pp}") for pp in range(2)])
        self.refuse("empty", "mp_rank_01_001", lambda top: os.remove(top + "/mp_rank_01_001/model_optim_rng.pt"))

    def test_a_rank_too_many(self):
        self.refuse("many", "mp_rank_02_000", lambda top: shutil.copytree(top + "/mp_rank_01_000", top + "/mp_rank_02_000"))

    def test_ranks_that_differ(self):
        def norm(coords, state):
            if coords[0] == 1:
                state["model"]["decoder.layers.0.input_layernorm.weight"] += 1
            return state
        self.refuse("values", ("input_layernorm.weight", "replicas must be equal"), change=norm)

        def heads(coords, state):
            state["args"].num_attention_heads += coords[0]
            return state
        self.refuse("args", ("num_attention_heads", "5", "4"), change=heads)

        def iteration(coords, state):
            return {**state, "iteration": 100 + coords[2]}
        self.refuse("iteration", ("iteration 101", "iteration 100"), change=iteration)

    def test_directories_that_were_swapped(self):
        """Each args have their writer's number; of files that one process wrote, or that were made for a layout, it says nothing."""
        def swap(one, other):
            return lambda top: [os.rename(f"{top}/{a}", f"{top}/{b}") for a, b in ((one, "x"), (other, one), ("x", other))]
        self.refuse("swapped-ranks", ("mp_rank_00_000/model_optim_rng.pt is tp rank 0 by its place", "rank 1 and rank 0", "swapped"),
                    swap("mp_rank_00_000", "mp_rank_01_000"))
        self.refuse("swapped-stages", ("is stage 1 by its place", "swapped"), swap("mp_rank_00_001", "mp_rank_00_002"), tp=1, pp=4)

        def converted(_coords, state):
            state["args"].rank = 0
            return state

        def pipeline_first(coords, state):
            state["args"].rank = coords[0] * 2 + coords[2]
            return state
        for name, change in (("converted", converted), ("pipeline-first", pipeline_first)):
            job = self.mount.job(name)
            save_tree(job.incoming("base"), Model(), 2, 2, change=change)
            job.commit("base")
            for layout in ("tp4-pp1-dp1", "tp1-pp4-dp1", "tp2-pp1-dp1"):
                again = self.mount.job(f"{name}-{layout}")
                shutil.copytree(job.checkpoint("base", "layouts", layout, "megatron"), again.incoming("base"))
                again.commit("base")

    def test_layers_that_are_not_those_of_args(self):
        self.refuse("layers", ("num_layers 6", "2 layers"), num_layers=6)
        self.refuse("uneven", ("has 3 layers", "num_layers 4"), stages=[3, 1], tp=1)

        def lacks(coords, state):
            if coords[2] == 1:
                for name in [name for name in state["model"] if name.startswith("decoder.layers.1.")]:
                    del state["model"][name]
            return state
        self.refuse("lacks", ("mp_rank_00_001", "has 1 layer,"), change=lacks)

    def test_what_cannot_be_cut(self):
        self.refuse("whole-experts", "expert_tensor_parallel_size 1", num_experts=2, expert_tensor_parallel_size=1)

        def opaque(_, state):
            state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = b"scales"
            return state
        self.refuse("opaque", "linear_fc1._extra_state", change=opaque)

    def test_stretches_of_layers(self):
        """What is wrong or missing of model0, model1 …"""
        def lacks(ranks):
            def change(coords, state):
                if coords[2] in ranks:
                    del state["model1"]
                return state
            return change

        def both(_, state):
            return {**state, "model": state["model1"]}

        def third(_, state):
            return {**state, "model2": OrderedDict(state["model1"])}

        def shorter(coords, state):
            if coords[2] == 1:
                for name in [name for name in state["model0"] if name.startswith("decoder.layers.1.")]:
                    del state["model0"][name]
            return state

        def swapped(_, state):
            state["model0"], state["model1"] = state["model1"], state["model0"]
            return state
        model = Model(layers=8)
        self.refuse("lacks-one", ("mp_rank_00_000", "mp_rank_00_001", "2 and 1 of them"), tp=1, vpp=2, model=model, change=lacks([1]))
        self.refuse("lacks-all", ("has model0, and no model1", "all of its 2"), tp=1, vpp=2, model=model, change=lacks([0, 1]))
        self.refuse("both", "both `model` and `model0`", tp=1, vpp=2, model=model, change=both)
        self.refuse("third", ("has model2", "virtual_pipeline_model_parallel_size 2"), tp=1, vpp=2, model=model, change=third)
        self.refuse("shorter", ("mp_rank_00_001", "1 layer in model0", "has 2 there"), tp=1, vpp=2, model=model, change=shorter)
        self.refuse("swapped", "embedding.word_embeddings.weight", tp=1, vpp=2, model=model, change=swapped)
        self.refuse("only-args", ("virtual_pipeline_model_parallel_size 2", "no model0"), virtual_pipeline_model_parallel_size=2)
        self.refuse("one-stage", ("model0", "pipeline_model_parallel_size 1"), tp=1, vpp=2, model=model, pipeline_model_parallel_size=1)
        self.refuse("stretches-args", ("num_layers 12", "has 3 there"), tp=1, vpp=2, model=model, num_layers=12)

    def test_experts(self):
        model = Model(experts=4)
        self.refuse("no-expert-rank", ("mp_rank_00_001_001", "expert_model_parallel_size 2"),
                    lambda top: shutil.rmtree(top + "/mp_rank_00_001_001"), tp=1, ep=2, model=model)
        self.refuse("rank-too-many", "mp_rank_00_002", lambda top: shutil.copytree(top + "/mp_rank_00_001", top + "/mp_rank_00_002"),
                    tp=1, pp=1, ep=2, model=model)
        self.refuse("two-of-one-rank", ("mp_rank_00_001", "mp_rank_00_000_001", "of one rank"),
                    lambda top: shutil.copytree(top + "/mp_rank_00_001", top + "/mp_rank_00_000_001"), tp=1, pp=1, ep=2, model=model)
        self.refuse("not-divided", ("5 experts", "ep = 2"), tp=1, pp=1, ep=2, model=model, num_experts=5)
        self.refuse("too-few", ("expert 1 of its rank", "has 1"), tp=1, pp=1, ep=2, model=model, num_experts=2)
        self.refuse("cut-otherwise", "expert_tensor_parallel_size 1", tp=2, pp=1, ep=2, model=model, expert_tensor_parallel_size=1)

        folded = Model(experts=4, grouped="folded")
        for name, number, why in (("folded-other", 10, "config.json says 10 experts, and a router has 4 rows"),
                                  ("folded-unknown", None, "nobody says how many experts")):
            self.refuse(name, ("experts.weight1", why), tp=1, pp=1, ep=2, model=folded, num_experts=number)

        def norm(coords, state):
            if coords[4] == 1:
                state["model"]["decoder.layers.0.input_layernorm.weight"] += 1
            return state
        self.refuse("replicas", ("input_layernorm.weight", "replicas must be equal"), tp=1, pp=1, ep=2, model=model, change=norm)

        def lacks(coords, state):
            if coords[4] == 1:
                del state["model"]["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"]
            return state
        self.refuse("lacks-expert", ("mp_rank_00_001", "local_experts.1.linear_fc2.weight", "one stage"), tp=1, pp=1, ep=2, model=model, change=lacks)

    def test_folded_experts_of_which_boxes_are_said(self):
        """They are taken as they are, and not cut: boxes have the file's axes."""
        job = self.new_job()
        at = "decoder.layers.0.mlp.experts."
        state = {at + name: torch.randn(shape) for name, shape in (("weight1", (16, 192)), ("weight2", (96, 16)))}
        os.makedirs(job.incoming("base") + "/rank")
        dcp.save(state, checkpoint_id=job.incoming("base") + "/rank/0", no_dist=True)
        with open(job.incoming("base") + "/rank/0/config.json", "w", encoding="utf-8") as file:
            file.write('{"model_type": "megatron", "num_layers": 1, "num_moe_experts": 4, "swiglu": true}')
        job.commit("base")
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=job.checkpoint("base", "dcp"), no_dist=True)
        self.expect_same(found, state)
        for sizes in ({"tp": 2}, {"ep": 2}):
            self.assertEqual(mount.error_of(lambda: job.save_layout(**sizes)), "EINVAL")  # pylint: disable=cell-var-from-loop
            self.assertIn("have said which boxes of it are theirs", job.error())

    def test_two_iterations(self):
        self.refuse("two", "two iterations", lambda top: shutil.copytree(top, top.replace("100", "050")))

    def test_a_layout_that_says_otherwise(self):
        def say(top):
            with open(os.path.dirname(top) + "/layout.json", "w", encoding="utf-8") as file:
                file.write('{"tp": 4, "pp": 1, "dp": 1}')
        self.refuse("says", "layout.json says tp4-pp1-dp1", say)


if __name__ == "__main__":
    mount.main()
