#!/usr/bin/env python3
"""Reading a data set's tars through the mount, as ratios to reading the source's own tars.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/dataset.py [--mib 400] [--rounds 3]

WebDataset tars of samples of 100 kB on a tmpfs; one rank, 64 samples a step, in source order and shuffled.
First: nothing of it is in the page cache of the mount. Also: from saving order.json until the first bytes of
the first tar are there.
"""
import glob
import io
import json
import os
import tarfile
import time

import bench
from bench import mount

SAMPLE = 100_000
SHARD_SAMPLES = 512
BATCH = 64


def write_source(path, samples):
    for first in range(0, samples, SHARD_SAMPLES):
        with tarfile.open(f"{path}/train-{first:08}.tar", "w") as shard:
            for number in range(first, min(samples, first + SHARD_SAMPLES)):
                member = tarfile.TarInfo(f"{number:08}.jpg")
                member.size = SAMPLE
                shard.addfile(member, io.BytesIO(os.urandom(SAMPLE)))


def read_all(paths):
    buffer, total = bytearray(1 << 20), 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while got := file.readinto(buffer):
                total += got
    return total


def speed(paths):
    start = time.perf_counter()
    return read_all(paths) / (time.perf_counter() - start)


def in_force(job, seed, shuffle):
    plan = json.loads(mount.read_text(job.file("dataset/plan.json")))
    return (plan.get("seed"), plan.get("shuffle")) == (seed, shuffle)


def main():
    options = bench.options(__doc__, mib=400, rounds=3)
    with bench.plain_tmpfs() as source, mount.Mount() as daemon:
        write_source(source, (options.mib << 20) // SAMPLE)
        native = sorted(glob.glob(source + "/*.tar"))
        job = daemon.job("bench")
        bench.write_json(job.file("dataset/source.json"), {"shards": source})
        ratios, latency = bench.Ratios(), bench.Ratios()
        for number in range(options.rounds):
            for shuffle in ("none", "global"):
                start = time.perf_counter()
                bench.write_json(job.file("dataset/order.json"),
                                 {"batch": BATCH, "seed": number, "shuffle": shuffle})
                while not in_force(job, number, shuffle):
                    time.sleep(0.001)
                read = os.path.realpath(job.file("dataset/head")) + "/rank-000/tar/e000"
                with open(read + "/000000.tar", "rb") as file:
                    file.read(512)
                latency.add("index and " * (number == 0 and shuffle == "none") + "first bytes: ms",
                            1000 * (time.perf_counter() - start))
                tars = sorted(glob.glob(read + "/*.tar"))
                plain = speed(native)
                ratios.add(f"{shuffle}: first", speed(tars) / plain)
                ratios.add(f"{shuffle}: again", speed(tars) / plain)
        print(f"{options.mib} MiB of samples of {SAMPLE // 1000} kB; speed, the source's tars = 1")
        ratios.print()
        latency.print()


if __name__ == "__main__":
    main()
