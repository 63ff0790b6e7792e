#!/usr/bin/env python3
"""How fast many small parameters are loaded one by one, as a ratio to the same files on a plain tmpfs.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/npy.py [--files 10000] [--rounds 5]

numpy.load and sum of every .npy under model/ of a checkpoint; odd rounds begin on a fresh mount.
"""
import argparse
import os

import bench
from bench import mount

numpy = mount.require("numpy")


def load_all(paths):
    for path in paths:
        numpy.load(path).view(numpy.uint32).sum()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--files", type=int, default=10000)
    parser.add_argument("--kib", type=int, default=16, help="size of a parameter")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    bench.need_root()
    with bench.plain_tmpfs() as plain, mount.Mount("--memory", "2G") as daemon:
        job = daemon.job("bench")
        tensors = [(f"m.g{i // 100}.p{i % 100}", "F32", (options.kib, 256))
                   for i in range(options.files)]
        bench.Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors")
        bench.flat_rules(job)
        job.commit("base")
        tree = job.checkpoint("base", "model")
        names = [f"m/g{i // 100}/p{i % 100}.npy" for i in range(options.files)]
        ours = [os.path.join(tree, name) for name in names]
        theirs = [os.path.join(plain, name) for name in names]
        for source, target in zip(ours, theirs):
            bench.copy(source, target)
        ratios = bench.Ratios()
        load_all(theirs)
        for _ in range(options.rounds):
            daemon.stop()
            daemon.start()
            for what in ("first time on a mount", "again"):
                base = bench.seconds(load_all, theirs)
                ratios.add(what, base / bench.seconds(load_all, ours))
        print(f"{options.files} .npy of {options.kib} KiB, numpy.load and sum; speed, tmpfs = 1")
        ratios.print()


if __name__ == "__main__":
    main()
