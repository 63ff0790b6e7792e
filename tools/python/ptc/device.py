"""Tensors between files and the memory of a GPU.

NVIDIA's driver is called directly (libcuda.so.1, by ctypes), in the context that PyTorch uses. Pages of a tmpfs, where a
store is as a rule, are registered with it in windows, by several threads, while those before are being copied: the device
reads and writes them by itself. All else, and what the driver does not register (some take nothing that this process may
only read), is read and written in pieces, through buffers that it has pinned. Both are for the time of a call: pages that
stayed registered would stay in memory after the checkpoint they belong to was removed.
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from . import in_place, pages, safetensors
from .arrays import ITEM_BYTES, local, torch_dtype

_WINDOW_BYTES = 1 << 26  # registered, or copied, at once
_BUFFER_BYTES = 1 << 24  # pinned; each thread has two
_OWN_BYTES = 1 << 20  # a tensor of so many has memory of its own; smaller ones beside each other share some,
_BLOCK_BYTES = 1 << 21  # of this size at most
_ALIGN_BYTES = 16  # that kernels count on
_SHORT_RUN_BYTES = 1 << 12  # shorter ones are put together on the host
_THREADS = min(4, os.cpu_count() or 1)
_PORTABLE, _READ_ONLY = 1, 8  # of registered memory
_HAS_READ_ONLY = 113  # an attribute of a device
_NON_BLOCKING = 1
_RELAXED = 2  # of captures of graphs, which other threads may be at
_BY_DESCRIPTOR, _ON_DEVICE, _READING = 1, 1, 1  # of memory that processes share


class DriverError(OSError):
    """What NVIDIA's driver refused."""


class Driver:
    """One device. Threads: any; each has streams of its own."""

    def __init__(self, ordinal: int) -> None:
        """DriverError, OSError: there is no such device, or no driver."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context, value = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        # PyTorch's own context, for as long as this process lives.
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        self.call("cuDeviceGetAttribute", ctypes.byref(value), _HAS_READ_ONLY, device)
        self._read_only = bool(value.value)
        self._number = device.value
        uuid = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", uuid, device)
        self.uuid = bytes(uuid)

    def call(self, name: str, *arguments: Any) -> None:
        """DriverError: with its own words."""
        error = getattr(self._cuda, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(error, ctypes.byref(text))
            raise DriverError(errno.EIO, f"{name}: {(text.value or b'failed').decode()}")

    def enter(self) -> None:
        """This thread, which is nobody else's, calls the driver from now on."""
        self.call("cuCtxSetCurrent", self._context)
        self._capture_mode(_RELAXED)

    def _capture_mode(self, mode: int) -> int:
        """Of this thread; what it was before."""
        found = ctypes.c_int(mode)
        self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(found))
        return found.value

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread calls the driver meanwhile; then its current device is again what PyTorch has set."""
        before = ctypes.c_void_p()
        self.call("cuCtxPushCurrent_v2", self._context)
        mode = self._capture_mode(_RELAXED)
        try:
            yield
        finally:
            self._capture_mode(mode)
            self.call("cuCtxPopCurrent_v2", ctypes.byref(before))

    def register(self, address: int, size: int, writable: bool) -> bool:
        """False: the driver does not take it."""
        flags = _PORTABLE | (0 if writable else _READ_ONLY)
        return not self._cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags))

    def registers(self, writable: bool) -> bool:
        """Whether it takes memory that this process may write, or may only read."""
        return writable or self._read_only

    def unregister(self, address: int) -> None:
        self._cuda.cuMemHostUnregister(ctypes.c_void_p(address))

    def map(self, descriptor: int, size: int) -> int:
        """The address of memory of the device that another process has, for reading. What gives it back is unmap()."""
        allocation, address = ctypes.c_uint64(), ctypes.c_uint64()
        access = (ctypes.c_int * 3)(_ON_DEVICE, self._number, _READING)
        bytes_ = ctypes.c_size_t(size)
        self.call("cuMemImportFromShareableHandle", ctypes.byref(allocation), ctypes.c_void_p(descriptor), _BY_DESCRIPTOR)
        try:
            self.call("cuMemAddressReserve", ctypes.byref(address), bytes_, ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
            try:
                self.call("cuMemMap", address, bytes_, ctypes.c_size_t(0), allocation, ctypes.c_uint64(0))
            except DriverError:
                self._cuda.cuMemAddressFree(address, bytes_)
                raise
        finally:
            self._cuda.cuMemRelease(allocation)  # what is mapped stays
        try:
            self.call("cuMemSetAccess", address, bytes_, access, ctypes.c_size_t(1))
        except DriverError:
            self.unmap(address.value, size)
            raise
        return address.value

    def unmap(self, address: int, size: int) -> None:
        self._cuda.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))
        self._cuda.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(size))

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def end_stream(self, stream: ctypes.c_void_p) -> None:
        self._cuda.cuStreamDestroy_v2(stream)

    def copy(self, target: int, source: int, size: int, stream: ctypes.c_void_p) -> None:
        """Any of the two may be of the host."""
        self.call("cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self.call("cuStreamSynchronize", stream)

    def pinned(self, size: int) -> int:
        """The address of memory of the host."""
        memory = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(size), _PORTABLE)
        return int(memory.value or 0)

    def free_pinned(self, address: int) -> None:
        self._cuda.cuMemFreeHost(ctypes.c_void_p(address))


_drivers: Dict[int, Driver] = {}
_drivers_lock = threading.Lock()
_told: Dict[str, bool] = {}


def _tell_once(text: str) -> None:
    if not _told.setdefault(text, False):
        _told[text] = True
        logging.getLogger("ptc").info("%s", text)


def driver_of(device: Any) -> Optional[Driver]:
    """Of a device of PyTorch's (`torch.device`, or what it takes). None: it is no GPU of NVIDIA's, or they are not to be
    copied to so (PTC_DEVICE_COPIES=0).
    """
    import torch
    device = torch.device(device)
    if not is_gpu(device) or os.environ.get("PTC_DEVICE_COPIES") == "0":
        return None
    index = device.index if device.index is not None else current_index()
    with _drivers_lock:
        if index not in _drivers:
            try:
                _drivers[index] = Driver(index)
            except (OSError, AttributeError) as error:  # no driver, or one that is too old
                _tell_once(f"{device} is reached by PyTorch's own copies alone: {error}")
                return None
        return _drivers[index]


def is_gpu(device: Any) -> bool:
    import torch
    return bool(device.type == "cuda" and not getattr(torch.version, "hip", None))


def current_index() -> int:
    import torch
    return int(torch.cuda.current_device())


def empty(size: int, device: Any) -> Any:
    """Memory of a device, as bytes, that nothing uses any more."""
    import torch
    return torch.empty(size, dtype=torch.uint8, device=device)


def settle(device: Any) -> None:
    """What this thread has asked of the device is done: memory that was used for it may be written by other streams."""
    import torch
    torch.cuda.current_stream(device).synchronize()


class Pages:
    """A file's bytes on the host. In a tmpfs its pages are mapped, and registered with a device in windows, when they are
    first copied.
    """

    def __init__(self, driver: Driver, file: int, size: int, writable: bool, found: Optional[pages.Found]) -> None:
        """`file` stays the caller's, and what was `found` of it becomes this object's."""
        self._driver, self._writable, self.size = driver, writable, size
        self.file = found.descriptor if found is not None and found.descriptor >= 0 else os.dup(file)
        self._memory: Optional[mmap.mmap] = None
        self._windows: List[Optional[bool]] = [None] * -(-size // _WINDOW_BYTES)
        self._locks = [threading.Lock() for _ in self._windows]
        if found is None or not driver.registers(writable):
            return
        # Not for this process alone: what is only its own would be copied page by page to be registered.
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with contextlib.suppress(OSError):
            self._memory = mmap.mmap(self.file, size, flags=mmap.MAP_SHARED, prot=protection)
            self.address = _address_of(self._memory)

    def registered(self, begin: int, end: int) -> bool:
        """Whether the device can have these bytes of one window by itself, at `address`."""
        window = begin // _WINDOW_BYTES
        assert begin < end <= (window + 1) * _WINDOW_BYTES
        if self._memory is None:
            return False
        with self._locks[window]:
            known = self._windows[window]
            if known is None:
                first = window * _WINDOW_BYTES
                size = min(_WINDOW_BYTES, -(-(self.size - first) // mmap.PAGESIZE) * mmap.PAGESIZE)
                known = self._driver.register(self.address + first, size, self._writable)
                self._windows[window] = known
                if not known:
                    _tell_once("the GPU's driver does not register the pages of these files: they are copied through buffers")
            return known

    def read(self, into: memoryview, offset: int) -> None:
        """ValueError: the file has become shorter."""
        while into.nbytes:
            done = os.preadv(self.file, [into], offset)
            if not done:
                raise ValueError(f"a file ends at byte {offset} while it is loaded")
            into, offset = into[done:], offset + done

    def write(self, data: memoryview, offset: int) -> None:
        while data.nbytes:
            done = os.pwrite(self.file, data, offset)
            data, offset = data[done:], offset + done

    def close(self) -> None:
        """Nothing copies from or to it any more."""
        for window, known in enumerate(self._windows):
            if known:
                self._driver.unregister(self.address + window * _WINDOW_BYTES)
        self._windows = []
        if self._memory is not None:
            self._memory.close()
        os.close(self.file)


def _address_of(memory: mmap.mmap) -> int:
    """Also of one that cannot be written, of which ctypes tells none."""
    view = ctypes.py_object(memory)
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(view, ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address


class _Buffer(ctypes.Structure):
    """Py_buffer, which has been as it is since Python 3.0."""
    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
                ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


class Borrowed:
    """A file's bytes in the memory of a GPU, mapped, for reading alone; until nobody holds this any more."""

    def __init__(self, driver: Driver, descriptor: int, size: int) -> None:
        """DriverError."""
        self._driver, self.size, self.address = driver, size, 0
        with driver.entered():
            self.address = driver.map(descriptor, size)

    @classmethod
    def of(cls, driver: Driver, found: pages.Found) -> "Optional[Borrowed]":
        """None: it is another GPU's. What was found becomes this one's."""
        try:
            return cls(driver, found.descriptor, found.size) if found.gpu == driver.uuid else None
        except DriverError as error:
            _tell_once(f"what is on the GPU is read through the host: {error}")
            return None
        finally:
            os.close(found.descriptor)

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(DriverError), self._driver.entered():
                self._driver.unmap(self.address, self.size)


class _CudaArray:
    """What PyTorch takes for memory of others."""

    def __init__(self, owner: Any, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3}


def wrap(owner: Any, address: int, size: int, device: Any) -> Any:
    """Memory of a device as a tensor of bytes, which holds its owner."""
    import torch
    return torch.as_tensor(_CudaArray(owner, address, size), device=device)


class Copy(NamedTuple):
    """Bytes of a file's pages, and where they are in the device's memory."""
    pages: Pages
    offset: int
    size: int
    device_address: int


class _Worker:
    """A thread's streams and buffers."""

    def __init__(self, driver: Driver, to_device: bool) -> None:
        self._driver, self._to_device = driver, to_device
        driver.enter()
        self._stream = driver.stream()
        self._buffers: List[int] = []
        self._streams: List[ctypes.c_void_p] = []
        self._after: List[Optional[Callable[[], None]]] = []  # what is to be done when a buffer's stream was waited for
        self._next = 0

    def copy(self, copy: Copy) -> None:
        """Some bytes of one window."""
        if copy.pages.registered(copy.offset, copy.offset + copy.size):
            ends = (copy.device_address, copy.pages.address + copy.offset)
            target, source = ends if self._to_device else ends[::-1]
            self._driver.copy(target, source, copy.size, self._stream)
            return
        for done in range(0, copy.size, _BUFFER_BYTES):
            size = min(_BUFFER_BYTES, copy.size - done)
            offset, there = copy.offset + done, copy.device_address + done
            if self._to_device:
                self.put(there, size, lambda buffer, at=offset, n=size: copy.pages.read(_view(buffer, n), at))  # type: ignore[misc]
            else:
                self._get(there, size, copy.pages, offset)

    def within(self, target: int, source: int, size: int) -> None:
        self._driver.copy(target, source, size, self._stream)

    def put(self, device_address: int, size: int, fill: Callable[[int], Any]) -> None:
        """What `fill` puts into a buffer (of _BUFFER_BYTES at most) goes to the device."""
        slot = self._slot()
        fill(self._buffers[slot])
        self._driver.copy(device_address, self._buffers[slot], size, self._streams[slot])

    def _get(self, device_address: int, size: int, target: Pages, offset: int) -> None:
        slot = self._slot()
        buffer = self._buffers[slot]
        self._driver.copy(buffer, device_address, size, self._streams[slot])
        self._after[slot] = lambda: target.write(_view(buffer, size), offset)

    def _slot(self) -> int:
        """One of two buffers that nothing uses."""
        if len(self._buffers) < 2:
            if len(self._streams) == len(self._buffers):
                self._streams.append(self._driver.stream())
            self._buffers.append(self._driver.pinned(_BUFFER_BYTES))
            self._after.append(None)
            return len(self._buffers) - 1
        slot, self._next = self._next, 1 - self._next
        self._finish(slot)
        return slot

    def _finish(self, slot: int) -> None:
        self._driver.wait(self._streams[slot])
        after, self._after[slot] = self._after[slot], None
        if after is not None:
            after()

    def wait(self) -> None:
        self._driver.wait(self._stream)
        for slot in range(len(self._buffers)):
            self._finish(slot)

    def end(self) -> None:
        """Whatever has failed, nothing uses the memory any more."""
        for stream in [self._stream, *self._streams]:
            self._driver.end_stream(stream)
        for buffer in self._buffers:
            self._driver.free_pinned(buffer)


class Copies:
    """Copies of one direction, in threads of their own: asked for one by one, waited for once."""

    def __init__(self, driver: Driver, to_device: bool) -> None:
        self._driver, self._to_device = driver, to_device
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ptc-device")
        self._own = threading.local()
        self._workers: List[_Worker] = []
        self._pages: List[Pages] = []
        self._lock = threading.Lock()
        self._asked: List[Any] = []
        self._held: List[Any] = []

    def pages(self, file: int, size: int, writable: bool, found: Optional[pages.Found]) -> Pages:
        """Of a file that may be closed now; until the end. What was `found` of it becomes their own."""
        made = Pages(self._driver, file, size, writable, found)
        self._pages.append(made)
        return made

    def add(self, copy: Copy) -> None:
        """In no order."""
        begin, end = copy.offset, copy.offset + copy.size
        while begin < end:
            upto = min(end, (begin // _WINDOW_BYTES + 1) * _WINDOW_BYTES)
            part = Copy(copy.pages, begin, upto - begin, copy.device_address + begin - copy.offset)
            self._run(lambda worker, part=part: worker.copy(part))
            begin = upto

    def borrowed(self, found: pages.Found) -> Optional[Borrowed]:
        return Borrowed.of(self._driver, found)

    def hold(self, memory: Any) -> None:
        """Until the end."""
        self._held.append(memory)

    def within(self, target: int, source: int, size: int) -> None:
        """From one place in the device's memory to another."""
        self._run(lambda worker: worker.within(target, source, size))

    def put(self, device_address: int, size: int, fill: Callable[[int], Any]) -> None:
        """_Worker.put()."""
        self._run(lambda worker: worker.put(device_address, size, fill))

    def _run(self, call: Callable[[_Worker], None]) -> None:
        def run() -> None:
            worker = getattr(self._own, "worker", None)
            if worker is None:
                worker = self._own.worker = _Worker(self._driver, self._to_device)
                with self._lock:
                    self._workers.append(worker)
            call(worker)
        self._asked.append(self._threads.submit(run))

    def wait(self) -> None:
        """The first error, if any; then what was copied is in doubt."""
        for asked in self._asked:
            asked.result()
        self._asked.clear()
        with self._driver.entered():
            for worker in self._workers:
                worker.wait()

    def __enter__(self) -> "Copies":
        return self

    def __exit__(self, *_: Any) -> None:
        for asked in self._asked:
            asked.cancel()
        self._threads.shutdown()
        with contextlib.ExitStack() as ending:  # each of these, whatever becomes of the others; the last first
            ending.enter_context(self._driver.entered())
            for worker in self._workers:
                ending.callback(worker.end)
            for one in self._pages:
                ending.callback(one.close)
            ending.callback(self._held.clear)
            for worker in self._workers:
                ending.callback(self._settle, worker)

    @staticmethod
    def _settle(worker: _Worker) -> None:
        """Memory of both sides is somebody else's from then on."""
        with contextlib.suppress(DriverError):  # it is told already, or would be by the next call
            worker.wait()


def tensors_of_files(where: str, paths: Iterable[str], device: Any, numpy: bool, copy: bool, shared: bool
                     ) -> Iterator[Tuple[safetensors.InMemory, Iterable[Tuple[str, Any]]]]:
    """Of each file of safetensors of a directory its tensors, one after the other. To a GPU they are being copied meanwhile:
    they have their bytes when this has ended.
    """
    on_device = device is not None and not numpy and str(device) != "cpu"
    driver = driver_of(device) if on_device else None
    with contextlib.ExitStack() as held:
        sources = in_place.sources_of(where) if copy or on_device else None
        if sources is not None:
            held.enter_context(sources)
        copies = held.enter_context(Copies(driver, to_device=True)) if driver is not None else None
        for path in paths:
            described = sources.files.get(os.path.relpath(path, where)) if sources else None
            mapped: safetensors.InMemory
            if sources and described:
                mapped = in_place.Gathered(path, sources, described, at_once=not on_device)
            elif copies is not None:
                with open(path, "rb", buffering=0) as file:
                    mapped = safetensors.described(path, file.fileno())
                    yield mapped, _load(mapped, file.fileno(), device, copies, shared).items()
                continue
            else:
                mapped = in_place.copied(path) if copy and not on_device else safetensors.Mapped(path)
            if copies is not None:
                made, places, _ = _allocate(mapped.entries, device, copies)
                _gather(mapped, places, copies)
                yield mapped, made.items()
            else:
                yield mapped, _tensors_of(mapped, device, numpy)
        if copies is not None:
            copies.wait()


def _tensors_of(mapped: safetensors.InMemory, device: Any, numpy: bool) -> Iterator[Tuple[str, Any]]:
    """Of another device nobody has more than one tensor in the host's memory, until it asks for the next."""
    for name in mapped.entries:
        tensor = mapped.tensor(name, numpy)
        yield name, tensor if device is None or numpy else tensor.to(device)


def _load(described: safetensors.InMemory, file: int, device: Any, copies: Copies, shared: bool) -> Dict[str, Any]:
    """The tensors of an open file, in memory of the device; their bytes are there after copies.wait(). `shared`: what is in
    the device's memory is not copied.
    """
    size = os.fstat(file).st_size
    found = pages.ask(file)
    there = copies.borrowed(found) if found is not None and found.gpu else None
    if there is not None and there.size < size:
        there = None
    if there is not None and shared:
        return _views(described.entries, wrap(there, there.address, there.size, device))
    made, places, runs = _allocate(described.entries, device, copies)
    if there is not None:
        copies.hold(there)
        for begin, end, address in runs:
            copies.within(address, there.address + begin, end - begin)
        return made
    source = copies.pages(file, size, False, found if found is not None and not found.gpu else None)
    for begin, end, address in runs:
        copies.add(Copy(source, begin, end - begin, address))
    return made


def _shaped(entry: safetensors.Entry, memory: Any) -> Any:
    if entry.begin % torch_dtype(entry.dtype).itemsize:
        memory = memory.clone()
    return memory.view(torch_dtype(entry.dtype)).view(entry.shape)


def _views(entries: Mapping[str, safetensors.Entry], memory: Any) -> Dict[str, Any]:
    """Tensors of a file's bytes, which they keep."""
    made: Dict[str, Any] = {}
    typed: Dict[str, Any] = {}
    for name, entry in entries.items():
        size = ITEM_BYTES[entry.dtype]
        if entry.begin % size or entry.begin == entry.end:
            made[name] = _shaped(entry, memory[entry.begin:entry.end])
            continue
        if entry.dtype not in typed:
            typed[entry.dtype] = memory[:memory.numel() // size * size].view(torch_dtype(entry.dtype))
        strides, stride = [], 1
        for extent in reversed(entry.shape):
            strides.append(stride)
            stride *= extent
        made[name] = typed[entry.dtype].as_strided(entry.shape, strides[::-1], entry.begin // size)
    return made


_Runs = List[Tuple[int, int, int]]  # (begin, end) in a file, and an address: one piece of both


def _allocate(entries: Mapping[str, safetensors.Entry], device: Any, copies: Copies) -> Tuple[Dict[str, Any], Dict[str, int], _Runs]:
    """Tensors, at which addresses their bytes are to be, and by which runs of the file. Small ones that lie beside each other
    lie so there, too. A run has no more than one piece of memory of the device.
    """
    made: Dict[str, Any] = {}
    places: Dict[str, int] = {}
    runs: _Runs = []
    block: List[Tuple[str, safetensors.Entry]] = []

    def end_block() -> None:
        if not block:
            return
        begin, end = block[0][1].begin, block[-1][1].end
        memory = empty(end - begin, device)
        copies.hold(memory)
        runs.append((begin, end, memory.data_ptr()))
        for name, entry in block:
            places[name] = memory.data_ptr() + entry.begin - begin
            made[name] = _shaped(entry._replace(begin=0), memory[entry.begin - begin:entry.end - begin])
        block.clear()
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        size = entry.end - entry.begin
        if size == 0:
            made[name] = _shaped(entry._replace(begin=0), empty(0, device))
            continue
        if block:
            align = _ALIGN_BYTES if size >= _ALIGN_BYTES else torch_dtype(entry.dtype).itemsize
            at = entry.begin - block[0][1].begin
            if size >= _OWN_BYTES or block[-1][1].end != entry.begin or at % align or at + size > _BLOCK_BYTES:
                end_block()
        block.append((name, entry))
        if size >= _OWN_BYTES:
            end_block()
    end_block()
    settle(device)
    return {name: made[name] for name in entries}, places, runs


def _gather(file: in_place.Gathered, places: Mapping[str, int], copies: Copies) -> None:
    """What lies in long runs is had from there; the rest is put together in a buffer."""
    sources: Dict[int, Pages] = {}

    def source(number: int) -> Pages:
        if number not in sources:
            handle = file.sources.file(number)
            sources[number] = copies.pages(handle, os.fstat(handle).st_size, False, _on_host(pages.ask(handle)))
        return sources[number]
    for name, place in places.items():
        entry = file.entries[name]
        parts = file.copies_of(entry)
        size = entry.end - entry.begin
        whole = sum(run * math.prod(levels[::3]) for _, _, _, run, *levels in parts) == size
        if whole and all(not levels and run >= _SHORT_RUN_BYTES for _, _, _, run, *levels in parts):
            for number, offset, at, run, *_ in parts:
                pages_of = source(number)
                if offset + run > pages_of.size:
                    raise ValueError(f"{file.path}: a file that it is made of ends at byte {pages_of.size}")
                copies.add(Copy(pages_of, offset, run, place + at - entry.begin))
        elif size <= _BUFFER_BYTES:
            copies.put(place, size, lambda buffer, e=entry, s=size: file.fill(e, _view(buffer, s)))  # type: ignore[misc]
        else:
            _gather_in_pieces(file, entry, place, copies)


def _on_host(found: Optional[pages.Found]) -> Optional[pages.Found]:
    if found is not None and found.gpu:
        os.close(found.descriptor)
        return None
    return found


def _gather_in_pieces(file: in_place.Gathered, entry: safetensors.Entry, place: int, copies: Copies) -> None:
    """One that is larger than a buffer: on the host first, and then as it is there."""
    memory = in_place.memory_of(entry.end - entry.begin)
    file.fill(entry, memoryview(memory)[:entry.end - entry.begin])
    address = _address_of(memory)
    for done in range(0, entry.end - entry.begin, _BUFFER_BYTES):
        size = min(_BUFFER_BYTES, entry.end - entry.begin - done)

        def fill(buffer: int, at: int = address + done, count: int = size, held: Any = memory) -> None:
            ctypes.memmove(buffer, at, count)
            del held
        copies.put(place + done, size, fill)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def gpu_of(tensor: Any) -> Any:
    """Its device, if that is a GPU; else None."""
    device = getattr(tensor, "device", None)
    return device if device is not None and hasattr(device, "type") and is_gpu(device) else None


def store(file: int, size: int, placed: List[Tuple[int, Any]]) -> bool:
    """Writes tensors of GPUs, each in one piece, into a file that has all its `size` bytes of space, at these offsets.
    False: they must be written otherwise.
    """
    drivers: Dict[Driver, List[Tuple[int, Any]]] = {}
    for offset, tensor in placed:
        driver = driver_of(tensor.device)
        if driver is None:
            return False
        drivers.setdefault(driver, []).append((offset, tensor))
    try:
        for driver, tensors in drivers.items():
            settle(tensors[0][1].device)
            with Copies(driver, to_device=False) as copies:
                target = copies.pages(file, size, True, _on_host(pages.ask(file)))
                for offset, tensor in tensors:
                    copies.add(Copy(target, offset, tensor.numel() * tensor.element_size(), tensor.data_ptr()))
                copies.wait()
    except DriverError as error:  # as of memory that it cannot pin
        _tell_once(f"PyTorch copies what is saved: {error}")
        return False
    return True


class Snapshot(NamedTuple):
    """Copies of tensors, on the devices where these are."""
    sections: Dict[str, Dict[str, Any]]
    ready: Callable[[], None]  # to be called before they are read


def snapshot(sections: Mapping[str, Mapping[str, Any]]) -> Optional[Snapshot]:
    """So that what is saved may change at once, and goes to the host behind it. None: nothing of it is on a GPU, a GPU has no
    room for that beside what is there, or the host has much of it too (PTC_DEVICE_SNAPSHOT=0: never).
    """
    wanted: Dict[Any, int] = {}
    host = 0
    for tensors in sections.values():
        for tensor in map(local, tensors.values()):
            device = gpu_of(tensor)
            if device is not None:
                wanted[device] = wanted.get(device, 0) + tensor.numel() * tensor.element_size()
            else:
                host += tensor.nbytes
    if not wanted or host > _WINDOW_BYTES or os.environ.get("PTC_DEVICE_SNAPSHOT") == "0":
        return None
    if any(bytes_free(device) < size + size // 16 for device, size in wanted.items()):
        return None
    import torch
    try:
        copies = {key: {name: local(tensor).clone() if hasattr(local(tensor), "clone") else tensor.copy()
                        for name, tensor in tensors.items()} for key, tensors in sections.items()}
    except torch.OutOfMemoryError:
        return None
    marks = [mark(device) for device in wanted]

    def ready() -> None:
        for one in marks:
            one()
    return Snapshot(copies, ready)


def bytes_free(device: Any) -> int:
    """What PyTorch can have there beside the most that it has had so far: the next step needs that again."""
    import torch
    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))


def mark(device: Any) -> Callable[[], None]:
    """What waits, on any thread, until all is done that this one has asked of the device by now."""
    import torch
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize  # type: ignore[no-any-return]
