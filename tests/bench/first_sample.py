#!/usr/bin/env python3
"""From a change of a data set to the first sample that a rank reads of the new head, with very many samples.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/first_sample.py [--samples 100000000] [--rounds 5]

JSONL with a line of 11 bytes a sample: 1.1 GB of source, which is written and indexed first. A batch is 1024 samples. A
change is saving order.json with another batch, or saving layout.json with another dp and waiting for `head`; each after
some steps were noted in `consumed`. Milliseconds until the first 8 bytes, for each tree; nothing of it was read before.
"""
import argparse
import os
import tempfile
import time

import bench
from bench import mount

numpy = mount.require("numpy")
SHARD_SAMPLES = 5_000_000
TREES = ("jsonl/e000/00000.jsonl", "tar/e000/000000.tar", "tfrecord/e000/00000.tfrecord", "ids.u64")


def write_source(path, samples):
    for first in range(0, samples, SHARD_SAMPLES):
        numbers = numpy.arange(first, min(samples, first + SHARD_SAMPLES))
        lines = numpy.full((len(numbers), 11), ord('"'), numpy.uint8)
        for digit in range(8):
            lines[:, 8 - digit] = ord("0") + numbers % 10
            numbers //= 10
        lines[:, 10] = ord("\n")
        lines.tofile(f"{path}/{first:09}.jsonl")


def change(job, action):
    """Runs `action`; the directory that `head` names then."""
    head = job.file("dataset/head")
    before = os.readlink(head) if os.path.lexists(head) else None
    action()
    while not os.path.lexists(head) or os.readlink(head) == before:
        time.sleep(0.0002)
    return os.path.realpath(head)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ptcfs-bench-") as source, mount.Mount() as daemon:
        write_source(source, options.samples)
        job = daemon.job("bench")

        def order(batch):
            bench.write_json(job.file("dataset/order.json"), {"batch": batch})

        bench.write_json(job.file("dataset/source.json"), {"shards": source})
        start = time.perf_counter()
        change(job, lambda: order(1024))
        print(f"{options.samples} samples; indexed in {time.perf_counter() - start:.1f} s")
        took, consumed, batch, dp = bench.Ratios(), 0, 1024, 1
        for tree in TREES * options.rounds:
            for what in ("order.json", "layout.json"):
                consumed += batch
                with open(job.file("dataset/consumed"), "w", encoding="utf-8") as file:
                    file.write(str(consumed))
                start = time.perf_counter()
                if what == "order.json":
                    batch = 3072 - batch
                    head = change(job, lambda: order(batch))
                else:
                    dp = 3 - dp
                    head = change(job, lambda: job.save_layout(dp=dp))
                with open(f"{head}/rank-000/{tree}", "rb", buffering=0) as file:
                    file.read(8)
                took.add(f"{what}, {tree.split('/', maxsplit=1)[0]}: ms", 1000 * (time.perf_counter() - start))
        took.print()


if __name__ == "__main__":
    main()
