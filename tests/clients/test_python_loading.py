"""tools/python: what is loaded is what was asked for, or refused by name; on a real mount."""
import argparse
import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import time
import unittest.mock

import models
import mount
import ranks

sys.path.insert(0, ranks.PACKAGE)
torch = mount.require("torch")
np = mount.require("numpy")
import ptc  # noqa: E402  pylint: disable=wrong-import-position
from ptc import in_place, loading  # noqa: E402  pylint: disable=wrong-import-position


def network():
    """Of two layers, each with a norm: weights, and biases without decay."""
    torch.manual_seed(1)
    return torch.nn.ModuleDict({f"layer{i}": torch.nn.ModuleDict({"up": torch.nn.Linear(3, 3), "norm": torch.nn.LayerNorm(3)})
                                for i in range(2)})


def adam_of(model, order=(0, 1), where=lambda name: True):
    groups = [{"params": [p for n, p in model.named_parameters() if where(n) and p.dim() > 1], "weight_decay": 0.5},
              {"params": [p for n, p in model.named_parameters() if where(n) and p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW([groups[i] for i in order], lr=0.1)


def step(model, adam):
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    adam.step()


class Optimizers(ranks.TestCase):
    def setUp(self):
        super().setUp()
        self.model = network()
        adam = adam_of(self.model)
        step(self.model, adam)
        adam.param_groups[0]["lr"] = 0.25
        self.state = ptc.optimizer_state(self.model, adam)

    def decays(self, adam):
        """By dimensions of the parameters."""
        return {(p.dim(), group["weight_decay"], group["lr"]) for group in adam.param_groups for p in group["params"]}

    def test_groups_go_by_their_parameters(self):
        for order in ((0, 1), (1, 0)):
            adam = adam_of(self.model, order)
            ptc.load_optimizer_state(self.model, adam, self.state)
            self.assertEqual(self.decays(adam), {(2, 0.5, 0.25), (1, 0.0, 0.1)})

    def test_groups_of_another_stage(self):
        """A rank may have another's list of names: of what has the same name but for the layer's number."""
        def first(name):
            return name.startswith("layer0")
        groups = [{**group, "params": [name for name in group["params"] if first(name)]}
                  for group in self.state["param_groups"]]
        adam = adam_of(self.model, (1, 0), lambda name: not first(name))
        ptc.load_optimizer_state(self.model, adam, {**self.state, "param_groups": groups})
        self.assertEqual(self.decays(adam), {(2, 0.5, 0.25), (1, 0.0, 0.1)})

    def test_groups_that_are_others(self):
        a, b = self.state["param_groups"]
        moved = [{**a, "params": a["params"][1:]}, {**b, "params": b["params"] + a["params"][:1]}]
        with self.assertRaisesRegex(ValueError, "one group here, but were saved in several, which differ.*layer0.up"):
            ptc.load_optimizer_state(self.model, adam_of(self.model), {**self.state, "param_groups": moved})
        strange = [{**group, "params": ["x." + name for name in group["params"]]} for group in (a, b)]
        with self.assertRaisesRegex(ValueError, "no group that was saved names any of the parameters layer0.up.weight"):
            ptc.load_optimizer_state(self.model, adam_of(self.model), {**self.state, "param_groups": strange})

    def test_parameters_that_are_not_known(self):
        def without(state, *names):
            return {"state": {name: values for name, values in state["state"].items() if name not in names},
                    "param_groups": [{**group, "params": [name for name in group["params"] if name not in names]}
                                     for group in state["param_groups"]]}
        fewer = without(self.state, "layer1.up.weight", "layer1.up.bias")
        with self.assertRaisesRegex(KeyError, "nothing of layer1.up.bias, layer1.up.weight; strict=False"):
            ptc.load_optimizer_state(self.model, adam_of(self.model), fewer)
        adam = adam_of(self.model)
        ptc.load_optimizer_state(self.model, adam, fewer, strict=False)
        self.assertEqual(len(adam.state), 6)
        del self.state["state"]["layer1.up.weight"]  # it had none, which its group tells
        adam = adam_of(self.model)
        ptc.load_optimizer_state(self.model, adam, self.state)
        self.assertEqual(len(adam.state), 7)

    def test_an_optimizer_of_some_parameters(self):
        """As of a model some of which is frozen: only these get state, and can be saved again."""
        adam = adam_of(self.model, where=lambda name: "layer1" in name)
        ptc.load_optimizer_state(self.model, adam, self.state)
        self.assertEqual(len(adam.state_dict()["state"]), 4)
        self.assertEqual(sorted(ptc.optimizer_state(self.model, adam)["state"]),
                         sorted(name for name, _ in self.model.named_parameters() if "layer1" in name))

    def test_a_module_without_memory(self):
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        with torch.device("meta"):
            empty = network()
        with self.assertRaisesRegex(ValueError, "layer0.up.weight is on the meta device.*to_empty"):
            ptc.load_model_state(empty, state)
        empty.to_empty(device="cpu")
        ptc.load_model_state(empty, {**state, "more": torch.ones(1)})
        self.assert_equal(dict(empty.state_dict()), state)
        with self.assertRaisesRegex(KeyError, "the model has no more"):
            ptc.load_model_state(empty, {**state, "more": torch.ones(1)}, strict=True)
        job = ptc.Job.create(self.mount.path + "/meta")
        job.save(state, "a")
        with self.assertRaisesRegex(ValueError, "to_empty"):
            ptc.Checkpoint(job.path).fill({"layer0.up.weight": torch.ones(3, 3, device="meta")})


class Newest(ranks.TestCase):
    """What a job, and its `current`, stand for. The daemon makes the layout in force of a checkpoint that was written in
    another one behind the commit, and takes long for this one.
    """
    SAVE = """
def state(step): return {"model": {"layers.0.w": torch.full((2000, 1000), float(step))}, "step": step}
"""

    def test_is_what_was_committed_last(self):
        job = ptc.Job.create(self.mount.path + "/newest", dp=4, optimizer="fsdp")
        with self.assertRaisesRegex(FileNotFoundError, "nothing was committed yet"):
            ptc.load(job.path)
        self.run_ranks(2, self.SAVE + """
for number in range(1, 5):
    if number % 2:
        dcp.save(state(number), storage_writer=ptc.Writer(path, f"s{number}"))
    else:
        ptc.Job(path).save(state(number), f"s{number}", layout={"dp": 2})
    back = {"model": {"layers.0.w": torch.zeros(2000, 1000)}, "step": 0}
    dcp.load(back, storage_reader=ptc.Reader(path + "/current"))
    assert back["step"] == number and torch.equal(back["model"]["layers.0.w"], state(number)["model"]["layers.0.w"])
    loaded = ptc.load(path, rank=rank)
    assert loaded["step"] == number and loaded["model"]["layers.0.w"].shape == (500, 1000), loaded
    assert torch.equal(ptc.load(path + "/current", rank=rank)["model"]["layers.0.w"], loaded["model"]["layers.0.w"])
    dist.barrier()
""", job.path)
        job.wait()
        self.assertEqual(job.newest, job.current)

    def test_is_the_same_for_all_ranks(self):
        """Of which one looks before a commit, and the other behind it."""
        job = ptc.Job.create(self.mount.path + "/agreed", dp=2)
        job.save({"model": {"w": torch.ones(4)}, "step": 1}, "s1", layout={"dp": 1})
        self.run_ranks(2, """
job = ptc.Job(path)
if rank == 1:
    ptc.save({"model": {"w": torch.ones(4)}, "step": 2}, job.incoming("s2"), rank=0, layout={"dp": 1})
dist.barrier()
if rank == 1:
    job.rename_into_checkpoints("s2")
found = [None, None]
dist.all_gather_object(found, ptc.load(path)["step"])
assert found[0] == found[1], found
dist.barrier()
class Slow(ptc.Reader):
    def read_metadata(self, *arguments, **options):
        if rank == 1:
            ptc.save({"model": {"w": torch.ones(4)}, "step": 3}, job.incoming("s3"), rank=0, layout={"dp": 1})
            dist.recv(torch.zeros(1), 0)
            job.rename_into_checkpoints("s3")
            return super().read_metadata(*arguments, **options)
        found = super().read_metadata(*arguments, **options)
        dist.send(torch.zeros(1), 1)
        return found
state = {"model": {"w": torch.zeros(4)}, "step": 0}
dcp.load(state, storage_reader=Slow(path))
assert state["step"] == 2, state
""", job.path)


class Origins(ranks.TestCase):
    def test_rows_are_told_by_names_that_say_how_they_are_cut_alone(self):
        """An older ptcfs had that in the hex digits: there the checkpoint is asked, instead of a guess."""
        where = self.mount.job("rows").incoming("a") + "/checkpoints/a"
        models.write_file(where + "/meta.json", "")
        whole, rows = argparse.Namespace(shape=(3,)), argparse.Namespace(shape=(1,))
        held = {}
        for name in ("tp1-pp1-dp4-shard2-fsdp", "tp1-pp1-dp4-fsdp", "tp1-pp1-dp4-zero1", "tp1-pp1-dp4+1a2b3c4d"):
            box = loading.Origin.of(f"{where}/layouts/{name}/rank/1")._held(whole, rows)
            held[name] = box and box.offset
        self.assertEqual(held, {"tp1-pp1-dp4-shard2-fsdp": (2,), "tp1-pp1-dp4-fsdp": (1,), "tp1-pp1-dp4-zero1": None,
                                "tp1-pp1-dp4+1a2b3c4d": None})


class Places(ranks.TestCase):
    def dcp_load(self, state, path):
        import torch.distributed.checkpoint as dcp
        dcp.load(state, storage_reader=ptc.Reader(path), no_dist=True)
        return state

    def test_sections_with_names_of_others(self):
        """A name in a section is not that of another section's tensor, and what several have is not guessed."""
        job = ptc.Job.create(self.mount.path + "/names")
        one, two = torch.ones(3), torch.full((3,), 2.0)
        job.save({"model": {"encoder.w": one}, "encoder": {"w": two}}, "a")
        self.assert_equal(self.dcp_load({"model": {"encoder.w": torch.zeros(3)}, "encoder": {"w": torch.zeros(3)}}, job.path),
                          {"model": {"encoder.w": one}, "encoder": {"w": two}})
        flat = {"model.w": one, "w": two}
        job.save(flat, "b")
        self.assert_equal(self.dcp_load({"model.w": torch.zeros(3), "w": torch.zeros(3)}, job.path), flat)
        own = {"model": {"w": one}, "w": two}
        job.save(own, "own")
        self.assert_equal(self.dcp_load({"model": {"w": torch.zeros(3)}, "w": None}, job.path), own)
        job.save({"student": {"w": one}, "teacher": {"w": two}}, "c")
        with self.assertRaisesRegex(KeyError, "w in student.safetensors and in teacher.safetensors"):
            ptc.Checkpoint(job.path).read("w")
        self.assert_equal(ptc.Checkpoint(job.path).read(ptc.Checkpoint(job.path).info("w", "teacher.safetensors")), two)

    def test_other_processes_than_ranks(self):
        """Would load other rows than theirs; where all ranks hold the same, fewer may."""
        job = ptc.Job.create(self.mount.path + "/processes", dp=4, optimizer="fsdp")
        job.save({"model": {"w": torch.arange(8.0)}}, "a", layout={"dp": 1})
        job.wait()
        self.assertEqual(ptc.load(job.file("checkpoints/a"))["model"]["w"].tolist(), list(range(8)))
        for path in (job.path, job.file("current"), os.path.realpath(job.file("current"))):
            with self.assertRaisesRegex(ValueError, r"1 process loads, but layout tp1-pp1-dp4-fsdp has 4 ranks.*set_layout.*rank="):
                ptc.load(path)
            self.assertEqual(ptc.load(path, rank=1)["model"]["w"].tolist(), [2, 3])
            self.assertEqual(ptc.load(os.path.realpath(job.file("current")) + "/rank/1")["model"]["w"].tolist(), [2, 3])
        self.assertEqual(ptc.load(job.file("checkpoints/a/layouts/tp1-pp1-dp2"))["model"]["w"].tolist(), list(range(8)))
        self.run_ranks(2, """
for where, ranks in (("", 4), ("/checkpoints/a", 1), ("/current", 4)):
    try:
        raise SystemExit(ptc.load(path + where))
    except ValueError as error:
        assert f"2 processes load, but layout " in str(error) and f"has {ranks} rank" in str(error), error
assert ptc.load(path + "/checkpoints/a/layouts/tp1-pp1-dp4")["model"]["w"].tolist() == list(range(8))
""", job.path)

    def test_numbers_follow_their_parameter(self):
        """A count that is an int is not left on the rank that wrote it."""
        job = ptc.Job.create(self.mount.path + "/numbers", pp=2)
        layers = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]
        counts = {name: {"exp_avg": torch.full((4, 2), float(i)), "step": 10 + i, "scale": 0.5 + i, "on": i > 1}
                  for i, name in enumerate(layers)}
        for rank in range(2):
            held = layers[2 * rank:2 * rank + 2]
            ptc.save({"model": {name: torch.ones(4, 2) for name in held}, "optim": {"state": {name: counts[name] for name in held}}},
                     job.incoming("a"), rank=rank, files={"config.json": {"model_type": "llama", "num_hidden_layers": 4}})
        ptc.commit(job.incoming("a"))
        for pp in (2, 1, 4):
            job.set_layout(pp=pp)
            for rank in range(pp):
                held = layers[rank * 4 // pp:(rank + 1) * 4 // pp]
                self.assert_equal(ptc.load(job.path, rank=rank)["optim"]["state"], {name: counts[name] for name in held})
        blank = {"optim": {"state": {name: {"exp_avg": torch.zeros(4, 2), "step": 0, "scale": 0.0, "on": None} for name in layers}}}
        self.assert_equal(self.dcp_load(blank, job.path), {"optim": {"state": counts}})

    def test_what_torch_wrote(self):
        import torch.distributed.checkpoint as dcp
        job = ptc.Job.create(self.mount.path + "/by_torch")
        state = {"model": {"a.w": torch.rand(4, 2), "a.b": torch.rand(3)}, "epoch": 3,
                 "optim": {"state": {"a.w": {"exp_avg": torch.rand(4, 2), "n": 4}},
                           "param_groups": [{"betas": (0.5, 0.9), "params": ["a.w"]}]}}

        def blank():
            return {"model": {"a.w": torch.zeros(4, 2), "a.b": torch.zeros(3)}, "epoch": 0,
                    "optim": {"state": {"a.w": {"exp_avg": torch.zeros(4, 2), "n": 0}}, "param_groups": [{"betas": None, "params": None}]}}
        dcp.save(state, checkpoint_id=job.incoming("dcp"), no_dist=True)
        os.makedirs(job.incoming("pt") + "/rank/0")
        torch.save(state, job.incoming("pt") + "/rank/0/checkpoint.pt")
        for name in ("dcp", "pt"):
            with self.subTest(name):
                path = ptc.commit(job.incoming(name))
                self.assert_equal(ptc.load(path), state)
                self.assert_equal(self.dcp_load(blank(), path), state)
        os.makedirs(job.incoming("code") + "/rank/0")
        torch.save({"model": state["model"], "what": argparse.Namespace(a=1)}, job.incoming("code") + "/rank/0/checkpoint.pt")
        path = ptc.commit(job.incoming("code"))
        with self.assertWarnsRegex(UserWarning, r"checkpoint.pt is loaded without what \(argparse.Namespace\).*torch.load"):
            self.assert_equal(ptc.load(path), {"model": state["model"]})
        blank_model = {"model": blank()["model"]}
        with self.assertWarns(UserWarning):
            self.assert_equal(self.dcp_load(blank_model, path), {"model": state["model"]})

    def test_what_torch_wrote_in_other_places(self):
        """In a directory below, in several, and inside a key: the state is that which was saved."""
        import torch.distributed.checkpoint as dcp
        job = ptc.Job.create(self.mount.path + "/elsewhere")
        model = {"a.w": torch.rand(4, 2), "a.b": torch.rand(3)}
        optim = {"state": {"a.w": {"exp_avg": torch.rand(4, 2)}}, "param_groups": [{"lr": 0.5, "params": ["a.w"]}]}
        state = {"model": model, "epoch": 3, "optim": optim}

        def blank(value):
            if isinstance(value, dict):
                return {key: blank(one) for key, one in value.items()}
            if isinstance(value, list):
                return [{"lr": 0.0, "params": []}]
            return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        dcp.save(state, checkpoint_id=job.incoming("below") + "/dcp", no_dist=True)
        dcp.save({"model": model}, checkpoint_id=job.incoming("several") + "/model_0", no_dist=True)
        dcp.save({"epoch": 3, "optim": optim}, checkpoint_id=job.incoming("several") + "/optimizer_0", no_dist=True)
        dcp.save({"app": state}, checkpoint_id=job.incoming("inside"), no_dist=True)
        dcp.save({"app": {"model": model}}, checkpoint_id=job.incoming("inside_alone") + "/ck", no_dist=True)
        os.makedirs(job.incoming("pt"))
        torch.save({"app": state}, job.incoming("pt") + "/c.pt")
        for name, value in (("below", state), ("several", state), ("inside", {"app": state}), ("inside_alone", {"app": {"model": model}}),
                            ("pt", {"app": state})):
            with self.subTest(name):
                path = ptc.commit(job.incoming(name))
                self.assert_equal(ptc.load(path), value)
                self.assert_equal(self.dcp_load(blank(value), path), value)
                names = ["a.b", "a.w"] + ["optim.state.a.w.exp_avg"] * (name != "inside_alone")
                self.assertEqual(sorted(name for _, name in ptc.Checkpoint(path).tensors), names)
        shutil.copytree(job.file("checkpoints/below/layouts/tp1-pp1-dp1/rank/0"), self.temporary("copy"))
        self.assert_equal(ptc.load(self.temporary("copy")), state)

    def test_objects_of_unknown_classes(self):
        """Are left out wherever they are; the rest is there, and no code was run."""
        job = ptc.Job.create(self.mount.path + "/opaque")
        os.makedirs(job.incoming("a") + "/rank/0")
        ran = self.temporary("ran")

        class Hostile:
            def __reduce__(self):
                return os.mkdir, (ran,)
        hidden = argparse.Namespace(tensor=torch.ones(2))
        torch.save({"model": {"w": torch.ones(2), "extra": io.BytesIO(b"x")}, "args": argparse.Namespace(a=1, b=[2]),
                    "list": [1, argparse.Namespace(), 3], "pair": (argparse.Namespace(), {"deep": argparse.Namespace(), "kept": 5}),
                    "shape": np.float64(0.5)}, job.incoming("a") + "/rank/0/c.pt")
        with self.assertWarns(UserWarning) as said:
            state = ptc.load(ptc.commit(job.incoming("a")))
        self.assert_equal({key: state[key] for key in ("model", "list", "pair")},
                          {"model": {"w": torch.ones(2)}, "list": [1, None, 3], "pair": (None, {"kept": 5})})
        self.assertNotIn("args", state)
        for words in ("model.extra (_io.BytesIO)", "args (argparse.Namespace)", "list.1 (", "pair.0 (", "pair.1.deep ("):
            self.assertIn(words, str(said.warning))
        for name, value in (("code", {"w": torch.ones(2), "x": Hostile()}), ("whole", hidden)):
            path = self.temporary(name + ".pt")
            torch.save(value, path)
            with self.assertRaisesRegex(ValueError, "cannot be loaded without running code"):
                loading.load_file(path, None)
        self.assertFalse(os.path.exists(ran))

    def test_what_each_rank_gets(self):
        """Of what is the ranks' own, values and files: the table of tools/python/README.md."""
        model = models.Llama()
        for sizes, expected in (
                ({"tp": 2, "dp": 2}, {"tp2-pp1-dp4": "01230000", "tp1-pp1-dp4": "0200", "tp2-pp2-dp1": "0100", "tp1-pp1-dp1": "0"}),
                ({"tp": 2, "pp": 2}, {"tp1-pp2-dp1": "02", "tp2-pp1-dp2": "0100", "tp1-pp4-dp1": "0200"})):
            job = ptc.Job.create(self.mount.path + "/gets-" + "-".join(sizes), **sizes)
            for rank in range(4):
                stage = rank // 2 if "pp" in sizes else 0
                held = {one.name: torch.frombuffer(bytearray(one.data), dtype=torch.bfloat16).reshape(one.shape)
                        for one in model.rank_tensors(2, sizes.get("pp", 1), rank % 2, stage)}
                ptc.save({"model": held, "rng": {"cpu": torch.full((3,), rank)}, "scheduler": {"last_epoch": rank}, "loader": [rank],
                          "step": rank}, job.incoming("a"), rank=rank, files={"config.json": model.config} if rank == 0 else None)
                models.write_file(job.incoming("a") + f"/rank/{rank}/scheduler.pt", str(rank))
            path = ptc.commit(job.incoming("a"))
            for layout, ranks_of in expected.items():
                for rank, of in enumerate(ranks_of):
                    with self.subTest(sizes=sizes, layout=layout, rank=rank):
                        state = ptc.load(f"{path}/layouts/{layout}", rank=rank)
                        del state["model"]
                        self.assert_equal(state, {"rng": {"cpu": torch.full((3,), int(of))}, "scheduler": {"last_epoch": int(of)},
                                                  "loader": [int(of)], "step": int(of)})
                        self.assertEqual(mount.read_text(f"{path}/layouts/{layout}/rank/{rank}/scheduler.pt"), of)

    def test_files_of_torch_by_other_names(self):
        """Sets, directories, what Lightning and Hugging Face call their files, and what has no tensors."""
        job = ptc.Job.create(self.mount.path + "/other_names")
        one, two = torch.rand(4, 2), torch.rand(3)
        for number, (files, expected) in enumerate((
                ({"model-00001-of-00002.pt": {"a.w": one, "n": 1}, "model-00002-of-00002.pt": {"b.w": two}}, {"a.w": one, "b.w": two, "n": 1}),
                ({"pytorch_model.bin": {"a.w": one}, "training_args.bin": argparse.Namespace(lr=1)}, {"a.w": one}),
                ({"last.ckpt": {"state_dict": {"a.w": one}, "epoch": 4}}, {"state_dict": {"a.w": one}, "epoch": 4}),
                ({"run/a.pt": {"a.w": one}, "run/b.pt": {"b.w": two}}, {"run-a": {"a.w": one}, "run-b": {"b.w": two}}))):
            where = job.incoming(f"torch{number}") + "/rank/0/"
            for name, value in files.items():
                os.makedirs(os.path.dirname(where + name), exist_ok=True)
                torch.save(value, where + name)
            models.write_file(where + "vocab.bin", b"no file of torch's")
            with self.subTest(number):
                path = ptc.commit(job.incoming(f"torch{number}"))
                self.assert_equal(ptc.load(path), expected)
                shutil.copytree(path + "/layouts/tp1-pp1-dp1/rank/0", self.temporary(f"copy{number}"))
                self.assert_equal(ptc.load(self.temporary(f"copy{number}")), expected)
                state = {key: 0 for key in ("n", "epoch") if key in expected}
                if state:
                    self.assert_equal(self.dcp_load(dict(state), path), {key: expected[key] for key in state})

    def test_files_of_npy(self):
        job = ptc.Job.create(self.mount.path + "/npy")
        arrays = {"layers.0.w": np.arange(6, dtype="<f4").reshape(2, 3), "flag": np.array([True, False]), "a/b": np.array(3)}
        for name, array in arrays.items():
            path = job.incoming("a") + "/rank/0/" + name.replace("/", "%2F").replace(".", "/") + ".npy"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            np.save(path, array)
        bits = torch.rand(4).to(torch.bfloat16)
        np.save(job.incoming("a") + "/rank/0/half.npy", bits.view(torch.uint16).numpy())
        os.setxattr(job.incoming("a") + "/rank/0/half.npy", "user.ptc.dtype", b"BF16")
        path = ptc.commit(job.incoming("a"))
        self.assert_equal(ptc.load(path), {"model": {"half": bits, **{name: torch.from_numpy(array) for name, array in arrays.items()}}})
        self.assertEqual(ptc.load(path, numpy=True)["model"]["layers.0.w"].tolist(), arrays["layers.0.w"].tolist())
        np.save(self.temporary("turned.npy"), np.asfortranarray(arrays["layers.0.w"]))
        with self.assertRaisesRegex(ValueError, "turned.npy: its order is Fortran's"):
            ptc.load(self.scratch)

    def test_a_folder_of_deepspeed(self):
        """The model's file is of torch's, the optimizer's of safetensors."""
        job = ptc.Job.create(self.mount.path + "/deepspeed")
        weight, top = torch.rand(4, 2), job.incoming("a") + "/universal/"
        os.makedirs(top + "zero/a.w")
        torch.save({"module": {"a.w": weight}, "param_shapes": [{"a.w": weight.shape}], "global_steps": 3}, top + "mp_rank_00_model_states.pt")
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"cat_dim": 0, "param": weight}, f"{top}zero/a.w/{kind}.pt")
        state = ptc.load(ptc.commit(job.incoming("a")))
        self.assert_equal(state["optim"], {f"a.w.{kind}": weight for kind in ("fp32", "exp_avg", "exp_avg_sq")})
        self.assert_equal(state["model_states"]["module"], {"a.w": weight})

    def test_directories_elsewhere_that_are_none(self):
        """Nothing below one is loaded that happens to have tensors in it; what was copied out of the mount is."""
        top = self.temporary("all-kinds")
        os.makedirs(top + "/a")
        torch.save({"w": torch.ones(2)}, top + "/a/model.pt")
        models.write_file(top + "/notes.org", "x")
        with self.assertRaisesRegex(FileNotFoundError, "this is no checkpoint: no ptc.json, config.json .* below it is notes.org"):
            ptc.load(top)
        os.remove(top + "/notes.org")
        models.write_file(top + "/b/run.py", "x")
        with self.assertRaisesRegex(FileNotFoundError, "below it is b/run.py"):
            ptc.load(top)
        self.assertRaisesRegex(FileNotFoundError, "no checkpoint|no tensors are here", ptc.load, self.mount.path)
        job = ptc.Job.create(self.mount.path + "/copied")
        job.save({"a": {"b": torch.ones(2)}}, "a")
        for way in ("--model", "--layout=current"):
            self.mount.ptc("export", "copied", self.temporary("out" + way), way)
        self.assert_equal(ptc.load(self.temporary("out--model")), {"model": {"b": torch.ones(2)}})
        self.assert_equal(ptc.load(self.temporary("out--layout=current")), {"a": {"b": torch.ones(2)}})

    def test_places_that_are_none(self):
        job = ptc.Job.create(self.mount.path + "/places")
        job.save({"w": torch.ones(2)}, "a")
        for place in ("checkpoints", "checkpoints/a/layouts", "current/rank", "dataset"):
            with self.subTest(place), self.assertRaisesRegex(FileNotFoundError, "this is neither a job"):
                ptc.load(job.file(place), rank=0)
        for place in ("", "checkpoints/a", "current"):
            with self.subTest(place), self.assertRaisesRegex(FileNotFoundError, "no rank 9 of 1"):
                ptc.load(job.file(place), rank=9)
        with self.assertRaisesRegex(FileNotFoundError, "in no checkpoint"):
            ptc.Checkpoint(job.file("dataset"))
        for place in ("", "incomming/x", "checkpoints/b"):
            with self.subTest(place), self.assertRaisesRegex(ValueError, "not in its incoming/"):
                ptc.save({"w": torch.ones(2)}, job.file(place))
        with self.assertRaisesRegex(FileNotFoundError, "ptc.Job.create"):
            ptc.Job(self.mount.path + "/nobody_made_it")


class InPlace(ranks.TestCase):
    """What would be computed is read from where its bytes lie, into memory of the process."""
    LAYOUTS = ({"tp": 8}, {"tp": 1}, {"tp": 2, "pp": 2, "dp": 2}, {"dp": 4, "optimizer": "fsdp"},
               {"tp": 2, "dp": 3, "optimizer": "zero1"}, {"tp": 4})

    def setUp(self):
        """A Llama and its moments, stored as four ranks of tensor parallelism have them."""
        super().setUp()
        model = models.Llama()
        torch.manual_seed(7)
        weights = {tensor.name: torch.rand(tensor.shape).to(torch.bfloat16) for tensor in model.tensors}
        moments = {name: {"exp_avg": torch.rand(value.shape), "step": torch.tensor(3.0)} for name, value in weights.items()}
        self.job = ptc.Job.create(f"{self.mount.path}/in_place_{self.id().rpartition('.')[2]}")
        self.job.save({"model": weights, "optim": {"state": moments}, "step": 3}, "a", files={"config.json": model.config})
        self.layouts = []  # by their names, of which some are known once the layout was in force
        for sizes in self.LAYOUTS:
            self.job.set_layout({"tp": 1, "pp": 1, "dp": 1, **sizes})
            self.layouts.append(os.path.basename(self.job.current))

    def gathered(self):
        with open(self.mount.path + "/.ptc/metrics", encoding="utf-8") as file:
            return sum(float(line.split()[-1]) for line in file if line.startswith("ptcfs_gather_cache_gathered_bytes_total"))

    def paths(self):
        """Of each rank of each layout: its directory, and whether it is stored as it is."""
        for name in self.layouts:
            where = self.job.file("checkpoints/a/layouts/" + name)
            for rank in range(len(os.listdir(where + "/rank"))):
                yield f"{where}/rank/{rank}", name == self.layouts[-1]

    def test_equals_what_is_computed(self):
        before = self.gathered()
        copies = {path: ptc.load(path, copy=True) for path, _ in self.paths()}
        self.assertEqual(self.gathered(), before)
        for path, stored in self.paths():
            with self.subTest(path):
                self.assert_equal(copies[path], ptc.load(path))
                described = json.loads(mount.read_text(path + "/.sources.json"))
                self.assertEqual(sorted(described["files"]), [] if stored else ["model.safetensors", "optim.safetensors"])
                self.assertNotIn(".sources.json", os.listdir(path))
        self.assertGreater(self.gathered(), before)

    def test_one_tensor_after_the_other(self):
        """As it is done for a device."""
        for path, stored in self.paths():
            with self.subTest(path), in_place.sources_of(path) or contextlib.nullcontext() as sources:
                self.assertEqual(sources is None, stored)
                for name, described in (sources.files if sources else {}).items():
                    file = in_place.Gathered(f"{path}/{name}", sources, described, at_once=False)
                    mapped = ptc.safetensors.Mapped(f"{path}/{name}")
                    self.assertEqual(file.entries, mapped.entries)
                    for tensor in reversed(list(file.entries)):
                        self.assert_equal(file.tensor(tensor), mapped.tensor(tensor))

    def test_boxes_of_tensors(self):
        """Any, of a checkpoint that is stored in any layout: by the whole, which the daemon computes."""
        seed = time.time_ns() % 1000000
        rng = random.Random(seed)

        def some(shape):
            begin = tuple(rng.randrange(extent + 1) for extent in shape)
            return ptc.Box(begin, tuple(rng.randrange(extent - first + 1) for first, extent in zip(begin, shape)))
        for sizes in self.LAYOUTS:
            self.job.set_layout({"tp": 1, "pp": 1, "dp": 1, **sizes})
            before = self.gathered()
            checkpoint = ptc.Checkpoint(self.job.path)
            copies = []
            for info in checkpoint.tensors.values():
                for part in (ptc.Box((0,) * len(info.shape), info.shape), *(some(info.shape) for _ in range(3))):
                    copy = torch.full(part.shape, -1.0, dtype=torch.float64)
                    checkpoint.copy_into(copy, info, part)
                    copies.append((info, part, copy, checkpoint.read(info, part)))
            if sizes.get("optimizer") != "zero1":  # which cuts moments flat
                self.assertEqual(self.gathered(), before)
            for info, part, copy, view in copies:
                with self.subTest(seed=seed, layout=sizes, tensor=info.name, part=part):
                    whole = torch.from_numpy(np.load(f"{checkpoint.path}/{info.path}").view(
                        {"BF16": np.uint16, "F32": np.float32}[info.dtype]))
                    whole = whole.view(torch.bfloat16) if info.dtype == "BF16" else whole
                    self.assert_equal(copy, whole[part.slices].double())
                    self.assert_equal(view.double(), copy)

    def test_without_torch(self):
        """By NumPy; numbers only, as it has no bfloat16."""
        text = ("import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1]); import ptc, numpy\n"
                "for path in sys.argv[2:]:\n"
                "    one, two = ptc.load(path, copy=True), ptc.load(path)\n"
                "    for name in two['model']: assert numpy.array_equal(one['model'][name], two['model'][name]), name\n"
                "    assert one['optim']['state'].keys() == two['optim']['state'].keys()\n")
        subprocess.run([sys.executable, "-c", text, ranks.PACKAGE, *(path for path, _ in self.paths())], check=True)

    def test_is_memory_of_its_own(self):
        """Also while the layout changes, and after the checkpoint is gone."""
        path = self.job.file("checkpoints/a/layouts/tp2-pp1-dp1/rank/1")
        expected = {name: value.clone() for name, value in ptc.load(path)["model"].items()}
        stored = ptc.load(self.job.path, rank=2, copy=True)["model"]
        of_stored = {name: value.clone() for name, value in ptc.load(self.job.path, rank=2)["model"].items()}
        self.job.set_layout(wait=False, tp=2)
        loaded = [ptc.load(path, copy=True)["model"] for _ in range(5)]
        self.job.wait()
        shutil.rmtree(self.job.file("checkpoints/a"))
        for one in loaded:
            self.assert_equal(one, expected)
        self.assert_equal(stored, of_stored)

    def test_of_a_file_nobody_can_read(self):
        """Who may not read all of the rank's files is not told where they lie."""
        path = self.job.file("checkpoints/a/layouts/tp2-pp1-dp1/rank/1")
        self.assertEqual(os.stat(path + "/.sources.json").st_mode & 0o777, os.stat(path + "/model.safetensors").st_mode & 0o777)
        with self.assertRaises(OSError):
            open(path + "/.sources.json", "w", encoding="utf-8")


class InPlaceOfWhat(ranks.TestCase):
    """What is read from where it lies is of the checkpoint that was asked for, as it was committed."""

    def job_of(self, state, **options):
        job = ptc.Job.create(f"{self.mount.path}/{self.id().rpartition('.')[2]}")
        job.save({"model": state}, "a", **options)
        return job

    def test_who_writes_to_what_was_read(self):
        """Changes nothing that is read then."""
        checkpoint = ptc.Checkpoint(self.job_of({"w": torch.arange(8.).view(4, 2)}).path)
        checkpoint.read("w").mul_(2)
        into = torch.empty(4, 2)
        checkpoint.copy_into(into, "w")
        checkpoint.read("w").zero_()
        self.assert_equal(into, torch.arange(8.).view(4, 2))
        self.assert_equal(checkpoint.read("w"), into)

    def test_a_tensor_of_another_checkpoint(self):
        """By its name, and not by its number there."""
        job = self.job_of({"b": torch.ones(4), "c": torch.full((4,), 2.)})
        job.save({"model": {"a": torch.zeros(4), "b": torch.full((4,), 3.), "c": torch.full((4,), 4.)}}, "b")
        info = ptc.Checkpoint(job.file("checkpoints/a")).info("b")
        self.assertEqual(ptc.Checkpoint(job.file("checkpoints/b")).read(info).tolist(), [3.] * 4)

    def test_another_of_the_name(self):
        """Is not read by what the first said of its bytes, nor the first by what the second says."""
        job = self.job_of({"b": torch.ones(4), "c": torch.full((4,), 2.)})
        first, told = (ptc.Checkpoint(job.file("checkpoints/a")) for _ in range(2))
        parts = in_place.Parts(told.path, told._committed)  # pylint: disable=protected-access
        job.set_layout(tp=1, pp=1, dp=2, optimizer="fsdp")
        where = job.file("checkpoints/a/layouts/tp1-pp1-dp1/rank/0")
        text, committed = in_place._said(where)  # pylint: disable=protected-access
        job.set_layout(tp=1, pp=1, dp=1)
        state = {name: torch.full((4,), float(number)) for number, name in enumerate("abc", 3)}
        job.save({"model": state}, "a", overwrite=True)
        with self.assertRaisesRegex(FileNotFoundError, "another checkpoint was committed under this name"):
            first.read("b")
        whole = ptc.Box((0,), (4,))
        with self.assertRaises(FileNotFoundError):
            parts.array(parts.of(told.info("b").number, whole)[0][0], whole, "F32", False)
        with self.assertRaises(FileNotFoundError):
            in_place.Sources(job.file("checkpoints/a"), text, committed)
        self.assert_equal(ptc.load(where, copy=True)["model"], state)

    def test_one_that_is_replaced_while_it_is_loaded(self):
        """Is not loaded as if nothing had been in it."""
        job = self.job_of({"w": torch.ones(4)})
        sources_of = in_place.sources_of

        def replaced(where):
            job.save({"model": {"w": torch.zeros(4)}}, "a", overwrite=True)
            shutil.rmtree(job.file("checkpoints/a"))
            return sources_of(where)
        self.addCleanup(setattr, in_place, "sources_of", sources_of)
        in_place.sources_of = replaced
        with self.assertRaises(FileNotFoundError):
            ptc.load(job.file("checkpoints/a"), rank=0, copy=True)

    def test_another_of_the_name_while_it_is_loaded(self):
        """The model is not of the one, and the optimizer of the other."""
        job = ptc.Job.create(self.mount.path + "/mixed")

        def save(value):
            job.save({"model": {"w": torch.full((4,), value)}, "optim": {"w": torch.full((4,), value)}}, "a", overwrite=True)
        save(1.)
        for name, options in (("Mapped", {}), ("Mapped", {"device": "meta"}), ("copied", {"copy": True})):
            module = in_place if name == "copied" else ptc.safetensors
            read = getattr(module, name)

            def replaced(path):
                file = read(path)  # pylint: disable=cell-var-from-loop
                save(2.)
                return file
            with self.subTest(name, **options), unittest.mock.patch.object(module, name, replaced):
                with self.assertRaisesRegex(FileNotFoundError, "another checkpoint was committed under this name"):
                    ptc.load(job.path, **options)
        self.assertEqual(ptc.load(job.path)["optim"]["w"].tolist(), [2.] * 4)

    def test_another_of_the_name_while_dcp_reads_it(self):
        import torch.distributed.checkpoint as dcp
        job = ptc.Job.create(self.mount.path + "/mixed_dcp")

        def state(value):
            return {"model": {"w": torch.full((4,), value)}, "optim": {"w": torch.full((4,), value)}}
        job.save(state(1.), "a")
        copy_into = ptc.Checkpoint.copy_into

        def replaced(checkpoint, target, tensor, part=None):
            copy_into(checkpoint, target, tensor, part)
            job.save(state(2.), "a", overwrite=True)
        into = state(0.)
        with unittest.mock.patch.object(ptc.Checkpoint, "copy_into", replaced):
            with self.assertRaisesRegex(BaseException, "another checkpoint was committed under this name"):
                dcp.load(into, storage_reader=ptc.Reader(job.path), no_dist=True)
        dcp.load(into, storage_reader=ptc.Reader(job.path), no_dist=True)
        self.assert_equal(into, state(2.))

    def test_one_that_is_removed_while_it_is_loaded(self):
        """Is not loaded in part: what the optimizer has lies in a directory that is looked at last."""
        import torch.distributed.checkpoint as dcp
        job = ptc.Job.create(self.mount.path + "/removed")
        state = {"model": {"w": torch.ones(4)}, "optim": {"state": {"w": {"exp_avg": torch.zeros(4)}}}}
        dcp.save(state, storage_writer=ptc.Writer(job, "a"), no_dist=True)
        mapped = ptc.safetensors.Mapped

        def removed(path):
            file = mapped(path)
            shutil.rmtree(job.file("checkpoints/a"))
            return file
        with unittest.mock.patch.object(ptc.safetensors, "Mapped", removed), self.assertRaises(OSError):
            ptc.load(job.file("checkpoints/a"), rank=0)

    def test_boxes_and_targets_that_do_not_fit(self):
        checkpoint = ptc.Checkpoint(self.job_of({"w": torch.ones(4, 4)}).path)
        for part, shape in ((None, (8, 4)), (ptc.Box((0, 0), (1, 4)), (4, 4)), (ptc.Box((0,), (4,)), (4,)),
                            (ptc.Box((3, 0), (2, 4)), (2, 4)), (ptc.Box((-1, 0), (1, 4)), (1, 4))):
            with self.subTest(part=part), self.assertRaises(ValueError):
                checkpoint.copy_into(torch.zeros(shape), "w", part)

    def test_a_file_of_a_rank_of_that_name(self):
        """Says nothing."""
        for text in ("no JSON", "[]", "{}", '{"files": {"model.safetensors": 3}, "sources": ["/etc/passwd"]}'):
            with self.subTest(text):
                job = self.job_of({"w": torch.ones(4)}, overwrite=True, files={".sources.json": text})
                path = job.file("checkpoints/a/layouts/tp1-pp1-dp1/rank/0")
                self.assertEqual(mount.read_text(path + "/.sources.json"), text)
                self.assert_equal(ptc.load(path, copy=True)["model"], {"w": torch.ones(4)})

    def test_more_files_than_a_process_may_open(self):
        whole = torch.arange(4096 * 4.).view(4096, 4)
        job = self.job_of({"w": whole})
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for number in (150, 300):
            job.set_layout(tp=1, pp=1, dp=number, optimizer="fsdp")
            checkpoint = ptc.Checkpoint(job.path)
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
            for row in range(0, 4096, 8):
                into = torch.empty(8, 4)
                checkpoint.copy_into(into, "w", ptc.Box((row, 0), (8, 4)))
                self.assert_equal(into, whole[row:row + 8])
            self.assert_equal(ptc.load(job.file("checkpoints/a/layouts/tp1-pp1-dp1"), rank=0, copy=True)["model"]["w"], whole)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def test_what_is_removed(self):
        """Takes no memory, though the Checkpoint that was copied from is there still."""
        job = self.job_of({"w": torch.ones(8 << 20)})
        checkpoint, into = ptc.Checkpoint(job.path), torch.empty(8 << 20)
        for copy in (lambda: checkpoint.copy_into(into, "w"), lambda: checkpoint.fill({"w": into})):
            copy()
            with open("/proc/self/maps", encoding="utf-8") as file:
                self.assertEqual([line for line in file if self.mount.path in line], [])

        def free():
            stat = os.statvfs(self.mount.path)
            return stat.f_bavail * stat.f_frsize
        before = free()
        shutil.rmtree(job.file("checkpoints/a"))
        deadline = time.monotonic() + 20
        while free() < before + (16 << 20):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_a_kernel_that_gives_no_pages_ahead(self):
        """Before Linux 5.14 it knows no MADV_POPULATE_WRITE: it is asked once, and all is read as it comes."""
        pages = in_place._Pages  # pylint: disable=protected-access
        whole = torch.arange(1 << 20)
        path = self.job_of({"w": whole}).file("checkpoints/a/layouts")
        for name in ("_madvise", "_POPULATE_WRITE"):
            self.addCleanup(setattr, pages, name, getattr(pages, name))
        pages._madvise, pages._POPULATE_WRITE = None, 9999  # pylint: disable=protected-access
        for _ in range(2):
            for rank in ("tp1-pp1-dp1/rank/0", "tp1-pp1-dp2/rank/1"):
                self.assert_equal(ptc.load(f"{path}/{rank}", copy=True)["model"]["w"], whole)
            self.assertIs(pages._madvise, False)  # pylint: disable=protected-access

    def test_threads_of_which_one_gets_no_pages_ahead(self):
        """It is refused while another is about to ask."""
        pages, address = in_place._Pages, in_place.ctypes.addressof  # pylint: disable=protected-access
        self.addCleanup(setattr, pages, "_madvise", pages._madvise)  # pylint: disable=protected-access

        def refused(memory):
            pages._madvise = False  # pylint: disable=protected-access
            return address(memory)
        with unittest.mock.patch.object(in_place.ctypes, "addressof", refused):
            for known in (None, False):
                pages._madvise = known  # pylint: disable=protected-access
                pages.take(memoryview(in_place.memory_of(1 << 20)))

    def test_under_another_default_device(self):
        """As where a model is made without memory: what is read lies in memory all the same."""
        self.run_ranks(2, """
mesh, checkpoint = init_device_mesh("cpu", (2,)), ptc.Checkpoint(path)
with torch.device("meta"):
    read = checkpoint.dtensor("w", mesh, [Replicate()]).to_local()
assert read.tolist() == list(range(8)), read
""", self.job_of({"w": torch.arange(8.)}).path)

    def test_a_checkpoint_for_another_process(self):
        """It can be sent there, as before something was read."""
        checkpoint = ptc.Checkpoint(self.job_of({"w": torch.ones(4)}).path)
        into = torch.empty(4)
        checkpoint.copy_into(into, "w")
        self.assert_equal(pickle.loads(pickle.dumps(checkpoint)).read("w"), into)

    def test_padding_that_is_kept(self):
        """It is no tensor's, and has a number behind those of tensors."""
        job, model = self.mount.job("padding"), models.Llama()
        job.set_layout(tp=2)
        model.write_ranks(job.incoming("a"), 2, 1)
        path = job.incoming("a") + "/rank/1/model.safetensors"
        tensors = models.read_safetensors(path)
        tensors["lm_head.weight"].data = tensors["lm_head.weight"].data[:-2 * model.hidden] + b"?" * (2 * model.hidden)
        models.write_safetensors(path, list(tensors.values()))
        job.commit("a")
        expected = next(tensor for tensor in model.tensors if tensor.name == "lm_head.weight")
        for sizes in ({"tp": 2}, {"tp": 1}, {"tp": 4}):
            job.set_layout(**sizes)
            found = ptc.Checkpoint(job.path).read("lm_head.weight")
            self.assertEqual(tuple(found.shape), expected.shape)
            self.assertEqual(bytes(found.contiguous().view(torch.uint8).flatten().tolist()), expected.data)

    def test_of_torch_save(self):
        """A copy is not of the file's pages."""
        job = self.mount.job("of_torch_save")
        os.makedirs(job.incoming("a") + "/rank/0")
        torch.save({"w": torch.ones(1000)}, job.incoming("a") + "/rank/0/state.pt")
        job.commit("a")
        for copy in (False, True):
            tensor = ptc.load(job.file("checkpoints/a"), copy=copy)["w"]
            with open("/proc/self/maps", encoding="utf-8") as file:
                mapped = [line for line in file if "state.pt" in line]
            self.assertEqual(bool(mapped), not copy)
            self.assert_equal(tensor, torch.ones(1000))
            del tensor


if __name__ == "__main__":
    mount.main()
