"""Directories that the ranks of several nodes have written, each on the file system of its own node."""
from __future__ import annotations

import functools
import os
import shutil
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from .group import Group
from .job import remove

_MARK = ".ptc-rank-"  # an empty file that says that a rank sees the directory
_PIECE = 16 << 20
_FAILED = "not moved, for another rank could not"


def move(processes: Group, source: str, target: str) -> None:
    """What ranks have written as `source` becomes `target`, on each node: renamed, or copied from another file system.
    Collective; errors of one are raised by all.

    Of the ranks that see the same directory the first moves it. Files of other nodes than that of rank 0 stay there,
    but for those that are on rank 0's, too. Directories in it, in which ranks write together, are brought to rank 0's
    node: a checkpoint takes what lies in them from one node only.
    """
    if processes.size == 1:
        _move(source, target)
        return
    leads = _leader(processes, source) == processes.rank
    processes.each(lambda: _move(source, target) if processes.rank == 0 else None, _FAILED, here=True)
    there = processes.together(lambda: set(_files(target)), here=True)
    mine = processes.each(lambda: _move_own(source, target, there) if leads and processes.rank != 0 else [], _FAILED, here=True)
    _bring(processes, target, processes.gather(mine, here=True))

    def remove_brought() -> None:
        for name in {name.split(os.sep)[0] for name, _ in mine}:
            remove(os.path.join(target, name))
    processes.each(remove_brought, _FAILED, here=True)


def _leader(processes: Group, directory: str) -> Optional[int]:
    """The first of the ranks that see this rank's directory; None: it has none. What is written there may say nothing of
    whose it is, and on a network's file system all see the same.
    """
    mark = os.path.join(directory, _MARK + str(processes.rank))

    def leave() -> bool:
        if not os.path.isdir(directory):
            return False
        with open(mark, "wb"):
            return True
    is_there = processes.each(leave, _FAILED, here=True)

    def look() -> Optional[int]:
        marks = [name for name in os.listdir(directory) if name.startswith(_MARK)] if is_there else []
        return min((int(name[len(_MARK):]) for name in marks), default=None)
    leader = processes.each(look, _FAILED, here=True)

    def take_away() -> None:
        if is_there:
            os.unlink(mark)
    processes.each(take_away, _FAILED, here=True)
    return leader


def _move(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.stat(source).st_dev == os.stat(os.path.dirname(target)).st_dev:
        os.rename(source, target)
    else:
        shutil.copytree(source, target)


def _move_own(source: str, target: str, there: Set[str]) -> List[Tuple[str, int]]:
    """Files in directories, with their sizes, which are to be brought to where `there` is."""
    _move(source, target)
    found: Dict[str, int] = {}
    for name in list(_files(target)):
        path = os.path.join(target, name)
        if name in there:
            os.unlink(path)
        elif os.sep in name:
            found[name] = os.path.getsize(path)
    return sorted(found.items())


def _files(directory: str) -> Iterator[str]:
    """Of all files below it the paths from there."""
    for where, _, names in os.walk(directory):
        yield from (os.path.relpath(os.path.join(where, name), directory) for name in names)


def _bring(processes: Group, target: str, files: List[List[Tuple[str, int]]]) -> None:
    """Sends what each rank has of `files` to rank 0, which writes it. Collective."""
    attempt = _Attempt()
    for rank, its in enumerate(files):
        for name, size in its:
            path = os.path.join(target, name)
            if processes.rank == rank:
                _send(processes, attempt, path, size)
            elif processes.rank == 0:
                _receive(processes, attempt, rank, path, size)
    processes.agree(attempt.failure, _FAILED, here=True)


class _Attempt:
    """Makes calls until one fails. The other side waits for what was announced, so that goes on then, whatever is in it."""

    def __init__(self) -> None:
        self.failure: Optional[OSError] = None

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.failure is None:
            try:
                return call(*arguments)
            except OSError as error:
                self.failure = error
        return None


def _send(processes: Group, attempt: _Attempt, path: str, size: int) -> None:
    def read(piece: memoryview) -> None:
        if file.readinto(piece) != len(piece):
            raise OSError(f"{path} has become shorter than {size} bytes")
    file = attempt(open, path, "rb", 0)
    for piece in _pieces(size):
        attempt(read, memoryview(piece.numpy()))
        processes.send(piece, 0, here=True)
    if file is not None:
        file.close()


def _receive(processes: Group, attempt: _Attempt, rank: int, path: str, size: int) -> None:
    attempt(functools.partial(os.makedirs, exist_ok=True), os.path.dirname(path))
    file = attempt(open, path, "wb")
    for piece in _pieces(size):
        processes.receive(piece, rank, here=True)
        if file is not None:
            attempt(file.write, memoryview(piece.numpy()))
    if file is not None:
        attempt(file.close)  # where a full store may say so


def _pieces(size: int) -> Iterator[Any]:
    import torch
    for at in range(0, size, _PIECE):
        yield torch.zeros(min(_PIECE, size - at), dtype=torch.uint8)
