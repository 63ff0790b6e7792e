"""The processes that save together: who this is, and what all of them must agree on."""
from __future__ import annotations

import logging
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
_own_group: "Optional[Group]" = None  # of several processes


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


def world_size_said() -> int:
    """Of torch.distributed, else of the environment (WORLD_SIZE, as RANK), else 1."""
    distributed = _distributed()
    return distributed.get_world_size() if distributed else int(os.environ.get("WORLD_SIZE", "1"))


class Group:
    """The processes that were together when `prepare` was called: what they do in the background is done by these, or
    fails. A process that is in no group is alone.
    """

    def __init__(self, distributed: Any = None) -> None:
        self.rank = distributed.get_rank() if distributed else 0
        self.size = distributed.get_world_size() if distributed else 1
        self.world: Any = distributed.group.WORLD if distributed else None
        # For calls in the background, and for those made `here`, in the thread of the program, for two threads must not
        # use the same at a time.
        self._groups: Any = distributed and [distributed.new_group(backend="gloo") for _ in range(2)]

    def _open(self) -> Any:
        """torch.distributed, with the group still in place. PtcError: the process has destroyed it meanwhile."""
        distributed = _distributed()
        if distributed is None or distributed.group.WORLD is not self.world:
            self._groups = None  # closes its connections: no other rank waits for this one
            raise PtcError("the process group was destroyed before this was done: wait for the future of a save first, "
                           "and call destroy_process_group then")
        return distributed

    def _meet(self, call: Callable[[Any, Any], T], here: bool) -> T:
        """A call of torch.distributed's, with one of the groups. PtcError: the group or another rank has gone."""
        distributed = self._open()
        try:
            return call(distributed, self._groups[here])
        except Exception as error:  # pylint: disable=broad-except
            self._open()
            raise PtcError(f"rank {self.rank} has waited for the others in vain: one has ended, or has not made the same "
                           f"call ({_reason(error).splitlines()[0]})") from error

    def _arrive(self, here: bool) -> None:
        """Until all are here. The barrier that says on rank 0 which rank is not."""
        self._meet(lambda distributed, group: distributed.monitored_barrier(group), here)

    def together(self, call: Callable[[], T], here: bool = False) -> T:
        """Once all ranks are here, rank 0 makes the call; all return its result, or raise its error."""
        if self.size == 1:
            return call()
        self._arrive(here)
        if self.rank == 0:
            self._open()
            try:
                result = call()
            except BaseException as error:
                self._tell([None, _as_told(error)], here)  # also if it is Ctrl-C
                raise
            self._tell([result, None], here)
            return result
        outcome: list = [None, None]
        self._meet(lambda distributed, group: distributed.broadcast_object_list(outcome, src=0, group=group), here)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _tell(self, outcome: list, here: bool) -> None:
        """What has become of rank 0's call, to the others. It has been made: that they cannot be told changes nothing.
        """
        try:
            self._meet(lambda distributed, group: distributed.broadcast_object_list(outcome, src=0, group=group), here)
        except PtcError as error:
            logging.getLogger("ptc").warning("other ranks do not learn what has become of a call of rank 0: %s", error)

    def gather(self, value: T, here: bool = False) -> List[T]:
        """What each rank gave, to all."""
        if self.size == 1:
            return [value]
        values: List[Any] = [None] * self.size
        self._arrive(here)
        self._meet(lambda distributed, group: distributed.all_gather_object(values, value, group=group), here)
        return values

    def agree(self, failure: Optional[BaseException], what: str, here: bool = False) -> None:
        """All ranks go on, or all raise: one that has failed its failure, the others an OSError with `what`, the rank
        and the reason.
        """
        reasons = self.gather(None if failure is None else f"rank {self.rank}: {_reason(failure)}", here)
        if failure is not None:
            raise failure
        told = [reason for reason in reasons if reason is not None]
        if told:
            more = f"; and {len(told) - _REASONS} more" if len(told) > _REASONS else ""
            raise OSError(f"{what}: " + "; ".join(told[:_REASONS]) + more)

    def each(self, call: Callable[[], T], what: str, here: bool = False) -> T:
        """All ranks make the call; `agree` on whether it went well."""
        failure: Optional[BaseException] = None
        result: Any = None
        try:
            result = call()
        except BaseException as error:  # pylint: disable=broad-except
            failure = error
        self.agree(failure, what, here)
        return result


def prepare() -> Group:
    """The group that this process is in now. Collective, where that is of several and is new.
    RuntimeError: the environment says that there are several processes, but they are in no group.
    """
    global _own_group
    distributed = _distributed()
    if distributed is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("WORLD_SIZE says that several processes save together, but torch.distributed is not in use: "
                           "call init_process_group first, or ptc.save in each with its rank and rename once")
    if distributed is None or distributed.get_world_size() == 1:
        return Group()
    if _own_group is None or _own_group.world is not distributed.group.WORLD:
        _own_group = Group(distributed)
    return _own_group


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


def directories() -> List[str]:
    """Those in which something goes on, or has failed."""
    with _under_way_lock:
        return sorted({directory for directory, _ in _under_way})


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
