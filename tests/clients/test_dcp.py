"""Safetensors that PyTorch's distributed checkpointing wrote in shards, and names that several files have."""
import importlib.util
import json
import os
import struct
import subprocess
import sys
import unittest

import models
import mount

SAVE = """
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
rank, path, rendezvous = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=3)
mesh = init_device_mesh("cpu", (3,))
whole = torch.load(sys.argv[4])
cuts = {name: Replicate() if tensor.dim() == 0 or "norm" in name else Shard(1 if "down" in name else 0)
        for name, tensor in whole.items()}
state = {name: distribute_tensor(tensor, mesh, [cuts[name]]) for name, tensor in whole.items()}
index = {name: 1 + number % 2 for number, name in enumerate(sorted(whole))}
dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, fqn_to_index_mapping=index, save_distributed=True))
# All have saved; then at once, because threads of PyTorch's own can abort a process that is taken apart.
open(f"{rendezvous}.{rank}", "w").close()
while not all(os.path.exists(f"{rendezvous}.{other}") for other in range(3)): time.sleep(0.01)
os._exit(0)
"""


def part(tensor, offset, shape):
    """A box of a tensor, C order."""
    size = models.ITEM_BYTES[tensor.dtype]
    if not shape:
        return models.Tensor(tensor.name, tensor.dtype, (), tensor.data)
    inner = models.count(tensor.shape[1:])
    data = b""
    for row in range(offset[0], offset[0] + shape[0]):
        whole = tensor.data[row * inner * size:(row + 1) * inner * size]
        if len(shape) == 1:
            data += whole
            continue
        rest = models.Tensor(tensor.name, tensor.dtype, tensor.shape[1:], whole)
        data += part(rest, offset[1:], shape[1:]).data
    return models.Tensor(tensor.name, tensor.dtype, tuple(shape), data)


def write_shard(path, boxes):
    """`boxes`: (tensor, offset, shape), as a rank of the writer has them."""
    info = {tensor.name: {"saved_offsets": list(offset)} for tensor, offset, _ in boxes}
    models.write_safetensors(path, [part(*box) for box in boxes], {
        "DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"})


def rows(tensors, rank, ranks):
    """What FSDP's rank has: rows of each, and of small ones none."""
    boxes = []
    for tensor in tensors:
        step = -(-tensor.shape[0] // ranks)
        begin, end = min(rank * step, tensor.shape[0]), min((rank + 1) * step, tensor.shape[0])
        if begin < end:
            boxes.append((tensor, (begin,) + (0,) * (len(tensor.shape) - 1), (end - begin,) + tuple(tensor.shape[1:])))
    return boxes


def shard_name(rank, index=1, files=1):
    return f"shard-{rank + 1:05}-model-{index:05}-of-{files:05}.safetensors"


def read_hf(job, checkpoint="base"):
    return models.read_hf(job.checkpoint(checkpoint, "hf"))


class Shards(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.model = models.Llama()
        self.whole = {tensor.name: tensor for tensor in self.model.tensors}

    def config(self, job, rank=0):
        models.write_file(job.incoming("base") + f"/rank/{rank}/config.json", self.model.config_text())

    def expect_whole(self, job):
        self.assertEqual(read_hf(job), self.whole)
        for tensor in self.model.tensors:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data), tensor.name)
        self.mount.ptc("verify", job.name)

    def test_of_all_ranks_in_one_directory(self):
        job = self.new_job()
        at = job.incoming("base") + "/rank/0/"
        tensors = self.model.tensors
        for rank in range(3):  # two files of each rank, as with fqn_to_index_mapping
            for index, some in ((1, tensors[::2]), (2, tensors[1::2])):
                write_shard(at + shard_name(rank, index, 2), rows(some, rank, 3))
        self.config(job)
        job.commit("base")
        self.expect_whole(job)
        self.assertEqual(models.read_safetensors(job.rank_file("base", "tp1-pp1-dp1", 0)), self.whole)
        job.set_layout(tp=2)
        for rank in range(2):
            held = {t.name: t for t in self.model.rank_tensors(2, 1, rank, 0)}
            self.assertEqual(models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1", rank)), held)
        self.expect_whole(job)

    def test_cut_along_both_axes_and_not_at_all(self):
        job = self.new_job()
        at = job.incoming("base") + "/rank/0/"
        shards = [[], [], [], []]
        for number, tensor in enumerate(self.model.tensors):
            if len(tensor.shape) < 2:
                shards[number % 4].append((tensor, (0,) * len(tensor.shape), tensor.shape))
                continue
            down, right = tensor.shape[0] // 2, tensor.shape[1] // 3
            for quarter in range(4):
                begin = (down if quarter & 1 else 0, right if quarter & 2 else 0)
                end = (tensor.shape[0] if quarter & 1 else down, tensor.shape[1] if quarter & 2 else right)
                shards[quarter].append((tensor, begin, (end[0] - begin[0], end[1] - begin[1])))
        for rank, boxes in enumerate(shards):
            write_shard(at + shard_name(rank), boxes)
        self.config(job)
        job.commit("base")
        self.expect_whole(job)

    def test_each_rank_in_its_own(self):
        job = self.new_job()
        job.set_layout(dp=2, optimizer="fsdp")
        for rank in range(2):
            write_shard(job.incoming("base") + f"/rank/{rank}/" + shard_name(rank), rows(self.model.tensors, rank, 2))
            self.config(job, rank)
        job.commit("base")
        self.expect_whole(job)
        job.set_layout(tp=2)
        self.expect_whole(job)

    def test_after_a_new_start(self):
        job = self.new_job()
        for rank in range(2):
            write_shard(job.incoming("base") + "/rank/0/" + shard_name(rank), rows(self.model.tensors, rank, 2))
        self.config(job)
        job.commit("base")
        self.mount.stop(kill=True)
        self.mount.start()
        self.expect_whole(job)

    def refused(self, job, *reasons):
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in reasons:
            self.assertIn(reason, job.commit_error("base"))

    def test_refusals(self):
        name = "model.embed_tokens.weight"
        tensor = self.whole[name]
        height, width = tensor.shape

        def write(job, *boxes):
            for number, box in enumerate(boxes):
                write_shard(job.incoming("base") + "/rank/0/" + shard_name(number), [(tensor, *box)])

        job = self.mount.job("a-shard-is-missing")
        write(job, ((0, 0), (4, width)), ((8, 0), (height - 8, width)))
        self.refused(job, f"tensor '{name}'", f"nothing holds [4:8, 0:{width}] of it")
        job = self.mount.job("the-first-is-missing")
        write(job, ((8, 0), (height - 8, width)))
        self.refused(job, f"tensor '{name}': it was saved as [8:{height}, 0:{width}] of the whole tensor", "layout.json")
        job = self.mount.job("overlap")
        write(job, ((0, 0), (8, width)), ((4, 0), (height - 4, width)))
        self.refused(job, "overlap")
        job = self.mount.job("both")
        write(job, ((0, 0), (8, width)), ((8, 0), (height - 8, width)))
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors", [tensor])
        self.refused(job, "is a shard of model.safetensors, which is there too")
        for number, (info, reason) in enumerate((("{}", "does not say where tensor"), ("[]", "no JSON object"), ("{", "line 1"),
                                                 (json.dumps({name: {"saved_offsets": [0]}}), "does not say where tensor"),
                                                 (json.dumps({name: {"saved_offsets": [0, -1]}}), "no number of elements"),
                                                 (json.dumps({name: {"saved_offsets": [2**63 - 2, 0]}}),
                                                  "no number of elements"))):
            job = self.mount.job(f"damaged-{number}")
            models.write_safetensors(job.incoming("base") + "/rank/0/" + shard_name(0), [tensor],
                                     {"DCP_SHARDING_INFO": info})
            self.refused(job, reason)

    def test_whole_tensors_are_what_they_are(self):
        """As without save_distributed: the offsets say nothing."""
        job = self.new_job()
        write_shard(job.incoming("base") + "/rank/0/model-00001-of-00001.safetensors",
                    [(tensor, (0,) * len(tensor.shape), tensor.shape) for tensor in self.model.tensors])
        self.config(job)
        job.commit("base")
        path = job.rank_file("base", "tp1-pp1-dp1", 0, "model-00001-of-00001.safetensors")
        self.assertEqual(models.read_safetensors(path), self.whole)
        self.expect_whole(job)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "Python has no torch here")
    def test_written_by_torch(self):
        import torch  # pylint: disable=import-error,import-outside-toplevel
        torch.manual_seed(1)
        shapes = {"model.embed_tokens.weight": (50, 12), "model.norm.weight": (12,), "model.down.weight": (12, 31),
                  "model.up.weight": (31, 12), "model.scale": (), "model.short.bias": (2,)}
        whole = {name: torch.rand(shape) for name, shape in shapes.items()}
        torch.save(whole, self.temporary("whole.pt"))
        job = self.new_job()
        at = job.incoming("base") + "/rank/0"
        os.makedirs(at)
        writers = [subprocess.Popen([sys.executable, "-c", SAVE, str(rank), at, self.temporary("meet"),
                                     self.temporary("whole.pt")]) for rank in range(3)]
        for writer in writers:
            self.addCleanup(writer.kill)
        self.assertEqual([writer.wait(timeout=240) for writer in writers], [0, 0, 0])
        self.assertGreater(len(os.listdir(at)), 3)
        job.commit("base")
        found = read_hf(job)
        self.assertEqual(sorted(found), sorted(whole))
        for name, tensor in whole.items():
            self.assertEqual(found[name].shape, tuple(tensor.shape), name)
            self.assertEqual(found[name].data, tensor.numpy().tobytes(), name)


def ramp(name, dtype, *shape, first=0):
    bytes_of = {"F32": "<f", "BF16": "<H"}[dtype]
    return models.Tensor(name, dtype, shape,
                         b"".join(struct.pack(bytes_of, first + number) for number in range(models.count(shape))))


class SameNames(mount.TestCase):
    def commit(self, **files):
        job = self.new_job()
        for name, tensors in files.items():
            models.write_safetensors(job.incoming("base") + f"/rank/0/{name}.safetensors", tensors)
        job.commit("base")
        return job

    def export(self, job, *options):
        target = self.temporary("out-" + "-".join(options).strip("-"))
        return self.mount.ptc("export", job.name, target, *options, check=False), target

    def test_with_equal_content(self):
        tensors = [ramp("a.weight", "F32", 4, 4), ramp("b.weight", "F32", 8)]
        job = self.commit(model=tensors, copy=tensors)
        self.assertEqual(job.status()["warnings"], [])
        done, _ = self.export(job)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_master_weights_are_optimizer_state(self):
        """Whichever file comes first: hf/ has the model."""
        model, masters = [ramp("a.weight", "BF16", 4, 4)], [ramp("a.weight", "F32", 4, 4)]
        for number, (first, second) in enumerate((("model", "optim"), ("weights", "a_optim"))):
            with self.subTest(first):
                job = self.mount.job(f"masters-{number}")
                models.write_safetensors(job.incoming("base") + f"/rank/0/{first}.safetensors", model)
                models.write_safetensors(job.incoming("base") + f"/rank/0/{second}.safetensors", masters)
                job.commit("base")
                self.assertEqual(read_hf(job), {"a.weight": model[0]})
                self.assertEqual(job.status()["warnings"], [])
                target = self.temporary(f"out-{number}")
                done = self.mount.ptc("export", job.name, target, check=False)
                self.assertEqual(done.returncode, 0)
                self.assertIn(f"left out: 1 tensors of {second}.safetensors, which are optimizer state", done.stderr)

    def test_with_other_content(self):
        model = [ramp("a.weight", "F32", 4, 4), ramp("b.weight", "F32", 8)]
        ema = [ramp("a.weight", "F32", 4, 4, first=9), ramp("b.weight", "F32", 8), ramp("c.weight", "F32", 2)]
        job = self.commit(model=model, ema=ema)
        self.assertEqual(read_hf(job), {t.name: t for t in [*model, ema[2]]})
        self.assertIn("1 tensors of ema.safetensors", mount.read_text(job.checkpoint("base", "hf/LEFT_OUT.txt")))
        warning, = job.status()["warnings"]
        self.assertIn("checkpoint base: 1 tensors of ema.safetensors have the names of others", warning)
        done, target = self.export(job)
        self.assertEqual(done.returncode, 1)
        self.assertIn("1 tensors of ema.safetensors", done.stderr)
        self.assertFalse(os.path.exists(target))
        done, target = self.export(job, "--partial")
        self.assertEqual(done.returncode, 0)
        self.assertIn("1 tensors of ema.safetensors", done.stderr)
        self.assertIn("LEFT_OUT.txt", os.listdir(target))
        done, target = self.export(job, "--model")
        self.assertEqual(done.returncode, 0)
        for name, tensors in (("", model), ("ema.safetensors/", ema[:1])):
            for tensor in tensors:
                path = os.path.join(target, name + tensor.name.replace(".", "/") + ".npy")
                self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data))
        done, target = self.export(job, "--layout", "current")
        self.assertEqual(done.returncode, 0)
        self.assertEqual(models.read_safetensors(os.path.join(target, "rank/0/ema.safetensors")), {t.name: t for t in ema})


if __name__ == "__main__":
    mount.main()
