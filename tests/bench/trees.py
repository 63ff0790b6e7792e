#!/usr/bin/env python3
"""How fast directory trees are walked, as ratios of time to the same tree on a plain tmpfs.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/trees.py [--files 100000] [--rounds 5]

The tree is model/ of a checkpoint of so many parameters, a hundred to a directory. Cold: the first
walk of a fresh mount; warm: the later ones.
"""
import os
import subprocess

import bench
from bench import mount


def find(path):
    subprocess.run(["find", path], stdout=subprocess.DEVNULL, check=True)


def ls(path):
    subprocess.run(["ls", "-lR", path], stdout=subprocess.DEVNULL, check=True)


def walk_and_stat(path):
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                walk_and_stat(entry.path)
            else:
                entry.stat(follow_symlinks=False)


WALKS = {"find": find, "ls -lR": ls, "os.walk": bench.walk, "scandir and stat": walk_and_stat}


def copy_tree(source, target):
    """Names and sizes are what matters."""
    for directory, _, files in os.walk(source):
        there = os.path.join(target, os.path.relpath(directory, source))
        os.makedirs(there, exist_ok=True)
        for name in files:
            with open(os.path.join(there, name), "wb") as file:
                file.write(bytes(144))


def main():
    options = bench.options(__doc__, files=100000, rounds=5)
    with bench.plain_tmpfs() as plain, mount.Mount("--memory", "2G") as daemon:
        job = daemon.job("bench")
        bench.write_flat(job, options.files)
        tree = job.checkpoint("base", "model")
        copy_tree(tree, plain)
        cold, warm = bench.Ratios(), bench.Ratios()
        for name, action in WALKS.items():
            for _ in range(options.rounds):
                daemon.stop()
                daemon.start()
                cold.add(name, bench.seconds(action, tree) / bench.seconds(action, plain))
                warm.add(name, bench.seconds(action, tree) / bench.seconds(action, plain))
        print(f"{options.files} files; time as a multiple of a plain tmpfs's")
        print("cold:")
        cold.print()
        print("warm:")
        warm.print()


if __name__ == "__main__":
    main()
