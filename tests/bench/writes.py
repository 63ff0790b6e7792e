#!/usr/bin/env python3
"""How fast a checkpoint is written into incoming/, as a ratio to a plain tmpfs.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/writes.py [--mib 512] [--rounds 5]

One file, written with a buffer of 1 MiB, by one process and by two at once: over an existing file (no
fresh pages), and as a new one.
"""
import os
import threading

import bench
from bench import mount

BLOCK = os.urandom(1 << 20)


def write(path, mib):
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    for _ in range(mib):
        os.write(file, BLOCK)
    os.close(file)


def write_by(writers, path, mib):
    threads = [threading.Thread(target=write, args=(f"{path}{i}", mib // writers))
               for i in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    options = bench.options(__doc__, mib=512, rounds=5)
    with bench.plain_tmpfs() as plain, \
            mount.Mount("--memory", f"{2 * options.mib + 256}M") as daemon:
        job = daemon.job("bench")
        os.makedirs(job.incoming("new") + "/rank/0")
        ours, theirs = job.incoming("new") + "/rank/0/file", plain + "/file"
        ratios = bench.Ratios()
        for writers in (1, 2):
            for _ in range(options.rounds):
                for what in ("new", "over"):
                    base = bench.seconds(write_by, writers, theirs, options.mib)
                    ratios.add(f"{what} file, {writers} writer(s)",
                               base / bench.seconds(write_by, writers, ours, options.mib))
                for path in (ours, theirs):
                    for i in range(writers):
                        os.unlink(f"{path}{i}")
        print(f"{options.mib} MiB into incoming/; speed, plain tmpfs = 1")
        ratios.print()


if __name__ == "__main__":
    main()
