"""Tensors of PyTorch and arrays of NumPy, as bytes of safetensors and back. Neither is imported unless it is used."""
from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional, Sequence, Tuple

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


def torch_or_none() -> Any:
    """PyTorch, if it can be imported."""
    try:
        import torch
        return torch
    except ImportError:
        return None


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
    """An array's type, shape and bytes. The bytes are the array's own where they lie in one piece in this memory."""

    def __init__(self, value: Any) -> None:
        value = local(value)
        self._keep: Any
        if _is_torch(value):
            import torch
            tensor = value.detach()
            if tensor.layout is not torch.strided or tensor.is_quantized:
                raise TypeError(f"a tensor of layout {tensor.layout} cannot be saved: only dense ones")
            names = {getattr(torch, name, None): key for key, name in _TORCH.items()}
            if tensor.dtype not in names:
                raise TypeError(f"a tensor of type {tensor.dtype} cannot be saved")
            self.dtype, self.shape = names[tensor.dtype], tuple(tensor.shape)
            tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
            self._keep = tensor  # its memory is what `data` shows, without NumPy, which may not be there
            size = tensor.numel() * tensor.element_size()
            self.data = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b"").cast("B")
        else:
            import numpy
            array = numpy.ascontiguousarray(value)
            names = {numpy.dtype(code): key for key, code in _NUMPY.items()}
            if array.dtype not in names:
                raise TypeError(f"an array of type {array.dtype} cannot be saved")
            self.dtype, self.shape = names[array.dtype], tuple(numpy.shape(value))
            self._keep = array.reshape(-1).view("u1") if array.size else b""
            self.data = memoryview(self._keep)


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
