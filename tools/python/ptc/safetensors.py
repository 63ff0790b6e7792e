"""Files of safetensors: written in one pass, each byte once, and mapped."""
from __future__ import annotations

import ctypes
import errno
import json
import math
import mmap
import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .arrays import ITEM_BYTES, Bytes, array_of

_MAX_HEADER_BYTES = 100_000_000
_WINDOW_BYTES = 1 << 26
_LARGE_BYTES = 1 << 21  # of a file that takes its space at once, which gives it huge pages


class Entry(NamedTuple):
    """A tensor of a file: where its bytes are, from the beginning of the file."""
    dtype: str
    shape: Tuple[int, ...]
    begin: int
    end: int


class Unfinished(NamedTuple):
    """A file of which all is written but its header. It may have its whole length: without a header it is none of
    safetensors, and a save that is killed leaves nothing that could be committed.
    """
    file: int
    header: bytes

    def finish(self) -> None:
        """Writes the header. What the daemon does at the close of `file` may take a while."""
        done = 0
        while done < len(self.header):
            done += os.pwrite(self.file, self.header[done:], done)


def write(path: str, tensors: Mapping[str, Any], metadata: Optional[Mapping[str, str]] = None) -> Unfinished:
    """Writes a file but for its header, which is to be finished and closed.

    The tensors may change as soon as this returns. Of those that are on another device, or do not lie in one piece, a
    few MiB are copied at a time. Errors: OSError; TypeError for what the format cannot hold, before there is a file.
    """
    arrays = []
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError("a tensor cannot be called __metadata__ in a file of safetensors")
        try:
            arrays.append((name, Bytes(tensor)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    arrays.sort(key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0]))
    header: Dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, array in arrays:
        end = offset + array.nbytes
        header[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    mapped = offset >= _LARGE_BYTES and any(array.on_gpu for _, array in arrays)
    file = os.open(path, (os.O_RDWR if mapped else os.O_WRONLY) | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        has_space = offset >= _LARGE_BYTES and _take_space(file, 8 + len(text) + offset)
        written = mapped and has_space and _write_from_gpus(file, arrays, 8 + len(text), 8 + len(text) + offset)
        os.lseek(file, 8 + len(text), os.SEEK_SET)
        parts: List[memoryview] = []
        copied = 0
        for _, array in arrays:
            if written and array.on_gpu:
                _write_all(file, parts)
                parts, copied = [], 0
                os.lseek(file, array.nbytes, os.SEEK_CUR)
                continue
            for data, is_copy in array.pieces(_WINDOW_BYTES):
                parts.append(data)
                copied += data.nbytes if is_copy else 0
                if copied >= _WINDOW_BYTES:
                    _write_all(file, parts)
                    parts, copied = [], 0
        _write_all(file, parts)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, path) from None
        raise
    return Unfinished(file, len(text).to_bytes(8, "little") + text)


def _write_from_gpus(file: int, arrays: Sequence[Tuple[str, Bytes]], begin: int, size: int) -> bool:
    """Into the file's own pages, as GPUs write them. False: not so."""
    from . import device
    placed = []
    for _, array in arrays:
        if array.on_gpu and array.nbytes:
            placed.append((begin, array.value))
        begin += array.nbytes
    return device.store(file, size, placed)


def _take_space(file: int, size: int) -> bool:
    """Where the file system can, else False: os.posix_fallocate would write into each page where it cannot. OSError: there
    is no room.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return False
    if call(ctypes.c_int(file), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        reason = ctypes.get_errno()
        if reason in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(reason, os.strerror(reason))
        return False
    return True


def _write_all(file: int, parts: List[memoryview]) -> None:
    parts = [part.cast("B") for part in parts if part.nbytes]
    while parts:
        done = os.writev(file, parts[:512])
        while parts and done >= parts[0].nbytes:
            done -= parts.pop(0).nbytes
        if done:
            parts[0] = parts[0][done:]


class InMemory:
    """A file of safetensors whose bytes are in memory, which its tensors keep.

    Errors: ValueError for what is no such file.
    """

    def __init__(self, path: str, memory: Any, size: int, header: Optional[bytes] = None) -> None:
        """`header`: where `memory` has it not, or is None."""
        self.path = path
        self._memory = memory
        if size < 8:
            raise ValueError(f"{path} is no file of safetensors: it has {size} bytes")
        length = int.from_bytes(memory[:8], "little") if header is None else len(header)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is no file of safetensors: its header would have {length} bytes")
        if length == 0:
            raise ValueError(f"{path} is no file of safetensors: it has no header, as one whose writer was ended before")
        parsed = json.loads(memory[8:8 + length] if header is None else header)
        if not isinstance(parsed, dict):
            raise ValueError(f"{path} is no file of safetensors: its header is no object")
        self.metadata: Dict[str, str] = parsed.pop("__metadata__", {})
        self.entries: Dict[str, Entry] = {}
        for name, entry in parsed.items():
            try:
                dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
                lies = 0 <= begin <= end <= size - 8 - length and min(shape, default=0) >= 0
                elements = math.prod(shape)
                known = dtype in ITEM_BYTES
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{path}: the entry of tensor {name!r} is not one of safetensors") from None
            if not known:
                raise ValueError(f"{path}: tensor {name!r} is of type {dtype!r}, which is not known here")
            if not lies or elements * ITEM_BYTES[dtype] != end - begin:
                raise ValueError(f"{path}: tensor {name!r} does not lie in the file")
            self.entries[name] = Entry(dtype, shape, 8 + length + begin, 8 + length + end)

    def tensor(self, name: str, numpy_arrays: bool = False) -> Any:
        """The tensor, of the file's own memory."""
        return self.array(self._memory, self.entries[name], numpy_arrays)

    @staticmethod
    def array(memory: Any, entry: Entry, numpy_arrays: bool) -> Any:
        """An array over memory in which it lies."""
        return array_of(memory, entry.dtype, entry.shape, entry.begin, numpy_arrays)


class Mapped(InMemory):
    """A file of safetensors in memory as it lies: reading a tensor reads nothing before it is used.

    Tensors may be written to; that changes neither the file nor what others see. They keep the mapping.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size >= 8 else None
        super().__init__(path, memory, size)


def described(path: str, file: int) -> InMemory:
    """An open file of which only the header is read: it has no tensors, but says where they lie."""
    size = os.fstat(file).st_size
    begin = os.pread(file, 8, 0)
    length = int.from_bytes(begin, "little")
    known = 0 < length <= min(_MAX_HEADER_BYTES, size - 8)
    return InMemory(path, begin, size, os.pread(file, length, 8) if known else None)


def read_header_of_npy(memory: Any) -> Tuple[str, Tuple[int, ...], int]:
    """(NumPy's type, shape, where the data begins) of a mapped .npy file in C order. ValueError: it is none."""
    import ast
    if memory[:6] != b"\x93NUMPY":
        raise ValueError("it is no .npy file")
    wide = memory[6] > 1
    start = 12 if wide else 10
    length = int.from_bytes(memory[8:start], "little")
    header = ast.literal_eval(memory[start:start + length].decode("latin1"))
    if header["fortran_order"] and len(header["shape"]) > 1:
        raise ValueError("its order is Fortran's")
    return str(header["descr"]), tuple(header["shape"]), start + length


def boxes_metadata(offsets: Mapping[str, Sequence[int]],
                   wholes: Optional[Mapping[str, Sequence[int]]] = None) -> Dict[str, str]:
    """What a file says of tensors of which it has one box each: where these begin in the whole, and how large that is."""
    info: Dict[str, Dict[str, List[int]]] = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    for name, shape in (wholes or {}).items():
        info[name]["global_shape"] = list(shape)
    return {"DCP_SHARDING_INFO": json.dumps(info, separators=(",", ":")), "DCP_VERSION": "1.0"}
