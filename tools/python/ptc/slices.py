"""Which part of a tensor a rank holds."""
from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple


class Box(NamedTuple):
    """A part of a tensor: where it begins in the whole, and its extent. In elements."""
    offset: Tuple[int, ...]
    shape: Tuple[int, ...]

    @property
    def slices(self) -> Tuple[slice, ...]:
        """For indexing the whole."""
        return tuple(slice(begin, begin + extent) for begin, extent in zip(self.offset, self.shape))

    @property
    def elements(self) -> int:
        """How many there are in it."""
        return math.prod(self.shape)

    def common(self, other: "Box") -> "Optional[Box]":
        """What is in both; None: nothing."""
        begin = tuple(map(max, self.offset, other.offset))
        extent = tuple(min(a + b, c + d) - first for a, b, c, d, first
                       in zip(self.offset, self.shape, other.offset, other.shape, begin))
        return Box(begin, extent) if min(extent, default=1) > 0 else None


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
    if mesh.get_coordinate() is None or len(extent) != len(shape):
        return Box((0,) * len(shape), (0,) * len(shape))
    return Box(tuple(offset), tuple(extent))


def box_of(tensor: Any) -> Box:
    """What this rank holds of a DTensor; all of any other tensor. ValueError: of a DTensor that is not clear, or it does
    not lie together in the whole.
    """
    if not (hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")):
        return whole(tensor.shape)
    placements, mesh = tensor.placements, tensor.device_mesh
    held = tuple(tensor._local_tensor.shape)  # pylint: disable=protected-access
    orders = _orders(tensor)
    strided = any("Strided" in type(placement).__name__ for placement in placements)
    if mesh.get_coordinate() is None or not (strided or orders):
        found = {box(tensor.shape, mesh, placements)}
    else:
        found = set(_boxes(tensor.shape, mesh, placements, orders))
    fit = {one for one in found if one.shape == held or (0 in one.shape and 0 in held)}
    if len(fit) != 1:
        raise ValueError(f"of {tuple(tensor.shape)} this rank holds {held}, by {tuple(placements)} on a mesh of "
                         f"{tuple(mesh.shape)}: which part that is cannot be told")
    return fit.pop()


def _orders(tensor: Any) -> Dict[int, Sequence[int]]:
    """By axis of a DTensor those of its mesh that cut it, where they do so in another order than their own."""
    entries = getattr(tensor._spec, "shard_order", None) or ()  # pylint: disable=protected-access
    found = {entry.tensor_dim: tuple(entry.mesh_dims) for entry in entries}
    return {axis: order for axis, order in found.items() if list(order) != sorted(order)}


def _boxes(shape: Sequence[int], mesh: Any, placements: Sequence[Any], orders: Mapping[int, Sequence[int]]) -> Iterator[Box]:
    """What a rank may hold where FSDP has cut after tensor parallelism, which its placements tell in the other order.

    Where the rows can be divided evenly the two are the same; else PyTorch itself has both: FSDP cuts what tensor
    parallelism has left, and a redistribution goes by the placements. Those that are not one box are left out.
    """
    coordinate = mesh.get_coordinate()
    for backwards in (False, True):
        offset, extent = [], []
        for axis, length in enumerate(shape):
            cuts = list(orders.get(axis) or [at for at, one in enumerate(placements) if getattr(one, "dim", None) == axis])
            if backwards and not _is_backwards(mesh, placements, cuts):
                break
            rows = [(0, length)]
            for at in reversed(cuts) if backwards else cuts:
                split = 1 if backwards else getattr(placements[at], "split_factor", 1)
                rows = _cut(rows, split, mesh.size(at), coordinate[at])
            if len(rows) > 1:
                break
            offset.append(rows[0][0] if rows else length)
            extent.append(rows[0][1] if rows else 0)
        else:
            yield Box(tuple(offset), tuple(extent))


def _is_backwards(mesh: Any, placements: Sequence[Any], cuts: Sequence[int]) -> bool:
    """Whether placements on one axis say that the last one came first: each counts the parts of those behind it."""
    parts = 1
    for at in reversed(cuts):
        if getattr(placements[at], "split_factor", 1) != parts:
            return False
        parts *= mesh.size(at)
    return True


def _cut(rows: Sequence[Tuple[int, int]], split: int, ranks: int, rank: int) -> List[Tuple[int, int]]:
    """Of stretches (begin, length) the rank's: the rank-th part of each of `split` parts, by torch.chunk's rule."""
    total = sum(length for _, length in rows)
    found: List[Tuple[int, int]] = []
    for number in range(split):
        outer, most = _chunk(total, split, number)
        begin, length = _chunk(most, ranks, rank)
        at, end = outer + begin, outer + begin + length
        for first, count in rows:
            low, high = max(at, 0), min(end, count)
            if low < high:
                if found and sum(found[-1]) == first + low:
                    found[-1] = found[-1][0], found[-1][1] + high - low
                else:
                    found.append((first + low, high - low))
            at, end = at - count, end - count
    return found


def _chunk(length: int, parts: int, number: int) -> Tuple[int, int]:
    step = -(-length // parts)
    begin = min(length, number * step)
    return begin, min(step, length - begin)
