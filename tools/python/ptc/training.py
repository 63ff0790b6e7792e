"""A rank of a training run in a mount: its samples, when to save, and how it ends. Needs PyTorch.

    stop = ptc.training.stops_at_sigterm()
    step, consumed = trainer.load(job.current)
    ptc.training.go_on(trainer, job, job.layout, step, consumed, stop=stop)

A trainer has `dp` and `dp_size`, `step(samples, size)` → the loss, of this rank's samples of a batch of so many, and
`save(job, layout, step, consumed)`.
"""
from __future__ import annotations

import glob
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Tuple

from . import group
from .job import Job


class Samples:
    """A data-parallel rank's samples of the data set's JSONL, a step behind the other, from where the job is."""

    def __init__(self, job: Job, dp_rank: int, dp_size: int) -> None:
        plan = job.read_json("dataset/plan.json")
        segment = plan["segments"][-1]
        self.batch, self.end = segment["batch"], plan["end"]
        if self.batch % dp_size != 0:
            raise ValueError(f"{dp_size} ranks cannot share a batch of {self.batch} evenly")
        self.each = self.batch // dp_size
        done = (plan["consumed"] - segment["from"]) // self.batch * self.each
        self.lines: Iterator[str] = itertools.islice(self.read(job, dp_rank), done, None)

    @staticmethod
    def read(job: Job, dp_rank: int) -> Iterator[str]:
        """All of what is the newest generation now, a line each."""
        head = os.path.realpath(job.file("dataset/head"))
        paths = sorted(glob.glob(f"{head}/rank-{dp_rank:03}/jsonl/e*/*.jsonl"))

        def lines(path: str) -> List[str]:
            with open(path, encoding="utf-8") as file:
                return file.read().splitlines()
        return itertools.chain.from_iterable(map(lines, paths))

    @classmethod
    def of(cls, lines: Iterable[str], each: int) -> "Samples":
        """Of lines in order."""
        samples = cls.__new__(cls)
        samples.lines, samples.each = iter(lines), each
        return samples

    @staticmethod
    def sample(one: Any) -> Any:
        """What a line's value becomes."""
        return one

    def step(self) -> List[Any]:
        """Empty at the end."""
        return [self.sample(json.loads(line)) for line in itertools.islice(self.lines, self.each)]


def stops_at_sigterm() -> Callable[[], bool]:
    """Whether SIGTERM has come. Who starts ranks with SIGTERM blocked has it wait until they can save."""
    asked: List[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all; the launcher says what to do
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return lambda: bool(asked)


def end_with_launcher() -> None:
    """Whatever becomes of the process that started this one, its ranks do not go on alone."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        launcher.join()  # type: ignore[union-attr]
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=watch, daemon=True).start()


def bring_data_set_to(job: Job, consumed: int, *, within: float = 60) -> None:
    """A run can be killed between a checkpoint and the word that its samples are consumed."""
    def shown() -> int:
        return int(job.read_json("dataset/plan.json")["consumed"])
    if shown() != consumed and group.rank() == 0:
        with open(job.file("dataset/consumed"), "w", encoding="utf-8") as file:
            file.write(str(consumed))
    deadline = time.monotonic() + within  # other nodes show it a moment later
    while shown() != consumed:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job.path}/dataset shows {shown()} samples consumed, not {consumed}")
        time.sleep(0.05)


def go_on(trainer: Any, job: Job, layout: Mapping[str, Any], step: int, consumed: int, *, stop: Callable[[], bool],
          batches: Optional[int] = None, save_every: int = 5, samples: Callable[[Job, int, int], Samples] = Samples,
          on_step: Callable[[int, int, Any, List[Any]], None] = lambda step, size, loss, batch: None,
          idles: bool = False) -> Tuple[int, int, str]:
    """Trains until all samples are consumed ("consumed"), `batches` are made ("batches"), or `stop` on a rank ("asked").
    All ranks end after the same step, and what they have made is saved then; (step, consumed, why).

    `idles`: the trainer takes an empty batch, where the last one has no samples for its rank.
    """
    import torch
    import torch.distributed as dist
    saved, begun = step, step
    bring_data_set_to(job, consumed)
    mine = samples(job, trainer.dp, trainer.dp_size)

    def save() -> None:
        nonlocal saved
        trainer.save(job, layout, step, consumed)
        saved = step
        if group.rank() == 0:  # the data set may go on from it
            with open(job.file("dataset/consumed"), "w", encoding="utf-8") as file:
                file.write(str(consumed))

    while True:
        batch = mine.step() if step - begun != batches and consumed < mine.end else []
        without = torch.tensor([stop(), not batch], dtype=torch.int)
        dist.all_reduce(without)  # all at the same step
        asked, ended = without.tolist()
        if asked or ended == dist.get_world_size() or (ended and not idles):
            break
        size = min(mine.batch, mine.end - consumed)  # the last one may be short
        loss = trainer.step(batch, size)
        step, consumed = step + 1, consumed + size
        on_step(step, size, loss, batch)
        if step % save_every == 0:
            save()
    if step != saved:
        save()
    dist.barrier()
    return step, consumed, "asked" if asked else "batches" if step - begun == batches else "consumed"
