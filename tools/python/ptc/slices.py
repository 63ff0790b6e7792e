"""Which part of a tensor a rank holds."""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence, Tuple


class Box(NamedTuple):
    """A part of a tensor: where it begins in the whole, and its extent. In elements."""
    offset: Tuple[int, ...]
    shape: Tuple[int, ...]

    @property
    def slices(self) -> Tuple[slice, ...]:
        """For indexing the whole."""
        return tuple(slice(begin, begin + extent) for begin, extent in zip(self.offset, self.shape))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def box(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Box:
    """What this rank holds of a tensor of that global shape on a mesh, by the placements of DTensor.

    ptc.box((4096, 4096), mesh["dp", "tp"], [Replicate(), Shard(1)]). Of a rank that is not on the mesh it is empty.
    """
    from .arrays import require_torch
    require_torch("distributed tensors")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    extent, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))
    if len(extent) != len(shape):
        return Box((0,) * len(shape), (0,) * len(shape))
    return Box(tuple(offset), tuple(extent))


def box_of(tensor: Any) -> Box:
    """What this rank holds of a DTensor; all of any other tensor."""
    if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):
        return box(tensor.shape, tensor.device_mesh, tensor.placements)
    return whole(tensor.shape)
