"""Optimizer state cut over data-parallel ranks, and context- and expert-parallel ones: ZeRO-1's flat parts and FSDP's rows,
there and back."""
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


def places(layout):
    """Of each rank, its number in each dimension."""
    sizes = {size: layout.get(size, 1) for size in layout.get("order", "tp-cp-ep-dp-pp").split("-")}
    found = []
    for rank in range(ranks_of(layout)):
        at = {}
        for name, size in sizes.items():
            rank, at[name] = divmod(rank, size)
        found.append(at)
    return found


def share(rank, layout, of_expert):
    """Among the ranks that share what of a tensor is cut over dp: which the rank is, and of how many."""
    over, neighbours = layout.get("shard_over", []), layout.get("dp_shard", layout.get("dp", 1))
    one_each = ["pp", "tp"] + ([] if "cp" in over else ["cp"]) + ([] if "ep" in over and not of_expert else ["ep"])
    of = places(layout)
    group = [other for other, at in enumerate(of)
             if all(at[size] == of[rank][size] for size in one_each) and at["dp"] // neighbours == of[rank]["dp"] // neighbours]
    return group.index(rank), len(group)


class Mixtral(models.Llama):
    layers, experts = 2, 4
    config = {**models.Llama.config, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
              "num_hidden_layers": layers, "num_local_experts": experts}

    def build(self):
        super().build()
        self.tensors = [tensor for tensor in self.tensors if ".mlp." not in tensor.name]
        for i in range(self.layers):
            self.add(f"model.layers.{i}.block_sparse_moe.gate.weight", self.experts, self.hidden)
            for expert in range(self.experts):
                for name, shape in (("w1", (self.ffn, self.hidden)), ("w2", (self.hidden, self.ffn)), ("w3", (self.ffn, self.hidden))):
                    self.add(f"model.layers.{i}.block_sparse_moe.experts.{expert}.{name}.weight", *shape)

    def expert_of(self, name):
        return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None

    def cut(self, tensor, rank, ranks):
        if self.expert_of(tensor.name) is None:
            return super().cut(tensor, rank, ranks)
        axis = 1 if ".w2." in tensor.name else 0
        return models.take(tensor, axis, *models.even(tensor.shape[axis], rank, ranks))


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

    def rank_files(self, rank, **layout):
        tp, pp, ep, optimizer = *(layout.get(size, 1) for size in ("tp", "pp", "ep")), layout.get("optimizer", "replicated")
        at = places(layout)[rank]
        tp_rank, pp_rank = at["tp"], at["pp"]
        files = {"model.safetensors": [], "optim.safetensors": []}
        for tensor in self.model.tensors:
            if pp_rank not in self.model.stages(tensor.name, pp):
                continue
            expert = self.model.expert_of(tensor.name) if isinstance(self.model, Mixtral) else None
            if expert is not None and expert * ep // self.model.experts != at["ep"]:
                continue
            dp_rank, dp = share(rank, layout, expert is not None)
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
    ranks = 1
    for size in ("tp", "pp", "dp", "ep", "cp"):
        ranks *= layout.get(size, 1)
    return ranks


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

    def test_over_context_parallel_ranks(self):
        """As Megatron's distributed optimizer and FSDP over (dp_shard, cp) have it."""
        over = {"shard_over": ["cp"]}
        self.check_chain(models.Llama(), {"tp": 2, "dp": 2, "cp": 2, "optimizer": "zero1", **over}, [
            {"tp": 2, "dp": 4, "optimizer": "zero1"},  # the same files
            {"dp": 3, "cp": 2, "optimizer": "fsdp", **over},
            {"dp": 3, "cp": 2, "optimizer": "fsdp", "order": "dp-cp-tp-ep-pp", **over},
            {"pp": 2, "dp": 2, "cp": 3, "dp_shard": 1, "optimizer": "fsdp", **over}, {"tp": 4, "cp": 2}])

    def test_rows_over_context_parallel_ranks(self):
        over = {"shard_over": ["cp"]}
        self.check_chain(models.Bert(), {"dp": 2, "cp": 3, "optimizer": "fsdp", **over}, [
            {"dp": 2, "cp": 3, "optimizer": "fsdp"}, {"tp": 2, "cp": 2, "optimizer": "zero1", **over}])

    def test_over_expert_parallel_ranks(self):
        """Experts are cut over dp, and all else over the expert-parallel ranks that have it too."""
        over, both = {"shard_over": ["ep"]}, {"shard_over": ["cp", "ep"]}
        self.check_chain(Mixtral(), {"tp": 2, "dp": 2, "ep": 2, "optimizer": "zero1", **over}, [
            {"dp": 2, "ep": 4, "optimizer": "fsdp", **over}, {"dp": 2, "ep": 2, "cp": 2, "optimizer": "zero1", **both},
            {"dp": 2, "ep": 2, "cp": 2, "optimizer": "fsdp", "order": "tp-ep-cp-dp-pp", **both},
            {"dp": 2, "ep": 2, "optimizer": "fsdp", "order": "tp-cp-dp-ep-pp", **over},
            {"dp": 4, "ep": 2, "dp_shard": 2, "optimizer": "zero1", **over}, {"pp": 2, "ep": 2}])

    def test_rows_over_expert_parallel_ranks(self):
        over = {"shard_over": ["ep"]}
        self.check_chain(Mixtral(), {"ep": 4, "dp": 3, "optimizer": "fsdp", **over}, [
            {"dp": 2, "ep": 2, "optimizer": "fsdp"}, {"ep": 4, "optimizer": "zero1", **over}])

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
