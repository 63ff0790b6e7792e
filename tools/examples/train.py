"""One rank of a training run whose parallelism is that of the job's layout.json. elastic.py starts it.

Loads its part of a checkpoint, reads its samples of the job's data set, and goes on until all samples are consumed, or
SIGTERM: then all ranks save after the same step, and end. Nothing in here knows what the layout was before.

Sums over samples are made in one order, whatever dp and pp are: a tree over the places of a batch, of which each rank
has a branch. So a run that changes only these is the same run, to the last bit.
"""
import gc
import json
import os

import torch
import torch.distributed as dist

import ptc
import ptc.training
from llama import CONFIG, Llama, Tensor

PRELOAD = ["train", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh"]  # of what ranks are forked from
SAVE_EVERY = 5
LEARNING = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "foreach": False}


def tree_sum(items):
    """Of a list, half by half."""
    if len(items) == 1:
        return items[0]
    left, right = tree_sum(items[:len(items) // 2]), tree_sum(items[len(items) // 2:])
    return [a + b for a, b in zip(left, right)] if isinstance(left, list) else left + right


class Samples(ptc.training.Samples):
    """(id, tokens, targets)"""

    @staticmethod
    def sample(one):
        return one["id"], *(torch.tensor(tokens) for tokens in (one["tokens"][:-1], one["tokens"][1:]))


class Ranks:
    """Where this rank is: order tp-dp-pp, which is what layout.json has unless it says otherwise."""

    def __init__(self, layout):
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.tp_size, self.pp_size, self.dp_size = (layout.get(key, 1) for key in ("tp", "pp", "dp"))
        self.tp, self.dp, self.pp = rank % self.tp_size, rank // self.tp_size % self.dp_size, rank // self.tp_size // self.dp_size
        self.tp_group = self.dp_group = None
        for dp in range(self.dp_size):
            for pp in range(self.pp_size):
                self.group("tp", [self.at(tp, dp, pp) for tp in range(self.tp_size)])
        for tp in range(self.tp_size):
            for pp in range(self.pp_size):
                self.group("dp", [self.at(tp, dp, pp) for dp in range(self.dp_size)])

    def at(self, tp, dp, pp):
        return tp + self.tp_size * (dp + self.dp_size * pp)

    def group(self, name, ranks):
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if self.at(self.tp, self.dp, self.pp) in ranks:
            setattr(self, name + "_group", group)

    def sum_over_dp(self, tensors):
        """By the upper part of the tree."""
        if self.dp_size == 1:
            return tensors
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        parts = [torch.empty_like(flat) for _ in range(self.dp_size)]
        dist.all_gather(parts, flat, group=self.dp_group)
        sums = tree_sum(parts).split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(sums, tensors)]


class Trainer:
    """What run() needs of one rank."""

    def __init__(self, ranks, model):
        self.ranks, self.model = ranks, model
        self.dp, self.dp_size = ranks.dp, ranks.dp_size
        self.logs = model.last and ranks.tp == 0  # the loss, for its data-parallel rank
        self.adam = torch.optim.AdamW(model.parameters(), **LEARNING)

    def step(self, samples, batch):
        """Of this data-parallel rank's samples; returns the mean over the whole batch, on the last stage."""
        self.adam.zero_grad()
        loss = self.gradients(samples, batch)
        self.adam.step()
        return loss

    def load(self, checkpoint):
        """(steps made, samples consumed)"""
        state = ptc.load(checkpoint)
        ptc.load_model_state(self.model, state["model"])
        ptc.load_optimizer_state(self.model, self.adam, state["optim"])
        return state["step"], state["consumed"]

    def save(self, job, layout, step, consumed):
        """A checkpoint of all ranks, in the layout they have, whatever is wanted by now."""
        job.save({"model": self.model.state_dict(), "optim": ptc.optimizer_state(self.model, self.adam), "step": step,
                  "consumed": consumed}, f"step{step:05}", layout=layout, consumed=consumed, files={"config.json": CONFIG})


class Manual(Trainer):
    """Tensor, pipeline and data parallelism, by hand."""

    def __init__(self, layout):
        ranks = Ranks(layout)
        super().__init__(ranks, Llama(CONFIG, Tensor(ranks.tp, ranks.tp_size, ranks.tp_group), ranks.pp, ranks.pp_size))

    def gradients(self, samples, batch):
        """Sets .grad to that of the mean over the batch; returns that mean, on the last stage."""
        ranks, parameters = self.ranks, list(self.model.parameters())
        before, behind = (ranks.at(ranks.tp, ranks.dp, ranks.pp + way) for way in (-1, 1))
        runs = []
        for _, tokens, targets in samples:  # all forward, then all back
            x = tokens
            if not self.model.first:
                x = torch.empty(len(tokens), CONFIG["hidden_size"])
                dist.recv(x, before)
                x.requires_grad_()
            y = self.model(x, targets)
            runs.append((x, y))
            if not self.model.last:
                dist.send(y.detach(), behind)
        found = []
        for x, y in runs:
            into = None
            if not self.model.last:
                into = torch.empty_like(y)
                dist.recv(into, behind)
            *mine, = torch.autograd.grad(y, parameters if self.model.first else [*parameters, x], into)
            if not self.model.first:
                dist.send(mine.pop(), before)
            found.append([y.detach() if self.model.last else torch.zeros(()), *mine])
        loss, *sums = ranks.sum_over_dp(tree_sum(found))
        for parameter, gradient in zip(parameters, sums):
            parameter.grad = gradient / batch
        return loss / batch


class Fsdp(Trainer):
    """FSDP2: each rank has rows of every parameter."""

    def __init__(self, layout):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        ranks, model = Ranks(layout), Llama(CONFIG)
        mesh = init_device_mesh("cpu", (ranks.dp_size,))
        for layer in model.model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(ranks, model)

    def gradients(self, samples, batch):
        losses = []
        for number, (_, tokens, targets) in enumerate(samples):
            self.model.set_requires_gradient_sync(number + 1 == len(samples))
            loss = self.model(tokens, targets)
            (loss * self.ranks.dp_size / batch).backward()  # FSDP makes the mean over ranks
            losses.append([loss.detach()])
        return self.ranks.sum_over_dp(tree_sum(losses))[0] / batch


def first():
    """One process with a model that has learned nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return Manual({})


def run(make, rank, world, job, layout, checkpoint, meet, log):
    """Trains as rank `rank` of `world`, that meet at a file of that name, from a checkpoint of the job on. `make` makes
    a Trainer of the layout.
    """
    stop = ptc.training.stops_at_sigterm()
    ptc.training.end_with_launcher()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays
    dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=world)
    trainer = make(layout)

    def note(step, size, loss, batch):
        if trainer.logs:
            with open(f"{log}.{trainer.dp}", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss.item(), "batch": size, "layout": layout,
                                       "ids": [one[0] for one in batch]}) + "\n")
    ptc.training.go_on(trainer, ptc.Job(job), layout, *trainer.load(checkpoint), stop=stop, samples=Samples,
                       save_every=SAVE_EVERY, on_step=note)
    os._exit(0)  # threads of PyTorch's own can abort a process that is taken apart


def main(rank, world, job, layout, checkpoint, meet, log):
    run(Fsdp if layout.get("optimizer") == "fsdp" else Manual, rank, world, job, layout, checkpoint, meet, log)
