#!/usr/bin/env python3
"""Samples a second of the `files` and `mds` trees, as ratios to the same samples in a squashfs that squashfuse mounts.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/squashfs.py [--kb 10] [--mib 200] [--rounds 3]

Needs mksquashfs and squashfuse. The image is not compressed and lies on a tmpfs, as do the sources. Files: those of one
shuffled epoch in its order, from both, each opened, read and closed. MDS: as MosaicML's reader does it, which opens the
shard for each sample; ours is the shuffled epoch, theirs the source's order. Each round begins with nothing in the page
cache: squashfuse is mounted anew, and ours is another generation. Again: the same once more.
"""
import contextlib
import json
import os
import struct
import subprocess
import time

import bench
from bench import mount

SHARD_BYTES = 32 << 20


def write_files(path, count, size):
    block = os.urandom(size + count)
    for first in range(0, count, 1000):
        os.makedirs(f"{path}/{first // 1000:03}")
        for number in range(first, min(count, first + 1000)):
            with open(f"{path}/{number // 1000:03}/{number:06}.bin", "wb") as file:
                file.write(block[number:number + size])


def write_mds(path, count, size):
    os.makedirs(path)
    config = json.dumps({"column_encodings": ["bytes"], "column_names": ["x"], "column_sizes": [None],
                         "compression": None, "format": "mds", "hashes": [], "size_limit": SHARD_BYTES,
                         "version": 2}).encode()
    shards, each = [], SHARD_BYTES // (size + 8)
    for first in range(0, count, each):
        here = min(each, count - first)
        begins = [4 * (here + 2) + len(config) + (4 + size) * i for i in range(here + 1)]
        name = f"shard.{first // each:05}.mds"
        with open(f"{path}/{name}", "wb") as file:
            file.write(struct.pack(f"<I{here + 1}I", here, *begins) + config)
            for _ in range(here):
                file.write(struct.pack("<I", size) + os.urandom(size))
        shards.append({**json.loads(config), "raw_data": {"basename": name, "bytes": begins[-1], "hashes": {}},
                       "samples": here, "zip_data": None})
    bench.write_json(f"{path}/index.json", {"version": 2, "shards": shards})


def read_files(paths):
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            file.read()


def read_mds(path):
    """All samples, as streaming's MDSReader.get_sample_data reads one."""
    for shard in mount.read_json(path + "/index.json")["shards"]:
        name = os.path.join(path, shard["raw_data"]["basename"])
        for index in range(shard["samples"]):
            with open(name, "rb", 0) as file:
                file.seek((1 + index) * 4)
                begin, end = struct.unpack("<II", file.read(8))
                file.seek(begin)
                file.read(end - begin)


@contextlib.contextmanager
def squashed(image, at):
    os.makedirs(at, exist_ok=True)
    subprocess.run(["squashfuse", image, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def head_of(job, seed):
    bench.write_json(job.file("dataset/order.json"), {"batch": 64, "seed": seed})
    while not os.path.lexists(job.file("dataset/head")) or \
            mount.read_json(job.file("dataset/plan.json")).get("seed") != seed:
        time.sleep(0.01)
    return os.path.realpath(job.file("dataset/head"))


def main():
    options = bench.options(__doc__, kb=10, mib=200, rounds=3)
    for program in ("mksquashfs", "squashfuse"):
        mount.require_program(program)
    size = options.kb * 1000
    count = (options.mib << 20) // size
    ratios = bench.Ratios()
    with bench.plain_tmpfs() as top, mount.Mount() as daemon:
        write_files(top + "/source/files", count, size)
        write_mds(top + "/source/mds", count, size)
        subprocess.run(["mksquashfs", top + "/source", top + "/image", "-noI", "-noD", "-noF", "-noX", "-quiet",
                        "-no-progress"], check=True)
        native = sorted(os.path.join(root, name)
                        for root, _, names in os.walk(top + "/source/files") for name in names)
        theirs = top + "/squashfs"
        jobs = [daemon.job(name) for name in ("files", "mds")]
        for job, source in zip(jobs, ("files", "mds")):
            bench.write_json(job.file("dataset/source.json"), {"shards": f"{top}/source/{source}"})
        for seed in range(options.rounds):
            epoch = head_of(jobs[0], seed) + "/rank-000/files/e000"
            ours = [f"{epoch}/{part}/{name}" for part in sorted(os.listdir(epoch))
                    for name in os.listdir(f"{epoch}/{part}")]
            same = [native[int(path.rsplit("_", 1)[1].split(".")[0])].replace("/source/", "/squashfs/")
                    for path in ours]
            mds = head_of(jobs[1], seed) + "/global/mds/e000"
            with squashed(top + "/image", theirs):
                for time_of_reading in ("first", "again"):
                    ratios.add(f"files: {time_of_reading}", bench.seconds(read_files, same) / bench.seconds(read_files, ours))
                    ratios.add(f"mds: {time_of_reading}", bench.seconds(read_mds, theirs + "/mds") / bench.seconds(read_mds, mds))
    print(f"{count} samples of {options.kb} kB; samples a second, squashfuse = 1")
    ratios.print()


if __name__ == "__main__":
    main()
