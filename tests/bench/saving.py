#!/usr/bin/env python3
"""Saving a state from the memory of four processes until it is committed: ptcfs, torch.save, DCP.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/saving.py [--mib 1500] [--rounds 3] [--pause 5]

The state is a Llama in bf16, cut by tensor parallelism into four; each process has its part. The time is from a barrier
on until the last process is done:

  ptcfs              ptc.Job.save of each process's part, until the checkpoint is committed
  torch.save         each process its part, to a tmpfs
  dcp.save           DTensors of the four, to a tmpfs

Each way keeps its last save until the next one is there, as training does; the first two are not timed. Printed are
ptcfs's times as multiples of theirs, of the same round, and which goals were reached.
"""
import os
import shutil
import time

import bench
from bench import mount
from goals import judge

torch = mount.require("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import peers  # noqa: E402
from peers import ptc  # noqa: E402

RANKS = peers.BEFORE
GOALS = {"ptcfs / torch.save": 1.3, "ptcfs / dcp.save": 0.5}


def own_part(rank, tensors):
    """Bytes that are not all zero, and pages that have been touched. What all ranks hold is equal."""
    def value(axis):
        return 1.0 if axis is None else 1.0 + rank
    return {name: torch.full(peers.extents(peers.part(shape, peers.cut_by_tp(name), rank, RANKS)),
                             value(peers.cut_by_tp(name)), dtype=torch.bfloat16) for name, _, shape in tensors}


def by_ptcfs(rank, job_path, name, tensors, config):
    state = own_part(rank, tensors)
    job = ptc.Job(job_path)

    return peers.timed(lambda: job.save({"model": state}, name, files={"config.json": config}))


def by_torch(rank, folder, tensors):
    state = own_part(rank, tensors)
    return peers.timed(lambda: torch.save(state, f"{folder}/rank-{rank}.pt"))


def by_dcp(rank, folder, tensors):
    mesh = init_device_mesh("cpu", (RANKS,))
    parts = own_part(rank, tensors)
    state = {name: DTensor.from_local(parts[name], mesh, peers.placement(peers.cut_by_tp(name)), run_check=False)
             for name, _, _ in tensors}
    return peers.timed(lambda: dcp.save(state, checkpoint_id=folder))


def main():
    given = bench.options(__doc__, mib=1500, rounds=3, pause=5)
    config, tensors = bench.llama(8, bench.hidden_for(given.mib, 8))
    with bench.plain_tmpfs() as plain, mount.Mount("--memory", f"{given.mib * 3 + 512}M") as daemon:
        job = daemon.job("bench")
        job.set_layout(tp=RANKS)
        ratios = bench.Ratios()

        def measure(body, *arguments):
            time.sleep(given.pause)
            return peers.run(RANKS, body, *arguments)

        for number in range(given.rounds + 2):
            name, before = f"step{number}", f"step{number - 1}"
            ours = measure(by_ptcfs, job.path, name, tensors, config)
            os.makedirs(f"{plain}/torch/{name}")
            by_torch_save = measure(by_torch, f"{plain}/torch/{name}", tensors)
            by_dcp_save = measure(by_dcp, f"{plain}/dcp/{name}", tensors)
            if number == 0:
                continue
            bench.remove(job.checkpoint(before))
            for peer in ("torch", "dcp"):
                shutil.rmtree(f"{plain}/{peer}/{before}")
            if number == 1:
                continue
            ratios.add("ptcfs: seconds", ours)
            ratios.add("ptcfs / torch.save", ours / by_torch_save)
            ratios.add("ptcfs / dcp.save", ours / by_dcp_save)
        print(f"{given.mib} MiB of {RANKS} processes, saved and committed")
        ratios.print()
        judge(ratios, GOALS, peers.REASON)


if __name__ == "__main__":
    main()
