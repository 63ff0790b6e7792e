"""Training state in a mount of ptcfs.

    job = ptc.Job("/mnt/ptc/llama")
    job.save({"model": model.state_dict(), "optim": ptc.optimizer_state(model, adam)}, "step100")
    state = ptc.load("/mnt/ptc/llama/current", device="cuda")     # this rank's part, under the layout in force

The mount is plain files, and this package only reads, writes and renames them. It is pure Python. What needs PyTorch
imports it when it is called; `load` and `save` also take and give NumPy arrays.

| | |
|---|---|
| `save`, `commit` | a rank's tensors into `incoming/`; the rename that makes a checkpoint of it |
| `load`, `Checkpoint` | a rank's files, mapped; any box of any tensor |
| `box` | which part of a tensor a rank holds, by a mesh and placements |
| `Job` | layouts, waiting, plans, checkpoints |
| `optimizer_state` | an optimizer's state by the names of parameters |
| `load_model_state`, `load_optimizer_state` | putting them back, of DTensors each rank's part |
| `Writer`, `Reader` | the same for `torch.distributed.checkpoint` |
| `ptc.training` | a rank's loop over the job's samples |
| `ptc.trainer`, `ptc.lightning` | for Hugging Face's Trainer and Lightning |
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import CommitError, LayoutError, PtcError, ReshardError
from .job import Job, Layout
from .loading import Checkpoint, TensorInfo, load
from .optimizer import load_model_state, load_optimizer_state, optimizer_state
from .saving import commit, save
from .slices import Box, box

if TYPE_CHECKING:
    from .dcp import Reader, Writer

__version__ = "0.1.0"
__all__ = [
    "Box", "Checkpoint", "CommitError", "Job", "Layout", "LayoutError", "PtcError", "Reader", "ReshardError", "TensorInfo",
    "Writer", "box", "commit", "load", "load_model_state", "load_optimizer_state", "optimizer_state", "save",
]


def __getattr__(name: str) -> Any:
    """`Reader` and `Writer` are classes of PyTorch's, and come with it."""
    if name in ("Reader", "Writer"):
        from . import dcp
        return getattr(dcp, name)
    raise AttributeError(f"module 'ptc' has no attribute {name!r}")
