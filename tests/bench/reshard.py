#!/usr/bin/env python3
"""How long a reshard takes, as a ratio to a memcpy of the bytes that change place.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/reshard.py [--mib 400] [--rounds 5] [--pause 5]

A Llama of --mib MiB in bf16 with Adam's moments in fp32 (four times as much), from tp4-pp2 to tp2-pp4
and back. Timed from the save of layout.json until `current` shows the new layout. Two baselines of two
threads: memcpy between memory used before, and into new files of a tmpfs like the store's, whose pages
must first be made; and the least that such a copy costs which is checked on the way (ptc_baseline keep). Then, as times and not ratios: dp 1 -> 4 and back, where nothing moves.
"""
import json
import os
import time

import bench
from bench import mount


WAIT_SECONDS = 0.002  # between two looks: who looks all the time takes one of the processors that the copy has


def reshard(job, **sizes):
    """Seconds until the layout is in force, and its plan."""
    name = "tp{tp}-pp{pp}-dp{dp}".format(**sizes)
    current = job.file("current")
    start = time.perf_counter()
    with open(job.file("layout.json"), "w", encoding="utf-8") as file:
        json.dump(sizes, file)
    looks = 0
    while not os.readlink(current).endswith(name):
        time.sleep(WAIT_SECONDS)
        looks += 1
        if looks % 100 == 0 and job.status()["state"] == "failed":
            raise RuntimeError(job.error())
    took = time.perf_counter() - start
    job.wait()
    with open(job.file("plan.json"), encoding="utf-8") as file:
        return took, json.load(file)


def main():
    options = bench.options(__doc__, mib=400, rounds=5, pause=5)
    with mount.Mount("--memory", f"{options.mib * 11 + 256}M") as daemon:
        job = daemon.job("bench")
        config, tensors = bench.llama(layers=8, hidden=bench.hidden_for(options.mib, layers=8))
        rank = job.incoming("base") + "/rank/0"
        bench.write_json(rank + "/config.json", config)
        bench.Writer(tensors).write(rank + "/model.safetensors")
        bench.Writer(bench.adam(tensors)).write(rank + "/optim.safetensors")
        job.commit("base")
        reshard(job, tp=4, pp=2, dp=1)
        ratios = bench.Ratios()
        for _ in range(options.rounds):
            for sizes in ({"tp": 2, "pp": 4, "dp": 1}, {"tp": 4, "pp": 2, "dp": 1}):
                time.sleep(options.pause)
                took, plan = reshard(job, **sizes)
                mib = bench.bytes_moved(plan) >> 20
                to = "-> tp{tp}-pp{pp}".format(**sizes)
                ratios.add(f"{to}: time / memcpy", took / bench.baseline("copy", mib, 2))
                ratios.add(f"{to}: time / memcpy to new files",
                           took / bench.baseline("copy-to", mib, 2, daemon.store))
                ratios.add(f"{to}: time / checksum and write", took / bench.baseline("keep", mib, 2, daemon.store))
        print(f"reshard of a Llama with Adam's moments, {mib} MiB change place")
        ratios.print()
        same = bench.Ratios()
        for _ in range(options.rounds):
            for dp in (4, 1):
                took, plan = reshard(job, tp=4, pp=2, dp=dp)
                same.add(f"-> dp{dp}: ms", took * 1000)
                same.add(f"-> dp{dp}: bytes that change place", bench.bytes_moved(plan))
        print("replicas only")
        same.print()


if __name__ == "__main__":
    main()
