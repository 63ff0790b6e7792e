"""What torch.save and dcp.save wrote, committed as it is: cut under other layouts, and loaded again by torch."""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

import models
import mount

torch = mount.require("torch")

SAVE_DCP = """
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
rank, path, meet = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=3)
mesh = init_device_mesh("cpu", (3,))
state = torch.load(meet + ".pt", weights_only=True)
def cut(value, number=[0]):
    if isinstance(value, dict): return {key: cut(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor) or value.dim() == 0: return value
    number[0] += 1
    return distribute_tensor(value, mesh, [(Shard(0), Shard(value.dim() - 1), Replicate())[number[0] % 3]])
dcp.save({key: cut(value) for key, value in state.items()}, checkpoint_id=path)
# All have saved; then at once, because threads of PyTorch's own can abort a process that is taken apart.
open(f"{meet}.{rank}", "w").close()
while not all(os.path.exists(f"{meet}.{other}") for other in range(3)): time.sleep(0.01)
os._exit(0)
"""

LOAD_DCP = """
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
rank, path, meet = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
expected = torch.load(meet + ".pt", weights_only=True)
def walk(value, do):
    if isinstance(value, dict): return {key: walk(item, do) for key, item in value.items()}
    return do(value)
def cut(value, number=[0]):
    if not isinstance(value, torch.Tensor) or value.dim() == 0: return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
    number[0] += 1
    return distribute_tensor(torch.zeros_like(value), mesh, [(Shard(0), Shard(value.dim() - 1), Replicate())[number[0] % 3]])
state = walk(expected, cut)
dcp.load(state, checkpoint_id=path)
def compare(found, wanted, at):
    if isinstance(wanted, dict): return [compare(found[key], item, f"{at}.{key}") for key, item in wanted.items()]
    if isinstance(found, DTensor): found = found.full_tensor()
    same = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
    assert same, at
compare(state, expected, "state")
open(f"{meet}.{rank}", "w").close()
while not all(os.path.exists(f"{meet}.{other}") for other in range(2)): time.sleep(0.01)
os._exit(0)
"""

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LAYOUTS = {"tp1-pp1-dp1": (1, 1), "tp2-pp1-dp1": (2, 1), "tp4-pp1-dp1": (4, 1), "tp1-pp2-dp1": (1, 2), "tp2-pp3-dp1": (2, 3)}


def to_torch(tensor):
    return torch.frombuffer(bytearray(tensor.data), dtype=TYPES[tensor.dtype]).view(tensor.shape)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def by_name(tensors):
    return {tensor.name: to_torch(tensor) for tensor in tensors}


def moments(weights):
    """Adam's, of other values than the weights and other values than each other."""
    return {name: {"step": torch.tensor(3.), "exp_avg": weight.float() * 2, "exp_avg_sq": weight.float() * 3}
            for name, weight in weights.items()}


def state(weights, rank):
    torch.manual_seed(rank)
    return {"model": weights,
            "optim": {"state": moments(weights), "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(weights)}]},
            "iteration": 7, "rng_state": [torch.get_rng_state(), rank], "args": {"name": "llama"}}


class Checkpoints(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.model = models.Llama()

    def save(self, job, value, rank=0, name="model.pt", checkpoint="base", **options):
        path = job.incoming(checkpoint) + f"/rank/{rank}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(value, path, **options)
        return path

    def save_ranks(self, job, tp, pp=1, make=state):
        for rank in range(tp * pp):
            self.save(job, make(by_name(self.model.rank_tensors(tp, pp, rank % tp, rank // tp)), rank), rank)
        models.write_file(job.incoming("base") + "/rank/0/config.json", self.model.config_text())

    def expect_tensors(self, found, expected):
        self.assertEqual(sorted(found), sorted(expected))
        for name, tensor in expected.items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape), name)
            self.assertEqual(bits(found[name]), bits(tensor), name)

    def expect_read(self, found, expected):
        """What models.py has read."""
        self.assertEqual(sorted(found), sorted(expected))
        for name, tensor in expected.items():
            self.assertEqual((found[name].shape, found[name].data), (tuple(tensor.shape), bits(tensor)), name)

    def expect_state(self, job, layout, tp, pp, written_ranks):
        for rank in range(tp * pp):
            loaded = torch.load(job.rank_file("base", layout, rank, "model.pt"), mmap=True, weights_only=True)
            weights = by_name(self.model.rank_tensors(tp, pp, rank % tp, rank // tp))
            self.expect_tensors(loaded["model"], weights)
            self.assertEqual(sorted(loaded["optim"]["state"]), sorted(weights))
            for name, expected in moments(weights).items():
                self.expect_tensors(loaded["optim"]["state"][name], expected)
            self.assertEqual(loaded["iteration"], 7)
            self.assertEqual(loaded["args"], {"name": "llama"})
            group, = loaded["optim"]["param_groups"]
            self.assertEqual((group["lr"], group["betas"]), (0.1, (0.9, 0.95)))
            self.assertEqual(sorted(group["params"]), sorted(weights))
            generator, owner = loaded["rng_state"]
            torch.manual_seed(owner)
            self.assertEqual(bits(generator), bits(torch.get_rng_state()))
            self.assertIn(owner, written_ranks)

    def expect_whole(self, job):
        """hf/ and model/."""
        self.assertEqual(models.read_hf(job.checkpoint("base", "hf")), {tensor.name: tensor for tensor in self.model.tensors})
        for tensor in self.model.tensors:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data), tensor.name)
        self.mount.ptc("verify", job.name)


class Saved(Checkpoints):
    """What each rank wrote with torch.save."""

    def test_ranks_of_tensor_parallelism(self):
        job = self.new_job()
        job.set_layout(tp=2)
        self.save_ranks(job, 2)
        written = [mount.read_bytes(job.incoming("base") + f"/rank/{rank}/model.pt") for rank in range(2)]
        job.commit("base")
        self.expect_whole(job)
        for rank in range(2):
            self.assertEqual(mount.read_bytes(job.rank_file("base", "tp2-pp1-dp1", rank, "model.pt")), written[rank])
        for layout in ("tp2-pp1-dp1", "tp1-pp1-dp1", "tp4-pp1-dp1"):
            self.expect_state(job, layout, *LAYOUTS[layout], range(2))
        job.set_layout(tp=4)
        self.expect_state(job, "tp4-pp1-dp1", 4, 1, range(2))
        self.expect_whole(job)
        self.expect_state(job, "tp2-pp1-dp1", 2, 1, range(2))
        job.set_layout(tp=2)  # the very bytes again
        for rank in range(2):
            self.assertEqual(mount.read_bytes(job.rank_file("base", "tp2-pp1-dp1", rank, "model.pt")), written[rank])
        self.expect_whole(job)

    def test_a_backup_is_brought_back(self):
        """A copy of the ranks' directories. Their tensors/ is what ptcfs shows of the very same."""
        job, other = self.mount.job("saved"), self.mount.job("brought-back")
        job.set_layout(tp=2)
        self.save_ranks(job, 2)
        job.commit("base")
        shutil.copytree(job.file("current/rank"), other.incoming("base") + "/rank", copy_function=shutil.copyfile)
        shutil.copyfile(job.file("layout.json"), other.incoming("base") + "/layout.json")
        other.commit("base")
        other.set_layout(tp=2)
        other.wait()
        ours, theirs = (mount.digests(one.checkpoint("base", "layouts", "tp2-pp1-dp1")) for one in (job, other))
        self.assertEqual(theirs, ours)
        self.expect_whole(other)
        self.expect_state(other, "tp4-pp1-dp1", 4, 1, range(2))

    def test_stages_of_a_pipeline(self):
        job = self.new_job()
        job.set_layout(tp=2, pp=2)
        self.save_ranks(job, 2, 2)
        job.commit("base")
        self.expect_whole(job)
        for layout, (tp, pp) in LAYOUTS.items():
            self.expect_state(job, layout, tp, pp, range(4))
        job.set_layout(tp=2, pp=3)
        self.expect_state(job, "tp2-pp3-dp1", 2, 3, range(4))
        self.expect_whole(job)

    def sharded(self, rank, ranks=2, groups=1):
        """What FSDP2's rank has: rows of each tensor, as DTensors; with HSDP each group of so many has the same."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        torch.distributed.init_process_group("fake", rank=rank, world_size=groups * ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (groups, ranks) if groups > 1 else (ranks,))
        placements = [Replicate(), Shard(0)] if groups > 1 else [Shard(0)]
        at = rank % ranks

        def cut(value):
            if isinstance(value, dict):
                return {key: cut(item) for key, item in value.items()}
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                return value
            step = -(-value.shape[0] // ranks)
            return DTensor.from_local(value[at * step:][:step].clone(), mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
        try:
            return cut(state(by_name(self.model.tensors), rank))
        finally:
            torch.distributed.destroy_process_group()

    def test_local_shards_of_hybrid_sharding(self):
        job = self.new_job()
        job.set_layout(dp=4, optimizer="fsdp", dp_shard=2)
        for rank in range(4):
            self.save(job, self.sharded(rank, 2, 2), rank)
        models.write_file(job.incoming("base") + "/rank/0/config.json", self.model.config_text())
        written = [mount.read_bytes(job.incoming("base") + f"/rank/{rank}/model.pt") for rank in range(4)]
        job.commit("base")
        self.expect_whole(job)
        current = job.file("current", "rank")
        self.assertEqual([mount.read_bytes(f"{current}/{rank}/model.pt") for rank in range(2)], written[:2])
        for layout in ("tp1-pp1-dp1", "tp2-pp1-dp1", "tp2-pp3-dp1"):
            self.expect_state(job, layout, *LAYOUTS[layout], range(2))
        job.set_layout(dp=6, optimizer="fsdp", dp_shard=3)
        norm = "model.norm.weight"
        parts = [torch.load(f"{current}/{rank}/model.pt", weights_only=True)["model"][norm] for rank in range(6)]
        for first, second in zip(parts[:3], parts[3:]):
            self.assertTrue(torch.equal(first, second))
        self.assertTrue(torch.equal(torch.cat(parts[:3]), state(by_name(self.model.tensors), 0)["model"][norm]))
        self.assertEqual([mount.digests(f"{current}/{rank}/tensors") for rank in range(3)],
                         [mount.digests(f"{current}/{rank}/tensors") for rank in range(3, 6)])
        self.expect_whole(job)

    def test_local_shards_of_dtensors(self):
        job = self.new_job()
        job.set_layout(dp=2, optimizer="fsdp")
        for rank in range(2):
            self.save(job, self.sharded(rank), rank)
        models.write_file(job.incoming("base") + "/rank/0/config.json", self.model.config_text())
        job.commit("base")
        self.expect_whole(job)
        for layout in ("tp1-pp1-dp1", "tp2-pp1-dp1", "tp2-pp3-dp1"):
            self.expect_state(job, layout, *LAYOUTS[layout], range(2))
        job = self.mount.job("said-otherwise")
        self.save(job, self.sharded(0))
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in ("is a DTensor that says it is [0:", "under layout tp1-pp1-dp1", "cuts like, take dcp.save"):
            self.assertIn(reason, job.commit_error("base"))
        job = self.mount.job("replicas-of-rows")
        job.set_layout(dp=4, optimizer="fsdp")
        for rank in range(4):
            self.save(job, self.sharded(rank, 2, 2), rank)
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn('with HSDP "dp_shard" says among how many ranks', job.commit_error("base"))

    def test_local_shards_of_two_axes(self):
        """FSDP2 cuts what tensor parallelism has left of each tensor."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard
        from torch.testing._internal.distributed.fake_pg import FakeStore
        self.model = type("Even", (models.Llama,), {"vocab": 512, "config": {**models.Llama.config, "vocab_size": 512}})()  # without padding
        shapes = {tensor.name: tensor.shape for tensor in self.model.tensors}

        def sharded(rank):
            torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

            def cut(name, value):
                whole = torch.Size(shapes[name])
                axis = next((axis for axis, extent in enumerate(whole) if extent != value.shape[axis]), None)
                tp = Replicate() if axis is None else Shard(axis)
                step = -(-value.shape[0] // 2)
                return DTensor.from_local(value[rank // 2 * step:][:step].clone(), mesh, [_StridedShard(0, split_factor=2) if axis == 0 else Shard(0), tp],
                                          run_check=False, shape=whole, stride=torch.empty(whole, device="meta").stride())
            weights = by_name(self.model.rank_tensors(2, 1, rank % 2, 0))
            try:
                return {"model": {name: cut(name, tensor) for name, tensor in weights.items()}}
            finally:
                torch.distributed.destroy_process_group()
        job = self.new_job()
        job.set_layout(tp=2, dp=2, optimizer="fsdp")
        for rank in range(4):
            self.save(job, sharded(rank), rank)
        models.write_file(job.incoming("base") + "/rank/0/config.json", self.model.config_text())
        job.commit("base")
        self.expect_whole(job)
        for rank in range(4):
            loaded = torch.load(job.rank_file("base", "tp4-pp1-dp1", rank, "model.pt"), mmap=True, weights_only=True)
            self.expect_tensors(loaded["model"], by_name(self.model.rank_tensors(4, 1, rank, 0)))

    def test_names(self):
        """What encloses the model is no part of its names, and is there again under every layout."""
        tensor = torch.arange(8.).reshape(4, 2)
        for number, value in enumerate(({"layers.0.w": tensor}, {"model": {"layers.0.w": tensor}}, {"state_dict": {"module.layers.0.w": tensor}},
                                        {"model": {"module": {"layers": [{"w": tensor}]}}}, {"_orig_mod.layers.0.w": tensor})):
            with self.subTest(number):
                job = self.mount.job(f"names-{number}")
                models.write_file(job.file("rules.json"), '{"format": "ptc-rules/1", "family": "mine", "rules": ['
                                  '{"names": ["layers.{layer}.w"], "cut": {"axis": 0}}]}')
                self.save(job, value, name="a.pth")
                job.commit("base")
                self.assertEqual(models.read_npy(job.checkpoint("base", "model/layers/0/w.npy")), ((4, 2), bits(tensor)))
                half = torch.load(job.rank_file("base", "tp2-pp1-dp1", 1, "a.pth"), mmap=True, weights_only=True)
                while not isinstance(half, torch.Tensor):
                    value, = value.values() if isinstance(value, dict) else value
                    half, = half.values() if isinstance(half, dict) else half
                self.assertEqual(half.tolist(), tensor[2:].tolist())

    def test_tied_weights_and_views(self):
        weight = torch.arange(12.).reshape(6, 2)
        both = torch.arange(10.)
        job = self.new_job()
        self.save(job, {"a.weight": weight, "b.weight": weight, "c.weight": weight.view(6, 2), "one": both[:4], "other": both[4:8],
                        "empty": torch.empty(0, 3), "scalar": torch.tensor(5), "flag": torch.tensor(True)}, name="pytorch_model.bin")
        written = mount.read_bytes(job.incoming("base") + "/rank/0/pytorch_model.bin")
        job.commit("base")
        for name, tensor in (("b/weight", weight), ("c/weight", weight), ("other", both[4:8])):
            self.assertEqual(models.read_npy(job.checkpoint("base", f"model/{name}.npy")), (tuple(tensor.shape), bits(tensor)))
        self.mount.ptc("verify", job.name)
        self.assertEqual(mount.read_bytes(job.rank_file("base", "tp1-pp1-dp1", 0, "pytorch_model.bin")), written)

    def test_what_has_no_tensors_is_kept(self):
        job = self.new_job()
        self.save(job, {"w": torch.ones(2)})
        kept = {"training_args.bin": {"lr": 0.1}, "rng_state.pth": {"cpu": torch.get_rng_state()}, "state.pt": torch.ones(3)}
        for name, value in kept.items():
            self.save(job, value, name=name)
        models.write_file(job.incoming("base") + "/rank/0/vocab.bin", b"PKnot")
        written = {name: mount.read_bytes(job.incoming("base") + "/rank/0/" + name) for name in [*kept, "vocab.bin"]}
        job.commit("base")
        for name, content in written.items():
            self.assertEqual(mount.read_bytes(job.rank_file("base", "tp1-pp1-dp1", 0, name)), content, name)
        self.assertEqual(os.listdir(job.checkpoint("base", "model")), ["w.npy"])

    RULES = ('{"format": "ptc-rules/1", "family": "mine", "rules": ['
             '{"names": ["layers.{layer}.w"], "cut": {"axis": 0}}]}')

    @staticmethod
    def stage(*layers):
        """A state with values that are no tensors at all depths, and under keys of many kinds."""
        names = [f"layers.{layer}.w" for layer in layers]
        tensors = {layer: torch.full((4, 2), float(layer)) for layer in layers}
        return {"model": {"layers": {layer: {"w": tensors[layer], "meta": {"deep": [layer], "none": {}}, (1, layer): "pair", 0.5: None}
                                     for layer in layers}},
                "optim": {"state": {name: {"exp_avg": tensor * 2, "step": 3} for name, tensor in zip(names, tensors.values())},
                          "param_groups": [{"lr": 0.1, "params": names, "betas": (0.9, 0.95)}]},
                "args": {"empty": [], "list": [{"a": 1}, {"b": ()}], None: {True: b"x"}}}

    def equal(self, found, expected, at="state"):
        self.assertIs(type(found), type(expected), at)
        if isinstance(expected, dict):
            self.assertEqual(set(found), set(expected), at)
            for key, value in expected.items():
                self.equal(found[key], value, f"{at}[{key!r}]")
        elif isinstance(expected, torch.Tensor):
            self.assertEqual(found.tolist(), expected.tolist(), at)
        else:
            self.assertEqual(found, expected, at)

    def test_what_is_beside_tensors(self):
        """When stages change nothing is lost of it, and what belongs to tensors goes where these go."""
        for written in (1, 2, 4):
            job = self.mount.job(f"beside-{written}")
            models.write_file(job.file("rules.json"), self.RULES)
            job.set_layout(pp=written)
            each = 4 // written
            for rank in range(written):
                self.save(job, self.stage(*range(rank * each, rank * each + each)), rank)
            job.commit("base")
            for stages in (1, 2, 4):
                each = 4 // stages
                for rank in range(stages):
                    with self.subTest(f"{written} to {stages}, {rank}"):
                        found = torch.load(job.rank_file("base", f"tp1-pp{stages}-dp1", rank, "model.pt"), weights_only=True)
                        self.equal(found, self.stage(*range(rank * each, rank * each + each)))

    def test_values_only_one_stage_has(self):
        job = self.new_job()
        models.write_file(job.file("rules.json"), self.RULES)
        job.set_layout(pp=2)
        for rank in range(2):
            self.save(job, {**self.stage(rank), f"only-{rank}": {"x": rank}, "of": rank, "list": [rank] * (rank + 1), "late": [{}, {"y": 1}][rank]}, rank)
        job.commit("base")
        found = torch.load(job.rank_file("base", "tp1-pp1-dp1", 0, "model.pt"), weights_only=True)
        self.equal(found, {**self.stage(0, 1), "only-0": {"x": 0}, "only-1": {"x": 1}, "of": 0, "list": [0], "late": {"y": 1}})

    def test_more_beside_tensors_than_is_kept(self):
        job = self.mount.job("beside-too-much")
        models.write_file(job.file("rules.json"), self.RULES)
        job.set_layout(tp=4)
        for rank in range(4):
            self.save(job, {"layers": [{"w": torch.ones(2, 2)}], "rng": torch.zeros(140 << 20, dtype=torch.uint8)}, rank)
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in ("at most 536870912 of a checkpoint are kept", "rank/0/model.pt has 14680"):
            self.assertIn(reason, job.commit_error("base"))
        job = self.mount.job("beside-many-times")
        models.write_file(job.file("rules.json"), self.RULES)
        self.save(job, {"layers": [{"w": torch.ones(4096, 2)}], "rng": torch.zeros(20 << 20, dtype=torch.uint8)})
        job.commit("base")
        self.assertEqual(mount.error_of(lambda: job.save_layout(dp=256, optimizer="fsdp")), "EINVAL")
        self.assertIn("each of 256 files has as many", job.status()["last_error"]["what"])

    def test_inside_a_key_of_any_name(self):
        """{"app": {"model": …, "optim": …}}: names are without it, and the file has it as it was."""
        job = self.new_job()
        job.set_layout(tp=2)
        self.save_ranks(job, 2, make=lambda weights, rank: {"app": state(weights, rank), "step": 5})
        job.commit("base")
        self.expect_whole(job)
        self.mount.stop(kill=True)
        self.mount.start()
        for layout in ("tp1-pp1-dp1", "tp4-pp1-dp1"):
            tp, pp = LAYOUTS[layout]
            for rank in range(tp * pp):
                loaded = torch.load(job.rank_file("base", layout, rank, "model.pt"), mmap=True, weights_only=True)
                weights = by_name(self.model.rank_tensors(tp, pp, rank, 0))
                self.expect_tensors(loaded["app"]["model"], weights)
                for name, expected in moments(weights).items():
                    self.expect_tensors(loaded["app"]["optim"]["state"][name], expected)
                self.assertEqual((loaded["app"]["iteration"], loaded["step"]), (7, 5))
        job.set_layout(tp=4)
        self.expect_whole(job)

    def test_a_key_that_encloses_not_all(self):
        """Two such, or parameters beside it: nothing is left out."""
        for number, other in enumerate(({"model": {"b.w": torch.ones(2)}}, {"b.w": torch.ones(2)})):
            job = self.mount.job(f"beside-it-{number}")
            self.save(job, {"one": {"model": {"a.w": torch.ones(2)}}, "other": other})
            job.commit("base")
            names = {tensor["name"] for tensor in mount.read_json(job.checkpoint("base", "meta.json"))["tensors"]}
            self.assertEqual(names, {"one.model.a.w", f"other.{'model.' * (number == 0)}b.w"})

    def test_as_frameworks_leave_it(self):
        """Without rank/: a directory of Hugging Face's, with what its Trainer puts there; a checkpoint that is one file."""
        job = self.mount.job("trainer")
        job.set_layout(tp=2)
        top = job.incoming("base")
        self.model.write_hf(top)
        torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, top + "/optimizer.pt")
        for rank in range(2):
            torch.save({"cpu": torch.get_rng_state()}, f"{top}/rng_state_{rank}.pth")
        models.write_file(top + "/trainer_state.json", "{}")
        job.commit("base")
        self.assertEqual(mount.read_json(job.checkpoint("base", "meta.json"))["written_as"], "tp1-pp1-dp1")
        self.expect_whole(job)
        job.wait()
        for rank in range(2):
            held = {tensor.name: tensor for tensor in self.model.rank_tensors(2, 1, rank, 0)}
            self.assertEqual(models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1", rank)), held)
        job = self.mount.job("one-file")
        os.makedirs(job.incoming("base"))
        torch.save(state(by_name(self.model.tensors), 0), job.incoming("base") + "/model.pt")
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        models.write_file(job.incoming("base") + "/consumed", "12")
        job.commit("base")
        self.expect_whole(job)
        self.expect_state(job, "tp2-pp1-dp1", 2, 1, range(1))
        self.assertEqual(mount.read_json(job.checkpoint("base", "meta.json"))["consumed"], 12)
        job = self.mount.job("of-ranks")
        os.makedirs(job.incoming("base"))
        for part in range(2):
            torch.save({"w": torch.ones(2)}, job.incoming("base") + f"/consolidated.{part:02}.pth")
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("consolidated.00.pth and consolidated.01.pth may be of several ranks", job.commit_error("base"))

    def refused(self, name, value, *reasons, layout=None, **options):
        job = self.mount.job(name)
        if layout:
            job.set_layout(**layout)
            self.save(job, value, 1, **options)
        self.save(job, value, **options)
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in reasons:
            self.assertIn(reason, job.commit_error("base"))

    def test_refusals(self):
        weight = torch.arange(12.).reshape(3, 4)
        self.refused("old", {"w": weight}, "rank/0/model.pt: it has the form that torch.save wrote before torch 1.6",
                     _use_new_zipfile_serialization=False)
        self.refused("transposed", {"w": weight.t()}, "tensor 'w' cannot be cut", ".contiguous()")
        self.refused("sparse", {"deep": [{"w": weight.to_sparse()}]}, "'deep.0.w' cannot be cut")
        self.refused("overlap", {"a": weight[:2], "b": weight[1:]}, "'a' and 'b' share some of their bytes")
        self.refused("by-number", {"optimizer": {"state": {0: {"exp_avg": weight}}}}, "optimizer.state.0.exp_avg",
                     "an optimizer's own state_dict() has numbers for its parameters", layout={"tp": 2})
        job = self.mount.job("cut-short")
        path = self.save(job, {"w": weight})
        os.truncate(path, os.path.getsize(path) - 100)
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("rank/0/model.pt: ", job.commit_error("base"))


class Held(Checkpoints):
    """Names of a module that holds the model, as Lightning's does: self.model."""

    def test_checkpoint_of_lightning(self):
        weights = by_name(self.model.tensors)
        held = {"model." + name: tensor for name, tensor in weights.items()}
        rest = {"epoch": 1, "global_step": 7, "pytorch-lightning_version": "2.5.0", "loops": {"fit_loop": {"state_dict": {}}}, "hparams_name": None}
        forms = {"weights": {"state_dict": held, **rest, "optimizer_states": []},
                 "optimizer": {"state_dict": held, **rest, "optimizer_states": [{"state": moments(held), "param_groups": [{"lr": 0.1, "params": list(held)}]}]}}
        for form, value in forms.items():
            job = self.mount.job("held-" + form)
            self.save(job, value, name="last.ckpt")
            models.write_file(job.incoming("base") + "/rank/0/config.json", self.model.config_text())
            job.commit("base")
            for layout, (tp, pp) in LAYOUTS.items():
                for rank in range(tp * pp):
                    own = {"model." + name: tensor for name, tensor in by_name(self.model.rank_tensors(tp, pp, rank % tp, rank // tp)).items()}
                    loaded = torch.load(job.rank_file("base", layout, rank, "last.ckpt"), weights_only=True)
                    self.expect_tensors(loaded["state_dict"], own)
                    self.assertEqual(loaded["global_step"], 7)
                    if form == "optimizer":
                        for name, expected in moments(own).items():
                            self.expect_tensors(loaded["optimizer_states"][0]["state"][name], expected)
            # As transformers wants it.
            self.assertEqual(models.read_hf(job.checkpoint("base", "hf")), {tensor.name: tensor for tensor in self.model.tensors})
            job.set_layout(tp=2, pp=2, naming="stage")
            loaded = torch.load(job.file("current/rank/2/last.ckpt"), weights_only=True)["state_dict"]
            self.assertIn("model.model.layers.0.self_attn.q_proj.weight", loaded)
            self.mount.ptc("verify", job.name)

    def test_without_a_head(self):
        """A tied model: all of its own names begin with `model`, and stay as they are."""
        weights = {name: tensor for name, tensor in by_name(self.model.tensors).items() if name != "lm_head.weight"}
        for prefix, name in (("", "plain"), ("model.", "held")):
            job = self.mount.job("tied-" + name)
            self.save(job, {"state_dict": {prefix + name: tensor for name, tensor in weights.items()}}, name="last.ckpt")
            config = {**json.loads(self.model.config_text()), "tie_word_embeddings": True}
            models.write_file(job.incoming("base") + "/rank/0/config.json", json.dumps(config))
            job.commit("base")
            self.expect_read(models.read_hf(job.checkpoint("base", "hf")), weights)
            loaded = torch.load(job.rank_file("base", "tp2-pp2-dp1", 3, "last.ckpt"), weights_only=True)["state_dict"]
            self.assertIn(prefix + "model.embed_tokens.weight", loaded)  # the last stage's head


class Distributed(Checkpoints):
    """What dcp.save wrote, all ranks into one directory."""

    saved = None  # a copy of what was saved: three processes that import torch take their time

    def save_dcp(self, job, below=""):
        top = job.incoming("base") + below
        if Distributed.saved:
            shutil.copytree(Distributed.saved, top)
            return
        meet = self.temporary("meet")
        torch.save(self.value(), meet + ".pt")
        os.makedirs(top)
        writers = [subprocess.Popen([sys.executable, "-c", SAVE_DCP, str(rank), top, meet]) for rank in range(3)]
        for writer in writers:
            self.addCleanup(writer.kill)
        self.assertEqual([writer.wait(timeout=240) for writer in writers], [0, 0, 0])
        keep = tempfile.mkdtemp(prefix="ptcfs-dcp-")
        self.addClassCleanup(shutil.rmtree, keep)
        Distributed.saved = shutil.copytree(top, keep + "/saved")

    def value(self):
        weights = by_name(self.model.tensors)
        return {"model": weights, "epoch": 7,
                "optim": {"state": moments(weights), "param_groups": [{"lr": 0.1, "params": list(weights)}]}}

    def expect_ranks(self, job, below=""):
        for layout, (tp, pp) in LAYOUTS.items():
            for rank in range(tp * pp):
                weights = self.model.rank_tensors(tp, pp, rank % tp, rank // tp)
                found = models.read_safetensors(job.rank_file("base", layout, rank, below + "model.safetensors"))
                self.assertEqual({name: found[name] for name in found if not name.startswith("optim.")}, {t.name: t for t in weights})
                for name, state_of in moments(by_name(weights)).items():
                    for kind, tensor in state_of.items():
                        self.assertEqual(found[f"optim.state.{name}.{kind}"].data, bits(tensor), name)
                self.assertEqual(len(found), 4 * len(weights))

    def test_of_all_ranks(self):
        for number, below in enumerate(("", "/dcp")):
            with self.subTest(below):
                job = self.mount.job(f"dcp-{number}")
                job.set_layout(tp=2)
                self.save_dcp(job, below)
                models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
                job.commit("base")
                job.wait()
                self.expect_whole(job)
                self.expect_ranks(job, below[1:] + "/" * bool(below))
                values = torch.load(job.rank_file("base", "tp2-pp1-dp1", 1, below[1:] + "/" * bool(below) + "values.pt"), weights_only=True)
                self.assertEqual(values, {"epoch": 7, "optim": {"param_groups": [{"lr": 0.1, "params": list(self.value()["model"])}]}})
                self.assertIn("layouts/tp2-pp1-dp1", os.readlink(job.file("current")))

        done = self.mount.ptc("import", "imported", Distributed.saved)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(sorted(os.listdir(self.mount.path + "/imported/checkpoints/base/model")), ["lm_head", "model", "optim"])

    def test_what_stays_as_it_was_written_is_no_damage(self):
        """Between its tensors a .distcp has what PyTorch put there."""
        job = self.mount.job("stays")
        self.save_dcp(job)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        job.wait()
        done = self.mount.ptc("verify", job.path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_inside_a_key_of_any_name(self):
        """As the state of DCP's AppState."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        job = self.new_job()
        value = {"app": self.value()}
        dcp.save(value, checkpoint_id=job.incoming("base"), no_dist=True)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        self.expect_whole(job)
        self.expect_ranks(job)
        job.set_layout(tp=2)
        blank = {"app": {"model": {name: torch.zeros_like(tensor) for name, tensor in value["app"]["model"].items()}}}
        dcp.load(blank, checkpoint_id=job.checkpoint("base", "dcp"), no_dist=True)
        self.expect_tensors(blank["app"]["model"], value["app"]["model"])

    def test_directories_of_trainers_with_fsdp(self):
        """The model and its optimizer side by side, with Trainer's own files; dcp/ has them so again."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        job = self.new_job()
        weights = by_name(self.model.tensors)
        state = {"pytorch_model_fsdp_0": {"model": weights},
                 "optimizer_0": {"optimizer": {"state": moments(weights), "param_groups": [{"lr": 0.1, "params": list(weights)}]}}}
        for below, value in state.items():
            dcp.save(value, checkpoint_id=f"{job.incoming('base')}/{below}", no_dist=True)
        torch.save({"last_epoch": 3}, job.incoming("base") + "/scheduler.pt")
        models.write_file(job.incoming("base") + "/trainer_state.json", '{"global_step": 5}')
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        self.expect_whole_model(job)
        for layout, (tp, pp) in LAYOUTS.items():
            for rank in range(tp * pp):
                own = by_name(self.model.rank_tensors(tp, pp, rank % tp, rank // tp))
                found = models.read_safetensors(job.rank_file("base", layout, rank, "pytorch_model_fsdp_0/model.safetensors"))
                self.expect_read(found, own)
                found = models.read_safetensors(job.rank_file("base", layout, rank, "optimizer_0/model.safetensors"))
                self.expect_read(found, {f"optimizer.state.{name}.{kind}": tensor for name, kinds in moments(own).items() for kind, tensor in kinds.items()})

        def blank(value):
            if isinstance(value, dict):
                return {key: blank(one) for key, one in value.items()}
            return torch.zeros_like(value) if isinstance(value, torch.Tensor) else [{"lr": 0.0, "params": []}]
        for below, value in state.items():
            for at in (f"dcp/{below}", "dcp"):
                found = blank(value)
                dcp.load(found, checkpoint_id=job.checkpoint("base", at), no_dist=True)
                self.expect_nested(found, value)
        self.assertEqual(torch.load(job.checkpoint("base", "dcp/scheduler.pt"), weights_only=True), {"last_epoch": 3})
        self.assertEqual(mount.read_text(job.checkpoint("base", "dcp/trainer_state.json")), '{"global_step": 5}')

    def expect_whole_model(self, job):
        self.assertEqual(models.read_hf(job.checkpoint("base", "hf")), {tensor.name: tensor for tensor in self.model.tensors})
        self.mount.ptc("verify", job.name)

    def expect_nested(self, found, expected):
        if isinstance(expected, dict):
            self.assertEqual(sorted(found), sorted(expected))
            for key, value in expected.items():
                self.expect_nested(found[key], value)
        elif isinstance(expected, torch.Tensor):
            self.assertEqual(bits(found), bits(expected))
        else:
            self.assertEqual(found, expected)

    def test_two_iterations(self):
        """A checkpoint is one of them; ptc import takes that which the run's own file names."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        job = self.new_job()
        run = self.temporary("run")
        for number in (100, 200):
            dcp.save({"decoder.w": torch.full((4,), float(number))}, checkpoint_id=f"{run}/iter_{number:07}", no_dist=True)
        shutil.copytree(run, job.incoming("base"))
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in ("iter_0000100/.metadata and iter_0000200/.metadata both have a tensor 'decoder.w'", "move one away"):
            self.assertIn(reason, job.commit_error("base"))
        done = self.mount.ptc("import", "run", run, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("has 2 iterations, and no latest_checkpointed_iteration.txt", done.stderr)
        models.write_file(run + "/latest_checkpointed_iteration.txt", "200")
        done = self.mount.ptc("import", "run", run)
        self.assertIn("left out: iter_0000100", done.stderr)
        path = self.mount.path + "/run/checkpoints/base"
        self.assertEqual(models.read_npy(path + "/model/decoder/w.npy")[1], bits(torch.full((4,), 200.)))
        self.assertEqual(os.listdir(path + "/layouts/tp1-pp1-dp1/rank/0"), ["iter_0000200", "latest_checkpointed_iteration.txt", "tensors"])

    def test_what_hugging_face_storage_writer_saved(self):
        """Right into the directory, as it makes it."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        for number, options in enumerate(({"save_distributed": True}, {})):
            job = self.mount.job(f"hugging-face-{number}")
            os.makedirs(job.incoming("base"))
            writer = dcp.HuggingFaceStorageWriter(job.incoming("base"), **options)
            dcp.save(by_name(self.model.tensors), storage_writer=writer, no_dist=True)
            models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
            job.commit("base")
            self.expect_whole(job)

    def test_without_its_config_and_where_that_belongs(self):
        """What is advised holds for both places in which dcp.save can write."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        for name, below in (("top", ""), ("rank", "/rank/0")):
            job = self.mount.job(f"advised-{name}")
            for checkpoint in ("without", "with"):
                at = job.incoming(checkpoint) + below
                dcp.save(by_name(self.model.tensors), checkpoint_id=at, no_dist=True)
                if checkpoint == "with":
                    models.write_file(at + "/config.json", self.model.config_text())
                job.commit(checkpoint)
                done = self.mount.ptc("layout", job.name, "set", "--tp", 2, "--wait", check=False)
                self.assertEqual(done.returncode, 1 if checkpoint == "without" else 0, done.stderr)
                if checkpoint == "without":
                    self.assertIn("put the model's config.json beside its files in the checkpoint (into rank/0, or beside .metadata)",
                                  done.stderr)

    def test_names_that_are_no_paths(self):
        """Refused, and the daemon goes on."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        for number, name in enumerate(("a" * 256, "")):
            job = self.mount.job(f"nameless-{number}")
            dcp.save({name: torch.ones(4), "b": torch.ones(4)}, checkpoint_id=job.incoming("base"), no_dist=True)
            self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
            self.assertIn(".metadata", job.commit_error("base"))

    def test_values_with_tensors_in_them(self):
        """A tuple, a set: dcp.save keeps them as one value."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        matrix = torch.arange(6.).reshape(2, 3)
        job = self.mount.job("values")
        dcp.save({"w": torch.ones(4), "pair": (matrix.t(), matrix[:, 1:], "text")}, checkpoint_id=job.incoming("base"), no_dist=True)
        job.commit("base")
        turned, columns, text = torch.load(job.rank_file("base", "tp1-pp1-dp1", 0, "values.pt"), weights_only=True)["pair"]
        self.assertEqual((turned.tolist(), columns.tolist(), text), (matrix.t().tolist(), [[1., 2.], [4., 5.]], "text"))
        job = self.mount.job("values-in-a-set")
        dcp.save({"w": torch.ones(4), "odd": {matrix}}, checkpoint_id=job.incoming("base"), no_dist=True)
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("value 'odd': what is at '' in it cannot be kept: its tensors are in an object", job.commit_error("base"))

    def refused(self, name, reason, spoil):
        job = self.mount.job(name)
        self.save_dcp(job)
        spoil(job.incoming("base"))
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn(reason, job.commit_error("base"))

    def test_refusals(self):
        self.refused("missing", ".metadata names __1_0.distcp, which is missing", lambda top: os.remove(top + "/__1_0.distcp"))
        self.refused("cut-short", "file '__1_0.distcp' has 700 bytes", lambda top: os.truncate(top + "/__1_0.distcp", 700))
        self.refused("long-metadata", ".metadata has 1500000000 bytes; at most 1073741824 are read",
                     lambda top: os.truncate(top + "/.metadata", 1_500_000_000))
        self.refused("no-metadata", "there is no .metadata beside it", lambda top: os.remove(top + "/.metadata"))
        self.refused("unknown", "stray.distcp: no .metadata beside it names it", lambda top: models.write_file(top + "/stray.distcp", b"x"))

        def swap(top):  # each as long as the other, and nothing is where it should be
            with open(top + "/__1_0.distcp", "r+b") as file:
                content = file.read()
                file.seek(0)
                file.write(content[1:] + b"x")
        self.refused("elsewhere", "__1_0.distcp: tensor ", swap)


class StackedLayers(Checkpoints):
    """What Megatron-Core's dist_checkpointing writes (test_megatron_core.py has its own): all layers of a kind in one tensor."""
    LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, EXPERTS = 4, 16, 4, 2, 24, 300, 4
    MOMENTS = ("exp_avg", "exp_avg_sq")

    @classmethod
    def shapes(cls, experts):
        """Of the stacked kinds by the names behind the layer's."""
        mlp = {"mlp.linear_fc1.weight": (2 * cls.FFN, cls.HIDDEN), "mlp.linear_fc2.weight": (cls.HIDDEN, cls.FFN)}
        of_experts = {"mlp.router.weight": (cls.EXPERTS, cls.HIDDEN), "mlp.experts.experts.linear_fc1.weight": (cls.EXPERTS, 2 * cls.FFN, cls.HIDDEN),
                      "mlp.experts.experts.linear_fc2.weight": (cls.EXPERTS, cls.HIDDEN, cls.FFN)}
        return {"self_attention.linear_qkv.layer_norm_weight": (cls.HIDDEN,), "self_attention.linear_qkv.weight": (2 * cls.HIDDEN, cls.HIDDEN),
                "self_attention.linear_proj.weight": (cls.HIDDEN, cls.HIDDEN), **(of_experts if experts else mlp)}

    def whole(self, experts=False, rows=384, prefix=""):
        torch.manual_seed(4)
        weights = {f"{prefix}decoder.layers.{name}": torch.rand((self.LAYERS, *shape)) for name, shape in self.shapes(experts).items()}
        weights |= {prefix + "embedding.word_embeddings.weight": torch.rand(rows, self.HIDDEN),
                    prefix + "decoder.final_layernorm.weight": torch.rand(self.HIDDEN), prefix + "output_layer.weight": torch.rand(rows, self.HIDDEN)}
        return weights | {f"optimizer.state.{kind}.{name}": torch.rand(tensor.shape) for kind in self.MOMENTS for name, tensor in weights.items()}

    def save_stacked(self, job, state, below="", **arguments):
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        dcp.save(state, checkpoint_id=job.incoming("base") + below, no_dist=True)
        said = {"num_layers": self.LAYERS, "num_attention_heads": self.HEADS, "num_query_groups": self.GROUPS, "group_query_attention": True,
                "swiglu": True, "vocab_size": self.VOCAB, "untie_embeddings_and_output_weights": True, **arguments}
        torch.save({"args": argparse.Namespace(**said), "checkpoint_version": 3.0, "iteration": 100}, job.incoming("base") + below + "/common.pt")

    def expected(self, state, tp, pp, tp_rank, pp_rank, ep=1, ep_rank=0, prefix="", first_layer=None):
        """What a rank has, by Megatron's own cuts."""
        each, found = self.LAYERS // pp, {}

        def cut(name, tensor):
            if "embedding" in name or "output_layer" in name:
                rows = -(-len(tensor) // (128 * tp)) * 128 * tp
                return torch.cat([tensor, torch.zeros(rows - len(tensor), self.HIDDEN)]).chunk(tp)[tp_rank]
            if ".experts." in name:
                tensor = tensor.chunk(ep)[ep_rank]
            if "linear_fc1.weight" in name:
                return torch.cat([half.chunk(tp, -2)[tp_rank] for half in tensor.chunk(2, -2)], -2)
            if "linear_qkv.weight" in name:
                return tensor.chunk(tp)[tp_rank]
            return tensor.chunk(tp, -1)[tp_rank] if "linear_proj" in name or "linear_fc2" in name else tensor
        for name, tensor in state.items():
            before, stacked, behind = name.partition(prefix + "decoder.layers.")
            if stacked:
                first = pp_rank * each if first_layer is None else first_layer
                for layer in range(each):
                    found[f"{before}{stacked}{first + layer}.{behind}"] = cut(name, tensor[pp_rank * each + layer])
            elif pp_rank == (0 if "embedding" in name else pp - 1):
                found[name] = cut(name, tensor)
        return found

    def expect_rank(self, path, expected):
        self.expect_read(models.read_safetensors(path), expected)

    def expect_layouts(self, job, state, layouts, below="", **how):
        for tp, pp in layouts:
            for rank in range(tp * pp):
                self.expect_rank(job.rank_file("base", f"tp{tp}-pp{pp}-dp1", rank, below + "model.safetensors"),
                                 self.expected(state, tp, pp, rank % tp, rank // tp, **how))

    def expect_dcp(self, job, state):
        """Names, shapes and values are those that were saved."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        known = dcp.FileSystemReader(job.checkpoint("base", "dcp")).read_metadata().state_dict_metadata
        self.assertEqual({name: tuple(one.size) for name, one in known.items() if hasattr(one, "size")},
                         {name: tuple(tensor.shape) for name, tensor in state.items()})
        found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(found, checkpoint_id=job.checkpoint("base", "dcp"), no_dist=True)
        self.expect_tensors(found, state)

    def test_stages_have_their_own_layers(self):
        for number, prefix in enumerate(("", "module.")):
            job = self.mount.job(f"stacked-{number}")
            state = self.whole(prefix=prefix)
            self.save_stacked(job, state, "/iter_0000100")
            job.commit("base")
            self.expect_layouts(job, state, ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2)), "iter_0000100/", prefix=prefix)
            self.expect_dcp(job, state)
            self.mount.ptc("verify", job.name)
        job.set_layout(tp=2, pp=2, naming="stage")
        for rank in range(4):
            self.expect_rank(f"{job.path}/current/rank/{rank}/iter_0000100/model.safetensors",
                             self.expected(state, 2, 2, rank % 2, rank // 2, prefix=prefix, first_layer=0))
        self.mount.ptc("verify", job.name)

    def test_dcp_is_committed_again(self):
        """With common.pt and all that is beside: chunks are others, and all else is the same."""
        state = self.whole()
        first, second = self.mount.job("first-time"), self.mount.job("second-time")
        self.save_stacked(first, state)
        first.commit("base")
        shutil.copytree(first.checkpoint("base", "dcp"), second.incoming("base"))
        second.commit("base")
        self.expect_layouts(second, state, ((1, 1), (2, 2)))
        self.expect_dcp(second, state)

    def test_experts(self):
        job = self.new_job()
        state = self.whole(experts=True)
        self.save_stacked(job, state, num_experts=self.EXPERTS)
        job.commit("base")
        self.expect_layouts(job, state, ((1, 1), (2, 2)))
        self.expect_dcp(job, state)
        for rank in range(4):  # ep is among dp's ranks
            self.expect_rank(job.rank_file("base", "tp1-pp2-dp1-ep2", rank),
                             self.expected(state, 1, 2, 0, rank // 2, ep=2, ep_rank=rank % 2))

    def test_vocabulary_that_was_padded_for_more_ranks(self):
        """A single rank has it as Megatron pads it there; and so all others."""
        job = self.new_job()
        state = self.whole(rows=512)
        self.save_stacked(job, state, tensor_model_parallel_size=4)
        job.commit("base")
        for name, tensor in state.items():
            state[name] = tensor[:384] if tensor.shape[0] == 512 else tensor
        self.expect_layouts(job, state, ((1, 1), (2, 1), (4, 1)))
        self.expect_dcp(job, state)

    def test_what_nobody_says(self):
        """Without args and config.json stages are known, and cuts of heads are refused by name."""
        job = self.new_job()
        state = self.whole()
        self.save_stacked(job, state)
        os.remove(job.incoming("base") + "/common.pt")
        job.commit("base")
        self.expect_layouts(job, state, ((1, 1), (1, 2), (1, 4)))
        refusal = self.mount.ptc("rules", "check", job.name, "--layout", "tp2-pp1-dp1", check=False)
        self.assertEqual(refusal.returncode, 1)
        self.assertIn("linear_qkv.weight", refusal.stderr)
        self.assertIn("kv_heads", refusal.stderr)

    def test_what_is_no_stack(self):
        """Layers that are not as many are no stacks; then stages are refused, by name."""
        job = self.new_job()
        state = self.whole()
        name = "decoder.layers.self_attention.linear_proj.weight"
        state[name] = state[name][:3]
        self.save_stacked(job, state)
        job.commit("base")
        self.expect_dcp(job, state)
        refusal = self.mount.ptc("rules", "check", job.name, "--layout", "tp1-pp2-dp1", check=False)
        self.assertEqual(refusal.returncode, 1)
        self.assertIn("decoder.layers.self_attention.linear_", refusal.stderr)

    def test_more_layers_than_can_be_meant(self):
        """What a few kilobytes say takes no gigabyte, and is refused at once."""
        job = self.new_job()
        name = "decoder.layers.mlp.linear_fc1.weight"
        self.save_stacked(job, {f"s{i}.{name}" if i else name: torch.zeros(16384, 1, dtype=torch.uint8) for i in range(40)})
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("of 16384 layers among them, are more than can be meant by", job.commit_error("base"))
        job = self.mount.job("without-an-element")
        self.save_stacked(job, {name: torch.zeros(1 << 40, 0, dtype=torch.uint8),
                                "embedding.word_embeddings.weight": torch.ones(128, 4)})
        job.commit("base")

    def test_optimizer_state_in_buckets(self):
        """Of Megatron's own default: the weights are there, and a cut is refused with the option that saves it otherwise."""
        job = self.new_job()
        state = {name: tensor for name, tensor in self.whole(rows=512).items() if not name.startswith("optimizer.")}
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"
        state[bucket] = torch.rand(999)
        self.save_stacked(job, state, tensor_model_parallel_size=4)
        job.commit("base")
        self.expect_dcp(job, state)
        refusal = self.mount.ptc("rules", "check", job.name, "--layout", "tp2-pp1-dp1", check=False)
        self.assertEqual(refusal.returncode, 1)
        self.assertIn("with --dist-ckpt-optim-fully-reshardable", refusal.stderr)


class ReadByDcp(Checkpoints):
    """dcp/: whatever was written, and under whatever layout, dcp.load takes it into any mesh."""

    def value(self):
        weights = by_name(self.model.tensors)
        return {"model": weights, "iteration": 7, "args": {"name": "llama"},
                "optim": {"state": moments(weights), "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(weights)}]}}

    def load(self, job, value, nested=True):
        """As one process has it; `nested`: also without being told what there is."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # pylint: disable=import-outside-toplevel

        def empty(item):
            if isinstance(item, dict):
                return {key: empty(one) for key, one in item.items()}
            if isinstance(item, list):
                return [empty(one) for one in item]
            return torch.zeros_like(item) if isinstance(item, torch.Tensor) else type(item)()
        state = empty(value)
        state.get("optim", {}).get("param_groups", [{}])[0]["params"] = ["one"]
        dcp.load(state, checkpoint_id=job.checkpoint("base", "dcp"), no_dist=True)
        self.same(state, value)
        if not nested:
            return None
        path = self.temporary(job.name + ".pt")
        dcp_to_torch_save(job.checkpoint("base", "dcp"), path)
        whole = torch.load(path, weights_only=True)
        self.same({key: whole[key] for key in value}, value)
        return whole

    def same(self, found, expected, at="state"):
        if isinstance(expected, dict):
            self.assertEqual(sorted(found, key=str), sorted(expected, key=str), at)
            for key, item in expected.items():
                self.same(found[key], item, f"{at}.{key}")
        elif isinstance(expected, list) and at.endswith("param_groups"):
            for number, item in enumerate(expected):
                self.same({**found[number], "params": sorted(found[number]["params"])}, {**item, "params": sorted(item["params"])}, at)
        elif isinstance(expected, torch.Tensor):
            self.assertEqual((found.dtype, found.shape, bits(found)), (expected.dtype, expected.shape, bits(expected)), at)
        else:
            self.assertEqual(found, expected, at)

    def load_in_mesh(self, job, value):
        meet = self.temporary("meet-" + job.name)
        torch.save(value, meet + ".pt")
        readers = [subprocess.Popen([sys.executable, "-c", LOAD_DCP, str(rank), job.checkpoint("base", "dcp"), meet]) for rank in range(2)]
        for reader in readers:
            self.addCleanup(reader.kill)
        self.assertEqual([reader.wait(timeout=240) for reader in readers], [0, 0])

    def test_what_torch_saved(self):
        job = self.new_job()
        job.set_layout(tp=2, pp=2)
        self.save_ranks(job, 2, 2)
        job.commit("base")
        whole = self.load(job, self.value())
        torch.manual_seed(0)
        self.assertEqual((bits(whole["rng_state"][0]), whole["rng_state"][1]), (bits(torch.get_rng_state()), 0))
        self.assertEqual(os.listdir(job.checkpoint("base", "dcp")), [".metadata", "__0_0.distcp"])
        value = self.value()
        value["optim"].pop("param_groups")
        self.load_in_mesh(job, value)
        job.set_layout(tp=4)
        self.load(job, self.value())

    def test_what_dcp_saved(self):
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        value = self.value()
        value["a/b"] = {"module.w": torch.arange(6.).reshape(2, 3), "scalar": torch.tensor(5), "empty": torch.empty(0, 3)}
        job = self.new_job()
        dcp.save(value, checkpoint_id=job.incoming("base"), no_dist=True)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        self.load(job, value)
        job.set_layout(dp=2, optimizer="fsdp")
        self.load(job, value)

    def test_what_lies_beside_the_files_of_dcp(self):
        """Megatron's dist_checkpointing wants its own two files there."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        job = self.new_job()
        top = job.incoming("base") + "/iter_0000100"
        dcp.save({"w": torch.ones(2)}, checkpoint_id=top, no_dist=True)
        written = {"metadata.json": b'{"sharded_backend": "torch_dist"}', "common.pt": b"any", "more/x.bin": b"y"}
        for name, content in written.items():
            models.write_file(f"{top}/{name}", content)
        models.write_file(job.incoming("base") + "/latest_checkpointed_iteration.txt", "100")
        job.commit("base")
        at = job.checkpoint("base", "dcp")
        self.assertEqual(sorted(os.listdir(at)), [".metadata", "__0_0.distcp", "common.pt", "metadata.json", "more"])
        for name, content in written.items():
            self.assertEqual(mount.read_bytes(f"{at}/{name}"), content)
        for layout in ("tp1-pp1-dp1", "tp1-pp1-dp4"):  # for Megatron's --load
            tree = job.checkpoint("base", "layouts", layout, "megatron")
            self.assertEqual(sorted(os.listdir(tree)), ["iter_0000100", "latest_checkpointed_iteration.txt"])
            self.assertEqual(mount.read_text(tree + "/latest_checkpointed_iteration.txt"), "100")
            self.assertEqual(sorted(os.listdir(tree + "/iter_0000100")), sorted(os.listdir(at)))
            for name in (".metadata", "common.pt", "more/x.bin"):
                self.assertEqual(mount.read_bytes(f"{tree}/iter_0000100/{name}"), mount.read_bytes(f"{at}/{name}"))

    def test_safetensors(self):
        job = self.new_job()
        self.model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        self.load(job, by_name(self.model.tensors))

    def test_sections_of_a_state(self):
        """As tools/python has them."""
        job = self.new_job()
        self.model.write_hf(job.incoming("base") + "/rank/0")
        one = self.model.tensors[0]
        models.write_safetensors(job.incoming("base") + "/rank/0/optim.safetensors",
                                 [models.Tensor(f"state.{one.name}.exp_avg", one.dtype, one.shape, one.data)])
        models.write_file(job.incoming("base") + "/rank/0/ptc.json", "{}")
        job.commit("base")
        self.load(job, {"model": by_name(self.model.tensors), "optim": {"state": {one.name: {"exp_avg": to_torch(one)}}}}, nested=False)

    def test_large_tensors_are_read_in_parts(self):
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        value = {"large": torch.arange(5000. * 1024).reshape(5000, 1024), "long": torch.arange(3_000_001), "flag": torch.tensor(True)}
        job = self.new_job()
        self.save(job, value)
        job.commit("base")
        self.load(job, value)
        metadata = dcp.FileSystemReader(job.checkpoint("base", "dcp")).read_metadata().state_dict_metadata
        self.assertEqual([tuple(chunk.sizes) for chunk in metadata["large"].chunks], [(1250, 1024)] * 4)
        self.assertEqual([tuple(chunk.sizes) for chunk in metadata["long"].chunks], [(750_001,), (750_001,), (750_001,), (749_998,)])
        self.load_in_mesh(job, value)

    def test_nobody_reads_there_what_he_may_not_read_elsewhere(self):
        """Values and random states of all files are side by side."""
        job = self.new_job()
        self.save(job, {"w": torch.ones(2)}, name="a.pt")
        os.chmod(self.save(job, {"secret": "of one", "rng_state": torch.ones(3), "empty": torch.ones(0)}, name="b.pt"), 0o600)
        job.commit("base")
        names = os.listdir(job.checkpoint("base", "dcp"))
        self.assertIn("__0_0.distcp", names)
        for name in names:
            self.assertEqual(os.stat(job.checkpoint("base", "dcp", name)).st_mode & 0o777, 0o400, name)

    def test_many_values(self):
        """Of each no more is looked at than itself; where their names alone are too much, it is said."""
        job = self.new_job()
        value = {"w": torch.ones(2), "steps": {str(number): number for number in range(20_000)}}
        self.save(job, value)
        job.commit("base")
        self.load(job, value, nested=False)
        job = self.mount.job("long-names")
        self.save(job, {"w": torch.ones(2), "a" * (64 << 10): {str(number): number for number in range(2000)}})
        job.commit("base")
        self.assertEqual(os.listdir(job.checkpoint("base", "dcp")), ["LEFT_OUT.txt"])
        self.assertIn("take more than 64 MiB", mount.read_text(job.checkpoint("base", "dcp/LEFT_OUT.txt")))

    def test_what_cannot_be_there_is_said(self):
        job = self.new_job()
        self.save(job, {"w": torch.ones(2), "by": {(1, 2): 3, "x": 4}})
        job.commit("base")
        self.load(job, {"w": torch.ones(2), "by": {"x": 4}})
        self.assertIn("neither a text nor a whole number", mount.read_text(job.checkpoint("base", "dcp/LEFT_OUT.txt")))
        shutil.rmtree(job.checkpoint("base"))


if __name__ == "__main__":
    mount.main()
