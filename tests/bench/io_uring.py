#!/usr/bin/env python3
"""What takes a round trip to the daemon, with requests by io_uring and by /dev/fuse: speed, /dev/fuse = 1.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/io_uring.py [--files 2000] [--rounds 5] [--stay]

Two daemons of one build with the same content, measured in turns; the kernel offers io_uring (enable_uring) for the moment in
which one of them mounts. Each round begins on fresh mounts. Parameters also as a ratio to a plain tmpfs. --stay: the caller
stays on one processor.
"""
import argparse
import contextlib
import os
import random
import subprocess

import bench
import squashfs
from bench import mount

numpy = mount.require("numpy")
OFFERED = "/sys/module/fuse/parameters/enable_uring"
CALLS = 4000


class Rings(mount.Mount):
    def start(self):
        before = mount.read_text(OFFERED)
        with open(OFFERED, "w", encoding="utf-8") as file:
            file.write("Y")
        try:
            super().start()
        finally:
            with open(OFFERED, "w", encoding="utf-8") as file:
                file.write(before)


def load_all(paths):
    for path in paths:
        numpy.load(path).view(numpy.uint32).sum()


def open_and_close(paths):
    for path in paths:
        os.close(os.open(path, os.O_RDONLY))


def ask(path):
    for _ in range(CALLS):
        os.statvfs(path)


def read_here_and_there(path, seed):
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    places = random.Random(seed).sample(range(os.fstat(file).st_size // 4096), CALLS)
    for place in places:
        os.pread(file, 4096, place * 4096)
    os.close(file)


def at_once(action, *arguments):
    """Two processes."""
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                action(*arguments)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def list_all(path):
    subprocess.run(["ls", "-lR", path], stdout=subprocess.DEVNULL, check=True)


class Side:
    """A daemon with its content."""

    def __init__(self, daemon, top, files):
        self.daemon = daemon
        job = daemon.job("bench")
        tensors = [(f"m.g{i // 100}.p{i % 100}", "F32", (16, 256)) for i in range(files)]
        bench.Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors")
        bench.flat_rules(job)
        job.commit("base")
        self.tree = job.checkpoint("base", "model")
        self.arrays = [os.path.join(self.tree, f"m/g{i // 100}/p{i % 100}.npy") for i in range(files)]
        large = daemon.job("large")
        config, parameters = bench.llama(4, 1024)
        bench.write_json(large.incoming("base") + "/rank/0/config.json", config)
        bench.Writer(parameters).write(large.incoming("base") + "/rank/0/model.safetensors")
        large.commit("base")
        self.computed = large.rank_file("base", "tp2-pp1-dp1", 0)
        self.samples_job = daemon.job("samples")
        bench.write_json(self.samples_job.file("dataset/source.json"), {"shards": top + "/source"})

    def new_samples(self, seed):
        epoch = squashfs.head_of(self.samples_job, seed) + "/rank-000/files/e000"
        self.samples = [f"{epoch}/{part}/{name}" for part in sorted(os.listdir(epoch))
                        for name in os.listdir(f"{epoch}/{part}")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stay", action="store_true", help="the caller stays on one processor")
    options = parser.parse_args()
    bench.need_root()
    everywhere = os.sched_getaffinity(0)
    here = {min(everywhere)} if options.stay else everywhere
    speed, to_tmpfs = bench.Ratios(), bench.Ratios()
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(bench.plain_tmpfs())
        squashfs.write_files(top + "/source", options.files, 10000)
        memory = ("--memory", "1G", "--cache", "1M")
        sides = [
            Side(stack.enter_context(daemon), top, options.files)
            for daemon in (mount.Mount(*memory), Rings("--io-uring", "on", *memory))]
        by_device, by_rings = sides
        theirs = [os.path.join(top, os.path.relpath(path, by_device.tree)) for path in by_device.arrays]
        for source, target in zip(by_device.arrays, theirs):
            bench.copy(source, target)
        load_all(theirs)

        def both(what, action, of):
            """Seconds of each; who is first changes."""
            taken = {}
            for side in sides:
                os.sched_setaffinity(0, here)
                taken[side] = bench.seconds(action, *of(side))
                os.sched_setaffinity(0, everywhere)  # a daemon that is started has it, too
            sides.reverse()
            speed.add(what, taken[by_device] / taken[by_rings])
            return taken

        for seed in range(options.rounds):
            for side in sides:
                side.daemon.stop()
                side.daemon.start()
            both("ls -lR, cold", list_all, lambda side: [side.tree])
            for what in (".npy of 16 KiB: first", ".npy of 16 KiB: again"):
                plain = bench.seconds(load_all, theirs)
                taken = both(what, load_all, lambda side: [side.arrays])
                to_tmpfs.add(what + ", io_uring", plain / taken[by_rings])
                to_tmpfs.add(what + ", /dev/fuse", plain / taken[by_device])
            both("a question (statfs)", ask, lambda side: [side.daemon.path])
            both("statfs, two callers", at_once, lambda side: [ask, side.daemon.path])
            both("4 KiB computed, here and there", read_here_and_there, lambda side: [side.computed, seed])
            for side in sides:
                side.new_samples(seed)
            both("samples: first", squashfs.read_files, lambda side: [side.samples])
            both("samples: again", squashfs.read_files, lambda side: [side.samples])
            both("samples: OPEN, RELEASE", open_and_close, lambda side: [side.samples])
            both("OPEN, RELEASE, two callers", at_once, lambda side: [open_and_close, side.samples])
    print(f"{options.files} of each; speed, /dev/fuse = 1")
    speed.print()
    print("speed, tmpfs = 1")
    to_tmpfs.print()


if __name__ == "__main__":
    main()
