#!/usr/bin/env python3
"""Whether a job costs more the more there are: mkdir and rmdir of the first thousand and of the last.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/jobs.py [--jobs 10000] [--nodes 3]

Printed is the time of the last thousand as a multiple of the first thousand's, of the same run, and of a
tmpfs's directories. `ls` of all of them is printed as a multiple of the tmpfs's.

With --nodes, of a cluster: the time of mkdir of the last fifty, and the processor time of all daemons and of
etcd until all show them, as multiples of the first fifty's.
"""
import argparse
import os
import sys
import time

import bench
from bench import mount

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
import cluster  # noqa: E402

BATCH = 1000
BATCH_OF_CLUSTER = 50


def batches(count, call, top):
    """Seconds of each thousand."""
    def one(first):
        for number in range(first, first + BATCH):
            call(f"{top}/job{number:06}")
    return [bench.seconds(one, first) for first in range(0, count, BATCH)]


def processor_time(processes):
    """Seconds that they have had so far."""
    ticks = 0
    for process in processes:
        fields = mount.read_text(f"/proc/{process.pid}/stat").rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def in_cluster(count, number_of_nodes):
    costs = []  # of each batch: mkdir's seconds, the daemons', etcd's
    with cluster.Cluster(number_of_nodes) as nodes:
        daemons, etcd = [node.process for node in nodes.nodes], [nodes.etcd]
        for first in range(0, count, BATCH_OF_CLUSTER):
            before = processor_time(daemons), processor_time(etcd)
            begun = time.monotonic()
            for number in range(first, first + BATCH_OF_CLUSTER):
                while mount.error_of(os.mkdir, f"{nodes.nodes[0].path}/job{number:06}") == "EAGAIN":
                    pass
            taken = time.monotonic() - begun
            for node in nodes.nodes:
                cluster.until(lambda node=node: os.path.isdir(f"{node.path}/job{first + BATCH_OF_CLUSTER - 1:06}"),
                              "all nodes show the jobs")
            costs.append((taken, processor_time(daemons) - before[0], processor_time(etcd) - before[1]))
    print(f"{count} jobs on {number_of_nodes} nodes, last {BATCH_OF_CLUSTER} / first")
    for what, values in zip(("mkdir", "processor time of the nodes", "processor time of etcd"), zip(*costs)):
        print(f"  {what:34} {values[-1] / values[0]:8.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--jobs", type=int, default=10000, help="how many (default: 10000)")
    parser.add_argument("--nodes", type=int, default=0, help="of a cluster of so many")
    arguments = parser.parse_args()
    if arguments.nodes > 0:
        in_cluster(arguments.jobs // BATCH_OF_CLUSTER * BATCH_OF_CLUSTER, arguments.nodes)
        return
    count = arguments.jobs // BATCH * BATCH
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
