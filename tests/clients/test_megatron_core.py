"""Trees that Megatron-Core itself wrote, with its distributed optimizer, on the CPU (megatron_ranks.py): what a layout has of one of
them is what Megatron writes when it runs under that layout."""
import argparse
import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys

import models
import mount

torch = mount.require("torch")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    mount.skip("Python has no megatron.core here (build/venv/bin/pip install megatron-core==0.16.1)")

from safetensors.torch import load_file, save_file  # noqa: E402  pylint: disable=wrong-import-position

HERE = os.path.dirname(os.path.abspath(__file__))
EXPERTS = 4

TORCH_DIST = """
import multiprocessing, os, sys
import torch
torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(2, 1)
rank = torch.distributed.get_rank()
mine = torch.arange(32.).reshape(8, 4).chunk(2)[rank].clone()
def cut(name, tensor): return ShardedTensor.from_rank_offsets(name, tensor, (0, rank, 2))
dist_checkpointing.save({"w": cut("decoder.w", mine), "moment": cut("optimizer.state.exp_avg.decoder.w", mine + 1),
                         "rng": ShardedObject("rng_state", [{"seed": rank}], (2,), (rank,)), "iteration": 100}, sys.argv[1], ("torch_dist", 1))
torch.distributed.barrier()
for child in multiprocessing.active_children(): child.kill()
os._exit(0)
"""


TORCH_DIST_LOAD = """
import multiprocessing, os, sys
import torch
torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
torch.distributed.init_process_group("gloo")
world = torch.distributed.get_world_size()
parallel_state.initialize_model_parallel(world, 1)
rank = torch.distributed.get_rank()
mine = torch.zeros(8 // world, 4)
found = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("decoder.w", mine, (0, rank, world))}, sys.argv[1])
assert torch.equal(found["w"], torch.arange(32.).reshape(8, 4).chunk(world)[rank]), found
assert found["iteration"] == 100, found
torch.distributed.barrier()
for child in multiprocessing.active_children(): child.kill()
os._exit(0)
"""


#: For each of some sizes prints of each rank which part it has of dense state and of experts', and its expert-parallel number.
GROUPS = """
import json, sys
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
for world, tp, pp, cp, ep, etp, instances in json.loads(sys.argv[1]):
    found = []
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(
            tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
            num_distributed_optimizer_instances=instances, create_gloo_process_groups=False)
        dense = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=instances > 1)
        experts = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=instances > 1)
        found.append([[dist.get_rank(group), dist.get_world_size(group)] for group in (dense, experts)]
                     + [parallel_state.get_expert_model_parallel_rank()])
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    print(json.dumps(found))
"""


class MegatronCore(mount.TestCase):
    def run_ranks(self, world, *command):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        variables = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        said = [self.temporary(f"said-{rank}") for rank in range(world)]  # a pipe would end with what they have forked
        processes = []
        for rank, path in enumerate(said):
            with open(path, "wb") as stderr:
                processes.append(subprocess.Popen([sys.executable, "-W", "ignore", *command], env={**variables, "RANK": str(rank)},
                                                  stdout=subprocess.DEVNULL, stderr=stderr))
        for process in processes:
            self.addCleanup(process.kill)
        codes = [process.wait(timeout=300) for process in processes]
        self.assertEqual(codes, [0] * world, "\n".join(map(mount.read_text, said)))

    def write(self, name, *sizes, **how):
        """The tree that so many ranks write."""
        top = self.temporary(name)
        self.megatron("save", top, *sizes, **how)
        return top

    def megatron(self, action, top, tp, pp, dp, ep=1, dtype="float32", tied=False, bucket=None, sharding="-"):
        self.run_ranks(tp * pp * dp, os.path.join(HERE, "megatron_ranks.py"), action, top, str(tp), str(pp), str(ep), dtype,
                       "tied" if tied else "untied", "-" if bucket is None else str(bucket), sharding)

    def load(self, path):
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, weights_only=True)

    def expect_same(self, found, wanted, at):
        if isinstance(wanted, dict):
            self.assertEqual(sorted(found, key=str), sorted(wanted, key=str), at)
            for key, value in wanted.items():
                self.expect_same(found[key], value, f"{at} {key}")
        elif isinstance(wanted, torch.Tensor):
            self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape), at)
            self.assertTrue(torch.equal(found, wanted), at)
        else:
            self.assertEqual(found, wanted, at)

    def compare(self, name, layouts, **how):
        trees = {sizes: self.write(f"{name}-{number}", *sizes, **how) for number, sizes in enumerate(layouts)}
        job = self.mount.job(name)
        self.mount.ptc("import", name, trees[layouts[0]], "--name", "base")
        for (tp, pp, dp), top in trees.items():
            for tp_rank, pp_rank in itertools.product(range(tp), range(pp)):
                rank = f"iter_0000100/mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")
                layout = job.checkpoint("base", "layouts", f"tp{tp}-pp{pp}-dp{dp}", "megatron", rank)
                found, wanted = (self.load(at + "/model_optim_rng.pt")["model"] for at in (layout, os.path.join(top, rank)))
                self.assertEqual([key for key, value in found.items() if value is not None],
                                 [key for key, value in wanted.items() if value is not None])
                self.expect_same({**found}, {**wanted}, f"{name} {layout}")
                self.expect_same(*(self.load(at + "/distrib_optim.pt") for at in (layout, os.path.join(top, rank))), f"{name} {layout}")

    def test_ranks_that_share_state(self):
        """Who has which part of what the distributed optimizer cuts: each part is of rows that say their numbers."""
        rows, experts = 32, 8
        dense = "model.layers.{}.input_layernorm.weight"
        of_expert = "model.layers.{}.block_sparse_moe.experts.{}.w2.weight"
        def numbered(name, *more):
            values = torch.arange(float(rows)).view(rows, *(1 for _ in more)).expand(rows, *more)
            return models.Tensor(name, "F32", (rows, *more), values.contiguous().numpy().tobytes())
        top = self.temporary("numbered")
        models.write_safetensors(top + "/model.safetensors",
                                 [numbered(dense.format(layer)) for layer in range(2)]
                                 + [numbered(of_expert.format(layer, e), 4) for layer in range(2) for e in range(experts)])
        models.write_file(top + "/config.json", json.dumps({"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": experts}))
        job = self.mount.job("shares")
        self.mount.ptc("import", "shares", top, "--name", "base")
        layouts = {"tp2-pp1-dp2-cp2-fsdp-over_cp": (8, 2, 1, 2, 1, None, 1),
                   "tp2-pp2-dp2-ep2-cp2-fsdp-over_cp_ep-order_tp_ep_cp_dp_pp": (32, 2, 2, 2, 2, None, 1),
                   "tp2-pp1-dp4-ep4-etp1-fsdp-over_ep": (16, 2, 1, 1, 4, 1, 1),
                   "tp2-pp1-dp2-ep4-etp1-cp2-fsdp-over_cp_ep": (16, 2, 1, 2, 4, 1, 1),
                   "tp1-pp1-dp4-cp2-shard2-fsdp-over_cp": (8, 1, 1, 2, 1, None, 2),
                   "tp1-pp1-dp4-ep2-shard2-fsdp-over_ep": (8, 1, 1, 1, 2, None, 2)}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", GROUPS, json.dumps(list(layouts.values()))], stdout=subprocess.PIPE,
                              check=True, timeout=300)
        for (name, sizes), line in zip(layouts.items(), done.stdout.splitlines()[-len(layouts):]):
            wanted = json.loads(line)
            world, ep, found = sizes[0], sizes[4], []
            for rank in range(world):
                held = models.read_safetensors(job.rank_file("base", name, rank))
                layer = min(int(tensor.split(".")[2]) for tensor in held)
                mine = [e for e in range(experts) if of_expert.format(layer, e) in held]
                parts = [held[dense.format(layer)], held[of_expert.format(layer, mine[0])]]
                found.append([[int(torch.frombuffer(bytearray(part.data), dtype=torch.float32)[0]) // part.shape[0], rows // part.shape[0]]
                              for part in parts] + [mine[0] * ep // experts])
            self.assertEqual(found, wanted, name)

    def test_one_bucket(self):
        self.compare("one", ((2, 2, 1), (1, 1, 3)))

    def test_tied_of_sixteen_bits_in_several_buckets(self):
        self.compare("several", ((1, 2, 2), (4, 1, 1), (1, 1, 1)), dtype="bfloat16", tied=True, bucket=500)

    def test_other_models(self):
        """Layers that predict further tokens, learnable sinks of attention, BERT and T5: ranks have what Megatron's own modules have."""
        grid = ((2, 2), (1, 1), (2, 1), (1, 2))
        kinds = {"mtp": grid, "bert": grid, "sinks": grid[1:], "t5": grid[1:3], "t5-relative": grid[1:3]}
        for kind, layouts in kinds.items():
            trees = {sizes: self.temporary(f"{kind}-{number}") for number, sizes in enumerate(layouts)}
            for (tp, pp), top in trees.items():
                self.run_ranks(tp * pp, os.path.join(HERE, "megatron_models.py"), kind, top, str(tp), str(pp))
            job = self.mount.job(kind)
            self.mount.ptc("import", kind, trees[layouts[0]], "--name", "base")
            for (tp, pp), top in trees.items():
                for tp_rank, pp_rank in itertools.product(range(tp), range(pp)):
                    rank = f"iter_0000100/mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")
                    layout = job.checkpoint("base", "layouts", f"tp{tp}-pp{pp}-dp1", "megatron", rank)
                    found, wanted = (self.load(at + "/model_optim_rng.pt")["model"] for at in (layout, os.path.join(top, rank)))
                    found, wanted = ({name: value for name, value in one.items() if value is not None} for one in (found, wanted))
                    self.expect_same(found, wanted, f"{kind} {layout}")
            if kind == "t5":
                self.assertEqual(mount.error_of(lambda: job.save_layout(pp=2)), "EINVAL")  # pylint: disable=cell-var-from-loop
                self.assertIn("cannot be cut under pp = 2", job.error())

    def test_experts_and_stretches(self):
        """Experts under tp, under a tp of their own, all of a rank in one parameter, and stages of several stretches: ranks have what
        Megatron's own modules have."""
        grids = {"experts": {"tp1-pp1-dp1": (1, 1), "tp2-pp1-dp1-ep2": (2, 1, 2), "tp1-pp2-dp1-ep2": (1, 2, 2), "tp2-pp2-dp1": (2, 2),
                             "tp2-pp1-dp1-ep2-etp1": (2, 1, 2, 1), "tp4-pp1-dp1-ep2-etp2": (4, 1, 2, 2)},
                 "grouped": {"tp1-pp2-dp1-ep2": (1, 2, 2), "tp1-pp1-dp1": (1, 1), "tp2-pp1-dp1-ep2": (2, 1, 2), "tp2-pp2-dp1": (2, 2),
                             "tp1-pp1-dp1-ep4": (1, 1, 4), "tp2-pp1-dp1-ep2-etp1": (2, 1, 2, 1), "tp4-pp1-dp1-ep2-etp2": (4, 1, 2, 2)},
                 "grouped-plain": {"tp2-pp1-dp1": (2, 1), "tp1-pp1-dp1-ep2": (1, 1, 2)},
                 "stretches": {"tp1-pp2-dp1-vpp2": (1, 2, 1, 0, 2), "tp1-pp1-dp1": (1, 1), "tp2-pp2-dp1-vpp2": (2, 2, 1, 0, 2), "tp2-pp1-dp1": (2, 1)}}
        for kind, layouts in grids.items():
            trees = {layout: self.temporary(f"{kind}-{layout}") for layout in layouts}
            for layout, (tp, pp, *more) in layouts.items():
                ep, etp, _ = (*more, *(1, 0, 0)[len(more):])
                self.run_ranks((tp if etp else tp * ep if ep > 1 else tp) * pp, os.path.join(HERE, "megatron_models.py"), kind, trees[layout],
                               *map(str, layouts[layout]))
            job = self.mount.job(kind)
            self.mount.ptc("import", kind, trees[next(iter(layouts))], "--name", "base")
            for layout, top in trees.items():
                written = sorted(os.listdir(top + "/iter_0000100"))
                if "etp" in layout:  # which Megatron's own trees are not cut to
                    self.expect_experts_apart(kind, layout, *layouts[layout], self.load(trees["tp1-pp1-dp1"] + "/iter_0000100/mp_rank_00/model_optim_rng.pt"), top)
                    continue
                at = job.checkpoint("base", "layouts", layout, "megatron", "iter_0000100")
                self.assertEqual(sorted(os.listdir(at)), written, layout)
                for rank in written:
                    found, wanted = (self.load(f"{one}/{rank}/model_optim_rng.pt") for one in (at, top + "/iter_0000100"))
                    for model in [key for key in wanted if key.startswith("model")]:
                        self.expect_same(*({name: value for name, value in one[model].items() if value is not None} for one in (found, wanted)),
                                         f"{kind} {layout} {rank} {model}")

    def expect_experts_apart(self, kind, layout, tp, pp, ep, etp, whole, top):
        """Of the same model in safetensors, whose experts count on through ranks."""
        name, each = f"apart-{kind}-{layout}", EXPERTS // ep
        job = self.mount.job(name)
        config = {"model_type": "megatron", "num_layers": 4, "num_attention_heads": 4, "num_query_groups": 2, "num_moe_experts": EXPERTS,
                  "gated_linear_unit": True}
        models.write_file(job.incoming("base") + "/rank/0/config.json", json.dumps(config))
        tensors = {key: value for key, value in whole["model"].items() if value is not None}
        save_file(tensors, job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        for rank in range(tp * pp):
            ep_rank = rank // etp
            found = load_file(job.rank_file("base", layout, rank))
            wanted = self.load(f"{top}/iter_0000100/mp_rank_{rank:02d}_{ep_rank:03d}/model_optim_rng.pt")["model"]
            wanted = {re.sub(r"(?<=local_experts\.)\d+", lambda number: str(int(number[0]) + ep_rank * each), key): value  # pylint: disable=cell-var-from-loop
                      for key, value in wanted.items() if value is not None}
            self.expect_same(found, wanted, f"{layout} rank {rank}")

    def test_torch_dist(self):
        """What its own distributed checkpointing wrote is dcp.save's, with more beside."""
        import torch.distributed.checkpoint as dcp  # pylint: disable=import-outside-toplevel
        job = self.mount.job("torch-dist")
        os.makedirs(job.incoming("base") + "/iter_0000100")
        self.run_ranks(2, "-c", TORCH_DIST, job.incoming("base") + "/iter_0000100")
        with open(job.incoming("base") + "/latest_checkpointed_iteration.txt", "w", encoding="utf-8") as file:
            file.write("100")
        job.commit("base")
        whole = torch.arange(32.).reshape(8, 4)
        state = {"decoder.w": torch.zeros(8, 4), "optimizer.state.exp_avg.decoder.w": torch.zeros(8, 4)}
        dcp.load(state, checkpoint_id=job.checkpoint("base", "dcp"), no_dist=True)
        self.expect_same(state, {"decoder.w": whole, "optimizer.state.exp_avg.decoder.w": whole + 1}, "dcp/")
        for world in (1, 4):
            self.run_ranks(world, "-c", TORCH_DIST_LOAD, job.checkpoint("base", "dcp"))
            self.run_ranks(world, "-c", TORCH_DIST_LOAD, job.file("current", "megatron", "iter_0000100"))
        self.assertEqual(torch.load(job.rank_file("base", "tp1-pp1-dp1", 0, "iter_0000100/common.pt"), weights_only=True)["iteration"], 100)

    def test_torch_dist_under_other_sizes(self):
        """Of a model and its distributed optimizer: Megatron loads dcp/ on other tensor ranks and stages, and files of ranks have what
        those of its own format have under their layout."""
        self.mount.ptc("import", "stacked", self.write("stacked", 2, 2, 1, sharding="fully_reshardable"), "--name", "base")
        job = mount.Job(self.mount, "stacked")
        for sizes in ((1, 1, 2), (1, 4, 1)):
            self.megatron("load", job.checkpoint("base", "dcp"), *sizes, sharding="fully_reshardable")
        layout = job.set_layout(tp=1, pp=2, naming="stage") and job.file("current", "rank")
        top = self.write("own", 1, 2, 1)
        for rank in range(2):
            own = self.load(f"{top}/iter_0000100/mp_rank_00_{rank:03d}/model_optim_rng.pt")["model"]
            found = models.read_safetensors(f"{layout}/{rank}/iter_0000100/model.safetensors")
            weights = {name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"): tensor
                       for name, tensor in own.items() if tensor is not None}
            self.assertEqual(sorted(weights), sorted(name for name in found if not name.startswith("optimizer.")))
            self.assertEqual(len(found), 4 * len(weights))
            for name, tensor in weights.items():
                self.assertEqual((found[name].shape, found[name].data), (tuple(tensor.shape), tensor.numpy().tobytes()), name)

    def test_torch_dist_in_buckets(self):
        """Unless it is told otherwise Megatron saves its optimizer's state in buckets, for as many tensor ranks and stages alone: it comes
        out as what it saves by parameters."""
        for number, (tied, sizes, how) in enumerate(((False, (2, 2, 2), {}), (True, (1, 2, 2), {"dtype": "bfloat16"}), (False, (4, 1, 1), {"bucket": 500}),
                                                       (True, (1, 2, 2), {"dtype": "bfloat16", "ep": 2}))):
            files = []
            for sharding in ("dp_reshardable", "fully_reshardable"):
                name = f"{sharding}-{number}"
                if sharding == "fully_reshardable":  # with several buckets it saves other parameters' state than it says
                    how = {**how, "bucket": None}
                self.mount.ptc("import", name, self.write(name, *sizes, tied=tied, sharding=sharding, **how), "--name", "base")
                job = mount.Job(self.mount, name)
                files.append({f"{layout} {rank}": models.read_safetensors(job.checkpoint("base", "layouts", layout, "rank", str(rank), "iter_0000100", "model.safetensors"))
                              for layout, ranks in (("tp1-pp1-dp1", 1), ("tp4-pp1-dp1", 4), ("tp2-pp2-dp1", 4), ("tp1-pp4-dp1", 4), ("tp1-pp1-dp3-fsdp", 3)) for rank in range(ranks)})
            self.assertEqual(sorted(files[0]), sorted(files[1]))
            for file, tensors in files[1].items():
                self.assertEqual(sorted(files[0][file]), sorted(tensors), file)
                self.assertTrue(any("optimizer.state.exp_avg_sq." in tensor for tensor in tensors), file)
                for tensor, wanted in tensors.items():
                    found = files[0][file][tensor]
                    self.assertEqual((found.shape, found.dtype), (wanted.shape, wanted.dtype), f"{file} {tensor}")
                    self.assertTrue(found.data == wanted.data, f"{number} {file} {tensor}")
            # Megatron itself takes it for the other.
            self.megatron("load", mount.Job(self.mount, f"dp_reshardable-{number}").checkpoint("base", "dcp"), *((1, 1, 2) if "ep" in how else (2, 1, 1)), tied=tied,
                          sharding="fully_reshardable", **{**how, "bucket": None})

    def test_torch_dist_with_experts(self):
        self.mount.ptc("import", "stacked-experts", self.write("stacked-experts", 1, 1, 2, ep=2, tied=True, sharding="fully_reshardable"),
                       "--name", "base")
        self.megatron("load", mount.Job(self.mount, "stacked-experts").checkpoint("base", "dcp"), 1, 2, 2, ep=2, tied=True, sharding="fully_reshardable")

    def test_a_run_whose_layout_changes(self):
        """tp2-dp2, pp2-dp2 (a process killed), tp2-pp2 with half the batch: its loss is that of one process."""
        tools = os.path.join(HERE, "../../tools")
        out = self.temporary("proof")
        told = subprocess.run([sys.executable, "-W", "ignore", tools + "/examples/proof.py", self.mount.path, "--out", out, "--only", "megatron"],
                              env={**os.environ, "PYTHONPATH": ":".join([tools + "/python", os.environ.get("PYTHONPATH", "")])}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
        self.assertEqual(told.returncode, 0, told.stdout)
        print(told.stdout.splitlines()[-1])
        self.assertIn("killed", mount.read_text(out + "/megatron.svg"))

    def test_expert_ranks(self):
        """What is no expert's only the first of them writes; each has it in what is made anew."""
        trees = {pp: self.write(f"experts-{pp}", 1, pp, 2, ep=2) for pp in (1, 2)}
        job = self.mount.job("experts")
        self.mount.ptc("import", "experts", trees[1], "--name", "base")
        for (pp, top), ep_rank in itertools.product(trees.items(), range(2)):
            for pp_rank in range(pp):
                rank = "iter_0000100/mp_rank_00" + (f"_{pp_rank:03d}" if pp > 1 else "") + f"_{ep_rank:03d}"
                layout = job.checkpoint("base", "layouts", f"tp1-pp{pp}-dp1-ep2", "megatron", rank)
                found, wanted = (self.load(at + "/distrib_optim.pt") for at in (layout, os.path.join(top, rank)))
                self.assertEqual(wanted[0] is None, ep_rank > 0)
                for optimizer in range(ep_rank, 2):
                    self.expect_same(found[optimizer], wanted[optimizer], f"{layout} {optimizer}")
                found, wanted = (self.load(at + "/model_optim_rng.pt")["model"] for at in (layout, os.path.join(top, rank)))
                self.expect_same({**found}, {**wanted}, layout)


if __name__ == "__main__":
    mount.main()
