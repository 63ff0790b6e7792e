"""save and commit: a rank's tensors into incoming/, and the rename that makes a checkpoint of what all have written."""
from __future__ import annotations

import contextlib
import json
import logging
import os
from concurrent.futures import Future
from typing import Any, Callable, Container, Dict, List, Literal, Mapping, Optional, Tuple, Union, overload

from . import arrays, device, group, owner, safetensors, state as states
from .errors import PtcError
from .job import Job, find, remove
from .loading import part_of
from .slices import box_of


@overload
def save(state: Mapping[str, Any], dir: Union[str, os.PathLike], wait: Literal[True] = True, *,
         rank: Optional[int] = None, layout: Optional[Mapping[str, Any]] = None,
         consumed: Optional[int] = None, files: Optional[Mapping[str, Any]] = None, overwrite: bool = False) -> str: ...


@overload
def save(state: Mapping[str, Any], dir: Union[str, os.PathLike], wait: Literal[False], *, rank: Optional[int] = None,
         layout: Optional[Mapping[str, Any]] = None, consumed: Optional[int] = None,
         files: Optional[Mapping[str, Any]] = None, overwrite: bool = False) -> "Future[str]": ...


def save(state: Mapping[str, Any], dir: Union[str, os.PathLike], wait: bool = True, *, rank: Optional[int] = None,
         layout: Optional[Mapping[str, Any]] = None, consumed: Optional[int] = None,
         files: Optional[Mapping[str, Any]] = None, overwrite: bool = False) -> "Union[str, Future[str]]":
    """Writes this rank's state into `dir`, <job>/incoming/<name>; `commit` makes a checkpoint of it.

    A dict of dicts of tensors, each of which becomes a file of safetensors, and of other values (state.py says how).
    Of a DTensor the part of this rank is written. Tensors are written once, straight to where they stay; from another
    device a few MiB at a time. All that is given may change again when this returns; with wait=False that is a future
    of the directory, for closing the files, at which the daemon reads them, goes on in the background. Where `dir` is
    not in an incoming/, files go right into it.

    `rank`: of torch.distributed, or RANK, if not given. Rank 0 also writes `layout` (under which the ranks are, if it
    is not the one in force), `consumed` (the samples of the data set that went into it) and `files` (Job.save). Where
    there is a checkpoint of that name already, nothing is written, unless `commit` is to replace it (`overwrite` here, or
    in the `begin` that gave the directory). What an older save left in a directory that `begin` did not give may stay
    beside it. Errors: CommitError (the name is taken), TypeError, ValueError (what cannot be saved, by its path in the
    state), OSError; then nothing stays of what this call wrote. With wait=False they are in the future, and are the
    `commit`'s, where all ranks learn of them: of several processes each should save so.
    """
    if not wait:
        return save_in_background(state, dir, True, rank, layout, consumed, files, overwrite)
    top, where, staged, rank = _place(dir, rank)
    _check_name(top, staged, overwrite)
    return _write(state, top, where, staged, rank, layout, consumed, files, later=False)()


def save_in_background(state: Mapping[str, Any], dir: Union[str, os.PathLike], later: bool, rank: Optional[int] = None,
                       layout: Optional[Mapping[str, Any]] = None, consumed: Optional[int] = None,
                       files: Optional[Mapping[str, Any]] = None, overwrite: bool = False) -> "Future[str]":
    """`save` with wait=False. Not `later`: who asked waits for it, so that no copies on a GPU are worth their room."""
    top, where, staged, rank = _place(dir, rank)
    future: "Future[str]"
    try:
        _check_name(top, staged, overwrite)
        future = group.in_background(_write(state, top, where, staged, rank, layout, consumed, files, later))
    except Exception as error:  # pylint: disable=broad-except
        future = Future()
        future.set_exception(error)
    group.keep(top, where, future)
    return future


def _place(dir: Union[str, os.PathLike], rank: Optional[int]) -> Tuple[str, str, bool, int]:
    """The directory, that of the rank in it, whether it is in an incoming/, and the rank; when nothing is saved there."""
    top = os.path.abspath(os.fspath(dir))
    rank = group.rank() if rank is None else rank
    staged = os.path.basename(os.path.dirname(top)) == "incoming"
    where = os.path.join(top, "rank", str(rank)) if staged else top
    if not staged:
        _check_place(top)
    group.wait_for(top, where)
    return top, where, staged, rank


def _check_place(path: str) -> None:
    """ValueError: it is in a job, where checkpoints are begun in incoming/ alone."""
    try:
        job = find(path).job
    except FileNotFoundError:
        return
    if os.path.relpath(path, job).split(os.sep)[0] != "incoming":
        raise ValueError(f"{path} is in a job, but not in its incoming/, where checkpoints are written")


def _check_name(top: str, staged: bool, overwrite: bool) -> None:
    """CommitError: the commit of a directory of incoming/ would be refused. Of what `begin` gave that has been seen."""
    if staged and not owner.is_staged_name(os.path.basename(top)):
        Job(find(top).job).check_free(os.path.basename(top), overwrite)


def _write(state: Mapping[str, Any], top: str, where: str, staged: bool, rank: int, layout: Optional[Mapping[str, Any]],
           consumed: Optional[int], files: Optional[Mapping[str, Any]], later: bool) -> Callable[[], str]:
    """Writes the tensors; what it returns writes all else, of which it has the text already, and closes the files. Their
    headers come last: what is killed before leaves nothing that could be committed. `later`: tensors of which a GPU can
    keep a copy are written there, too.
    """
    sections, text = states.flatten(state)
    says = described(sections, lambda: layout if layout is not None else Job(find(top).job).layout if staged else {})
    small = {os.path.join(where, states.FILE): json.dumps(text, separators=(",", ":")).encode()}
    if rank == 0:
        beside = top if staged else where
        if layout is not None:
            small[os.path.join(beside, "layout.json")] = json.dumps({"tp": 1, "pp": 1, "dp": 1, **layout}).encode()
        if consumed is not None:
            small[os.path.join(beside, "consumed")] = str(int(consumed)).encode()
        taken = {states.FILE, *(section + ".safetensors" for section in sections)}
        for name, content in contents(files, taken).items():
            small[os.path.join(where, name)] = content
    open_files: Dict[str, safetensors.Unfinished] = {}
    written: List[str] = []

    def close() -> None:
        failure: Optional[OSError] = None
        for path in list(open_files):
            try:
                os.close(open_files.pop(path).file)
            except OSError as error:
                failure = failure or OSError(error.errno, error.strerror, path)
        if failure is not None:
            raise failure

    def take_back() -> None:
        """What a save that has failed wrote would take up room for ever."""
        with contextlib.suppress(OSError):
            close()
        for path in written:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def finish() -> str:
        try:
            for path, content in small.items():
                written.append(path)
                write_file(path, content)
            for path, unfinished in open_files.items():
                try:
                    unfinished.finish()
                except OSError as error:
                    raise OSError(error.errno, error.strerror, path) from None
            close()
        except BaseException:
            take_back()
            raise
        return top

    def write(now: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            for section, tensors in now.items():
                path = os.path.join(where, section + ".safetensors")
                written.append(path)
                open_files[path] = safetensors.write(path, tensors, says.get(section))
        except BaseException:
            take_back()
            raise
    kept = device.snapshot(sections) if later else None
    if kept is None:
        write(sections)
        return finish

    def write_and_finish() -> str:
        kept.ready()
        write(kept.sections)
        return finish()
    return write_and_finish


def described(sections: Mapping[str, Dict[str, Any]], layout: Callable[[], Mapping[str, Any]]) -> Dict[str, Dict[str, str]]:
    """By section what its file says of its tensors, where there are DTensors: which part of the whole each is. All other
    tensors are wholes then, which all ranks have. The commit puts them together by that, whatever the layout is.

    A section without DTensors says nothing, and is cut as the layout says; but under fsdp, where it would be taken for
    rows, it says so, too, if another has any, or if `load` gave some of it: these are the parts that they were.
    ValueError: what a rank holds of a tensor cannot be told, by name.
    """
    distributed = [key for key, tensors in sections.items() if any(map(arrays.is_distributed, tensors.values()))]
    if len(distributed) < len(sections) and layout().get("optimizer") == "fsdp":
        # What was loaded and is saved again is the part that it was.
        distributed = [key for key, tensors in sections.items() if distributed or any(map(part_of, tensors.values()))]
    found: Dict[str, Dict[str, str]] = {}
    for key in distributed:
        tensors = sections[key]
        offsets, wholes = {}, {}
        for name, tensor in tensors.items():
            try:
                loaded = None if arrays.is_distributed(tensor) else part_of(tensor)
                part, shape = loaded or (box_of(tensor), tuple(tensor.shape))
                if arrays.is_distributed(tensor) and 0 in part.shape:
                    tensors[name] = arrays.local(tensor).new_empty(part.shape)
            except ValueError as error:
                raise ValueError(f"{key}.{name}: {error}") from None
            offsets[name], wholes[name] = part.offset, shape
        found[key] = safetensors.boxes_metadata(offsets, wholes)
    return found


def contents(files: Optional[Mapping[str, Any]], taken: Container[str]) -> Dict[str, bytes]:
    """Of `files` as they are now: bytes, a text, something with to_dict(), or anything that is JSON. ValueError: a name
    is a path to elsewhere, or one of the checkpoint's own; TypeError: it is no JSON.
    """
    found = {}
    for name, content in (files or {}).items():
        clean = os.path.normpath(name)
        if os.path.isabs(name) or clean == os.curdir or clean.split(os.sep)[0] == os.pardir:
            raise ValueError(f"files: {name!r} is no name of a file in a checkpoint")
        if clean in taken:
            raise ValueError(f"files: {name!r} is a file of the state's own")
        if hasattr(content, "to_dict"):
            content = content.to_dict()
        if not isinstance(content, (bytes, bytearray, str)):
            try:
                content = json.dumps(content, indent=2) + "\n"
            except TypeError as error:
                raise TypeError(f"files: {name!r}: {error}") from None
        found[clean] = content.encode() if isinstance(content, str) else bytes(content)
    return found


def write_file(path: str, content: bytes) -> None:
    """A small file, in a directory that is made if there is none."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


@overload
def commit(dir: Union[str, os.PathLike], wait: Literal[True] = True, *, after: "Optional[Future[Any]]" = None,
           timeout: Optional[float] = None, overwrite: bool = False) -> str: ...


@overload
def commit(dir: Union[str, os.PathLike], wait: Literal[False], *, after: "Optional[Future[Any]]" = None,
           timeout: Optional[float] = None, overwrite: bool = False) -> "Future[str]": ...


def commit(dir: Union[str, os.PathLike], wait: bool = True, *, after: "Optional[Future[Any]]" = None,
           timeout: Optional[float] = None, overwrite: bool = False) -> "Union[str, Future[str]]":
    """Makes a checkpoint of <job>/incoming/<name>, or of what `Job.begin` gave, once all ranks have come here; returns its
    directory.

    Rank 0 renames; all return, or all raise. Collective, if torch.distributed is in use. With wait=False a future:
    calls are made one after another in the background, over a group of their own, so training may go on. What this
    process saves there with wait=False ends before, and its failure is that of the commit; so is that of `after`, a
    future of whatever else must be done. What fails in the background is logged, too. `overwrite`: a checkpoint of that
    name is removed first, and is lost if this one is refused then. Errors: CommitError (the daemon's reason; nothing of
    what was written is lost), OSError; where another rank has failed it names that and its reason.
    """
    return commit_logged(dir, wait, after, timeout, overwrite, True, False)


def commit_logged(dir: Union[str, os.PathLike], wait: bool, after: "Optional[Future[Any]]", timeout: Optional[float],
                  overwrite: bool, log: bool, discard: bool) -> "Union[str, Future[str]]":
    """`commit`; with `log` what fails in the background is logged; with `discard` nothing stays where a rank could not
    save.
    """
    processes = group.prepare()
    before = group.taken(os.path.abspath(os.fspath(dir))) + ([] if after is None else [after])

    def run() -> str:
        def ready() -> Tuple[Job, str]:
            for future in before:
                future.result()
            place = find(dir)
            job = Job(place.job)
            job.check_joined()
            return job, place.name
        try:
            try:
                job, name = processes.each(ready, "not committed, for another rank could not save", here=wait)
            except Exception as error:  # pylint: disable=broad-except
                if discard and not isinstance(error, PtcError):
                    with contextlib.suppress(OSError):
                        remove(os.fspath(dir))
                raise
            return processes.together(lambda: job.rename_into_checkpoints(name, timeout, overwrite), here=wait)
        finally:
            owner.release(os.fspath(dir))
    if wait:
        return run()
    committed = group.in_background(run)
    group.keep(os.path.abspath(os.fspath(dir)), "", committed)
    if log:
        committed.add_done_callback(_tell)
    return committed


def _tell(committed: "Future[str]") -> None:
    """In the log: perhaps nobody asks the future."""
    error = committed.exception()
    if error is not None:
        logging.getLogger("ptc").error("a checkpoint is not committed: %s", str(error) or type(error).__name__)
