#!/usr/bin/env python3
"""A change of parallelism of a state that four ranks of tensor parallelism wrote: ptcfs and what else does it.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/peers.py [--to tp2|tp8|fsdp4] [--mib 400] [--rounds 3] [--pause 5]

The state is a Llama in bf16. Every way begins with what it keeps of four ranks and ends when all processes of the new
layout, each with torch, have their own tensors in memory of their own:

  ptcfs              ptc.load of layouts/<new>/ with copy=True: from where the bytes of the four lie
  ptcfs, reshard     saves layout.json, waits until it is in force, loads a rank's file of `current`
  ptcfs, at once     saves layout.json, and loads from layouts/<new>/ while the reshard goes on
  ptcfs, computed    a rank's file under layouts/<new>/ read by safetensors: the daemon computes it then
  safetensors        safe_open and get_slice of the whole model's file on a tmpfs
  torch DCP          torch.distributed.checkpoint.load of DTensors from a .distcp directory on a tmpfs
  torch DCP, HF      the same from safetensors, with the HuggingFaceStorageReader
  gloo               the tensors are in the memory of the four processes, and go from each to whom they belong

Times are from a barrier on until the last process is done; peers' are multiples of ptcfs's of the round. Bytes read are
those of the first: multiples of what the new ranks' tensors have. At the end is said which goals were reached.
"""
import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time

import bench
from bench import mount
from goals import judge

torch = mount.require("torch")
safetensors = mount.require("safetensors")
import safetensors.torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "python"))
import ptc  # noqa: E402

BEFORE = 4
FASTER = 1.01  # than a peer, by as much as is printed
PEERS = ("safetensors slices", "torch DCP", "torch DCP, HF", "gloo")
AT_ONCE = 0.7
REASON = "see the other ratios, how far the rounds are apart, and what else ran"


def cut_by_tp(name):
    """Where Megatron's way cuts a Llama; None: nowhere."""
    if "norm" in name:
        return None
    return 1 if "o_proj" in name or "down_proj" in name else 0


def cut_by_fsdp(name):
    del name
    return 0


# The new layout: ranks, which axis each cuts, and as layout.json.
TARGETS = {"tp2": (2, cut_by_tp, {"tp": 2}),
           "tp8": (8, cut_by_tp, {"tp": 8}),
           "fsdp4": (4, cut_by_fsdp, {"dp": 4, "optimizer": "fsdp"})}


def part(shape, axis, rank, ranks):
    if axis is None:
        return tuple(slice(0, extent) for extent in shape)
    step = shape[axis] // ranks
    return tuple(slice(rank * step, (rank + 1) * step) if i == axis else slice(0, extent)
                 for i, extent in enumerate(shape))


def extents(slices):
    return [one.stop - one.start for one in slices]


def placement(axis):
    return [Replicate() if axis is None else Shard(axis)]


def with_group(rank, ranks, folder, body, *arguments):
    """One process of a gloo group; when it began and ended what is timed is left in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank,
                            world_size=ranks)
    try:
        times = body(rank, *arguments)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    with open(f"{folder}/times-{rank}", "w", encoding="utf-8") as file:
        json.dump(times or (0, 0), file)


def run(ranks, body, *arguments):
    """Seconds from when the first of so many processes begins until the last has ended."""
    folder = tempfile.mkdtemp(prefix="ptcfs-bench-")
    try:
        # Forked from one that has imported all of this, which takes seconds of a processor each time.
        os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
        multiprocessing.set_forkserver_preload(["peers"])
        multiprocessing.start_processes(with_group, (ranks, folder, body, *arguments), nprocs=ranks, start_method="forkserver")
        times = [mount.read_json(f"{folder}/times-{rank}") for rank in range(ranks)]
        return max(end for _, end in times) - min(begin for begin, _ in times)
    finally:
        shutil.rmtree(folder)


def timed(body):
    dist.barrier()
    begin = time.perf_counter()  # the same clock in all processes
    kept = body()
    end = time.perf_counter()
    del kept
    return begin, end


def load_of_its_own(path):
    """safetensors maps the file: what is mapped is not read yet."""
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}


def by_ptcfs(rank, job_path, to, name, how):
    edit, wait = how in ("reshard", "at once"), how == "reshard"
    where = f"{job_path}/checkpoints/base/layouts/{name}"

    def load():
        if edit and rank == 0:
            with open(job_path + "/layout.json", "w", encoding="utf-8") as file:
                json.dump({"tp": 1, "pp": 1, "dp": 1, **TARGETS[to][2]}, file)
        while wait and not os.readlink(job_path + "/current").endswith(name):
            time.sleep(0.005)  # each rank waits; who looks all the time takes the processors that the copy has
        if how == "computed":
            return load_of_its_own(f"{where}/rank/{rank}/model.safetensors")
        return ptc.load(where, rank=rank, copy=True)
    return timed(load)


def by_slices(rank, path, to):
    ranks, axis_of, _ = TARGETS[to]

    def load():
        state = {}
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():
                view = file.get_slice(name)
                state[name] = view[part(view.get_shape(), axis_of(name), rank, ranks)].clone()
        return state
    return timed(load)


def empty_state(tensors, to):
    ranks, axis_of, _ = TARGETS[to]
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for name, _, shape in tensors:
        axis = axis_of(name)
        local = torch.empty(extents(part(shape, axis, 0, ranks)), dtype=torch.bfloat16)
        state[name] = DTensor.from_local(local, mesh, placement(axis), run_check=False)
    return state


def save_dcp(rank, path, whole):
    del rank
    mesh = init_device_mesh("cpu", (BEFORE,))
    state = {name: distribute_tensor(tensor, mesh, placement(cut_by_tp(name)))
             for name, tensor in safetensors.torch.load_file(whole).items()}
    dcp.save(state, checkpoint_id=path)


def by_dcp(rank, path, tensors, to):
    del rank
    state = empty_state(tensors, to)
    return timed(lambda: dcp.load(state, checkpoint_id=path))


def by_dcp_of_hugging_face(rank, path, tensors, to):
    del rank
    state = empty_state(tensors, to)
    reader = dcp.HuggingFaceStorageReader(path)
    return timed(lambda: dcp.load(state, storage_reader=reader))


def common(one, other):
    """What two parts of a tensor have in common; None: nothing."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other))
    return None if any(cut.start >= cut.stop for cut in both) else both


def within(cut, whole):
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(cut, whole))


def holder(wanted, held, cut):
    """Who gives it: whoever has all of it and is nearest; of what is replicated nobody else is asked."""
    return min((rank for rank, part_held in enumerate(held) if common(part_held, cut) == cut),
               key=lambda rank: abs(rank - wanted))


def by_gloo(rank, tensors, to):
    """Each process of the new layout gets its part from the four, all at once; what it has itself it copies."""
    ranks, axis_of, _ = TARGETS[to]
    plan, mine = [], {}
    for name, _, shape in tensors:
        held = [part(shape, cut_by_tp(name), one, BEFORE) for one in range(BEFORE)]
        if rank < BEFORE:
            mine[name] = torch.ones(extents(held[rank]), dtype=torch.bfloat16)
        for wanted in range(ranks):
            needs = part(shape, axis_of(name), wanted, ranks)
            cuts = {tuple((c.start, c.stop) for c in cut): cut for cut in
                    (common(needs, one) for one in held) if cut is not None}
            for cut in cuts.values():
                plan.append((name, wanted, needs, holder(wanted, held, cut), held, cut))

    def exchange():
        state, arriving, leaving = {}, [], []
        for tag, (name, wanted, needs, giver, held, cut) in enumerate(plan):
            if wanted == rank and name not in state:
                state[name] = torch.empty(extents(needs), dtype=torch.bfloat16)
            if wanted == rank and giver != rank:
                buffer = torch.empty(extents(cut), dtype=torch.bfloat16)
                arriving.append((dist.irecv(buffer, giver, tag=tag), name, within(cut, needs), buffer))
            elif wanted == rank:
                state[name][within(cut, needs)] = mine[name][within(cut, held[rank])]
            elif giver == rank:
                buffer = mine[name][within(cut, held[rank])].contiguous()
                leaving.append((dist.isend(buffer, wanted, tag=tag), buffer))
        for request, name, where, buffer in arriving:
            request.wait()
            state[name][where] = buffer
        for request, _ in leaving:
            request.wait()
        return state
    return timed(exchange)


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--to", choices=TARGETS, default="tp2", help="the new layout")
    for name, default in (("mib", 400), ("rounds", 3), ("pause", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help=bench.MEANINGS[name])
    given = parser.parse_args()
    bench.need_root()
    return given


def main():
    given = options()
    ranks = TARGETS[given.to][0]
    config, tensors = bench.llama(8, bench.hidden_for(given.mib, 8))
    with bench.plain_tmpfs() as plain, \
            mount.Mount("--memory", f"{given.mib * 3 + 256}M") as daemon:
        job = daemon.job("bench")
        bench.write_json(job.incoming("base") + "/rank/0/config.json", config)
        whole = plain + "/hf/model.safetensors"
        bench.Writer(tensors).write(whole)
        bench.copy(whole, job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        run(BEFORE, save_dcp, plain + "/dcp", whole)
        ratios = bench.Ratios()
        job.set_layout(**TARGETS[given.to][2])
        name = os.path.basename(os.readlink(job.file("current")))
        job.set_layout(tp=BEFORE)

        def measure(processes, body, *arguments):
            time.sleep(given.pause)
            return run(processes, body, *arguments)

        def of_four(how):
            job.set_layout(tp=BEFORE)
            daemon.stop()  # it may have what was computed before in memory
            daemon.start()
            return measure(ranks, by_ptcfs, job.path, given.to, name, how)

        def bytes_read():
            """By what the daemon says of where they lie."""
            total = needed = 0
            for rank in range(ranks):
                path = os.path.dirname(job.rank_file("base", name, rank))
                needed += os.path.getsize(path + "/model.safetensors")
                described = json.loads(mount.read_text(path + "/.sources.json"))["files"]["model.safetensors"]
                needed -= 8 + len(described["header"])
                total += sum(run * math.prod(levels[::3]) for _, _, _, run, *levels in described["copies"])
            return total / needed

        ratios.add("bytes read / needed", bytes_read())
        for _ in range(given.rounds):
            base = of_four("where they lie")
            ratios.add("ptcfs: seconds", base)
            reshard = of_four("reshard")
            ratios.add("ptcfs, reshard / ptcfs", reshard / base)
            ratios.add("ptcfs, at once / reshard", of_four("at once") / reshard)
            ratios.add("ptcfs, computed / ptcfs", of_four("computed") / base)
            ratios.add("safetensors slices / ptcfs", measure(ranks, by_slices, whole, given.to) / base)
            ratios.add("torch DCP / ptcfs", measure(ranks, by_dcp, plain + "/dcp", tensors, given.to) / base)
            ratios.add("torch DCP, HF / ptcfs",
                       measure(ranks, by_dcp_of_hugging_face, plain + "/hf", tensors, given.to) / base)
            ratios.add("gloo / ptcfs", measure(max(ranks, BEFORE), by_gloo, tensors, given.to) / base)
        print(f"tp{BEFORE} -> {given.to} of {given.mib} MiB")
        ratios.print()
        judge(ratios, {f"{peer} / ptcfs": FASTER for peer in PEERS}, REASON, at_least=True)
        judge(ratios, {"ptcfs, at once / reshard": AT_ONCE}, REASON)


if __name__ == "__main__":
    main()
