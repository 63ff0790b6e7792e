"""A job of a mount: its layout, its checkpoints, what it is busy with."""
from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from concurrent.futures import Future
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Union

from . import group, owner
from .errors import CommitError, LayoutError, PtcError, ReshardError

_POLL_SECONDS = 0.05
_ASK_TRIES = 600
_REMOVE_TRIES, _REMOVE_WITHIN = 10, 15.0

_HINTS = {  # what of the daemon's words is done here
    "there is no tensor in it that has a name":
        " (to ptc.save, tensors at the top beside other values are the rank's own, which nothing cuts: put them into a "
        'dict, {"model": {…}, "step": 3})',
    "put a layout.json beside rank/":
        " (ptc.save and job.save put one there that are told the layout of the ranks that save: "
        'layout={"tp": 1, "pp": 1, "dp": 2})'}

Layout = Dict[str, Any]
"""layout.json: {"tp": 4, "pp": 1, "dp": 2, …}; the sizes are required."""


class _Place(NamedTuple):
    job: str
    name: str  # of a directory in incoming/ or checkpoints/; "": none


def checkpoint_name(name: str) -> str:
    """The same, if a checkpoint can have it. ValueError: it is empty, hidden, or a path: what it leads to is not
    touched.
    """
    if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ValueError(f"a checkpoint has a name and no path: {name!r} cannot be one")
    return name


def find(path: Union[str, os.PathLike]) -> _Place:
    """The job around a path, and the name of a checkpoint in it. FileNotFoundError: there is no job."""
    path = os.path.abspath(os.fspath(path))
    name, top = "", path
    while not os.path.lexists(os.path.join(top, "status.json")) or not os.path.isdir(os.path.join(top, "checkpoints")):
        parent, last = os.path.split(top)
        if parent == top:
            raise FileNotFoundError(errno.ENOENT, "no job of ptcfs is here, nor around (mkdir in a mount makes one, or "
                                                  "ptc.Job.create)", path)
        if os.path.basename(parent) in ("incoming", "checkpoints"):
            name = last
        top = parent
    return _Place(top, name)


def stands_for(path: Union[str, os.PathLike]) -> "Optional[Job]":
    """The job, if a path is one, or leads to its `current`: what it stands for is another checkpoint with each commit.
    """
    path = os.path.abspath(os.fspath(path))
    while True:
        top, last = os.path.split(path)
        place = os.path.realpath(top if last == "current" else path)
        if os.path.lexists(os.path.join(place, "status.json")) and os.path.isdir(os.path.join(place, "checkpoints")):
            return Job(place)
        if last == "current" or not os.path.islink(path):
            return None
        path = os.path.normpath(os.path.join(os.path.realpath(top), os.readlink(path)))


def remove(directory: str) -> None:
    """All of a directory, which other ranks may be removing, too. OSError: something stays.

    Of a cluster nodes that cannot be asked at the moment make it wait (EAGAIN), at most _REMOVE_WITHIN seconds.
    """
    end = time.monotonic() + _REMOVE_WITHIN
    tries = 0
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        tries += 1
        try:
            shutil.rmtree(directory)  # says why
        except FileNotFoundError:
            if not os.path.lexists(directory):
                return
            if tries >= _REMOVE_TRIES:
                raise
        except OSError as error:
            waits = error.errno == errno.EAGAIN and time.monotonic() < end
            if not waits and tries >= _REMOVE_TRIES:
                raise
            if waits:
                time.sleep(0.1)


def _what(status: Mapping[str, Any], error: str) -> str:
    return (status.get(error) or {}).get("what", "")


class Job:
    """A directory of the mount, /mnt/ptc/<job>.

    Holds nothing open; any number may be made, by any process that sees the mount. What waits does so by looking again.
    """

    def __init__(self, path: Union[str, os.PathLike]) -> None:
        """FileNotFoundError: the path is not in a job. `Job.create` makes one."""
        self.path = find(path).job
        self.name = os.path.basename(self.path)

    def __repr__(self) -> str:
        return f"ptc.Job({self.path!r})"

    @classmethod
    def create(cls, path: Union[str, os.PathLike], **layout: Any) -> "Job":
        """The job of that path, made if there is none; `layout`: its first one, set_layout's sizes.

        A layout that somebody has saved stays: a job that begins with this, again and again, takes back nobody's edit.
        FileNotFoundError: the path is not right below a mount of ptcfs.
        """
        path = os.path.abspath(os.fspath(path))
        if not os.path.isdir(os.path.join(os.path.dirname(path), ".ptc")):
            raise FileNotFoundError(errno.ENOENT, "not right below a mount of ptcfs", path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        job = cls(path)
        if layout and job.status["revision"] == 1:
            job.set_layout(**layout)
        return job

    def file(self, *parts: object) -> str:
        """A path below the job."""
        return os.path.join(self.path, *map(str, parts))

    def read_json(self, *parts: object) -> Any:
        """A file below the job: job.read_json("dataset/plan.json")."""
        with open(self.file(*parts), encoding="utf-8") as file:
            return json.load(file)

    # ---- layout ----

    @property
    def status(self) -> Dict[str, Any]:
        """status.json of now."""
        return self.read_json("status.json")

    @property
    def error(self) -> str:
        """What was refused or failed last; "" if nothing was."""
        return _what(self.status, "last_error")

    @property
    def layout(self) -> Layout:
        """The layout that is wanted, as it was saved. status["layout"] is the name of the one in force."""
        return self.read_json("layout.json")

    def set_layout(self, layout: Optional[Mapping[str, Any]] = None, wait: bool = True, timeout: Optional[float] = None,
                   **sizes: Any) -> Dict[str, Any]:
        """Saves layout.json, and waits until it is in force.

        `layout` as a whole, or what of the present one is another: set_layout(tp=2, dp=4). With other sizes, its
        `devices` and `stages` are left out, for they would not fit; so is a `dp_shard` that does not divide dp, and
        a `shard_over` where nothing is cut over dp. Returns the status. Errors: LayoutError (refused; the one before stays),
        ReshardError, TimeoutError.
        """
        if layout is None:
            layout = self.layout
            if any(layout.get(key, 1) != sizes.get(key, layout.get(key, 1)) for key in ("tp", "pp", "dp", "ep", "etp", "cp", "vpp")):
                layout = {key: value for key, value in layout.items() if key not in ("devices", "stages")}
            if {**layout, **sizes}.get("dp", 1) % layout.get("dp_shard", 1) != 0:
                layout = {key: value for key, value in layout.items() if key != "dp_shard"}
            if {**layout, **sizes}.get("optimizer", "replicated") == "replicated":
                layout = {key: value for key, value in layout.items() if key != "shard_over"}
        text = json.dumps({"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1, **layout, **sizes})
        try:
            with open(self.file("layout.json"), "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise LayoutError(_what(self.status, "layout_error") or str(error)) from None
            raise
        return self.wait(timeout) if wait else self.status

    def wait(self, timeout: Optional[float] = None) -> Dict[str, Any]:
        """Waits until the layout that is wanted is in force; returns the status.

        Errors: LayoutError (what was saved last was refused, by whomever, and the one before it is in force),
        ReshardError, TimeoutError.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = self.status
            if status["state"] == "failed":
                raise ReshardError(_what(status, "last_error") or "the reshard failed")
            if status["state"] == "idle" and status["in_force_revision"] == status["revision"]:
                if refused := _what(status, "layout_error"):
                    raise LayoutError(refused)
                return status
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.path}: {status['wanted']} is not in force after {timeout} s")
            time.sleep(_POLL_SECONDS)

    def watch(self, interval: float = 0.2, revision: Optional[int] = None) -> Iterator[Optional[Layout]]:
        """Each layout that is saved from now on, or after `revision`, as soon as it is seen; None while there is none.

        A loop over it may end at any time, and goes around once an interval, so that it can look after other things. Of
        layouts that are saved faster than that only the last is seen. `wait` waits until it is in force.
        """
        seen = self.status["revision"] if revision is None else revision
        while True:
            now = self.status["revision"]
            if now != seen:
                seen = now
                yield self.layout
            else:
                yield None
            time.sleep(interval)

    def plan(self, layout: Optional[Mapping[str, Any]] = None, **sizes: Any) -> Dict[str, Any]:
        """What a layout would move, in plan.json's form; without one, plan.json of the running or last reshard."""
        if layout is None and not sizes:
            return self.read_json("plan.json")
        return self.ask(do="plan", job=self.name, layout={**(self.layout if layout is None else layout), **sizes})

    def ask(self, **question: Any) -> Dict[str, Any]:
        """Asks the daemon through .ptc/ask, as `ptc` does. PtcError: its reason."""
        path = os.path.join(os.path.dirname(self.path), ".ptc/ask")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for tries in range(_ASK_TRIES):  # it works on a few questions at once
                try:
                    os.write(file, json.dumps(question).encode())
                    break
                except BlockingIOError:
                    if tries + 1 == _ASK_TRIES:
                        raise
                    time.sleep(0.1)
            answer = b""
            while True:
                part = os.read(file, 1 << 16)
                if not part:
                    break
                answer += part
        finally:
            os.close(file)
        told = json.loads(answer)
        if not told.get("ok"):
            raise PtcError(told.get("error") or "the daemon refused without a reason")
        return told["result"]

    # ---- checkpoints ----

    def checkpoints(self) -> List[str]:
        """Names, the oldest first."""
        return [one["name"] for one in self.status["checkpoints"]]

    def is_pinned(self, name: str) -> bool:
        """Whether a checkpoint is, so that it cannot be removed (`ptc pin`)."""
        return any(one["name"] == name and one["pinned"] for one in self.status["checkpoints"])

    def remove_checkpoint(self, name: str) -> None:
        """As `ptc rm` does, however many names are in it. PermissionError: it is pinned. OSError: something stays."""
        try:
            self.ask(do="remove", job=self.name, checkpoint=name)
        except (PtcError, OSError):
            remove(self.file("checkpoints", name))  # says why, and waits where that helps

    def remove_unpinned(self, name: str) -> None:
        """Removes a checkpoint, if there is one, and if it is not pinned. OSError: something stays."""
        if self.is_pinned(name):
            return
        try:
            self.remove_checkpoint(checkpoint_name(name))
        except PermissionError:
            if not self.is_pinned(name):  # meanwhile
                raise

    @property
    def newest(self) -> Optional[str]:
        """The newest checkpoint under the layout in force: a path that stays what it is. `current` leads there once it
        has been made of what was committed, and until then to the one before. None: nothing was committed yet.
        """
        status = self.status
        if not status["checkpoints"]:
            return None
        return self.file("checkpoints", status["checkpoints"][-1]["name"], "layouts", status["layout"])

    @property
    def current(self) -> Optional[str]:
        """Where `current` leads now: a path that stays what it is. None: it leads nowhere yet."""
        try:
            return self.file(os.readlink(self.file("current")))
        except FileNotFoundError:
            return None

    def incoming(self, name: str) -> str:
        """Where a checkpoint of that name is written. ValueError: it is a path, and no name."""
        return self.file("incoming", checkpoint_name(name))

    def begin(self, name: str, overwrite: bool = False) -> str:
        """A new directory in incoming/, <name>.ptc-save-<16 hex>, for one save of a checkpoint of that name: the same on all
        ranks, and there on their nodes. `commit` of it makes checkpoints/<name>. Collective.

        As no other save has had that directory, nothing of an older one, on whatever node, goes into the checkpoint. What
        attempts of that name that were broken off left on the ranks' nodes is removed. What this process still saves of
        that name in the background ends before. Until a `commit` ends, well or not, or this process does, the name
        is these processes' own. Errors, the same on all ranks, before anything is written or removed: CommitError (there is
        such a checkpoint, and it is not to be replaced: no `overwrite`, or it is pinned; another process of one of these
        machines saves that name), ValueError (`checkpoint_name`); OSError.
        """
        processes = group.prepare()
        self.wait_for(name)
        own = processes.together(lambda: self.take(name, overwrite), here=True)
        try:
            def clear() -> str:
                where = self.incoming(own)
                self.remove_older(own)
                with contextlib.suppress(CommitError):  # another of these ranks has it on this node
                    owner.claim(where)
                return where
            return processes.each(clear, f"{name} was not begun, for another rank could not", here=True)
        except BaseException:
            self.give_up(own)
            raise

    def give_up(self, own: str) -> None:
        """Of a directory that `take` gave: it goes, on this node, and others may have the name."""
        where = self.file("incoming", own)
        with contextlib.suppress(OSError):
            remove(where)
        owner.release(where)

    def wait_for(self, name: str) -> None:
        """Until nothing that this process saves of that name goes on in the background."""
        for directory in group.directories():
            if os.path.dirname(directory) == os.path.realpath(self.file("incoming")) and owner.target_of(
                    os.path.basename(directory)) == name:
                group.wait_for(directory)

    def check_free(self, name: str, overwrite: bool = False) -> None:
        """CommitError: a checkpoint of that name is there, and is not to be replaced. What to do is in it."""
        found = next((one for one in self.status["checkpoints"] if one["name"] == name), None)
        if found is None:
            return
        if not overwrite:
            raise CommitError(f"checkpoint {name} exists already, and nothing was written: save under another name, remove it "
                              f"(ptc rm {self.name}/{name}), or replace it (overwrite=True)")
        if found["pinned"]:
            raise CommitError(f"checkpoint {name} is pinned, and not replaced; ptc pin {self.name}/{name} --remove "
                              "takes that off")

    def take(self, name: str, overwrite: bool) -> str:
        """What rank 0 does to begin: the name of the directory in incoming/, which is there then, and this process' own."""
        self.check_free(checkpoint_name(name), overwrite)
        own = owner.staged_name(name)
        with owner.alone(self.file("incoming")):
            for other in self._begun(name):
                owner.check_free(self.file("incoming", other))
                owner.release(self.file("incoming", other))  # of a save of this process that has failed
            owner.claim(self.file("incoming", own))
        return own

    def remove_older(self, own: str) -> None:
        """What is left here of other saves of the name that the directory `own` is of, and what was said of them."""
        name = owner.target_of(own)
        for other in self._begun(name):
            where = self.file("incoming", other)
            if other == own:
                continue
            owner.check_free(where)
            remove(where)
        for file in os.listdir(self.file("incoming")):
            begun, _, kind = file.rpartition(".")
            if kind in ("error", "without") and begun != own and owner.target_of(begun) == name:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(self.file("incoming", file))

    def _begun(self, name: str) -> List[str]:
        """Directories in incoming/ of this node that are for that name."""
        incoming = self.file("incoming")
        return [one for one in sorted(os.listdir(incoming))
                if owner.target_of(one) == name and os.path.isdir(path := os.path.join(incoming, one))
                and not os.path.islink(path)]

    def check_joined(self, patience: float = 30) -> None:
        """CommitError: this node has been cut off from its cluster for `patience` seconds. A commit that another node leads
        would not know of what is written here.
        """
        deadline = time.monotonic() + patience
        while True:
            trouble = None
            with contextlib.suppress(OSError, ValueError), \
                    open(os.path.join(os.path.dirname(self.path), ".ptc", "nodes.json"), encoding="utf-8") as file:
                trouble = json.load(file).get("agreement")
            if not trouble:
                return
            if time.monotonic() >= deadline:
                raise CommitError(f"{trouble.get('why', 'this node is cut off')}: what was saved here would be left out")
            time.sleep(1)

    def save(self, state: Mapping[str, Any], name: str, *, wait: bool = True, layout: Optional[Mapping[str, Any]] = None,
             consumed: Optional[int] = None, files: Optional[Mapping[str, Any]] = None, overwrite: bool = False
             ) -> "Union[str, Future[str]]":
        """Saves each rank's state and commits it as a checkpoint. Collective, if torch.distributed is in use.

        Returns the checkpoint's directory; with wait=False, as soon as the tensors were copied, a future of it: then
        they, and all that was given, may change again. A name that is still being saved is waited for. `layout`: under
        which the ranks are, if it is not the one in force. `consumed`: of the data set. `files`: {"config.json": a
        dict, text, bytes, or anything with to_dict()}, kept as they are. `overwrite`: a checkpoint of that name is
        removed before the commit, and is lost if this one is refused then; else a name that is taken is refused before
        anything is written. Errors: CommitError (what was written stays in incoming/); what a rank fails with, and on the
        others OSError, which says which rank and why: then nothing stays.
        """
        from .saving import commit_logged, save_in_background
        where = self.begin(name, overwrite)
        # If it fails, commit tells all ranks.
        save_in_background(state, where, not wait, layout=layout, consumed=consumed, files=files)
        committed: "Any" = commit_logged(where, False, None, None, overwrite, not wait, True)
        return committed.result() if wait else committed

    def rename_into_checkpoints(self, begun: str, timeout: Optional[float] = None, overwrite: bool = False) -> str:
        """The rename that commits a directory of incoming/, on one rank, tried again while what it asked for goes on.
        `overwrite`: what has the name is removed before. CommitError (also of `overwrite`, where that is pinned), OSError.
        """
        name = owner.target_of(begun)
        source, target = self.incoming(begun), self.file("checkpoints", name)
        if overwrite and os.path.isdir(source) and os.path.isdir(target):
            self.check_free(name, overwrite)
            self.remove_checkpoint(name)
        deadline = None if timeout is None else time.monotonic() + timeout
        in_vain = 0
        while True:
            try:
                os.rename(source, target)
                return target
            except BlockingIOError as error:
                goes_on = any(one["checkpoint"] == name for one in self.status["commits"])
                in_vain = 0 if goes_on else in_vain + 1  # once: it ended at just that moment
                if in_vain == 3:
                    raise CommitError(self._reason(begun) or str(error)) from None
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"{target} is not committed after {timeout} s") from None
                time.sleep(_POLL_SECONDS)
            except OSError:
                reason = self._reason(begun)
                if not reason:
                    raise
                raise CommitError(f"{name}: {reason}") from None

    def _reason(self, begun: str) -> str:
        try:
            with open(self.incoming(begun) + ".error", encoding="utf-8") as file:
                reason = file.read().strip()
            return reason + "".join(hint for said, hint in _HINTS.items() if said in reason)
        except OSError:
            return ""
