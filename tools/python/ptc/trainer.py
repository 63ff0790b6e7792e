"""Hugging Face's Trainer: what it saves becomes a checkpoint of a job.

    callback = ptc.trainer.Callback("/mnt/ptc/llama")
    trainer = Trainer(…, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.latest)
"""
from __future__ import annotations

import json
import os
import re
import tempfile
from concurrent.futures import Future
from typing import Any, Dict, List, Optional, Union

from transformers import TrainerCallback

from . import group, trees
from .job import Job
from .loading import load
from .optimizer import load_optimizer_state, optimizer_state
from .saving import commit, save, write_file

_ALONE = {"tp": 1, "pp": 1, "dp": 1}
_NAME = re.compile(r"checkpoint-\d+")  # what the Trainer calls what it saves, by its count of steps
_DEEPSPEED = re.compile(r"global_step\d+")  # directories of its engine's
_SHARDED = "pytorch_model_fsdp"  # directories of such names are FSDP's sharded state, which dcp.load reads


class Callback(TrainerCallback):
    """Commits each checkpoint-<step> that the Trainer has saved, its optimizer's state by the names of parameters.

    An `output_dir` in the job's incoming/ makes that a rename, and each byte is written once; otherwise files are
    copied. optimizer.pt, which goes by numbers, is left out; all else is kept. What ranks have written on other nodes
    than that of rank 0 belongs to it, too, and stays there. One process, DDP, or FSDP with SHARDED_STATE_DICT.
    CommitError and OSError end the training.

    The best model is loaded at the end from where it was committed, if the Trainer was asked to, and its
    save_total_limit holds for the checkpoint-<step> of the job; pinned ones stay, and do not count. In output_dir
    nothing stays, so training goes on from `latest`, and not from resume_from_checkpoint=True. `overwrite`: a
    checkpoint-<step> of a former run is replaced; else, and where that is pinned, it is a CommitError before the Trainer
    writes anything of it.
    """

    def __init__(self, job: Union[str, os.PathLike, Job], *, overwrite: bool = False) -> None:
        self.job = job if isinstance(job, Job) else Job(job)
        self.overwrite = overwrite
        self._links: "Dict[str, tempfile.TemporaryDirectory[str]]" = {}  # by checkpoint; until this process ends

    @property
    def latest(self) -> Optional[str]:
        """For trainer.train(resume_from_checkpoint=…): the checkpoint-<step> of most steps, as one rank has it; of
        FSDP's sharded state, and of DeepSpeed's (with "load_universal"), for any number of ranks. None: the job has none
        of that name, whatever else it has. All ranks ask, and get the same; of DeepSpeed's each a directory of links.
        """
        def newest() -> Optional[str]:
            name = max(self._names(), key=_steps, default=None)
            return None if name is None else os.path.relpath(self._place(name), self.job.path)
        processes = group.prepare()
        found = processes.together(newest, here=True)
        if found is None:
            return None
        name = found.split(os.sep)[1]
        return processes.each(lambda: self._of_deepspeed(name) or self.job.file(found), f"{name} cannot be read by another rank", here=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the Trainer writes anything: whether the checkpoint's name is free."""
        if control.should_save:
            name = f"checkpoint-{state.global_step}"
            group.prepare().together(lambda: self.job.check_free(name, self.overwrite), here=True)

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        name = f"checkpoint-{state.global_step}"
        self._check(args)
        processes = group.prepare()
        where, source = self.job.begin(name, self.overwrite), os.path.join(args.output_dir, name)
        if name == os.path.basename(state.best_model_checkpoint or "") or (
                getattr(state, "best_global_step", None) == state.global_step):
            state.best_model_checkpoint = self.job.file("checkpoints", name, "dcp") if _is_sharded(source) else self._alone(name)
        moved: "Future[None]" = Future()
        try:
            trees.move(processes, source, os.path.join(where, "rank", "0"))
            if group.rank() == 0:
                self._finish(where, state, model, optimizer)
            moved.set_result(None)
        except Exception as error:  # pylint: disable=broad-except
            moved.set_exception(error)  # all ranks are told so in commit()
        commit(where, after=moved, overwrite=self.overwrite)
        processes.together(lambda: self._remove_oldest(args.save_total_limit, state.best_model_checkpoint), here=True)

    def _alone(self, name: str) -> str:
        """A checkpoint as one rank has it."""
        return self.job.file("checkpoints", name, "layouts/tp1-pp1-dp1/rank/0")

    def _place(self, name: str) -> str:
        """A checkpoint as the Trainer takes it."""
        sharded = self.job.file("checkpoints", name, "dcp")
        return sharded if _is_sharded(sharded) else self._alone(name)

    def _of_deepspeed(self, name: str) -> Optional[str]:
        """Of a checkpoint with DeepSpeed's state links to its universal form, beside those to the Trainer's own files. They
        are this process', and go with it. None: there is no such state.
        """
        alone = self._alone(name)
        if not any(map(_DEEPSPEED.match, os.listdir(alone))):
            return None
        if name in self._links:
            return self._links[name].name
        links = tempfile.TemporaryDirectory(prefix=f"{name}-")
        universal = os.path.join(os.path.dirname(os.path.dirname(alone)), "deepspeed")
        for top in (universal, alone):
            for file in os.listdir(top):
                link = os.path.join(links.name, file)
                if file == "LEFT_OUT.txt" or top == alone and (_DEEPSPEED.match(file) or file == "latest"):
                    continue
                if not os.path.lexists(link):
                    os.symlink(os.path.join(top, file), link)
        self._links[name] = links
        return links.name

    def _names(self) -> List[str]:
        """Of the Trainer's checkpoints, the oldest first."""
        return [name for name in self.job.checkpoints() if _NAME.fullmatch(name)]

    def _remove_oldest(self, limit: Optional[int], best: Optional[str]) -> None:
        """As the Trainer does in output_dir: never the newest, nor the best. Pinned ones do not count, as for `keep`."""
        names = [name for name in self._names() if not self.job.is_pinned(name)]
        kept = None if best is None else os.path.relpath(best, self.job.file("checkpoints")).split(os.sep)[0]
        removable = [name for name in names[:-1] if name != kept]
        for name in removable[:max(0, len(names) - limit)] if limit and limit > 0 else ():
            self.job.remove_unpinned(name)

    def _check(self, args: Any) -> None:
        if os.path.realpath(args.output_dir) == os.path.realpath(self.job.file("incoming")):
            raise ValueError(f"output_dir is {args.output_dir} itself, where begun checkpoints are: name a directory "
                             "in it, like incoming/trainer")

    @staticmethod
    def _finish(where: str, state: Any, model: Any, optimizer: Any) -> None:
        """What rank 0 adds to what the Trainer wrote."""
        target = os.path.join(where, "rank", "0")
        write_file(os.path.join(where, "layout.json"), json.dumps(_ALONE).encode())
        if optimizer is not None and os.path.exists(os.path.join(target, "optimizer.pt")):
            os.unlink(os.path.join(target, "optimizer.pt"))
            save({"optim": optimizer_state(model, optimizer)}, where, rank=0, layout=_ALONE)
        config = os.path.join(target, "config.json")
        if not os.path.exists(config) and hasattr(getattr(model, "config", None), "to_json_string"):  # rules go by it
            write_file(config, model.config.to_json_string().encode())
        state.save_to_json(os.path.join(target, "trainer_state.json"))  # which says where the best is

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


def _steps(name: str) -> int:
    return int(name.rpartition("-")[2])


def _is_sharded(directory: str) -> bool:
    """Whether FSDP's sharded state is in it."""
    try:
        return any(name.startswith(_SHARDED) and os.path.isdir(os.path.join(directory, name)) for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False
