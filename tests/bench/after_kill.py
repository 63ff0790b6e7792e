#!/usr/bin/env python3
"""How soon a large file that is computed on read gives bytes after kill -9 and a start.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/after_kill.py [--mib 5000] [--rounds 3] [--pause 45]

The file is a rank's of a layout that is not in force, half of the model. Before each kill there is a pause, in
which a host may take free memory back. Printed are the seconds until it is open and the first byte is there, and
these and reading all of it as multiples of the time that a copy of such a file on a tmpfs takes to be read.
"""
import os
import time

import bench
from bench import mount

READ_BYTES = 1 << 20


def read_on(file):
    buffer, at = bytearray(READ_BYTES), 0
    while done := os.preadv(file, [buffer], at):
        at += done
    return at


def read_all(path):
    """Seconds to the first byte, and of all; bytes."""
    begun = time.perf_counter()
    file = os.open(path, os.O_RDONLY)
    os.pread(file, 1, 0)
    first = time.perf_counter() - begun
    size = read_on(file)
    took = time.perf_counter() - begun
    os.close(file)
    return first, took, size


def main():
    options = bench.options(__doc__, mib=5000, rounds=3, pause=45)
    first, ratios = bench.Ratios(), bench.Ratios()
    with bench.plain_tmpfs() as plain, mount.Mount("--memory", f"{options.mib * 2 + 512}M") as daemon:
        job = daemon.job("bench")
        config, tensors = bench.llama(16, bench.hidden_for(options.mib, 16))
        bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
        bench.Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        path = job.rank_file("base", "tp2-pp1-dp1", 0)
        for _ in range(options.rounds):
            time.sleep(options.pause)
            daemon.stop(kill=True)
            daemon.start()
            soon, took, size = read_all(path)
            copy = f"{plain}/copy"
            with open(path, "rb") as source, open(copy, "wb") as target:
                while chunk := source.read(READ_BYTES):
                    target.write(chunk)
            _, there, _ = read_all(copy)
            os.unlink(copy)
            first.add("seconds to the first byte", soon)
            ratios.add("first byte / reading a tmpfs's", soon / there)
            ratios.add("all of it / reading a tmpfs's", took / there)
        print(f"a rank's file of {size >> 20} MiB, after kill -9 and a start")
        first.print()
        ratios.print()


if __name__ == "__main__":
    main()
