#!/usr/bin/env python3
"""How long a commit takes, as a ratio to hashing the same bytes with the checksum's own code.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/commit.py [--mib 1024] [--rounds 5]

From the last close of what was written until `mv incoming/x checkpoints/` returns. The baseline hashes
memory with two threads. Nothing else may pass over the data: printed beside it is what the daemon hashed.
"""
import os

import bench
from bench import mount


def main():
    options = bench.options(__doc__, mib=1024, rounds=5)
    ratios = bench.Ratios()
    with mount.Mount("--memory", f"{options.mib * 2 + 256}M") as daemon:
        job = daemon.job("bench")
        config, tensors = bench.llama(layers=max(1, options.mib // 100), hidden=2048)
        writer = bench.Writer(tensors)
        mib = writer.offset >> 20
        for i in range(options.rounds):
            bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
            file = writer.write(job.incoming("base") + "/rank/0/model.safetensors", keep_open=True)

            def close_and_commit():
                os.close(file)
                job.commit("base")

            hashed_before = bench.metric(daemon, "ptcfs_job_hashed_bytes_total")
            took = bench.seconds(close_and_commit)
            passes = (bench.metric(daemon, "ptcfs_job_hashed_bytes_total") - hashed_before) / writer.offset
            ratios.add("speed, hash of two threads = 1", bench.baseline("hash", mib, 2) / took)
            ratios.add("passes over the data", passes)
            bench.remove(job.checkpoint("base"))
        print(f"commit of {mib} MiB")
        ratios.print()


if __name__ == "__main__":
    main()
