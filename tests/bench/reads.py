#!/usr/bin/env python3
"""How fast files of a checkpoint are read, as ratios to a plain tmpfs in the same run.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/reads.py [--mib 512] [--rounds 7]

By one process, and by two at once, each with a file of its own. Every round reads, in turn: copies on a
tmpfs with pages of 4 KiB (the baseline), copies on one with huge pages, the materialised files through
the mount, files that are computed on read (their first open, gathering included), and the same once
more. Printed are medians over the rounds of the rates as multiples of the baseline's in the same round:
read() with buffers of 1 MiB, 64 KiB and 4 KiB, and one byte of each page of a mapping.
"""
import argparse
import mmap
import os
import statistics

import bench
from bench import mount


def read_by(block):
    def read(path):
        buffer = bytearray(block)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return read


def map_all(path):
    """One byte of every page: the cost of mapping, without Python's own of reading."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
            bytes(mapping[::4096])


ACTIONS = {"read(1 MiB)": read_by(1 << 20), "read(64 KiB)": read_by(64 << 10),
           "read(4 KiB)": read_by(4 << 10), "mmap": map_all}


def read_when_told(action, path, ready, go):
    """A child: ends without going back to what its parent does."""
    try:
        os.write(ready, b"r")
        os.read(go, 1)
        action(path)
    except BaseException as error:  # pylint: disable=broad-exception-caught
        os.write(2, repr(error).encode())
        os._exit(1)
    os._exit(0)


def rate(action, paths):
    """Bytes a second, by one process for each file."""
    size = sum(map(os.path.getsize, paths))
    if len(paths) == 1:
        return size / bench.seconds(action, paths[0])
    (ready, tell_ready), (go, tell_go) = os.pipe(), os.pipe()
    children = [os.fork() or read_when_told(action, path, tell_ready, go) for path in paths]
    for _ in paths:
        os.read(ready, 1)

    def start_and_wait():
        os.write(tell_go, b"g" * len(paths))
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)

    took = bench.seconds(start_and_wait)
    for end in (ready, tell_ready, go, tell_go):
        os.close(end)
    return size / took


def compare(title, rounds, action, baseline, others):
    """`others`: for each name, the sets of files for the rounds in turn."""
    ratios, rates = bench.Ratios(), []
    for i in range(rounds + 1):
        base = rate(action, baseline)
        now = {name: rate(action, sets[i % len(sets)]) for name, sets in others.items()}
        if i == 0:
            continue  # fresh pages
        rates.append(base)
        for name, value in now.items():
            ratios.add(name, value / base)
    print(f"{title}: plain tmpfs {statistics.median(rates) / 1e9:.2f} GB/s = 1")
    ratios.print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=512, help="size of a rank's file")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    bench.need_root()
    # Query matrices alone, of 32 MiB.
    layers = max(1, options.mib // 32)
    config, tensors = bench.llama(2 * layers, 4096, key_value_heads=32)
    tensors = [tensor for tensor in tensors if ".q_proj." in tensor[0]]
    with bench.plain_tmpfs() as plain, bench.plain_tmpfs("always") as huge, \
            mount.Mount("--memory", f"{8 * options.mib + 256}M",
                        "--cache", f"{options.mib * 5 // 4}M") as daemon:
        job = daemon.job("bench")
        bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
        bench.Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        job.set_layout(pp=2)
        stored = [job.file("current", f"rank/{r}/model.safetensors") for r in (0, 1)]
        # The cache holds one of these, or two of the halves: each first open gathers, into memory that
        # was used before.
        wide, narrow = ([job.rank_file("base", f"tp{tp}-pp1-dp1", r) for r in range(tp)]
                        for tp in (2, 4))
        for directory in (plain, huge):
            for r in (0, 1):
                bench.copy(stored[r], f"{directory}/{r}")
        print(f"files of {os.path.getsize(stored[0]) >> 20} MiB, {options.rounds} rounds")
        for readers in (1, 2):
            computed = [wide[:1], wide[1:]] if readers == 1 else [narrow[:2], narrow[2:]]
            for name, action in ACTIONS.items():
                compare(f"{name}, {readers} reader{'s'[:readers - 1]}", options.rounds, action,
                        [f"{plain}/{r}" for r in range(readers)],
                        {"tmpfs with huge pages": [[f"{huge}/{r}" for r in range(readers)]],
                         "materialised": [stored[:readers]],
                         "computed, first open": computed,
                         "computed, again": computed})


if __name__ == "__main__":
    main()
