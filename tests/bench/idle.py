#!/usr/bin/env python3
"""What a node costs that nobody uses: time of the processor, as a share of the minute, threads and memory.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/idle.py [--nodes 4] [--seconds 60] [--lease 10]

A cluster over a real etcd, a job of 200 MiB in tp2-pp2, and then nobody. Memory: what is the daemon's own, images and
the reserve apart.
"""
import argparse
import os
import statistics
import sys
import time

import bench
import nodes
from bench import mount

CALM_SECONDS = 15  # what the change before still causes


def processor_seconds(node):
    """Of all its threads."""
    total = 0
    for thread in os.listdir(f"/proc/{node.process.pid}/task"):
        total += int(mount.read_text(f"/proc/{node.process.pid}/task/{thread}/schedstat").split()[0])
    return total / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=60, help="that are looked at")
    parser.add_argument("--lease", type=int, default=10, help="seconds after which a node that is silent is gone")
    options = parser.parse_args()
    bench.need_root()
    with nodes.cluster.Cluster(options.nodes, "--lease", str(options.lease), memory="3G") as started:
        nodes.Bench(started, 200).commit(tp=2, pp=2, dp=1)
        time.sleep(CALM_SECONDS)
        before = [processor_seconds(node) for node in started.nodes]
        time.sleep(options.seconds)
        shares = [(processor_seconds(node) - then) / options.seconds for node, then in zip(started.nodes, before)]
        threads = [sum(node.threads().values()) for node in started.nodes]
        memory = [node.own_bytes() >> 20 for node in started.nodes]
    print(f"{options.nodes} nodes that nobody uses, {options.seconds} s; median, most of one")
    print(f"  of one processor     {statistics.median(shares):.4%}   {max(shares):.4%}")
    print(f"  threads              {statistics.median(threads):.0f}   {max(threads)}")
    print(f"  MiB, its own memory  {statistics.median(memory):.0f}   {max(memory)}")


if __name__ == "__main__":
    sys.exit(main())
