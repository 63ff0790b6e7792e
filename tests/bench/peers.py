#!/usr/bin/env python3
"""A change of tensor parallelism from 4 to 2 ranks: ptcfs and what else does it, on the same state.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/peers.py [--mib 400] [--rounds 3] [--pause 5]

The state is a Llama in bf16. Every way begins with what it keeps of four ranks and ends when two
processes, each with torch, have their own tensors in memory of their own:

  ptcfs              saves layout.json, waits until it is in force, safetensors.torch.load_file of a rank's file
  safetensors        safe_open and get_slice of the whole model's file on a tmpfs
  torch DCP          torch.distributed.checkpoint.load of DTensors from a .distcp directory on a tmpfs
  torch DCP, HF      the same from safetensors, with the HuggingFaceStorageReader
  gloo               the tensors are in the memory of four processes; two of them receive the others' parts

Times are those of the slower process, from a barrier on; printed as multiples of ptcfs's of the round.
"""
import json
import os
import shutil
import tempfile
import time

import bench
from bench import mount

torch = mount.require("torch")
safetensors = mount.require("safetensors")
import safetensors.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

BEFORE, AFTER = 4, 2


def axis_of(name):
    """Where Megatron's way cuts a Llama; None: nowhere."""
    if "norm" in name:
        return None
    return 1 if "o_proj" in name or "down_proj" in name else 0


def part(shape, axis, rank, ranks):
    if axis is None:
        return tuple(slice(None) for _ in shape)
    step = shape[axis] // ranks
    return tuple(slice(rank * step, (rank + 1) * step) if i == axis else slice(None)
                 for i in range(len(shape)))


def placement(name):
    axis = axis_of(name)
    return [Replicate() if axis is None else Shard(axis)]


def with_group(rank, ranks, folder, body, *arguments):
    """One process of a gloo group; what it returns of time is left in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank,
                            world_size=ranks)
    try:
        seconds = body(rank, *arguments)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    with open(f"{folder}/seconds-{rank}", "w", encoding="utf-8") as file:
        file.write(repr(seconds or 0.0))


def run(ranks, body, *arguments):
    """Seconds of the slowest of so many processes."""
    folder = tempfile.mkdtemp(prefix="ptcfs-bench-")
    try:
        multiprocessing.spawn(with_group, (ranks, folder, body, *arguments), nprocs=ranks)
        return max(float(mount.read_text(f"{folder}/seconds-{rank}")) for rank in range(ranks))
    finally:
        shutil.rmtree(folder)


def timed(body):
    dist.barrier()
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def by_ptcfs(rank, job_path):
    def load():
        if rank == 0:
            with open(job_path + "/layout.json", "w", encoding="utf-8") as file:
                json.dump({"tp": AFTER, "pp": 1, "dp": 1}, file)
        while not os.readlink(job_path + "/current").endswith(f"tp{AFTER}-pp1-dp1"):
            time.sleep(0.0005)
        state = safetensors.torch.load_file(f"{job_path}/current/rank/{rank}/model.safetensors")
        return state
    return timed(load)


def by_slices(rank, path):
    def load():
        state = {}
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():
                view = file.get_slice(name)
                state[name] = view[part(view.get_shape(), axis_of(name), rank, AFTER)].clone()
    return timed(load)


def empty_state(tensors, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for name, _, shape in tensors:
        local = torch.empty([s.stop - s.start if s.stop else n for s, n in
                             zip(part(shape, axis_of(name), 0, ranks), shape)], dtype=torch.bfloat16)
        state[name] = DTensor.from_local(local, mesh, placement(name), run_check=False)
    return state


def save_dcp(rank, path, whole, tensors):
    del tensors
    mesh = init_device_mesh("cpu", (BEFORE,))
    state = {name: distribute_tensor(tensor, mesh, placement(name))
             for name, tensor in safetensors.torch.load_file(whole).items()}
    dcp.save(state, checkpoint_id=path)


def by_dcp(rank, path, tensors):
    state = empty_state(tensors, AFTER)
    return timed(lambda: dcp.load(state, checkpoint_id=path))


def by_dcp_of_hugging_face(rank, path, tensors):
    state = empty_state(tensors, AFTER)
    reader = dcp.HuggingFaceStorageReader(path)
    return timed(lambda: dcp.load(state, storage_reader=reader))


def by_gloo(rank, tensors):
    """Ranks 0 and 2 of the four go on, as 0 and 1: each has its own half and gets the next one's."""
    mine = {name: torch.ones([s.stop - s.start if s.stop else n for s, n in
                              zip(part(shape, axis_of(name), rank, BEFORE), shape)],
                             dtype=torch.bfloat16)
            for name, _, shape in tensors}

    def exchange():
        for name, _, _ in tensors:
            axis = axis_of(name)
            if axis is None:
                continue
            if rank % 2 == 1:
                dist.send(mine[name], rank - 1)
                continue
            other = torch.empty_like(mine[name])
            dist.recv(other, rank + 1)
            torch.cat((mine[name], other), axis)
    return timed(exchange)


def main():
    options = bench.options(__doc__, mib=400, rounds=3, pause=5)
    config, tensors = bench.llama(8, bench.hidden_for(options.mib, 8))
    with bench.plain_tmpfs() as plain, \
            mount.Mount("--memory", f"{options.mib * 3 + 256}M") as daemon:
        job = daemon.job("bench")
        bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
        whole = plain + "/hf/model.safetensors"
        bench.Writer(tensors).write(whole)
        bench.copy(whole, job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        run(BEFORE, save_dcp, plain + "/dcp", whole, tensors)
        ratios = bench.Ratios()
        for _ in range(options.rounds):
            job.set_layout(tp=BEFORE)
            time.sleep(options.pause)
            base = run(AFTER, by_ptcfs, job.path)
            ratios.add("ptcfs: seconds", base)
            time.sleep(options.pause)
            ratios.add("safetensors slices / ptcfs", run(AFTER, by_slices, whole) / base)
            time.sleep(options.pause)
            ratios.add("torch DCP / ptcfs", run(AFTER, by_dcp, plain + "/dcp", tensors) / base)
            time.sleep(options.pause)
            ratios.add("torch DCP, HF / ptcfs",
                       run(AFTER, by_dcp_of_hugging_face, plain + "/hf", tensors) / base)
            time.sleep(options.pause)
            ratios.add("gloo / ptcfs", run(BEFORE, by_gloo, tensors) / base)
        print(f"tp{BEFORE} -> tp{AFTER} of {options.mib} MiB")
        ratios.print()


if __name__ == "__main__":
    main()
