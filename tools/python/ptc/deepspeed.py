"""DeepSpeed: the state of an engine under ZeRO 1, 2 or 3 as a checkpoint of a job.

    ptc.deepspeed.save(engine, ptc.Job("/mnt/ptc/llama"), "step100")
    ptc.deepspeed.load(engine, "/mnt/ptc/llama/current")

What ranks hold parts of is asked for by name, which is collective, and rank 0 has all of it in its memory. What
DeepSpeed keeps beside, like its scheduler and its loss scale, is not in it.
"""
from __future__ import annotations

import os
from typing import Any, Dict, Union

from deepspeed.utils import (safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param,
                             safe_set_full_optimizer_state)

from .job import Job
from .loading import Checkpoint
from .saving import commit, save as save_state

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(engine: Any, job: Union[str, os.PathLike, Job], name: str, *, overwrite: bool = False) -> str:
    """Commits parameters, buffers, fp32 copies and moments; returns the checkpoint's directory. Collective. Errors, on
    all ranks: CommitError, OSError.
    """
    job = job if isinstance(job, Job) else Job(job)
    state = state_of(engine)
    where = job.begin(name)
    if engine.global_rank == 0:
        save_state(state, where, False, layout={"tp": 1, "pp": 1, "dp": 1})
    return commit(where, overwrite=overwrite)


def state_of(engine: Any) -> Dict[str, Any]:
    """{"model", "optim"} on rank 0, on others nothing of it. Collective. Under ZeRO 3 the module's own tensors are empty,
    so parameters are those of the optimizer, rounded as DeepSpeed does.
    """
    model: Dict[str, Any] = {}
    optim: Dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        values = {"fp32": safe_get_full_fp32_param(parameter),
                  **{key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}}
        if engine.global_rank == 0:
            model[name], optim[name] = values["fp32"].to(parameter.dtype), values
    if engine.global_rank == 0:
        kept = engine.module.state_dict().keys()
        model.update((name, buffer) for name, buffer in engine.module.named_buffers() if name in kept)
    return {"model": model, "optim": {"state": optim}}


def load(engine: Any, path: Union[str, os.PathLike]) -> None:
    """What `save` saved, under another stage and on another number of ranks, too. Collective.

    DeepSpeed 0.19 itself fails to set, under ZeRO 3, a parameter whose elements its ranks cannot divide evenly.
    """
    checkpoint = Checkpoint(path)
    for name, parameter in engine.module.named_parameters():
        safe_set_full_fp32_param(parameter, checkpoint.read(f"state.{name}.fp32"))
        for key in _MOMENTS:
            safe_set_full_optimizer_state(parameter, checkpoint.read(f"state.{name}.{key}"), key)
