"""save and commit: a rank's tensors into incoming/, and the rename that makes a checkpoint of what all have written."""
from __future__ import annotations

import json
import os
from concurrent.futures import Future
from typing import Any, List, Literal, Mapping, Optional, Union, overload

from . import arrays, group, safetensors, state as states
from .job import Job, find


@overload
def save(state: Mapping[str, Any], dir: Union[str, os.PathLike], wait: Literal[True] = True, *,
         rank: Optional[int] = None, layout: Optional[Mapping[str, Any]] = None,
         consumed: Optional[int] = None, files: Optional[Mapping[str, Any]] = None) -> str: ...


@overload
def save(state: Mapping[str, Any], dir: Union[str, os.PathLike], wait: Literal[False], *, rank: Optional[int] = None,
         layout: Optional[Mapping[str, Any]] = None, consumed: Optional[int] = None,
         files: Optional[Mapping[str, Any]] = None) -> "Future[str]": ...


def save(state: Mapping[str, Any], dir: Union[str, os.PathLike], wait: bool = True, *, rank: Optional[int] = None,
         layout: Optional[Mapping[str, Any]] = None, consumed: Optional[int] = None,
         files: Optional[Mapping[str, Any]] = None) -> "Union[str, Future[str]]":
    """Writes this rank's state into `dir`, <job>/incoming/<name>; `commit` makes a checkpoint of it.

    A dict of dicts of tensors, each of which becomes a file of safetensors, and of other values (state.py says how).
    Of a DTensor the part of this rank is written. Tensors are written once, straight to where they stay. They may be
    on any device, and change again when this returns; with wait=False that is a future of the directory, for closing
    the files, at which the daemon reads them, goes on in the background. Where `dir` is not in an incoming/, files go
    right into it.

    `rank`: of torch.distributed, or RANK, if not given. Rank 0 also writes `layout` (under which the ranks are, if it
    is not the one in force), `consumed` (the samples of the data set that went into it) and `files` (Job.save).
    Errors: TypeError, ValueError (what cannot be saved, by its path in the state), OSError.
    """
    top = os.path.abspath(os.fspath(dir))
    rank = group.rank() if rank is None else rank
    staged = os.path.basename(os.path.dirname(top)) == "incoming"
    where = os.path.join(top, "rank", str(rank)) if staged else top
    sections, text = states.flatten(state)
    if staged:
        check_placements(sections, Job(find(top).job).layout if layout is None else layout)
    open_files: List[int] = []
    try:
        for section, tensors in sections.items():
            open_files.append(safetensors.write(os.path.join(where, section + ".safetensors"), tensors))
    except BaseException:
        for file in open_files:
            os.close(file)
        raise

    def finish() -> str:
        for file in open_files:
            os.close(file)
        write_text(os.path.join(where, states.FILE), json.dumps(text, separators=(",", ":")))
        if rank == 0:
            beside = top if staged else where
            if layout is not None:
                write_text(os.path.join(beside, "layout.json"), json.dumps({"tp": 1, "pp": 1, "dp": 1, **layout}))
            if consumed is not None:
                write_text(os.path.join(beside, "consumed"), str(int(consumed)))
            for name, content in (files or {}).items():
                write_text(os.path.join(where, name), content)
        return top
    # Values are text already, so what finish() writes does not change under its hands.
    return finish() if wait else group.in_background(finish)


def check_placements(sections: Mapping[str, Mapping[str, Any]], layout: Mapping[str, Any]) -> None:
    """Under fsdp the files of all data-parallel ranks are taken for rows of each tensor, one below the other. ValueError:
    of a DTensor this rank holds another part than that, or all of a tensor; ptc.Writer saves these.
    """
    if layout.get("optimizer") != "fsdp" or int(layout.get("dp", 1)) == 1:
        return
    for section, tensors in sections.items():
        if not any(arrays.is_distributed(tensor) for tensor in tensors.values()):
            continue
        for name, tensor in tensors.items():
            if not arrays.is_distributed(tensor):
                wrong = len(tensor.shape) > 0 and max(tensor.shape) > 1 and "all of it is on each rank"
            else:
                rows = [placement for placement in tensor.placements if placement.is_shard(0)]
                strided = any("Strided" in type(placement).__name__ for placement in tensor.placements)
                if not tensor.placements[0].is_shard(0) and not strided:
                    wrong = f"its placements are {tuple(tensor.placements)}"
                else:
                    wrong = len(rows) > 1 and not strided and f"its rows are cut twice: {tuple(tensor.placements)}"
            if wrong:
                raise ValueError(f"{section}.{name} is not cut by rows over the data-parallel ranks, as the layout's "
                                 f"\"optimizer\": \"fsdp\" says ({wrong}): save it with torch.distributed.checkpoint and "
                                 "ptc.Writer")


def write_text(path: str, content: Any) -> None:
    """A small file: of bytes, a text, something with to_dict(), or anything that is JSON."""
    if hasattr(content, "to_dict"):
        content = content.to_dict()
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content, indent=2) + "\n"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@overload
def commit(dir: Union[str, os.PathLike], wait: Literal[True] = True, *, after: "Optional[Future[Any]]" = None,
           timeout: Optional[float] = None) -> str: ...


@overload
def commit(dir: Union[str, os.PathLike], wait: Literal[False], *, after: "Optional[Future[Any]]" = None,
           timeout: Optional[float] = None) -> "Future[str]": ...


def commit(dir: Union[str, os.PathLike], wait: bool = True, *, after: "Optional[Future[Any]]" = None,
           timeout: Optional[float] = None) -> "Union[str, Future[str]]":
    """Makes a checkpoint of <job>/incoming/<name>, once all ranks have come here; returns its directory.

    Rank 0 renames; all return, or raise, the same. Collective, if torch.distributed is in use. With wait=False a
    future: calls are made one after another in the background, over a group of their own, so training may go on.
    `after`: a future of `save`, whose failure is that of the commit. Errors: CommitError (the daemon's reason; nothing
    is lost), OSError.
    """
    place = find(dir)
    job = Job(place.job)
    group.prepare()

    here = wait and after is None  # in this thread

    def run() -> str:
        failure: Optional[BaseException] = after.exception() if after is not None else None
        # All must come, also one whose save failed, or the others wait for it.
        reasons = group.gather(None if failure is None else f"rank {group.rank()}: {failure}", here)
        if failure is not None:
            raise failure
        if any(reasons):
            raise OSError("not committed, for another rank could not save: " + "; ".join(filter(None, reasons)))
        return group.together(lambda: job.rename_into_checkpoints(place.name, timeout), here)
    return run() if here else _result(run, wait)


def _result(run: Any, wait: bool) -> Any:
    future = group.in_background(run)
    return future.result() if wait else future
