"""Who saves into a directory of incoming/: one process, or one group of these, at a time.

What says so is a lock (flock) on the directory, so it ends with its process, however that ends. It is known on one
node: of a group rank 0 has it, and a second start of the same training meets it there.
"""
from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from typing import Dict

from .errors import CommitError

_held: Dict[str, int] = {}  # directory → its descriptor; guarded by _lock
_lock = threading.Lock()


def claim(directory: str) -> None:
    """Makes the directory this process' own until `release`. CommitError: it is that of another, which runs; OSError.
    """
    key = os.path.realpath(directory)
    with _lock:
        if key in _held and _is_at(_held[key], key):
            return
    release(directory)
    while True:
        os.makedirs(directory, exist_ok=True)
        try:
            file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # committed or removed just now
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _who(file)
            os.close(file)
            raise CommitError(f"{os.path.basename(key)} is being saved by {who}") from None
        except OSError:
            pass  # no locks here: then nobody is told
        if _is_at(file, key):
            with _lock:
                _held[key] = file
            return
        os.close(file)


def release(directory: str) -> None:
    """Others may have the directory; nothing, if it is not this process' own."""
    with _lock:
        file = _held.pop(os.path.realpath(directory), None)
    if file is not None:
        fcntl.flock(file, fcntl.LOCK_UN)  # also of children that have inherited it
        os.close(file)


def _is_at(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):  # it was committed, or removed
            return False
        raise


def _who(file: int) -> str:
    """By what the kernel says of locks on the directory."""
    try:
        with open("/proc/locks", encoding="ascii") as locks:
            found = re.search(rf"FLOCK +ADVISORY +WRITE +([0-9]+) +\S+:{os.fstat(file).st_ino} ", locks.read())
    except OSError:
        found = None
    return f"process {found[1]}" if found else "another process"


def _after_fork() -> None:
    """What the parent saves is not the child's."""
    global _lock
    _lock = threading.Lock()
    for file in _held.values():
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)
