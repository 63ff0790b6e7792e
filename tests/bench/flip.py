#!/usr/bin/env python3
"""How long a flip of `current` is felt by a reader, beside a symbolic link renamed on a plain tmpfs.

    PTC_BIN_DIR=$PWD/build/bin chrt -r 5 python3 tests/bench/flip.py [--names 100000] [--flips 20]

A process reads the link over and over, and between two readings looks whether the decision was written
down: the store's metadata, there the link's directory. Printed in microseconds, at most:

    old after decision   from then until the last answer with the old target
    new after decision   until the first answer with the new one was there
    first open           open of a rank's file through the link then, and its first byte

once with few names of the job in the kernel's caches, and once with that many. Nothing changes place
(dp 1 to 2 and back), so that nothing else runs; chrt, because on a busy machine each step would wait for
a time slice, here and there.
"""
import json
import os
import time

import bench
from bench import mount

FILE = "rank/0/model.safetensors"


def now():
    return time.perf_counter_ns() / 1000


def watch(link, decision):
    """Until the link changes; microseconds by what they are of."""
    old = os.readlink(link)
    stamp, looked, answered, decided = os.stat(decision).st_mtime_ns, now(), now(), None
    while True:
        target, seen = os.readlink(link), now()
        stamp_before, stamp = stamp, os.stat(decision).st_mtime_ns
        if stamp != stamp_before:
            decided = looked  # after that; of several changes the last counts
        if target != old:
            break
        looked = answered = seen
    start = now()
    file = os.open(os.path.join(link, FILE), os.O_RDONLY)
    os.pread(file, 1, 0)
    return {"old after decision": max(0, answered - decided), "new after decision": seen - decided,
            "first open": now() - start}


def watched(change, link, decision):
    """What a process beside it sees of change()."""
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(ends[1], json.dumps(watch(link, decision)).encode())
        finally:
            os._exit(0)
    os.close(ends[1])
    time.sleep(0.05)
    change()
    with open(ends[0], encoding="utf-8") as result:
        seen = json.load(result)
    os.waitpid(child, 0)
    return seen


def flip_on_tmpfs(top):
    def change():
        target = "b" if os.readlink(top + "/current") == "a" else "a"
        os.symlink(target, top + "/a/new")
        os.rename(top + "/a/new", top + "/current")
    return watched(change, top + "/current", top)


def flip(job, dp):
    def change():
        bench.write_json(job.file("layout.json"), {"tp": 1, "pp": 1, "dp": dp})
    seen = watched(change, job.file("current"), job.mount.store + "/meta.db-wal")
    job.wait()
    return seen


def measure(job, plain, flips, before):
    ours, theirs = bench.Ratios(), bench.Ratios()
    for i in range(flips):
        before()
        for what, took in flip(job, 1 + (i + 1) % 2).items():
            ours.add(what, took)
        for what, took in flip_on_tmpfs(plain).items():
            theirs.add(what, took)
    print("ptcfs")
    ours.print(" us")
    print("tmpfs")
    theirs.print(" us")


def main():
    options = bench.options(__doc__, names=100000, flips=20)
    with bench.plain_tmpfs() as plain, mount.Mount("--memory", "2G") as daemon:
        job = daemon.job("bench")
        config, tensors = bench.llama(layers=32, hidden=256, vocabulary=1000)
        bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
        bench.Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        for name in "ab":
            bench.copy(job.file("current", FILE), f"{plain}/{name}/{FILE}")
        os.symlink("a", plain + "/current")
        print("few names known:")
        measure(job, plain, options.flips, lambda: None)
        ranks = options.names // len(tensors)
        tree = job.checkpoint("base", f"layouts/tp1-pp1-dp{ranks}/rank")
        print(f"{options.names} names known:")
        measure(job, plain, options.flips, lambda: bench.walk(tree))


if __name__ == "__main__":
    main()
