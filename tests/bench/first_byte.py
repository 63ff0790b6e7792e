#!/usr/bin/env python3
"""How soon the first byte of a very large file that is computed on read comes, and what it costs.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/first_byte.py [--gib 40] [--rounds 9]

A Llama of about that size, written by two pipeline stages as files with holes: the first and the last
4 KiB of each tensor are there. The commit takes the space of the holes (on a disk, where that writes
nothing; TMPDIR says where) and hashes every byte. Timed, on a fresh mount each time: open and the first
byte of the one file that a single rank would load, and then the last 4 KiB of each tensor, which are
compared with what was written. Baseline: a file with a hole of that size on a tmpfs.

Where the disk has no room for it, a file with holes is disk enough:
    truncate -s 160G disk; mkfs.ext4 -q disk; mount -o loop disk DIR; TMPDIR=DIR … --gib 96
"""
import json
import os
import struct

import bench
from bench import mount

EDGE = 4096


def write_with_holes(path, tensors):
    """Returns the last bytes of each tensor."""
    writer, edges = bench.Writer(tensors), {}
    text = json.dumps(writer.header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in writer.header.items():
            begin, end = (file.tell() + at for at in entry["data_offsets"])
            edges[name] = os.urandom(EDGE)
            os.pwrite(file.fileno(), os.urandom(EDGE), begin)
            os.pwrite(file.fileno(), edges[name], end - EDGE)
    return edges


def first_byte(path):
    file = os.open(path, os.O_RDONLY)
    os.pread(file, 1, 0)
    os.close(file)


def places(path):
    """Where each tensor ends in a safetensors file."""
    with open(path, "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][1]
            for name, entry in header.items() if name != "__metadata__"}


def check_edges(path, ends, edges):
    with open(path, "rb", buffering=0) as file:
        for name, end in ends.items():
            assert os.pread(file.fileno(), EDGE, end - EDGE) == edges[name], name


def main():
    options = bench.options(__doc__, gib=40, rounds=9)
    layer = bench.llama(1, 8192, 64)[1][1:-2]
    layers = max(2, (options.gib << 30) // sum(2 * bench.extent_product(shape) for *_, shape in layer))
    config, tensors = bench.llama(layers, 8192, 64)
    stages = [layers // 2, layers - layers // 2]
    half = 1 + stages[0] * len(layer)
    with bench.plain_tmpfs() as plain, mount.Mount() as daemon:
        job = daemon.job("bench")
        bench.write_json(job.file("layout.json"), {"tp": 1, "pp": 2, "dp": 1, "stages": stages})
        rank = job.incoming("base") + "/rank"
        bench.write_json(rank + "/0/config.json", config)
        edges = write_with_holes(rank + "/0/model.safetensors", tensors[:half])
        edges |= write_with_holes(rank + "/1/model.safetensors", tensors[half:])
        took = bench.seconds(job.commit, "base")
        whole = job.rank_file("base", "tp1-pp1-dp1", 0)
        size = os.path.getsize(whole)
        print(f"a file of {size / (1 << 30):.1f} GiB; its commit took {took:.0f} s")
        with open(plain + "/file", "wb") as file:
            file.truncate(size)
        ratios = bench.Ratios()
        for _ in range(options.rounds):
            daemon.stop()
            daemon.start()
            ratios.add("open, first byte: ms", 1000 * bench.seconds(first_byte, whole))
            ends = places(whole)
            ratios.add("last 4 KiB of a tensor: ms",
                       1000 * bench.seconds(check_edges, whole, ends, edges) / len(ends))
            ratios.add("tmpfs, open, first byte: ms",
                       1000 * bench.seconds(first_byte, plain + "/file"))
        ratios.print()


if __name__ == "__main__":
    main()
