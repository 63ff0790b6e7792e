"""Who saves into a directory of incoming/: one process, or one group of these, at a time.

What says so is a lock (flock) on the directory, so it ends with its process, however that ends. It is known on one
node: of a group rank 0 has it, and a second start of the same training meets it there.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
from typing import Dict, Iterator

from .errors import CommitError

_MARK = ".ptc-save-"  # which nobody gives a checkpoint of his own
_OWN = re.compile(re.escape(_MARK).join((r"(.+)", r"[0-9a-f]{16}")), re.DOTALL)
_LONGEST = 255 - len(_MARK) - 16
_ALONE_WITHIN = 5.0
_held: Dict[str, int] = {}  # directory → its descriptor; guarded by _lock
_lock = threading.Lock()


def staged_name(name: str) -> str:
    """A directory of incoming/ for one save alone of a checkpoint of that name: nothing older can be in it, on any node.
    ValueError: the name is too long for that.
    """
    if len(os.fsencode(name)) > _LONGEST:
        raise ValueError(f"a checkpoint that is saved so has a name of at most {_LONGEST} bytes, for it has another, longer one until "
                         f"it is whole; this is {len(os.fsencode(name))}: {name}")
    return f"{name}{_MARK}{secrets.token_hex(8)}"


def is_staged_name(directory: str) -> bool:
    """Whether `staged_name` made the name of a directory."""
    return _OWN.fullmatch(directory) is not None


def target_of(directory: str) -> str:
    """The checkpoint that a directory of incoming/ becomes, by its name."""
    own = _OWN.fullmatch(directory)
    return own[1] if own else directory


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
            os.close(file)
            check_free(directory)
            time.sleep(0.01)  # somebody has looked just now
            continue
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


def check_free(directory: str) -> None:
    """CommitError: it is that of another process, which runs. What this process has is free to it."""
    key = os.path.realpath(directory)
    with _lock:
        if key in _held:
            return
    try:
        file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # which other ranks that look may have, too
        fcntl.flock(file, fcntl.LOCK_UN)  # also of children that have inherited it
    except BlockingIOError:
        raise CommitError(f"{_name(key)} is being saved by {_who(file)}") from None
    except OSError:
        pass
    finally:
        os.close(file)


@contextlib.contextmanager
def alone(directory: str) -> Iterator[None]:
    """One process of this machine at a time, for a moment: so two that begin at once see each other. Whoever may read the
    directory can lock it, too. So nobody waits for that lock for ever, and without it all goes on.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _ALONE_WITHIN
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.01)
            except OSError:  # no locks here
                break
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # also of children that have inherited it
    finally:
        os.close(file)


def _name(directory: str) -> str:
    return target_of(os.path.basename(directory))


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
