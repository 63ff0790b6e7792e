"""Hugging Face's Trainer: what it saves becomes a checkpoint of a job.

    callback = ptc.trainer.Callback("/mnt/ptc/llama")
    trainer = Trainer(…, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.latest)
"""
from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import Future
from typing import Any, Optional, Union

from transformers import TrainerCallback

from . import group
from .job import Job, remove
from .loading import load
from .optimizer import load_optimizer_state, optimizer_state
from .saving import commit, save


class Callback(TrainerCallback):
    """Commits each checkpoint-<step> that the Trainer has saved, its optimizer's state by the names of parameters.

    An `output_dir` in the job's incoming/ makes that a rename, and each byte is written once; otherwise files are
    copied. optimizer.pt, which goes by numbers, is left out; all else is kept. Of a Trainer whose ranks have the whole
    model: one process, or DDP. For FSDP there are `ptc.Writer` and `ptc.Reader`. CommitError and OSError end the
    training.

    The best model is loaded at the end from where it was committed, if the Trainer was asked to, and its
    save_total_limit holds for the checkpoint-<step> of the job. In output_dir nothing stays, so training goes on from
    `latest`, and not from resume_from_checkpoint=True. `overwrite`: a checkpoint-<step> of a former run is replaced;
    else it is a CommitError.
    """

    def __init__(self, job: Union[str, os.PathLike, Job], *, overwrite: bool = False) -> None:
        self.job = job if isinstance(job, Job) else Job(job)
        self.overwrite = overwrite

    @property
    def latest(self) -> Optional[str]:
        """For trainer.train(resume_from_checkpoint=…): the newest checkpoint, as one rank has it. None: there is none.
        All ranks ask, and get the same.
        """
        newest = self.job.newest
        if group.world_size() > 1:
            newest = group.prepare().together(lambda: self.job.newest, here=True)
        return None if newest is None else os.path.join(os.path.dirname(newest), "tp1-pp1-dp1", "rank", "0")

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        name = f"checkpoint-{state.global_step}"
        self._check(args)
        where = self.job.begin(name)
        if name == os.path.basename(state.best_model_checkpoint or "") or (
                getattr(state, "best_global_step", None) == state.global_step):
            state.best_model_checkpoint = self._alone(name)
        moved: "Future[None]" = Future()
        try:
            if group.rank() == 0:
                self._move(os.path.join(args.output_dir, name), where, model, optimizer)
                state.save_to_json(os.path.join(where, "rank", "0", "trainer_state.json"))  # which says where the best is
            moved.set_result(None)
        except Exception as error:  # pylint: disable=broad-except
            moved.set_exception(error)  # all ranks are told so in commit()
        commit(where, after=moved, overwrite=self.overwrite)
        group.prepare().together(lambda: self._remove_oldest(args.save_total_limit, state.best_model_checkpoint), here=True)

    def _alone(self, name: str) -> str:
        """A checkpoint as one rank has it."""
        return self.job.file("checkpoints", name, "layouts/tp1-pp1-dp1/rank/0")

    def _remove_oldest(self, limit: Optional[int], best: Optional[str]) -> None:
        """As the Trainer does in output_dir: never the newest, nor the best."""
        names = [name for name in self.job.checkpoints() if re.fullmatch(r"checkpoint-\d+", name)]
        removable = [name for name in names[:-1] if best is None or os.path.normpath(best) != self._alone(name)]
        for name in removable[:max(0, len(names) - limit)] if limit and limit > 0 else ():
            remove(self.job.file("checkpoints", name))

    def _check(self, args: Any) -> None:
        if os.path.realpath(args.output_dir) == os.path.realpath(self.job.file("incoming")):
            raise ValueError(f"output_dir is {args.output_dir} itself, where begun checkpoints are: name a directory "
                             "in it, like incoming/trainer")

    @staticmethod
    def _move(source: str, where: str, model: Any, optimizer: Any) -> None:
        target = os.path.join(where, "rank", "0")
        os.makedirs(os.path.dirname(target))
        if os.stat(source).st_dev == os.stat(where).st_dev:
            os.rename(source, target)
        else:
            shutil.copytree(source, target)
        if optimizer is not None and os.path.exists(os.path.join(target, "optimizer.pt")):
            os.unlink(os.path.join(target, "optimizer.pt"))
            save({"optim": optimizer_state(model, optimizer)}, where, rank=0, layout={"tp": 1, "pp": 1, "dp": 1})

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None,
                       lr_scheduler: Any = None, **kwargs: Any) -> None:
        """Loads what the Trainer has not found without its optimizer.pt."""
        self._check(args)
        if state.global_step == 0 or optimizer is None:
            return
        where = self._alone(f"checkpoint-{state.global_step}")
        processes = group.prepare()

        def resume() -> bool:
            if optimizer.state or not os.path.isdir(where):
                return False  # resumed from elsewhere
            saved = load(where)
            if "optim" in saved:
                load_optimizer_state(model, optimizer, saved["optim"])
            schedule = os.path.join(where, "scheduler.pt")
            if lr_scheduler is not None and os.path.exists(schedule):
                import torch
                lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
            return True
        resumed = processes.each(resume, "not resumed, for another rank could not load", here=True)
        if len(set(processes.gather(resumed, here=True))) > 1:
            raise OSError(f"{where} was found by some ranks, and not by others")
