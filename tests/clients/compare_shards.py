#!/usr/bin/env python3
"""Puts one tensor together from the ranks' files and compares it with the original, bit for bit.

    compare_shards.py ORIGINAL.safetensors LAYOUT_DIR TENSOR

LAYOUT_DIR holds rank/0, rank/1 …; TENSOR is one that is cut evenly along one axis, neither fused
nor padded. Python's own library is all it needs.
"""
import glob
import json
import os
import sys

from models import count


def read_tensor(path, name):
    """(shape, bytes) of a tensor, or None if the file does not hold it."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size)).get(name)
        if entry is None:
            return None
        begin, end = entry["data_offsets"]
        file.seek(8 + size + begin)
        data = file.read(end - begin)
    return entry["shape"], data


def joined(parts, axis):
    """The parts behind each other on an axis."""
    shape = parts[0][0]
    rows = count(shape[:axis])
    data = []
    for row in range(rows):
        for _, part in parts:
            step = len(part) // rows
            data.append(part[row * step:(row + 1) * step])
    return b"".join(data)


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    original_path, layout, name = sys.argv[1:]
    original = read_tensor(original_path, name)
    if original is None:
        sys.exit(f"{original_path} holds no {name}")
    ranks = sorted(int(os.path.basename(path)) for path in glob.glob(layout + "/rank/*"))
    held = {rank: read_tensor(f"{layout}/rank/{rank}/model.safetensors", name) for rank in ranks}
    held = {rank: part for rank, part in held.items() if part is not None}
    parts = list(held.values())
    print(f"{name} {original[0]}: rank {', '.join(map(str, held))} hold {parts[0][0]} each")
    axes = [axis for axis, extent in enumerate(original[0]) if extent != parts[0][0][axis]]
    whole = joined(parts, axes[0]) if axes else parts[0][1]
    if whole != original[1]:
        sys.exit("DIFFERENT from the original")
    print(f"put together: {len(whole)} bytes, identical to the original")


if __name__ == "__main__":
    main()
