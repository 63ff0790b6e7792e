"""The processes that save together: who this is, and what all of them must agree on."""
from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from .errors import PtcError

T = TypeVar("T")
_REASONS = 4  # that are told in full

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
    failure: Optional[BaseException] = None
    if distributed.get_rank() == 0:
        try:
            outcome = [call(), None]
        except BaseException as error:  # pylint: disable=broad-except
            failure = error  # the others are told so, also if it is Ctrl-C
            outcome = [None, _as_told(error)]
    distributed.broadcast_object_list(outcome, src=0, group=group)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _as_told(error: BaseException) -> Exception:
    """An error of rank 0 as the others raise it: what the daemon refused as it is, else with the rank."""
    if isinstance(error, PtcError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"rank 0: {error.strerror}", error.filename)
    if type(error) in (TimeoutError, OSError, ValueError, TypeError):
        return type(error)(f"rank 0: {error}")  # type: ignore[return-value]
    return PtcError(f"rank 0: {_reason(error)}")  # of any class: perhaps one that others could not make again


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def gather(value: T, here: bool = False) -> List[T]:
    """What each rank gave, to all. After `prepare`."""
    distributed = _distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return [value]
    values: List[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value, group=_own_group[2 if here else 1])
    return values


def agree(failure: Optional[BaseException], what: str, here: bool = False) -> None:
    """All ranks go on, or all raise: one that has failed its failure, the others an OSError with `what`, the rank and
    the reason. After `prepare`.
    """
    reasons = gather(None if failure is None else f"rank {rank()}: {_reason(failure)}", here)
    if failure is not None:
        raise failure
    told = [reason for reason in reasons if reason is not None]
    if told:
        more = f"; and {len(told) - _REASONS} more" if len(told) > _REASONS else ""
        raise OSError(f"{what}: " + "; ".join(told[:_REASONS]) + more)


def each(call: Callable[[], T], what: str, here: bool = False) -> T:
    """All ranks make the call; `agree` on whether it went well."""
    failure: Optional[BaseException] = None
    result: Any = None
    try:
        result = call()
    except BaseException as error:  # pylint: disable=broad-except
        failure = error
    agree(failure, what, here)
    return result


def _after_fork() -> None:
    """A child has none of its parent's threads, nor what these do."""
    global _background, _own_group, _under_way_lock
    _background = _own_group = None
    _under_way_lock = threading.Lock()
    _under_way.clear()


os.register_at_fork(after_in_child=_after_fork)


def in_background(call: Callable[[], T]) -> "Future[T]":
    """After what was asked for before. It cannot be cancelled, for other ranks would wait for this one."""
    global _background
    if _background is None:
        _background = ThreadPoolExecutor(1, thread_name_prefix="ptc")
    future: "Future[T]" = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # pylint: disable=broad-except
            future.set_exception(error)
    _background.submit(run)
    return future


# What goes on in the background in a directory of incoming/, and saves that have failed: (directory, where files go, or
# "" for the commit).
_under_way: Dict[Tuple[str, str], "Future[Any]"] = {}
_under_way_lock = threading.Lock()


def keep(directory: str, where: str, future: "Future[Any]") -> None:
    """For `wait_for` and `taken`, until it is done; of a save that fails, until somebody asks."""
    key = os.path.realpath(directory), where

    def done(_: Any) -> None:
        with _under_way_lock:
            ended_well = not where or future.exception() is None
            if ended_well and _under_way.get(key) is future:
                del _under_way[key]
    with _under_way_lock:
        _under_way[key] = future
    future.add_done_callback(done)


def taken(directory: str) -> List["Future[Any]"]:
    """The saves into a directory that go on, or have failed; they are the caller's from now on."""
    directory = os.path.realpath(directory)
    with _under_way_lock:
        return [_under_way.pop(key) for key in list(_under_way) if key[0] == directory and key[1]]


def wait_for(directory: str, where: Optional[str] = None) -> None:
    """Until nothing goes on in a directory, or no commit and nothing at this place. What failed there is forgotten."""
    directory = os.path.realpath(directory)
    with _under_way_lock:
        found = {key: future for key, future in _under_way.items()
                 if key[0] == directory and (where is None or key[1] in ("", where))}
    wait(found.values())
    with _under_way_lock:
        for key, future in found.items():
            if _under_way.get(key) is future:
                del _under_way[key]
