#!/usr/bin/env python3
"""A rank's tensors between its files and a GPU: ptc.load and ptc.save, and what others take.

    build/venv/bin/python tests/bench/device.py [--mib 2500] [--rounds 5] [--host]

Needs PyTorch with CUDA and a GPU, and no root: the files are in /dev/shm, where a store's are as a rule. The state is a
Llama in bf16, one rank's. In each round, each from a process's second time on:

  load                 ptc.load(…, device="cuda"): from the files' pages to tensors on the GPU
  save                 ptc.save of tensors on the GPU, until the files are whole
  standstill           until ptc.save(…, wait=False) has returned, and training may go on

  pinned copy          one copy of as many bytes from pinned memory to the GPU, or back
  copy on the device   of as many bytes
  safetensors          load_file(device="cuda"); torch.load(mmap=True, map_location="cuda"); fastsafetensors, where it is installed

Printed are the others' times over ptcfs's, of the same round: 1 is as fast, more is faster than they. `--host` tries the
script without a GPU, with tensors of the host: such figures say nothing of one.
"""
import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "..", "tools", "python")]
from goals import verdict  # noqa: E402

try:
    import torch
except ImportError:
    print("skipped: Python has no torch here")
    sys.exit(77)
import ptc  # noqa: E402
from ptc import device as gpus  # noqa: E402
try:
    from safetensors.torch import load_file
except ImportError:
    load_file = None

# name: (goal, of which two times)
GOALS = {"load, pinned copy": 0.95, "load, safetensors": 3.0, "save, pinned copy": 0.9, "standstill, copy on the device": 1 / 1.1}


class Bench:
    def __init__(self, given, folder):
        self.folder, self.device = folder, "cpu" if given.host else "cuda:0"
        hidden = max(256, int((given.mib * 2 ** 20 / (16 * 13.5 * 2)) ** 0.5) // 128 * 128)
        generator = torch.Generator().manual_seed(1)

        def weight(*shape):
            return torch.randint(-2 ** 15, 2 ** 15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
        names = {}
        for layer in range(16):
            at = f"model.layers.{layer}."
            names |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
            names |= {at + f"self_attn.{one}_proj.weight": (hidden if one in "qo" else hidden // 4, hidden) for one in "qkvo"}
            names |= {at + f"mlp.{one}_proj.weight": (hidden, hidden * 7 // 2) if one == "down" else (hidden * 7 // 2, hidden)
                      for one in ("gate", "up", "down")}
        self.tensors = {name: weight(*shape) for name, shape in names.items()}
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        ptc.save({"model": self.tensors}, folder + "/rank", rank=0)
        torch.save(self.tensors, folder + "/state.pt")
        self.on_device = {name: tensor.to(self.device) for name, tensor in self.tensors.items()}
        self.pinned = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=not given.host).fill_(1)
        self.there = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        self.saves = 0

    def wait(self):
        if self.device != "cpu":
            torch.cuda.synchronize()

    def timed(self, call):
        self.wait()
        start = time.perf_counter()
        result = call()
        self.wait()
        return time.perf_counter() - start, result

    def load(self):
        seconds, state = self.timed(lambda: ptc.load(self.folder + "/rank", self.device, rank=0, copy=self.device == "cpu"))
        for name, tensor in self.on_device.items():
            assert torch.equal(state["model"][name].view(torch.int16), tensor.view(torch.int16)), name
        return seconds

    def next_save(self):
        shutil.rmtree(f"{self.folder}/save{self.saves - 1}", ignore_errors=True)  # as training keeps the last one
        self.saves += 1
        return f"{self.folder}/save{self.saves}"

    def save(self):
        where = self.next_save()
        seconds, _ = self.timed(lambda: ptc.save({"model": self.on_device}, where, rank=0))
        found = ptc.load(where, rank=0)["model"]
        assert all(torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in self.tensors.items())
        return seconds

    def standstill(self):
        where = self.next_save()
        seconds, future = self.timed(lambda: ptc.save({"model": self.on_device}, where, False, rank=0))
        future.result()
        return seconds

    def safetensors(self):
        return self.timed(lambda: load_file(self.folder + "/rank/model.safetensors", device=self.device))[0]

    def fastsafetensors(self):
        from fastsafetensors import fastsafe_open

        def load():
            with fastsafe_open(filenames=[self.folder + "/rank/model.safetensors"], nogds=True, device=self.device) as file:
                return {key: file.get_tensor(key).clone() for key in file.keys()}
        return self.timed(load)[0]

    def torch_load(self):
        return self.timed(lambda: {name: tensor.to(self.device) for name, tensor in
                                   torch.load(self.folder + "/state.pt", mmap=True).items()})[0]

    def measure(self):
        rows = {"pinned copy to it": self.timed(lambda: self.there.copy_(self.pinned, non_blocking=True))[0],
                "pinned copy back": self.timed(lambda: self.pinned.copy_(self.there, non_blocking=True))[0],
                "copy on the device": self.timed(lambda: self.there.clone())[0],
                "load": self.load(), "save": self.save(), "standstill": self.standstill(), "torch.load": self.torch_load()}
        if load_file is not None:
            rows["safetensors"] = self.safetensors()
        try:
            rows["fastsafetensors"] = self.fastsafetensors()
        except ImportError:
            pass
        return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--mib", type=int, default=2500, help="MiB of state")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each, of which the median is shown")
    parser.add_argument("--host", action="store_true", help="without a GPU, to try the script")
    given = parser.parse_args()
    if not given.host and not torch.cuda.is_available():
        print("skipped: there is no GPU here that PyTorch can use (--host tries the script)")
        sys.exit(77)
    folder = tempfile.mkdtemp(prefix="ptcfs-bench-", dir="/dev/shm")
    try:
        run(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(given, folder):
    bench = Bench(given, folder)
    by_driver = not given.host and gpus.driver_of("cuda:0") is not None
    print(f"{bench.bytes / 2 ** 20:.0f} MiB in {len(bench.tensors)} tensors, "
          + ("the host" if given.host else torch.cuda.get_device_name(0) + (", by its driver" if by_driver else ", by PyTorch's copies")))
    bench.measure()
    ratios = {}
    for _ in range(given.rounds):
        rows = bench.measure()
        pairs = {"load, pinned copy": (rows["pinned copy to it"], rows["load"]),
                 "save, pinned copy": (rows["pinned copy back"], rows["save"]),
                 "standstill, copy on the device": (rows["copy on the device"], rows["standstill"]),
                 "standstill, pinned copy": (rows["pinned copy back"], rows["standstill"])}
        pairs |= {f"load, {other}": (rows[other], rows["load"]) for other in ("safetensors", "fastsafetensors", "torch.load")
                  if other in rows}
        for what, (theirs, ours) in pairs.items():
            ratios.setdefault(what, []).append(theirs / ours)
    for what, values in ratios.items():
        print(f"  {what:34} {statistics.median(values):7.2f}   ({min(values):.2f} to {max(values):.2f})")
    for what, goal in GOALS.items():
        if what in ratios and not given.host:
            print(f"{what}: {verdict(statistics.median(ratios[what]), goal, 'no reason is known yet', at_least=True)}")


if __name__ == "__main__":
    main()
