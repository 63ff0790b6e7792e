"""Lightning: checkpoints of its Trainer as checkpoints of a job.

    Trainer(plugins=[CheckpointIO("/mnt/ptc/llama")],
            callbacks=[NamedOptimizers(), ModelCheckpoint("/mnt/ptc/llama/checkpoints")])
"""
from __future__ import annotations

import io
import os
import pickle
from typing import Any, Dict, Optional, Union

from .arrays import require_torch

require_torch("ptc.lightning")

# pylint: disable=wrong-import-position,wrong-import-order
import torch

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.io import CheckpointIO as _CheckpointIO
except ImportError:  # under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]
    from pytorch_lightning.plugins.io import CheckpointIO as _CheckpointIO  # type: ignore[assignment]

from . import owner
from .job import Job, checkpoint_name
from .loading import load, why_not
from .optimizer import optimizer_state
from .saving import save

_REST = "lightning.ckpt"
_ALONE = {"tp": 1, "pp": 1, "dp": 1}


class CheckpointIO(_CheckpointIO):
    """Saves the module's parameters and its optimizers' state as tensors, by name, and all else in one file of
    torch.save's.

    The last part of a path is the checkpoint's name; one that is there is replaced, as Lightning wants it. Of a
    strategy whose first rank has the whole module: one process, or DDP. Lightning calls it on that rank alone: the
    others learn of an error when that process ends. That file is loaded without running code, unless `weights_only` is
    False here, or where Lightning takes it (trainer.fit, load_from_checkpoint): hyperparameters of classes of your own
    want that. Errors: CommitError, OSError; TypeError, where `NamedOptimizers` is not among the callbacks; ValueError:
    code would have to run.
    """

    def __init__(self, job: Union[str, os.PathLike, Job], *, weights_only: bool = True) -> None:
        self.job = job if isinstance(job, Job) else Job(job)
        self.weights_only = weights_only

    def save_checkpoint(self, checkpoint: Dict[str, Any], path: Any, storage_options: Optional[Any] = None) -> None:
        name = checkpoint_name(os.path.basename(os.fspath(path)))
        own = self.job.take(name, overwrite=True)  # before anything is written: not if that is pinned
        where = self.job.incoming(own)
        try:
            self.job.remove_older(own)  # of attempts that were broken off
            rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
            buffer = io.BytesIO()
            torch.save(rest, buffer)
            state = {"model": checkpoint["state_dict"], "optim": checkpoint.get("optimizer_states", [])}
            try:
                save(state, where, rank=0, layout=_ALONE, files={_REST: buffer.getvalue()})
            except TypeError as error:
                raise TypeError(f"{error}; of Lightning: callbacks=[ptc.lightning.NamedOptimizers()]") from None
            self.job.rename_into_checkpoints(own, overwrite=True)
        finally:
            owner.release(where)

    def load_checkpoint(self, path: Any, map_location: Optional[Any] = None, weights_only: Optional[bool] = None
                        ) -> Dict[str, Any]:
        where = self.job.file("checkpoints", checkpoint_name(os.path.basename(os.fspath(path))), "layouts/tp1-pp1-dp1/rank/0")
        state = load(where, map_location if isinstance(map_location, (str, torch.device)) else None)
        try:
            checkpoint = torch.load(os.path.join(where, _REST), map_location=map_location,
                                    weights_only=self.weights_only if weights_only is None else weights_only)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{_REST} of {where} cannot be loaded without running code ({why_not(error)}). If you trust who wrote "
                "it: ptc.lightning.CheckpointIO(job, weights_only=False), or torch.serialization.add_safe_globals"
            ) from None
        return {**checkpoint, "state_dict": state["model"], "optimizer_states": state["optim"]}

    def remove_checkpoint(self, path: Any) -> None:
        """Of one that is gone already nothing. One that is pinned stays."""
        self.job.remove_unpinned(checkpoint_name(os.path.basename(os.fspath(path))))


class NamedOptimizers(Callback):
    """Turns the numbers of parameters in optimizers' state into names where it is saved, and back where it is loaded.
    """

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = [optimizer_state(pl_module, one) for one in trainer.optimizers]

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Dict[str, Any]) -> None:
        numbered = []
        for saved in checkpoint.get("optimizer_states", []):
            number: Dict[str, int] = {}
            groups = []
            for one in saved["param_groups"]:
                for name in one["params"]:
                    number[name] = len(number)
                groups.append({**one, "params": [number[name] for name in one["params"]]})
            numbered.append({"state": {number[name]: values for name, values in saved["state"].items()},
                             "param_groups": groups})
        checkpoint["optimizer_states"] = numbered
