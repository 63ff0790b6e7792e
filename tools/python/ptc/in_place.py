"""What would be computed when it is read, taken from where its bytes lie instead: files of a rank, boxes of tensors."""
from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
import resource
import threading
from bisect import bisect_left
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import safetensors
from .arrays import ITEM_BYTES, array_of, row_runs, torch_or_none
from .slices import Box

_FILE = ".sources.json"  # of a rank's directory, or a checkpoint: reshard/checkpoint/byte_sources.h says what is in it
_READ_BYTES = 1 << 30  # of one call
_RUN_BYTES = 1 << 16  # longer ones are read, not mapped
_MANY_PARTS = 64  # that one box would be made of
_KEPT = 64  # mappings, of which each has a descriptor


def _host_takes_free_memory() -> bool:
    """Whether the host of this virtual machine takes back what nobody uses (free page reporting): that are huge pages,
    and to have one again takes much longer then than the small ones that stay.
    """
    try:
        with open("/sys/module/page_reporting/parameters/page_reporting_order", encoding="ascii") as file:
            return int(file.read()) < 32
    except (OSError, ValueError):
        return False


def memory_of(size: int) -> mmap.mmap:
    """Memory of this process, all zero, in huge pages where they are allowed, and had soon."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and not _host_takes_free_memory():
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    return memory


class _Pages:
    """Fresh memory, had some pages at a time just before they are written: a fault for each takes longer."""
    LEAST, WINDOW = 1 << 18, 1 << 21
    _POPULATE_WRITE = 23  # of Linux 5.14
    _madvise: Any = None

    @classmethod
    def take(cls, memory: memoryview) -> bool:
        """False: there is no such call."""
        if cls._madvise is None:
            try:
                cls._madvise = ctypes.CDLL(None).madvise
            except (AttributeError, OSError):
                cls._madvise = False
        madvise = cls._madvise  # another thread may be refused meanwhile
        if not madvise:
            return False
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        before = begin % mmap.PAGESIZE
        place, size = ctypes.c_void_p(begin - before), ctypes.c_size_t(memory.nbytes + before)
        if madvise(place, size, cls._POPULATE_WRITE) == 0:
            return True
        cls._madvise = False
        return False


def read(file: int, into: memoryview, offset: int, path: str) -> None:
    """All of it. ValueError: the file is shorter."""
    while into.nbytes:
        fresh = into.nbytes >= _Pages.LEAST and _Pages.take(into[:_Pages.WINDOW])
        done = os.preadv(file, [into[:_Pages.WINDOW if fresh else _READ_BYTES]], offset)
        if not done:
            raise ValueError(f"{path} ends at byte {offset}")
        into, offset = into[done:], offset + done


def copied(path: str) -> safetensors.InMemory:
    """A file of safetensors in memory of this process."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        memory = memory_of(size)
        read(file, memoryview(memory)[:size], 0, path)
    finally:
        os.close(file)
    return safetensors.InMemory(path, memory, size)


def _said(directory: str) -> Tuple[Any, int]:
    """What a directory says of where its bytes lie, and when the checkpoint was committed. OSError: nothing."""
    with open(os.path.join(directory, _FILE), "rb") as file:
        stat = os.fstat(file.fileno())
        if stat.st_size:  # of ptcfs's own nobody knows before how long it is
            raise FileNotFoundError(errno.ENOENT, "this is a file that somebody wrote", file.name)
        return json.loads(file.read()), stat.st_mtime_ns


def _opened(path: str, committed: int) -> int:
    """OSError: it cannot be opened, or is one of another checkpoint, which has the name by now."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if os.fstat(file).st_mtime_ns != committed:
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "another checkpoint was committed under this name", path)
    return file


def _map(file: int) -> mmap.mmap:
    # To be written to only because torch.frombuffer warns otherwise.
    return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)


class _Mapped:
    """Mappings that were asked for last, by the number of a source. Nobody writes to them."""

    def __init__(self) -> None:
        self._kept: Dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def get(self, source: int) -> Optional[mmap.mmap]:
        with self._lock:
            found = self._kept.pop(source, None)
            if found is not None:
                self._kept[source] = found
            return found

    def put(self, source: int, memory: mmap.mmap) -> mmap.mmap:
        with self._lock:
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[source] = memory
            return memory

    def __reduce__(self) -> Any:
        return _Mapped, ()


class Sources:
    """The files that what a rank loads lies in, open as long as this is. Threads: any, but for close()."""

    def __init__(self, checkpoint: str, text: Mapping[str, Any], committed: int) -> None:
        """OSError: one cannot be opened, or they are too many."""
        self.files: Dict[str, Dict[str, Any]] = text["files"]
        self._paths = [os.path.join(checkpoint, path) for path in text["sources"]]
        self._open: List[int] = []
        self._mapped = _Mapped()
        if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * len(self._paths):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), checkpoint)
        try:
            for path in self._paths:
                self._open.append(_opened(path, committed))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Tensors that were read stay."""
        while self._open:
            os.close(self._open.pop())
        self._mapped = _Mapped()

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def file(self, source: int) -> int:
        """Its descriptor, which stays this object's."""
        return self._open[source]

    def copy(self, copies: Sequence[Sequence[int]], into: memoryview, begin: int) -> None:
        """Carries out copies into memory that has the bytes of the file from `begin` on."""
        for source, offset, at, run, *levels in copies:
            if not levels and run >= _RUN_BYTES:
                read(self._open[source], into[at - begin:][:run], offset, self._paths[source])
            else:
                memory = self._mapped.get(source) or self._mapped.put(source, _map(self._open[source]))
                if levels:
                    _copy_runs(memory, offset, into, at - begin, run, levels)
                else:  # there may be very many short ones
                    into[at - begin:at - begin + run] = memoryview(memory)[offset:offset + run]


class Gathered(safetensors.InMemory):
    """A file of safetensors that nobody computes."""

    def __init__(self, path: str, sources: Sources, described: Mapping[str, Any], at_once: bool) -> None:
        """`at_once`: all of it into memory that its tensors keep; else each tensor when it is asked for, into memory
        that the next one takes.
        """
        self.sources = sources
        self._copies = sorted(described["copies"], key=lambda copy: copy[2])
        self._begins = [copy[2] for copy in self._copies]
        header = described["header"].encode()
        self._scratch: Optional[mmap.mmap] = None
        memory = memory_of(described["bytes"]) if at_once else None
        super().__init__(path, memory, described["bytes"], header)
        if memory is not None:
            sources.copy(self._copies, memoryview(memory), 0)

    def tensor(self, name: str, numpy_arrays: bool = False) -> Any:
        if self._memory is not None:
            return super().tensor(name, numpy_arrays)
        entry = self.entries[name]
        size = entry.end - entry.begin
        if self._scratch is None or len(self._scratch) < size:
            self._scratch = memory_of(max(size, max(one.end - one.begin for one in self.entries.values())))
        into = memoryview(self._scratch)[:size]
        self.fill(entry, into)
        return self.array(self._scratch, entry._replace(begin=0, end=size), numpy_arrays)

    def copies_of(self, entry: safetensors.Entry) -> List[Sequence[int]]:
        """What the tensor is made of: source, offset, where in the file, run, and levels. Threads: any."""
        first, last = (bisect_left(self._begins, place) for place in (entry.begin, entry.end))
        return self._copies[first:last]

    def fill(self, entry: safetensors.Entry, into: memoryview) -> None:
        """The tensor's bytes into memory of that size. Threads: any."""
        copies = self.copies_of(entry)
        if sum(run * math.prod(levels[::3]) for _, _, _, run, *levels in copies) < into.nbytes:
            into[:] = bytes(into.nbytes)  # what none reaches
        self.sources.copy(copies, into, entry.begin)


def sources_of(where: str) -> Optional[Sources]:
    """Of a rank's directory; None: nothing of it is better read elsewhere, or it is no directory of ptcfs."""
    head, found, _ = where.rpartition("/layouts/")
    if not found:
        return None
    try:
        text, committed = _said(where)
        return Sources(head, text, committed) if text["files"] else None
    except (OSError, ValueError):
        return None  # an older ptcfs; or one of them cannot be had, and whoever reads the files learns why


class Part(NamedTuple):
    """Of a tensor, what lies in one array of a file."""
    source: int
    offset: int  # of the array, in bytes
    shape: Tuple[int, ...]  # of the array
    begin: Tuple[int, ...]  # of the part in it
    box: Box  # in the tensor

    def slices(self, box: Box) -> Tuple[slice, ...]:
        """Where a box of it is in the array."""
        return tuple(slice(at - first + begin, at - first + begin + extent) for at, first, begin, extent
                     in zip(box.offset, self.box.offset, self.begin, box.shape))


class Parts:
    """Where parts of a checkpoint's tensors lie, by their numbers in meta.json."""

    def __init__(self, checkpoint: str, committed: int) -> None:
        """With none, where an older ptcfs does not say, or another checkpoint than that has the name by now."""
        self._checkpoint, self._committed = checkpoint, committed
        self._mapped = _Mapped()
        try:
            text, said_of = _said(checkpoint)
        except (OSError, ValueError):
            text, said_of = None, 0
        if text is None or said_of != committed:
            text = {"tensors": [], "sources": []}
        self._sources: List[str] = text["sources"]
        self._tensors: List[List[Any]] = text["tensors"]

    def of(self, number: int, box: Box) -> List[Tuple[Part, Box]]:
        """What the box is made of: of each part the box that is in both. Empty: all of it is not here."""
        found: List[Tuple[Part, Box]] = []
        for source, offset, shape, begin, *whole in self._tensors[number] if number < len(self._tensors) else ():
            part = Part(source, offset, tuple(shape), tuple(begin), Box(*map(tuple, whole)))
            common = part.box.common(box)
            if common == box:
                return [(part, box)]
            if common is not None:
                found.append((part, common))
        apart = len(found) <= _MANY_PARTS and all(one.common(other) is None for i, (_, one) in enumerate(found)
                                                  for _, other in found[:i])
        return found if apart and sum(common.elements for _, common in found) == box.elements else []

    def array(self, part: Part, box: Box, dtype: str, numpy_arrays: bool, shared: bool = False) -> Any:
        """A box of a part, mapped; if `shared`, in memory that others have too, and nobody writes to. OSError: its file is
        not there any more.
        """
        memory = (self._mapped.get(part.source) if shared else None) or self._map(part.source, shared)
        rows = row_runs(part.shape, [one.start for one in part.slices(box)], box.shape)
        if rows is not None:
            return array_of(memory, dtype, box.shape, part.offset + rows[0] * ITEM_BYTES[dtype], numpy_arrays)
        return array_of(memory, dtype, part.shape, part.offset, numpy_arrays)[part.slices(box)]

    def let_go(self) -> None:
        """Of what is mapped for all: a checkpoint that is removed takes memory as long as somebody has mapped it."""
        self._mapped = _Mapped()

    def _map(self, source: int, shared: bool) -> mmap.mmap:
        file = _opened(os.path.join(self._checkpoint, self._sources[source]), self._committed)
        try:
            return self._mapped.put(source, _map(file)) if shared else _map(file)
        finally:
            os.close(file)


def _copy_runs(source: Any, offset: int, target: Any, at: int, run: int, levels: Sequence[int]) -> None:
    counts, source_strides, target_strides = levels[::3], levels[1::3], levels[2::3]
    numbers = (offset, at, run, *source_strides, *target_strides)
    size = next(size for size in (8, 4, 2, 1) if all(number % size == 0 for number in numbers))
    shape = (*counts, run // size)
    torch = torch_or_none()
    if torch is None:
        import numpy
        arrays = [numpy.ndarray(shape, f"<u{size}", memory, begin, (*strides, size))
                  for memory, begin, strides in ((target, at, target_strides), (source, offset, source_strides))]
        numpy.copyto(arrays[0], arrays[1])
        return
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    views = [torch.frombuffer(memory, dtype=kind, count=len(memory) // size)
             .as_strided(shape, [*(stride // size for stride in strides), 1], begin // size)
             for memory, begin, strides in ((target, at, target_strides), (source, offset, source_strides))]
    views[0].copy_(views[1])
