"""tools/python: DTensors of any mesh, as FSDP2, HSDP and tensor parallelism make them, saved by each rank and read by all."""
import os
import shutil
import sys
import tempfile

import mount
import ranks

sys.path.insert(0, ranks.PACKAGE)
torch = mount.require("torch")
import ptc  # noqa: E402  pylint: disable=wrong-import-position
import ptc.loading  # noqa: E402  pylint: disable=wrong-import-position
import ptc.safetensors  # noqa: E402  pylint: disable=wrong-import-position

# On four ranks: name → (shape, the mesh's shape, placements).
CUTS = """
from torch.distributed.tensor.placement_types import _StridedShard
flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
pair = init_device_mesh("cpu", (2, 2))
cuts = {
    "columns.w": ((6, 9), flat, [Shard(1)]), "hybrid.w": ((7, 5), grid, [Replicate(), Shard(0)]),
    "hybrid.columns": ((3, 8), grid, [Replicate(), Shard(1)]), "two.w": ((7, 5), grid, [Shard(0), Shard(1)]),
    "twice.w": ((9, 2), grid, [Shard(0), Shard(0)]), "strided.w": ((8, 3), grid, [_StridedShard(0, split_factor=2), Shard(0)]),
    "few.w": ((2, 3), flat, [Shard(0)]), "few.b": ((4,), flat, [Shard(0)]), "one.b": ((1,), flat, [Shard(0)]),
    "none.w": ((0, 3), flat, [Shard(0)]), "same.w": ((3, 3), grid, [Replicate(), Replicate()]), "n.s": ((), flat, [Replicate()]),
    "rows.w": ((10, 4), flat, [Shard(0)]), "deep.w": ((3, 5, 6), grid, [Shard(2), Shard(1)])}
dtensors = {name: distribute_tensor(whole(name, *shape), mesh, cut) for name, (shape, mesh, cut) in cuts.items()}
"""


def expected(names):
    """The tensors of CUTS, as `whole` of ranks.PROLOGUE makes them."""
    found = {}
    for name, shape in names.items():
        torch.manual_seed(sum(map(ord, name)))
        found[name] = torch.rand(shape)
    return found


WHOLE = {"columns.w": (6, 9), "hybrid.w": (7, 5), "hybrid.columns": (3, 8), "two.w": (7, 5), "twice.w": (9, 2), "strided.w": (8, 3),
         "few.w": (2, 3), "few.b": (4,), "one.b": (1,), "none.w": (0, 3), "same.w": (3, 3), "n.s": (), "rows.w": (10, 4),
         "deep.w": (3, 5, 6)}


# A model with buffers and uneven rows, on a mesh that `wrap` has; one step of Adam a call.
MODEL = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.arange(8.0))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)))
    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.scale.sum()
torch.manual_seed(5)
model = torch.nn.Sequential(Block(), torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7))
def wrap(mesh, tensor=None):
    if tensor is not None:
        parallelize_module(model[0], tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in model: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.parameters(), lr=0.1)
def step():
    torch.manual_seed(9)
    model(torch.rand(4, 6)).square().sum().backward(); adam.step(); adam.zero_grad()
def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
def everything():
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found.update({f"state.{name}.{key}": full(value) for key, value in adam.state[parameter].items()})
    return found
def same(left, right):
    assert set(left) == set(right), set(left) ^ set(right)
    for name, value in right.items(): assert torch.equal(left[name], value), (name, left[name], value)
def load(where):
    state = ptc.load(where)
    ptc.load_model_state(model, state["model"], strict=True)
    ptc.load_optimizer_state(model, adam, state["optim"])
"""
SAVE = """
step(); step()
kept = everything()
if rank == 0: torch.save(kept, path + ".pt")
ptc.Job(path).save({"model": model.state_dict(), "optim": ptc.optimizer_state(model, adam)}, "a")
"""
CHECK = """
load(path)
same(everything(), torch.load(path + ".pt"))
step()
"""
# How a model is cut on four processes.
WRAPS = {
    "fsdp": "adam = wrap(init_device_mesh('cpu', (size,)))\n",
    "hybrid": "adam = wrap(init_device_mesh('cpu', (2, size // 2), mesh_dim_names=('copies', 'rows')))\n",
    "tensor": "grid = init_device_mesh('cpu', (size // 2, 2), mesh_dim_names=('dp', 'tp'))\nadam = wrap(grid['dp'], grid['tp'])\n",
}


class Meshes(ranks.TestCase):
    def check_everywhere(self, job, name, tensors, section="model"):
        """A section of a checkpoint in model/, hf/, dcp/ and under layouts."""
        path = job.file("checkpoints", name)
        checkpoint = ptc.Checkpoint(path)
        for key, value in tensors.items():
            self.assert_equal(checkpoint.read(key), value, key)
        hf = ptc.safetensors.Mapped(path + "/hf/model.safetensors")
        for key, value in tensors.items():
            self.assert_equal(hf.tensor(key), value, key)
        import torch.distributed.checkpoint as dcp
        state = {f"{section}.{key}": torch.zeros_like(value) for key, value in tensors.items()}
        dcp.load(state, checkpoint_id=path + "/dcp", no_dist=True)
        self.assert_equal(state, {f"{section}.{key}": value for key, value in tensors.items()})
        for layout, count in (("tp1-pp1-dp1", 1), ("tp1-pp1-dp3", 3)):
            for rank in range(count):
                self.assert_equal(ptc.load(f"{path}/layouts/{layout}", rank=rank)[section], tensors, layout)

    def test_every_placement(self):
        """Rows, columns, both, replicas and strided rows; fewer than there are ranks; under a layout that cuts nothing so."""
        for number, layout in enumerate(({"optimizer": "fsdp"}, {})):
            with self.subTest(layout):
                job = ptc.Job.create(f"{self.mount.path}/every{number}", dp=4, **layout)
                self.run_ranks(4, CUTS + "ptc.Job(path).save({'model': dtensors, 'who': rank}, 'a')", job.path)
                self.check_everywhere(job, "a", expected(WHOLE))
                job.wait()
                self.assertEqual([ptc.load(job.path, rank=rank)["who"] for rank in range(4)], [0, 1, 2, 3])

    def test_every_placement_by_dcp(self):
        job = ptc.Job.create(f"{self.mount.path}/every_dcp", dp=4, optimizer="fsdp")
        self.run_ranks(4, CUTS + """
del dtensors["none.w"]  # DCP itself writes nothing of it
dcp.save({"model": {**dtensors, "buffer": whole("buffer", 5)}}, storage_writer=ptc.Writer(path, "a"))
""", job.path)
        self.check_everywhere(job, "a", expected({**{name: shape for name, shape in WHOLE.items() if name != "none.w"}, "buffer": (5,)}))

    def kept(self, job):
        """What SAVE kept beside: the model's, the optimizer's."""
        found = torch.load(job.path.replace(self.mount.path, self.scratch) + ".pt")
        return ({name: value for name, value in found.items() if not name.startswith("state.")},
                {name: value for name, value in found.items() if name.startswith("state.")})

    def run_wrapped(self, size, kind, body, job):
        beside = job.path.replace(self.mount.path, self.scratch)
        self.run_ranks(size, MODEL + WRAPS[kind] + body.replace('path + ".pt"', repr(beside + ".pt")), job.path)

    def test_a_model_on_its_mesh(self):
        """fully_shard with buffers, on replicas, and of tensor parallelism: as it was under every layout, and on any mesh."""
        for kind, others, options in (("fsdp", ("hybrid", "tensor"), {}), ("hybrid", ("hybrid", "fsdp"), {}),
                                      ("hybrid", ("hybrid", "tensor"), {"dp_shard": 2}), ("tensor", ("tensor", "hybrid"), {})):
            with self.subTest(kind, **options):
                job = ptc.Job.create(f"{self.mount.path}/{kind}{len(options)}", dp=4, optimizer="fsdp", **options)
                self.run_wrapped(4, kind, SAVE, job)
                model, optim = self.kept(job)
                self.check_everywhere(job, "a", model)
                checkpoint = ptc.Checkpoint(job.file("checkpoints/a"))
                for name, value in optim.items():
                    self.assert_equal(checkpoint.read(name), value, name)
                job.wait()
                for other in others:
                    self.run_wrapped(4, other, CHECK, job)
        job.set_layout(dp=3)
        self.run_wrapped(3, "fsdp", CHECK, job)
        job.set_layout(dp=2, optimizer="replicated")
        self.run_wrapped(2, "fsdp", CHECK, job)

    def test_rows_and_buffers_stay_as_they_are_written(self):
        """What the layout gives each rank, buffers whole: the files are the layout's, and so is it on other ranks."""
        job = ptc.Job.create(self.mount.path + "/rows", dp=4, optimizer="fsdp")
        shapes = {"a.w": (7, 3), "a.b": (4,), "a.one": (1, 2), "n": (), "table": (8,)}
        self.run_ranks(4, f"""
flat = init_device_mesh("cpu", (4,))
state = {{name: whole(name, *shape) if name == "table" else distribute_tensor(whole(name, *shape), flat, [Shard(0) if shape else Replicate()])
         for name, shape in {shapes}.items()}}
job = ptc.Job(path)
ptc.save({{"model": state, "teacher": {{"a.w": whole("teacher", 8, 2)}}}}, job.incoming("a"))
dist.barrier()
if rank == 0: os.system(f"cp -r {{job.incoming('a')}} " + {self.temporary("kept")!r})
ptc.commit(job.incoming("a"))
""", job.path)
        written = self.temporary("kept") + "/rank/{}/{}.safetensors"
        spec = os.path.basename(os.readlink(job.file("current")))
        for rank in range(4):
            for section in ("model", "teacher"):
                self.assertEqual(mount.same_bytes(written.format(rank, section), job.file("checkpoints/a/layouts", spec, "rank", str(rank),
                                                                                          section + ".safetensors")), section == "model")
        self.check_everywhere(job, "a", expected(shapes))
        torch.manual_seed(sum(map(ord, "teacher")))
        teacher = torch.rand(8, 2)
        self.assert_equal(ptc.Checkpoint(job.path).read(ptc.Checkpoint(job.path).info("a.w", "teacher.safetensors")), teacher)
        for size in (2, 4):
            job.set_layout(dp=size)
            found = [ptc.load(job.path, rank=rank) for rank in range(size)]
            for name, value in expected(shapes).items():
                parts = [state["model"][name] for state in found]
                self.assert_equal(parts if name in ("n", "table") else torch.cat(parts), [value] * size if name in ("n", "table") else value)
            self.assert_equal(torch.cat([state["teacher"]["a.w"] for state in found]), teacher)

    def test_what_cannot_be_put_together(self):
        """By name: a part that is missing, or there twice and not the same, or of which nobody says which it is."""
        job = ptc.Job.create(self.mount.path + "/refused", dp=4)
        self.run_ranks(4, """
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
flat = init_device_mesh("cpu", (4,))
def save(name, state):
    ptc.save({"model": state}, ptc.Job(path).incoming(name))
mine = whole("a", 8, 2)[2 * rank:][:2]
w = {"a.w": distribute_tensor(whole("a", 8, 2), flat, [Shard(0)])}
save("missing", {**w, "a.b": DTensor.from_local(mine, flat, [Shard(0)], run_check=False)} if rank != 2 else w)
save("end", {**w, "a.b": DTensor.from_local(mine, flat, [Shard(0)], run_check=False)} if rank != 3 else w)
save("differ", {**w, "a.b": DTensor.from_local(torch.ones(4, 2) + rank, grid, [Replicate(), Shard(0)], run_check=False)})
save("whole", {**w, "a.b": torch.ones(4, 2) * (rank // 3)})
save("silent", w if rank != 3 else {"a.w": mine})
save("lengths", {"a.w": DTensor.from_local(mine, flat, [Shard(0)], run_check=False, shape=torch.Size((8 if rank else 7, 2)), stride=(2, 1))})
from torch.distributed.tensor.placement_types import _StridedShard
odd = DTensor.from_local(torch.ones(1 + (rank == 0), 1), grid, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False,
                         shape=torch.Size((9, 1)), stride=(1, 1))
try:
    raise SystemExit(save("odd", {"odd.w": odd}))
except ValueError as error:
    assert "model.odd.w: of (9, 1) this rank holds" in str(error), error
""", job.path)
        for name, reason in (("missing", r"tensor 'a.b': nothing holds \[4:6, 0:2\] of it"),
                             ("end", r"'a.b' is \[8, 2\], and all ranks together have \[0:6, 0:2\] of it"),
                             ("differ", r"a.b, but with different values"),
                             ("whole", "a.b, but with different values"), ("silent", "a.w does not say which part of the whole it is"),
                             ("lengths", r"a.w says it is part of \[8, 2\], but of \[7, 2\] on rank 0")):
            with self.subTest(name), self.assertRaisesRegex(ptc.CommitError, reason):
                ptc.commit(job.incoming(name))
        self.assertEqual(job.checkpoints(), [])


class Wrapped(ranks.TestCase):
    """Names of DistributedDataParallel and torch.compile: cut as the model's own, and in hf/ without."""
    BODY = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        for name, size in (("q", 8), ("k", 4), ("v", 4)): setattr(self.self_attn, name + "_proj", torch.nn.Linear(8, size, bias=False))
        self.self_attn.o_proj, self.mlp.down_proj = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(12, 8, bias=False)
        for name in ("gate", "up"): setattr(self.mlp, name + "_proj", torch.nn.Linear(8, 12, bias=False))
        for name in ("input", "post_attention"): setattr(self, name + "_layernorm", torch.nn.RMSNorm(8))
    def forward(self, x): return x
torch.manual_seed(2)
model = torch.nn.Module()
model.model = torch.nn.Module()
model.model.layers = torch.nn.ModuleList([torch.compile(Layer()), Layer()])
bare = {name.replace("_orig_mod.", ""): tensor.clone() for name, tensor in model.state_dict().items()}
wrapped = torch.nn.parallel.DistributedDataParallel(torch.compile(model))
adam = torch.optim.AdamW(wrapped.parameters())
for parameter in wrapped.parameters(): parameter.grad = torch.ones_like(parameter)
adam.step()
now = {name.replace("module.", "").replace("_orig_mod.", ""): tensor.detach().clone() for name, tensor in wrapped.state_dict().items()}
assert "module._orig_mod.model.layers.0._orig_mod.mlp.up_proj.weight" in wrapped.state_dict() and set(now) == set(bare)
if rank == 0: torch.save(now, KEPT)
config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
"""

    def check(self, job, kept, wrapper):
        """The bare names in hf/; layers and rows by the rules, under the names that were written, which `wrapper` begins."""
        bare = torch.load(kept)
        hf = ptc.safetensors.Mapped(job.file("checkpoints/a/hf/model.safetensors"))
        self.assert_equal({name: hf.tensor(name) for name in hf.entries}, bare)
        first, last = "model.layers.0._orig_mod.", "model.layers.1."
        job.set_layout(tp=2, pp=2, dp=1)
        for rank in range(4):
            state = ptc.load(job.path, rank=rank)
            here = wrapper + (first if rank < 2 else last)
            self.assertEqual({name[:len(here)] for name in state["model"]}, {here})
            half = slice(rank % 2 * 6, rank % 2 * 6 + 6)
            layer = f"model.layers.{rank // 2}.mlp."
            self.assert_equal(state["model"][here + "mlp.up_proj.weight"], bare[layer + "up_proj.weight"][half])
            self.assert_equal(state["model"][here + "mlp.down_proj.weight"], bare[layer + "down_proj.weight"][:, half])
            if "optim" in state:
                moments = state["optim"]["state"]
                self.assertEqual(set(moments), set(state["model"]))
                self.assertEqual(moments[here + "mlp.down_proj.weight"]["exp_avg"].shape, (8, 6))

    def test_in_safetensors(self):
        job, kept = ptc.Job.create(self.mount.path + "/wrapped", dp=2), self.temporary("kept.pt")
        self.run_ranks(2, self.BODY.replace("KEPT", repr(kept)) + """
ptc.Job(path).save({"model": wrapped.state_dict(), "optim": ptc.optimizer_state(wrapped, adam)}, "a", files={"config.json": config})
""", job.path)
        self.check(job, kept, "module._orig_mod.")

    def test_in_torch_files(self):
        job, kept = ptc.Job.create(self.mount.path + "/wrapped_torch", dp=2), self.temporary("kept.pt")
        self.run_ranks(2, self.BODY.replace("KEPT", repr(kept)) + """
import json
where = ptc.Job(path).incoming("a") + f"/rank/{rank}/"
os.makedirs(where)
torch.save({"model": wrapped.state_dict()}, where + "model.pt")
with open(where + "config.json", "w") as file: json.dump(config, file)
ptc.commit(os.path.dirname(os.path.dirname(where[:-1])))
""", job.path)
        self.check(job, kept, "module._orig_mod.")


class Loaded(ranks.TestCase):
    """What `load` gave, used otherwise than to be put into the module as it is: right, or refused."""

    def test_saved_again_it_is_the_part_that_it_was(self):
        """Also by who copies a layout's files into incoming/: a buffer that all have whole is no rows."""
        job = ptc.Job.create(self.mount.path + "/again", dp=4, optimizer="fsdp")
        self.run_ranks(4, """
flat, job = init_device_mesh("cpu", (4,)), ptc.Job(path)
job.save({"model": {"d.w": distribute_tensor(whole("d", 8, 2), flat, [Shard(0)]), "mask": whole("mask", 8)}}, "a")
job.wait()
job.save(ptc.load(path), "b")
""", job.path)
        job.wait()
        for dp in (4, 2):
            job.set_layout(dp=dp, optimizer="fsdp")
            job.wait()
            os.makedirs(job.incoming(f"c{dp}"))
            shutil.copytree(os.path.realpath(job.file("current")) + "/rank", job.incoming(f"c{dp}") + "/rank")
            ptc.commit(job.incoming(f"c{dp}"))
        first = ptc.Checkpoint(job.file("checkpoints/a"))
        for name in ("b", "c4", "c2"):
            again = ptc.Checkpoint(job.file("checkpoints", name))
            for key in ("d.w", "mask"):
                self.assertEqual(again.info(key).shape, first.info(key).shape, (name, key))
                self.assert_equal(again.read(key), first.read(key))

    def test_a_copy_is_not_taken_for_another_part(self):
        """FSDP2 after tensor parallelism on one axis: all ranks' parts have one shape."""
        job = ptc.Job.create(self.mount.path + "/origin", dp=4, optimizer="fsdp")
        self.run_ranks(4, """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
m = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False))
with torch.no_grad(): m[0].weight.copy_(torch.arange(32.).view(8, 4))
parallelize_module(m, grid["tp"], {"0": ColwiseParallel()}); fully_shard(m, mesh=grid["dp"])
kept = m[0].weight.full_tensor().clone()
job = ptc.Job(path)
job.save({"model": m.state_dict()}, "a"); job.wait()
loaded = ptc.load(path)["model"]
ptc.load_model_state(m, loaded)
assert torch.equal(m[0].weight.full_tensor(), kept)
try:
    ptc.load_model_state(m, {name: value.to(torch.float64) for name, value in loaded.items()})
    raise SystemExit("taken")
except ValueError as error:
    assert "0.weight: a tensor of" in str(error), error
""", job.path)

    def test_what_was_changed_or_replaced_since_is_not_mixed(self):
        job = ptc.Job.create(self.mount.path + "/since", dp=2, optimizer="fsdp")
        self.run_ranks(2, """
flat, job = init_device_mesh("cpu", (2,)), ptc.Job(path)
def state(value): return {"model": {name: distribute_tensor(torch.full((4, 4), value), flat, [Shard(0)]) for name in "vw"}}
m = torch.nn.Module()
m.v, m.w = (torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4), flat, [Shard(axis)])) for axis in (0, 1))
def refused(loaded, kind, words):
    try:
        ptc.load_model_state(m, loaded)
    except kind as error:
        assert words in str(error), error
        return
    raise SystemExit("taken")
job.save(state(1.), "latest"); job.wait()
loaded = ptc.load(path)["model"]
for value in loaded.values(): value.mul_(3)
refused(loaded, ValueError, "was changed since it was loaded")
loaded = ptc.load(path)["model"]
job.save(state(2.), "latest", overwrite=True); job.wait()
refused(loaded, FileNotFoundError, "another checkpoint was committed under this name")
ptc.load_model_state(m, ptc.load(path)["model"])
assert all((value.full_tensor() == 2).all() for value in (m.v, m.w))
""", job.path)

    def test_a_copy_of_a_layout_elsewhere(self):
        """With no checkpoint around it: loaded as it lies there."""
        job = ptc.Job.create(self.mount.path + "/elsewhere")
        job.save({"model": {"w": torch.ones(2)}}, "a")
        job.wait()
        with tempfile.TemporaryDirectory() as top:
            there = top + "/checkpoints/a/layouts/tp1-pp1-dp1/rank/0"
            shutil.copytree(os.path.realpath(job.file("current")) + "/rank/0", there)
            self.assert_equal(ptc.load(there)["model"]["w"], torch.ones(2))

    def test_which_part_the_layouts_name_says(self):
        job = ptc.Job.create(self.mount.path + "/parts", dp=4, optimizer="fsdp", dp_shard=2)
        job.save({"model": {"w": torch.arange(14.).view(7, 2)}}, "a", layout={"dp": 1})
        job.wait()
        for name, ranks_of, parts, each in (("tp1-pp1-dp4-shard2-fsdp", 4, 2, 4), ("tp1-pp1-dp3-fsdp", 3, 3, 3),
                                            ("tp1-pp1-dp2-fsdp-order_dp_tp_cp_ep_pp", 2, 2, 4), ("tp1-pp1-dp2-cp2-fsdp-over_cp", 4, 4, 2),
                                            ("tp1-pp1-dp4-cp2-shard1-fsdp-over_cp", 8, 2, 4)):
            for rank in range(ranks_of):
                with self.subTest(name, rank=rank):
                    begin = rank % parts * each
                    loaded = ptc.load(job.file("checkpoints/a/layouts", name), rank=rank)["model"]["w"]
                    self.assertEqual(ptc.loading.part_of(loaded), (((begin, 0), (min(each, 7 - begin), 2)), (7, 2)))

    def test_a_mesh_that_a_rank_is_not_on(self):
        job = ptc.Job.create(self.mount.path + "/foreign", dp=2, optimizer="fsdp")
        self.run_ranks(2, """
from torch.distributed.device_mesh import DeviceMesh
flat, one = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [1])
ptc.Job(path).save({"model": {"d.w": distribute_tensor(whole("d", 4, 2), flat, [Shard(0)]),
                              "e.b": distribute_tensor(whole("e", 4), one, [Shard(0)])}}, "a")
""", job.path)
        self.assertEqual(ptc.Checkpoint(job.path).info("e.b").shape, (4,))


if __name__ == "__main__":
    mount.main()
