"""The processes that save together: who this is, and what all of them must agree on."""
from __future__ import annotations

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, List, Optional, TypeVar

T = TypeVar("T")

# One thread: what a process does in the background it does in the order in which it was asked to, so that collective
# calls meet their like on other ranks.
_background: Optional[ThreadPoolExecutor] = None
_own_group: Any = None


def _distributed() -> Any:
    """torch.distributed where the process is in a group; else None. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def rank() -> int:
    """Of torch.distributed, else of the environment (RANK), else 0."""
    distributed = _distributed()
    return distributed.get_rank() if distributed else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Of torch.distributed; a process that is in no group is alone."""
    distributed = _distributed()
    return distributed.get_world_size() if distributed else 1


def prepare() -> None:
    """Makes the groups for `together` and `gather`: one for calls in the background, and one for those made `here`, in
    the thread of the program, for two threads must not use the same at a time. Collective, at its first call.
    RuntimeError: the environment says that there are several processes, but they are in no group.
    """
    global _own_group
    distributed = _distributed()
    if distributed is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("WORLD_SIZE says that several processes save together, but torch.distributed is not in use: "
                           "call init_process_group first, or ptc.save in each with its rank and rename once")
    if distributed is None or distributed.get_world_size() == 1:
        _own_group = None
    elif _own_group is None or _own_group[0] is not distributed.group.WORLD:
        _own_group = (distributed.group.WORLD, distributed.new_group(backend="gloo"),
                      distributed.new_group(backend="gloo"))


def together(call: Callable[[], T], here: bool = False) -> T:
    """Once all ranks are here, rank 0 makes the call; all return its result, or raise its error. After `prepare`."""
    distributed = _distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return call()
    group = _own_group[2 if here else 1]
    distributed.barrier(group)
    outcome: list = [None, None]
    if distributed.get_rank() == 0:
        try:
            outcome = [call(), None]
        except Exception as error:  # pylint: disable=broad-except
            outcome = [None, error]
    distributed.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def gather(value: T, here: bool = False) -> List[T]:
    """What each rank gave, to all. After `prepare`."""
    distributed = _distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return [value]
    values: List[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=_own_group[2 if here else 1])
    return values


def in_background(call: Callable[[], T]) -> "Future[T]":
    """After what was asked for before."""
    global _background
    if _background is None:
        _background = ThreadPoolExecutor(1, thread_name_prefix="ptc")
    return _background.submit(call)
