"""Tensors of PyTorch and arrays of NumPy, as bytes of safetensors and back. Neither is imported unless it is used."""
from __future__ import annotations

import ctypes
import re
import sys
from typing import Any, Iterator, Optional, Sequence, Tuple

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}
_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}


def type_of_numpy(descr: str) -> str:
    """The name of safetensors for a type in a .npy file. ValueError: there is none."""
    for name, code in _NUMPY.items():
        if descr.lstrip("<|") in (code.lstrip("<"), "b1" if name == "BOOL" else ""):
            return name
    raise ValueError(f"an array of type {descr!r} is not known here")


_TORCH_VERSION = "2.5"  # in which torch.distributed.tensor is public


def torch_or_none() -> Any:
    """PyTorch, if it can be imported."""
    try:
        import torch
        return torch
    except ImportError:
        return None


def require_torch(what: str) -> None:
    """ImportError: there is no PyTorch, or one too old for distributed tensors and checkpoints as used here."""
    try:
        import torch
    except ImportError:
        raise ImportError(f"{what} need PyTorch {_TORCH_VERSION} or newer, and there is none") from None
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and tuple(map(int, found.groups())) < tuple(map(int, _TORCH_VERSION.split("."))):
        raise ImportError(f"{what} need PyTorch {_TORCH_VERSION} or newer, and this is {torch.__version__}")


def torch_dtype(name: str) -> Any:
    """PyTorch's type of a name of safetensors'."""
    import torch
    dtype = getattr(torch, _TORCH.get(name, ""), None)
    if dtype is None:
        raise TypeError(f"this PyTorch has no type for {name}")
    return dtype


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_array(value: Any) -> bool:
    """Whether a value of a state is a tensor, or an array."""
    return _is_torch(value) or _is_numpy(value)


def is_distributed(value: Any) -> bool:
    """Whether it is a DTensor."""
    return _is_torch(value) and hasattr(value, "to_local") and hasattr(value, "placements")


def local(value: Any) -> Any:
    """What this rank holds of a DTensor; anything else is what it is."""
    if not is_distributed(value):
        return value
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError("a DTensor whose sum is not made yet (Partial) cannot be saved: redistribute it first")
    part = value.to_local()
    return part.wait() if hasattr(part, "wait") else part


class Bytes:
    """An array's type, shape and bytes, which are read when `pieces` comes to them."""

    def __init__(self, value: Any) -> None:
        """TypeError, ValueError: it is of a kind that cannot be saved."""
        value = local(value)
        self._torch = _is_torch(value)
        if self._torch:
            import torch
            value = value.detach()
            if value.layout is not torch.strided or value.is_quantized or value.is_nested:
                raise TypeError(f"a tensor of layout {value.layout} cannot be saved: only dense ones")
            names = {getattr(torch, name, None): key for key, name in _TORCH.items()}
            if value.dtype not in names:
                raise TypeError(f"a tensor of type {value.dtype} cannot be saved")
            if value.is_meta or (value.device.type == "cpu" and value.numel() and not _address(value)):
                raise TypeError(f"a {type(value).__name__} without memory of its own cannot be saved: on device "
                                f"{value.device}")
            self.dtype, self.shape = names[value.dtype], tuple(value.shape)
            self._in_place = (value.device.type == "cpu" and value.is_contiguous() and not value.is_conj()
                              and not value.is_neg())
        else:
            import numpy
            names = {numpy.dtype(code): key for key, code in _NUMPY.items()}
            if value.dtype not in names:
                raise TypeError(f"an array of type {value.dtype} cannot be saved")
            self.dtype, self.shape = names[value.dtype], tuple(value.shape)
            self._in_place = value.flags.c_contiguous
        self.value = value
        self.on_gpu = False  # in one piece, and not made of others
        if self._torch and value.is_contiguous() and not value.is_conj() and not value.is_neg() and _address(value):
            from . import device
            self.on_gpu = device.gpu_of(value) is not None
        self.nbytes = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            self.nbytes *= extent

    def pieces(self, most: int = 1 << 26) -> Iterator[Tuple[memoryview, bool]]:
        """(bytes, whether they are a copy), in order. What lies in one piece in this memory is itself; of all else, as
        of another device, no more is copied at a time than `most` bytes, or a row where that is longer.
        """
        if self.nbytes == 0:
            return
        if self._in_place:
            yield self._view(self.value), False
            return
        value = self.value if self.shape else self.value.reshape(1)
        rows = max(1, most * len(value) // self.nbytes)
        for row in range(0, len(value), rows):
            part = value[row:row + rows]
            if self._torch:
                yield self._view(part.resolve_conj().resolve_neg().cpu().contiguous()), True
            else:
                import numpy
                yield self._view(numpy.ascontiguousarray(part)), True

    def _view(self, array: Any) -> memoryview:
        """Its memory, which it keeps. Without NumPy, which may not be there."""
        if not self._torch:
            return memoryview(array.reshape(-1).view("u1"))
        buffer = (ctypes.c_ubyte * (array.numel() * array.element_size())).from_address(array.data_ptr())
        buffer.tensor = array  # type: ignore[attr-defined]
        return memoryview(buffer).cast("B")


def _address(tensor: Any) -> int:
    """0: a tensor of a class of its own, which is made of others."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return 0


def array_of(buffer: Any, dtype: str, shape: Sequence[int], offset: int, numpy_arrays: bool) -> Any:
    """An array over memory of a buffer, which it keeps; a copy where that begins between two items."""
    elements = 1
    for extent in shape:
        elements *= extent
    if numpy_arrays:
        import numpy
        if dtype not in _NUMPY:  # NumPy has no such type: as bits
            dtype = {1: "U8", 2: "U16"}[ITEM_BYTES[dtype]]
        return numpy.frombuffer(buffer, _NUMPY[dtype], elements, offset).reshape(tuple(shape))
    import torch
    kind = torch_dtype(dtype)
    if elements == 0:
        return torch.empty(tuple(shape), dtype=kind)
    size = ITEM_BYTES[dtype]
    if offset % size:
        buffer, offset = bytearray(memoryview(buffer)[offset:offset + elements * size]), 0
    return torch.frombuffer(buffer, dtype=kind, count=elements, offset=offset).view(tuple(shape))


def row_runs(shape: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Optional[Tuple[int, int]]:
    """Where a box lies in a C-ordered array, in elements, if it is one run of it; else None."""
    run, whole, offset, stride = 1, True, 0, 1
    for axis in reversed(range(len(shape))):
        offset += begin[axis] * stride
        if whole:
            run *= extent[axis]
            whole = extent[axis] == shape[axis]
        elif extent[axis] != 1:
            return None
        stride *= shape[axis]
    return offset, run
