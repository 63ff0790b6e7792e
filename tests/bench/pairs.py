#!/usr/bin/env python3
"""How much longer another build takes than this one for what a daemon does most, in pairs that alternate.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/pairs.py OTHER/build/bin [--rounds 5] [reshard commit samples nodes …]

reshard  tp4-pp2 -> tp2-pp4 and back of a Llama with Adam's moments; two daemons, one of each build, after a pause
commit   the last close -> `mv incoming/x checkpoints/` returned; the same two daemons
samples  a rank's shuffled tars of a data set, first and again; saving order.json -> the first bytes; the same two daemons
nodes    what nodes.py does: one holder -> three nodes, tp4-pp2-dp1 -> tp2-pp2-dp2, a node lost; a cluster of each build

The ratio of a round is the other build's time by this one's: more than 1 says that this one is faster. Which is first
alternates.
"""
import argparse
import contextlib
import glob
import os
import time

import bench
import dataset
import nodes
import reshard
from bench import mount

SIDES = ("this", "other")
LAYOUTS = ({"tp": 2, "pp": 4, "dp": 1}, {"tp": 4, "pp": 2, "dp": 1})


@contextlib.contextmanager
def build(directory):
    """Daemons that are started meanwhile are of the build in this directory."""
    before = os.environ["PTC_BIN_DIR"]
    os.environ["PTC_BIN_DIR"] = directory
    try:
        yield
    finally:
        os.environ["PTC_BIN_DIR"] = before


def add_pair(ratios, what, number, timed):
    """`timed(side)` says how long that side takes, or how long each of some things takes it, by name."""
    order = SIDES if number % 2 == 0 else SIDES[::-1]
    took = {side: timed(side) for side in order}
    if not isinstance(took["this"], dict):
        ratios.add(what, took["other"] / took["this"])
        return
    for name, seconds in took["this"].items():
        ratios.add(f"{what}: {name}", took["other"][name] / seconds)


class Pair:
    """A daemon of each build, with one job."""

    def __init__(self, stack, bins, mib):
        self.jobs = {}
        for side in SIDES:
            with build(bins[side]):
                daemon = stack.enter_context(mount.Mount("--memory", f"{mib * 11 + 256}M"))
                self.jobs[side] = daemon.job("bench")


def reshards(ratios, bins, options):
    config, tensors = bench.llama(layers=8, hidden=bench.hidden_for(options.mib, layers=8))
    with contextlib.ExitStack() as stack:
        jobs = Pair(stack, bins, options.mib).jobs
        for job in jobs.values():
            rank = job.incoming("base") + "/rank/0"
            bench.write_json(rank + "/config.json", config)
            bench.Writer(tensors).write(rank + "/model.safetensors")
            bench.Writer(bench.adam(tensors)).write(rank + "/optim.safetensors")
            job.commit("base")
            reshard.reshard(job, **LAYOUTS[1])
        for number in range(options.rounds):
            for layout in LAYOUTS:
                def timed(side, layout=layout):
                    time.sleep(options.pause)
                    return reshard.reshard(jobs[side], **layout)[0]
                add_pair(ratios, "reshard: -> tp{tp}-pp{pp}".format(**layout), number, timed)


def commits(ratios, bins, options):
    config, tensors = bench.llama(layers=max(1, options.mib // 100), hidden=2048)
    with contextlib.ExitStack() as stack:
        jobs = Pair(stack, bins, options.mib).jobs

        def timed(side):
            job = jobs[side]
            bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
            file = bench.Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors", keep_open=True)
            start = time.perf_counter()
            os.close(file)
            job.commit("base")
            took = time.perf_counter() - start
            bench.remove(job.checkpoint("base"))
            return took

        for number in range(options.rounds):
            add_pair(ratios, "commit", number, timed)


def samples(ratios, bins, options):
    with bench.plain_tmpfs() as source, contextlib.ExitStack() as stack:
        dataset.write_source(source, (options.mib << 20) // dataset.SAMPLE)
        jobs = Pair(stack, bins, options.mib).jobs
        for job in jobs.values():
            bench.write_json(job.file("dataset/source.json"), {"shards": source})

        def timed(side, number):
            job, start = jobs[side], time.perf_counter()
            bench.write_json(job.file("dataset/order.json"), {"batch": dataset.BATCH, "seed": number, "shuffle": "global"})
            while not dataset.in_force(job, number, "global"):
                time.sleep(0.001)
            epoch = os.path.realpath(job.file("dataset/head")) + "/rank-000/tar/e000"
            with open(epoch + "/000000.tar", "rb") as file:
                file.read(512)
            took = {"first bytes": time.perf_counter() - start}
            tars = sorted(glob.glob(epoch + "/*.tar"))
            for reading in ("first", "again"):
                took[reading] = bench.seconds(dataset.read_all, tars)
            return took

        for side in SIDES:
            timed(side, options.rounds)  # the index is made, and the shards are mapped
        for number in range(options.rounds):
            add_pair(ratios, "samples", number, lambda side, number=number: timed(side, number))


def clusters(ratios, bins, options):
    def timed(side, what):
        with build(bins[side]), nodes.cluster.Cluster(nodes.NODES, "--lease", "3", rate=options.rate,
                                                      memory=f"{options.mib * 8 + 1024}M") as started:
            return getattr(nodes.Bench(started, options.mib), what)()[0]

    for number in range(options.rounds):
        for what in ("one", "layout", "loss"):
            add_pair(ratios, f"four nodes: {what}", number, lambda side, what=what: timed(side, what))


PARTS = {"reshard": reshards, "commit": commits, "samples": samples, "nodes": clusters}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("other", help="directory with the ptcfs of another build")
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--mib", type=int, default=400, help=bench.MEANINGS["mib"])
    parser.add_argument("--rounds", type=int, default=5, help=bench.MEANINGS["rounds"])
    parser.add_argument("--pause", type=int, default=5, help="seconds before each reshard")
    parser.add_argument("--rate", default="1gbit", help="of each node's link")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    bench.need_root()
    bins = {"this": mount.bin_dir(), "other": os.path.abspath(options.other)}
    with build(bins["other"]):
        mount.bin_dir()
    ratios = bench.Ratios()
    for part in options.parts:
        PARTS[part](ratios, bins, options)
    print("the other build's time by this one's")
    ratios.print()


if __name__ == "__main__":
    main()
