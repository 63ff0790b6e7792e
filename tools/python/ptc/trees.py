"""Directories that the ranks of several nodes have written, each on the file system of its own node."""
from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import Iterator, Optional, Set

from .group import Group

_MARK = ".ptc-rank-"  # of an empty file that says that a rank sees the directory: …<call>-<rank>
_FAILED = "not moved, for another rank could not"


def move(processes: Group, source: str, target: str) -> None:
    """What ranks have written as `source` becomes `target`, on each node: renamed, or copied from another file system.
    Collective; errors of one are raised by all.

    Of the ranks that see the same directory the first moves it. Files stay on their nodes; of one that is on rank 0's,
    too, that counts.
    """
    if processes.size == 1:
        _move(source, target)
        return
    leads = _leader(processes, source) == processes.rank
    processes.each(lambda: _move(source, target) if processes.rank == 0 else None, _FAILED, here=True)
    there = processes.together(lambda: set(_files(target)), here=True)
    processes.each(lambda: _move_own(source, target, there) if leads and processes.rank != 0 else None, _FAILED, here=True)


def _leader(processes: Group, directory: str) -> Optional[int]:
    """The first of the ranks that see this rank's directory; None: it has none. What is written there may say nothing of
    whose it is, and on a network's file system all see the same.
    """
    call = processes.together(lambda: f"{_MARK}{secrets.token_hex(8)}-", here=True)  # what killed ones left has another
    mark = os.path.join(directory, call + str(processes.rank))

    def leave() -> bool:
        if not os.path.isdir(directory):
            return False
        with open(mark, "wb"):
            return True

    def look() -> Optional[int]:
        marks = [name for name in os.listdir(directory) if name.startswith(call)] if is_there else []
        return min((int(name[len(call):]) for name in marks), default=None)

    def take_away() -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(mark)
    try:
        is_there = processes.each(leave, _FAILED, here=True)
        leader = processes.each(look, _FAILED, here=True)
    except BaseException:
        with contextlib.suppress(OSError):
            take_away()
        raise
    processes.each(take_away, _FAILED, here=True)
    return leader


def _move(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    for name in os.listdir(source):
        if name.startswith(_MARK):  # of processes that were killed
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(source, name))
    if os.stat(source).st_dev == os.stat(os.path.dirname(target)).st_dev:
        os.rename(source, target)
    else:
        shutil.copytree(source, target)


def _move_own(source: str, target: str, there: Set[str]) -> None:
    _move(source, target)
    for name in list(_files(target)):
        if name in there:
            os.unlink(os.path.join(target, name))


def _files(directory: str) -> Iterator[str]:
    """Of all files below it the paths from there."""
    for where, _, names in os.walk(directory):
        yield from (os.path.relpath(os.path.join(where, name), directory) for name in names)
