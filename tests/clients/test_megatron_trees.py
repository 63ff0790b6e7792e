"""Trees that Megatron-LM wrote (`--ckpt-format torch`), committed as they are: read under other layouts by torch, compared
with a whole model that is cut here by hand."""
import argparse
import os
import random
import shutil
from collections import OrderedDict

import mount

torch = mount.require("torch")

HIDDEN, HEADS, GROUPS, FFN, VOCAB, POSITIONS = 16, 4, 2, 24, 300, 12
HEAD = HIDDEN // HEADS


def padded(tp):
    return -(-VOCAB // (128 * tp)) * 128 * tp


def fill(name, *shape):
    """Numbers that depend on the name alone."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
    return torch.randn(shape, generator=generator)


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

    def __init__(self, layers=4, tied=False, bias=False, dtype=torch.float32):
        self.layers, self.tied, self.bias, self.dtype = layers, tied, bias, dtype

    def cut(self, name, whole, tp_rank, tp):
        if "word_embeddings" in name or name == "output_layer.weight":
            rows = padded(tp) // tp
            full = torch.zeros(padded(tp), *whole.shape[1:], dtype=whole.dtype)
            full[:VOCAB] = whole
            return full[tp_rank * rows:(tp_rank + 1) * rows]
        if "linear_qkv." in name:
            return whole.chunk(tp)[tp_rank]
        if "linear_fc1." in name:
            return torch.cat([half.chunk(tp)[tp_rank] for half in whole.chunk(2)])
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            return whole.chunk(tp, dim=1)[tp_rank]
        return whole

    def stage(self, pp_rank, pp, stages=None):
        """(name in the file, name of what fills it, shape of the whole) of a stage."""
        counts = stages or [self.layers // pp] * pp
        begin = sum(counts[:pp_rank])
        items = []
        if pp_rank == 0:
            items += [(name, name, shape) for name, shape in (("embedding.word_embeddings.weight", (VOCAB, HIDDEN)),
                                                              ("embedding.position_embeddings.weight", (POSITIONS, HIDDEN)))]
        for layer in range(counts[pp_rank]):
            items += [(f"decoder.layers.{layer}.{name}", f"decoder.layers.{begin + layer}.{name}", shape)
                      for name, shape in layer_shapes(self.bias)]
        if pp_rank == pp - 1:
            items += [(name, name, (HIDDEN,)) for name in ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")]
            if not self.tied:
                items.append(("output_layer.weight", "output_layer.weight", (VOCAB, HIDDEN)))
            elif pp > 1:
                items.append(("output_layer.weight", "embedding.word_embeddings.weight", (VOCAB, HIDDEN)))
            items.append(("output_layer._extra_state", "", None))
        return items

    def rank(self, tp_rank, tp, pp_rank, pp, stages=None, kind="", dtype=None):
        """`kind`: of the optimizer's state, "exp_avg"."""
        made = OrderedDict()
        for local, name, shape in self.stage(pp_rank, pp, stages):
            whole = None if shape is None else fill(kind + name, *shape).to(dtype or self.dtype)
            made[local] = None if whole is None else self.cut(local, whole, tp_rank, tp).clone()
        return made

    def arguments(self, tp, pp, rank, **more):
        return argparse.Namespace(**{
            "num_layers": self.layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_query_groups": GROUPS,
            "group_query_attention": True, "swiglu": True, "ffn_hidden_size": FFN, "vocab_size": VOCAB, "padded_vocab_size": padded(tp),
            "untie_embeddings_and_output_weights": not self.tied, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": None, "expert_model_parallel_size": 1, "data_parallel_size": 1,
            "world_size": tp * pp, "rank": rank, "params_dtype": self.dtype, "lr": 1.5e-4, "data_path": ["a", "b"], **more})

    def groups(self, weights):
        """Parameters' names by group: what decays, and biases and norms."""
        names = [name for name, tensor in weights.items() if tensor is not None]
        kept = [name for name in names if weights[name].dim() == 1 or name.endswith(".bias")]
        return [[name for name in names if name not in kept], kept]

    def optimizer(self, coords, mixed, stages=None):
        """As torch's Adam, or Megatron's wrapper of it for a model of 16 bits, numbers its parameters."""
        weights = self.rank(*coords, stages)
        moments = {kind: self.rank(*coords, stages, kind, torch.float32) for kind in ("exp_avg", "exp_avg_sq")}
        groups = self.groups(weights)
        order = [name for group in groups for name in group]
        state = {number: {"step": torch.tensor(100.), **{kind: moments[kind][name] for kind in moments}} for number, name in enumerate(order)}
        begin, lists = 0, []
        for wd_mult, group in zip((1.0, 0.0), groups):
            lists.append({"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "lr": 1e-4,
                          "betas": (0.9, 0.95), "params": list(range(begin, begin + len(group)))})
            begin += len(group)
        inner = {"state": state, "param_groups": lists}
        if not mixed:
            return inner
        masters = self.rank(*coords, stages, "master", torch.float32)
        return {"optimizer": inner, "grad_scaler": {"scale": torch.tensor([65536.]), "growth_tracker": 3},
                "fp32_from_fp16_params": [[masters[name] for name in group] for group in groups]}

    def state(self, coords, mixed=None, stages=None, **arguments):
        """What a rank saves; `mixed`: with an optimizer, of 16 bits or not."""
        tp_rank, tp, pp_rank, pp = coords
        rank = pp_rank * tp + tp_rank
        torch.manual_seed(rank)
        random.seed(rank)
        made = {"args": self.arguments(tp, pp, rank, **arguments), "checkpoint_version": 3.0, "iteration": 100,
                "num_floating_point_operations_so_far": 1e15, "model": self.rank(*coords, stages),
                "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 100},
                "rng_state": [{"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state(),
                               "cuda_rng_state": None, "rng_tracker_states": {}}]}
        if mixed is not None:
            made["optimizer"] = self.optimizer(coords, mixed, stages)
        return made


def directory(tp_rank, pp_rank, pp):
    return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")


def save_tree(top, model, tp, pp, mixed=None, stages=None, iteration="iter_0000100", change=lambda coords, state: state, **arguments):
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            coords = (tp_rank, tp, pp_rank, pp)
            path = os.path.join(top, iteration, directory(tp_rank, pp_rank, pp))
            os.makedirs(path)
            torch.save(change(coords, model.state(coords, mixed, stages, **arguments)), os.path.join(path, "model_optim_rng.pt"))
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

    def expect_layout(self, job, model, layout, tp, pp, mixed=None, stages=None):
        for pp_rank in range(pp):
            for tp_rank in range(tp):
                coords = (tp_rank, tp, pp_rank, pp)
                found = self.load(job, layout, pp_rank * tp + tp_rank)
                wanted = model.state(coords, mixed, stages)
                self.expect_same(found["model"], wanted["model"], f"{layout} {coords} model")
                if mixed is not None:
                    self.expect_same(found["optimizer"], wanted["optimizer"], f"{layout} {coords} optimizer")
                for key in ("iteration", "checkpoint_version", "opt_param_scheduler"):
                    self.assertEqual(found[key], wanted[key])
                for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "padded_vocab_size", "num_layers", "lr", "data_path"):
                    self.assertEqual(getattr(found["args"], key), getattr(wanted["args"], key), key)

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
        self.mount.ptc("import", name, self.temporary("run"))
        self.expect_layouts(mount.Job(self.mount, name), model)
        os.remove(self.temporary("run/latest_checkpointed_iteration.txt"))
        done = self.mount.ptc("import", name, self.temporary("run"), "--name", "other", check=False)
        self.assertIn("2 iterations", done.stderr)

    def test_stages_of_other_sizes(self):
        job, model = self.new_job(), Model()
        save_tree(job.incoming("base"), model, 1, 2, stages=[1, 3], decoder_first_pipeline_num_layers=1)
        job.commit("base")
        job.save_layout(pp=2, stages=[3, 1])
        job.wait()
        self.expect_layout(job, model, os.path.basename(os.readlink(job.file("current"))), 1, 2, stages=[3, 1])
        self.expect_layouts(job, model)

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


class Refused(Trees):
    def refuse(self, name, why, spoil=lambda top: None, tp=2, pp=2, **options):
        job = self.mount.job(name)
        save_tree(job.incoming("base"), Model(), tp, pp, **options)
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
        def chunks(_, state):
            model = state.pop("model")
            return {**state, "model0": model, "model1": OrderedDict(model)}
        self.refuse("chunks", "virtual pipeline", change=chunks)
        self.refuse("experts", "expert-parallel", expert_model_parallel_size=2)
        self.refuse("whole-experts", "expert_tensor_parallel_size 1", num_experts=2, expert_tensor_parallel_size=1)
        self.refuse("buckets", ("distrib_optim.pt", "torch_dist"),
                    lambda top: torch.save({0: {(torch.bfloat16, torch.float32): {"exp_avg": torch.zeros(5)}}}, top + "/mp_rank_00_000/distrib_optim.pt"))

        def opaque(_, state):
            state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = b"scales"
            return state
        self.refuse("opaque", "linear_fc1._extra_state", change=opaque)

    def test_two_iterations(self):
        self.refuse("two", "two iterations", lambda top: shutil.copytree(top, top.replace("100", "050")))

    def test_a_layout_that_says_otherwise(self):
        def say(top):
            with open(os.path.dirname(top) + "/layout.json", "w", encoding="utf-8") as file:
                file.write('{"tp": 4, "pp": 1, "dp": 1}')
        self.refuse("says", "layout.json says tp4-pp1-dp1", say)


if __name__ == "__main__":
    mount.main()
