#!/usr/bin/env python3
"""How fast a node takes an image from another over loopback, as ratios to one stream of iperf3.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/stream.py [--mib 2048] [--rounds 5]

Both sides are two processes. iperf3 moves the same bytes again and again and looks at none; a fetch reads
an image, checks CRC32C on both sides, and puts every byte where it belongs.
"""
import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys

import bench

PROGRAM = os.path.join(os.environ.get("PTC_BIN_DIR", "build/bin"), "ptc_stream_bench")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def iperf3(mib):
    """Bytes a second that arrived."""
    port = str(free_port())
    with subprocess.Popen(["iperf3", "-s", "-1", "--forceflush", "-B", "127.0.0.1", "-p", port],
                          stdout=subprocess.PIPE, text=True) as server:
        while "listening" not in server.stdout.readline():
            pass
        done = subprocess.run(["iperf3", "-c", "127.0.0.1", "-p", port, "-n", f"{mib}M", "-J"],
                              capture_output=True, text=True)
        server.stdout.read()
    report = json.loads(done.stdout)
    if "sum_received" not in report["end"]:
        sys.exit(f"iperf3: {report.get('error', done.stderr)}")
    return report["end"]["sum_received"]["bits_per_second"] / 8


@contextlib.contextmanager
def serving(directory, mib):
    server = subprocess.Popen([PROGRAM, "serve", directory, str(mib)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    try:
        yield server.stdout.readline().split()
    finally:
        server.stdin.close()
        server.wait()


def fetch(address, image, mib, run):
    """Bytes a second."""
    done = subprocess.run([PROGRAM, "fetch", address, image, str(mib), str(run)], check=True,
                          capture_output=True, text=True)
    return (mib << 20) / (2 if run else 1) / float(done.stdout)


RUNS = {"one run": 0, "runs of 64 KiB": 64 << 10, "runs of 4 KiB": 4 << 10, "runs of 256 bytes": 256}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not shutil.which("iperf3"):
        print("skipped: iperf3 is not installed (tools/install-deps --tests)")
        sys.exit(77)
    bench.need_root()
    ratios, speed = bench.Ratios(), bench.Ratios()
    with bench.plain_tmpfs(huge="always") as directory, serving(directory, options.mib) as (address, image):
        for _ in range(options.rounds):
            base = iperf3(options.mib)
            speed.add("iperf3, one stream", base / 1e9)
            for name, run in RUNS.items():
                ratios.add(name, fetch(address, image, options.mib, run) / base)
    speed.print(" GB/s")
    print("fetched, as a multiple of iperf3's bytes a second:")
    ratios.print()


if __name__ == "__main__":
    main()
