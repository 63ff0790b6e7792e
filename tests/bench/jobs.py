#!/usr/bin/env python3
"""Whether a job costs more the more there are: mkdir and rmdir of the first thousand and of the last.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/jobs.py [--jobs 10000]

Printed is the time of the last thousand as a multiple of the first thousand's, of the same run, and of a
tmpfs's directories. `ls` of all of them is printed as a multiple of the tmpfs's.
"""
import argparse
import os

import bench
from bench import mount

BATCH = 1000


def batches(count, call, top):
    """Seconds of each thousand."""
    def one(first):
        for number in range(first, first + BATCH):
            call(f"{top}/job{number:06}")
    return [bench.seconds(one, first) for first in range(0, count, BATCH)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=10000, help="how many (default: 10000)")
    count = parser.parse_args().jobs // BATCH * BATCH
    with bench.plain_tmpfs() as plain, mount.Mount("--memory", "1G") as daemon:
        made, plain_made = (batches(count, os.mkdir, top) for top in (daemon.path, plain))
        listed, plain_listed = (bench.seconds(os.listdir, top) for top in (daemon.path, plain))
        removed = batches(count, os.rmdir, daemon.path)
    print(f"{count} jobs")
    print(f"  mkdir, last thousand / first       {made[-1] / made[0]:8.2f}")
    print(f"  mkdir, all / a tmpfs's             {sum(made) / sum(plain_made):8.0f}")
    print(f"  rmdir, first thousand / last       {removed[0] / removed[-1]:8.2f}")
    print(f"  ls / a tmpfs's                     {listed / plain_listed:8.1f}")


if __name__ == "__main__":
    main()
