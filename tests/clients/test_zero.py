"""Optimizer state cut over data-parallel ranks: ZeRO-1's flat parts and FSDP's rows, there and back."""
import hashlib
import random

import models
import mount
from models import Tensor, count


def chunk(rows, rank, ranks):
    """The rows of a rank by torch.chunk's rule: as many to each, until none is left."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def cut_rows(tensor, rank, ranks):
    begin, end = chunk(tensor.shape[0], rank, ranks)
    return models.take(tensor, 0, [(begin, end)], end - begin)


def cut_flat(tensor, rank, ranks):
    each = -(-count(tensor.shape) // ranks)
    size = each * tensor.item_bytes
    data = tensor.data[rank * size:(rank + 1) * size]
    return Tensor(tensor.name, tensor.dtype, (each,), data.ljust(size, b"\0"))


class Training:
    """A model with Adam's state, as each rank saves it under a layout."""

    def __init__(self, model):
        rng = random.Random(7)
        self.model = model
        self.state = {}  # of each parameter
        for tensor in model.tensors:
            if tensor.name.endswith("position_ids"):
                continue  # a buffer
            self.state[tensor.name] = [
                models.random_tensor(rng, f"{moment}.{tensor.name}", "F32", tensor.shape)
                for moment in ("exp_avg", "exp_avg_sq")]
            self.state[tensor.name].append(
                models.random_tensor(rng, f"state.{tensor.name}.step", "F32", ()))

    def rank_files(self, rank, tp=1, pp=1, dp=1, optimizer="replicated"):
        tp_rank, dp_rank, pp_rank = rank % tp, rank // tp % dp, rank // (tp * dp)
        files = {"model.safetensors": [], "optim.safetensors": []}
        for tensor in self.model.tensors:
            if pp_rank not in self.model.stages(tensor.name, pp):
                continue
            part = self.model.cut(tensor, tp_rank, tp)
            if optimizer == "fsdp" and tensor.name in self.state:
                part = cut_rows(part, dp_rank, dp)
            files["model.safetensors"].append(part)
            for moment in self.state.get(tensor.name, []):
                if moment.shape:
                    as_parameter = Tensor(tensor.name, moment.dtype, moment.shape, moment.data)
                    part = self.model.cut(as_parameter, tp_rank, tp)
                    part = Tensor(moment.name, part.dtype, part.shape, part.data)
                    if optimizer != "replicated":
                        cut = cut_flat if optimizer == "zero1" else cut_rows
                        moment = cut(part, dp_rank, dp)
                    else:
                        moment = part
                files["optim.safetensors"].append(moment)
        return files

    def write(self, directory, layout):
        """Returns what was written: path below rank/ → digest."""
        digests = {}
        for rank in range(ranks_of(layout)):
            for name, tensors in self.rank_files(rank, **layout).items():
                content = models.safetensors_bytes(tensors, {"format": "pt"})
                models.write_file(f"{directory}/rank/{rank}/{name}", content)
                digests[f"{rank}/{name}"] = hashlib.sha256(content).hexdigest()
        models.write_file(f"{directory}/rank/0/config.json", self.model.config_text())
        return digests


def ranks_of(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)


class Zero(mount.TestCase):
    def check_current(self, job, training, layout):
        for rank in range(ranks_of(layout)):
            for name, tensors in training.rank_files(rank, **layout).items():
                found = models.read_safetensors(job.file("current", "rank", rank, name))
                self.assertEqual(set(found), {t.name for t in tensors}, f"{layout} rank {rank}")
                for tensor in tensors:
                    self.assertEqual(found[tensor.name], tensor, f"{layout} rank {rank}")

    def digests(self, job, paths):
        found = {}
        for path in paths:
            with open(job.file("current", "rank", path), "rb") as file:
                found[path] = hashlib.sha256(file.read()).hexdigest()
        return found

    def check_chain(self, model, written, others):
        training = Training(model)
        job = self.new_job()
        job.set_layout(**written)
        digests = training.write(job.incoming("base"), written)
        job.commit("base")
        self.assertEqual(self.digests(job, digests), digests, "the written files themselves")
        for other in others:
            job.set_layout(**other)
            self.check_current(job, training, other)
        for tensor in [*model.tensors, *sum(training.state.values(), [])]:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data), tensor.name)
        job.set_layout(**written)
        self.assertEqual(self.digests(job, digests), digests, "there and back")
        self.mount.ptc("verify", job.name)

    def test_zero1(self):
        self.check_chain(models.Llama(), {"tp": 2, "dp": 2, "optimizer": "zero1"}, [
            {"tp": 2, "dp": 4, "optimizer": "zero1"}, {"dp": 3, "optimizer": "zero1"},
            {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "dp": 2, "optimizer": "zero1"},
            {"tp": 2, "dp": 3, "optimizer": "fsdp"}])

    def test_fsdp(self):
        self.check_chain(models.Bert(), {"dp": 5, "optimizer": "fsdp"}, [
            {"tp": 2, "dp": 5, "optimizer": "fsdp"}, {"pp": 2, "dp": 3, "optimizer": "fsdp"},
            {"tp": 4}, {"tp": 2, "dp": 2, "optimizer": "zero1"}])

    def test_replicated_and_back(self):
        self.check_chain(models.Gpt2(), {"tp": 2}, [
            {"tp": 2, "dp": 3, "optimizer": "fsdp"}, {"tp": 4, "dp": 2, "optimizer": "zero1"}])

    def test_a_missing_rank_is_named(self):
        training, layout = Training(models.Bert()), {"dp": 3, "optimizer": "zero1"}
        job = self.new_job()
        job.set_layout(**layout)
        training.write(job.incoming("base"), layout)
        for name in ("model", "optim"):
            mount.os.remove(f"{job.incoming('base')}/rank/1/{name}.safetensors")
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        self.assertIn("rank 1 (tp rank 0, pp rank 0, ep rank 0, dp rank 1)",
                      job.commit_error("base"))

    def test_the_rule_is_torchs(self):
        try:
            import torch
        except ImportError:
            self.skipTest("Python has no torch here")
        for rows in range(1, 40):
            for ranks in range(1, 12):
                parts = torch.chunk(torch.arange(rows), ranks)
                for rank in range(ranks):
                    mine = list(range(*chunk(rows, rank, ranks)))
                    theirs = parts[rank].tolist() if rank < len(parts) else []
                    self.assertEqual(mine, theirs, (rows, rank, ranks))


if __name__ == "__main__":
    mount.main()
