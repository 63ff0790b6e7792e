#!/usr/bin/env python3
"""How fast files of a checkpoint are read, as ratios to a plain tmpfs in the same run.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/reads.py [--mib 512] [--rounds 7]

Every round reads, in turn: a copy on a tmpfs with pages of 4 KiB (the baseline), the materialised
file through the mount, a file that is computed on read (its first open, gathering included), and
the same once more. Printed are medians over the rounds of each one's ratio to the baseline of its
own round, for read() with a buffer of 1 MiB and for a sum over a mapping. Needs root (it mounts).
"""
import argparse
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import mount  # noqa: E402

BUFFER = bytearray(1 << 20)


def read_all(path):
    with open(path, "rb", buffering=0) as file:
        while file.readinto(BUFFER):
            pass


def map_all(path):
    """One byte of every page: the cost of mapping, without Python's own of reading."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
            bytes(mapping[::4096])


def seconds(action, path):
    start = time.perf_counter()
    action(path)
    return time.perf_counter() - start


def write_model(path, mib):
    """Square matrices of a Llama's attention, 32 MiB each, bf16."""
    side, header, offset = 4096, {}, 0
    for layer in range(max(1, mib // 32)):
        header[f"model.layers.{layer}.self_attn.q_proj.weight"] = {
            "dtype": "BF16", "shape": [side, side], "data_offsets": [offset, offset + 2 * side**2]}
        offset += 2 * side**2
    text = repr(header).replace("'", '"').encode()
    text += b" " * (-len(text) % 8)
    block = os.urandom(1 << 20)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(offset >> 20):
            file.write(block)


def write_job(job, mib):
    os.makedirs(job.incoming("base") + "/rank/0")
    write_model(job.incoming("base") + "/rank/0/model.safetensors", mib)
    with open(job.incoming("base") + "/rank/0/config.json", "w", encoding="utf-8") as file:
        file.write('{"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 32, '
                   '"num_hidden_layers": %d}' % max(1, mib // 32))
    os.rename(job.incoming("base"), job.file("checkpoints", "base"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=512, help="size of a rank's file")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("reads.py: mounts a tmpfs for its baseline, so it must be root")
    plain = tempfile.mkdtemp(prefix="ptcfs-bench-")
    mib = 2 * options.mib  # two ranks, or halves, of it
    subprocess.run(["mount", "-t", "tmpfs", "-o", "huge=never", "ptcfs-bench", plain], check=True)
    try:
        with mount.Mount("--memory", f"{4 * mib + 256}M",
                         "--cache", f"{options.mib * 5 // 4}M") as daemon:
            job = daemon.job("bench")
            write_job(job, mib)
            job.set_layout(tp=1, pp=2, dp=1)
            job.wait()
            stored = job.file("current/rank/0/model.safetensors")
            computed = [job.checkpoint("base", f"layouts/tp2-pp1-dp1/rank/{r}/model.safetensors")
                        for r in (0, 1)]
            baseline = os.path.join(plain, "file")
            with open(stored, "rb") as source, open(baseline, "wb") as target:
                while block := source.read(1 << 20):
                    target.write(block)
            run(options, baseline, stored, computed)
    finally:
        subprocess.run(["umount", plain], check=True)
        os.rmdir(plain)


def run(options, baseline, stored, computed):
    print(f"files of {os.path.getsize(stored) >> 20} MiB, {options.rounds} rounds")
    for name, action in (("read", read_all), ("mmap", map_all)):
        ratios, rates = {}, []
        for i in range(options.rounds + 1):
            path = computed[i % 2]  # the cache holds one: each first open gathers, into used memory
            base = seconds(action, baseline)
            times = {"materialised": seconds(action, stored),
                     "computed, first open": seconds(action, path),
                     "computed, again": seconds(action, path)}
            if i == 0:
                continue  # fresh pages
            rates.append(os.path.getsize(baseline) / base / 1e9)
            for what, took in times.items():
                size = os.path.getsize(path if "computed" in what else stored)
                ratios.setdefault(what, []).append(
                    size / took / (os.path.getsize(baseline) / base))
        print(f"{name}: plain tmpfs {statistics.median(rates):.2f} GB/s = 1")
        for what, values in ratios.items():
            print(f"  {what:22} {statistics.median(values):5.2f}   "
                  f"({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
