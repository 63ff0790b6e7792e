#!/usr/bin/env python3
"""Reading a rank's file that lies on another node: how fast, and how much of it moves.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/remote.py [--mib 376] [--rounds 5] [--against OTHER/build/bin]

Three daemons in network namespaces; the file lies on w0, and w1 reads it. The baseline of a round are the same bytes
through one TCP connection between the two, from a file to memory. With --against, w2 is a daemon of another build,
which reads the same file in the same round. All readers start anew for each round, so nothing is cached.

all        read() of 1 MiB from front to back, and one byte of each page of a mapping: times as multiples of the
           baseline's, first and again (of a new open)
a little   8 bytes in the middle, of a file just opened: bytes that came over the link
4 KiB      at random places: times as multiples of a question and its answer of 4 KiB through one TCP connection
           between two idle processes on the two nodes, first and again; and in microseconds
"""
import argparse
import os
import random
import statistics
import subprocess
import sys
import time

import bench
from reads import ACTIONS

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
import cluster  # noqa: E402

PORT = 7171
SEND = f"""
import socket, sys
with socket.create_server(("", {PORT})) as server, open(sys.argv[1], "rb") as file:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.sendfile(file)
"""
RECEIVE = f"""
import socket, sys, time
buffer = bytearray(1 << 20)
start = time.perf_counter()
with socket.create_connection((sys.argv[1], {PORT})) as connection:
    while connection.recv_into(buffer):
        pass
print(time.perf_counter() - start)
"""
ANSWER = f"""
import socket
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(8):
        connection.sendall(bytes(4096))
"""
ASK = f"""
import socket, statistics, sys, time
times = []
with socket.create_connection((sys.argv[1], {PORT})) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(400):
        start = time.perf_counter()
        connection.sendall(bytes(8))
        left = 4096
        while left:
            left -= len(connection.recv(left))
        times.append(time.perf_counter() - start)
print(statistics.median(times) * 1e6)
"""


def between_two(nodes, serve, ask, *arguments):
    """What `ask` prints on w1 of what `serve` serves on w0."""
    with subprocess.Popen([*nodes.launcher("w0"), sys.executable, "-c", serve, *arguments], stdout=subprocess.PIPE,
                          text=True) as server:
        server.stdout.readline()
        done = subprocess.run([*nodes.launcher("w1"), sys.executable, "-c", ask, nodes.nodes[0].address],
                              capture_output=True, text=True, check=True)
    return float(done.stdout)


def by_tcp(nodes, image):
    """Seconds."""
    return between_two(nodes, SEND, RECEIVE, image)


def round_trip(nodes):
    """Microseconds."""
    return between_two(nodes, ANSWER, ASK)


def renew(nodes, number):
    nodes.stop(number)
    nodes.start(number)
    nodes.wait_members()
    nodes.wait_settled("bench")


def places(path, count=200):
    return random.Random(1).sample(range(0, os.path.getsize(path) - 4096, 1 << 16), count)


def microseconds(path):
    """Of pread(4 KiB), the median over many places."""
    times = []
    with open(path, "rb", buffering=0) as file:
        for place in places(path):
            start = time.perf_counter()
            os.pread(file.fileno(), 4096, place)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def look(path):
    with open(path, "rb", buffering=0) as file:
        os.pread(file.fileno(), 8, os.path.getsize(path) // 2)


def measure(nodes, reader, what, ratios, baseline, trip):
    path = nodes.job(reader, "bench").rank_file("base", "tp1-pp1-dp1", 0)
    for name in ("read(1 MiB)", "mmap"):
        renew(nodes, reader)
        ratios.add(f"{what}: {name}, first", bench.seconds(ACTIONS[name], path) / baseline)
        ratios.add(f"{what}: {name}, again", bench.seconds(ACTIONS[name], path) / baseline)
    renew(nodes, reader)
    before = nodes.bytes_received(reader)
    look(path)
    ratios.add(f"{what}: 8 bytes, KiB moved", (nodes.bytes_received(reader) - before) / 1024)
    renew(nodes, reader)
    for times in ("first", "again"):
        taken = microseconds(path)
        ratios.add(f"{what}: 4 KiB, {times}", taken / trip)
        ratios.add(f"{what}: 4 KiB, {times}, µs", taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=376, help="MiB of the file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", help="directory with the ptcfs of another build")
    given = parser.parse_args()
    bench.need_root()
    with cluster.Cluster(3 if given.against else 2, memory=f"{given.mib * 2 + 512}M") as nodes:
        job = nodes.job(0, "bench")
        config, tensors = bench.llama(8, bench.hidden_for(given.mib, 8, vocabulary=8000), vocabulary=8000)
        rank = job.incoming("base") + "/rank/0"
        bench.write_json(rank + "/config.json", config)
        bench.Writer(tensors).write(rank + "/model.safetensors")
        job.commit("base")
        job.set_layout(devices=["w0:0"])
        nodes.wait_settled("bench")
        if given.against:
            nodes.nodes[2].bin = given.against
        images = os.path.join(nodes.nodes[0].store, "images")
        image = max((os.path.join(images, name) for name in os.listdir(images)), key=os.path.getsize)
        ratios = bench.Ratios()
        for _ in range(given.rounds):
            baseline, trip = by_tcp(nodes, image), round_trip(nodes)
            measure(nodes, 1, "this", ratios, baseline, trip)
            if given.against:
                measure(nodes, 2, "other", ratios, baseline, trip)
        print(f"a file of {os.path.getsize(image) >> 20} MiB on another node, times as multiples of one TCP connection's")
        ratios.print()


if __name__ == "__main__":
    main()
