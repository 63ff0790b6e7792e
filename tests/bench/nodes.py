#!/usr/bin/env python3
"""How long several nodes take to move state, as ratios to the time that the busiest link needs for its bytes.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/nodes.py [--mib 768] [--rounds 3] [--rate 1gbit] [one|layout|loss …]

Four daemons in network namespaces, every link shaped in both directions. The baseline of a round is the
largest number of bytes that the plan has in or out of one node, over the rate of one stream of iperf3
between two of the nodes in this round.

one      one holder, three nodes that all need the whole state (dp 3): the state's bytes, once
layout   tp4-pp2-dp1 -> tp2-pp2-dp2, all nodes
loss     one of the nodes is killed, of a state with one copy more: from when the others know until they have
         made the copies that are missing
"""
import argparse
import json
import os
import subprocess
import sys
import time

import bench

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
import cluster  # noqa: E402
from cluster import mount  # noqa: E402

NODES = 4
POLL_SECONDS = 0.005


def until(true):
    while not true():
        time.sleep(POLL_SECONDS)


def link_rate(nodes, seconds=2):
    """Bytes a second that arrive at w1 from w0 in one stream."""
    server_at, client_at = nodes.launcher("w1"), nodes.launcher("w0")
    with subprocess.Popen([*server_at, "iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE,
                          text=True) as server:
        while "listening" not in server.stdout.readline():
            pass
        done = subprocess.run([*client_at, "iperf3", "-c", nodes.nodes[1].address, "-t", str(seconds), "-J"],
                              capture_output=True, text=True, check=False)
        server.stdout.read()
    report = json.loads(done.stdout)
    if "sum_received" not in report["end"]:
        sys.exit(f"iperf3: {report.get('error', done.stderr)}")
    return report["end"]["sum_received"]["bits_per_second"] / 8


def busiest(plan):
    """The most bytes in or out of one node."""
    load = {}
    for pair in plan["pairs"]:
        if pair["source"] != pair["target"]:
            for end in (("out", pair["source"]), ("in", pair["target"])):
                load[end] = load.get(end, 0) + pair["bytes"]
    return max(load.values())


class Bench:
    def __init__(self, nodes, mib):
        self.nodes, self.mib, self.name = nodes, mib, "bench"

    def commit(self, **layout):
        """A job whose one checkpoint lies as the layout says."""
        job = self.nodes.job(0, self.name)
        config, tensors = bench.llama(layers=8, hidden=bench.hidden_for(self.mib, layers=8, vocabulary=8000),
                                      vocabulary=8000)
        rank = job.incoming("base") + "/rank/0"
        bench.write_json(rank + "/config.json", config)
        bench.Writer(tensors).write(rank + "/model.safetensors")
        job.commit("base")
        if layout:
            self.set(**layout)
        self.nodes.wait_settled(self.name)

    def set(self, **layout):
        """Seconds from the save until every node shows the layout in force."""
        links = [mount.Job(node, self.name).file("current") for node in self.nodes.alive()]
        name = "tp{tp}-pp{pp}-dp{dp}".format(**layout)
        job = mount.Job(self.nodes.nodes[0], self.name)
        start, self.cpu = time.perf_counter(), self.cpu_seconds()
        try:
            bench.write_json(job.file("layout.json"), layout)
        except OSError:
            sys.exit(f"refused: {job.error()}")
        until(lambda: all(os.readlink(link).endswith(name) for link in links))
        self.cpu = self.cpu_seconds() - self.cpu
        return time.perf_counter() - start

    def plans(self):
        """plan.json of each living node: one that led a change has that one's."""
        return [mount.read_json(mount.Job(node, self.name).file("plan.json")) for node in self.nodes.alive()]

    def new_plan(self, before):
        return next(plan for plan in self.plans() if plan.get("state") == "done" and plan not in before)

    def one(self):
        self.commit()
        before = self.plans()
        took = self.set(tp=1, pp=1, dp=3, devices=["w1:0", "w2:0", "w3:0"])
        plan = self.new_plan(before)
        return took, plan["bytes"]["moved"] / 3, plan

    def layout(self):
        self.commit(tp=4, pp=2, dp=1)
        before = self.plans()
        took = self.set(tp=2, pp=2, dp=2)
        plan = self.new_plan(before)
        return took, busiest(plan), plan

    def cpu_seconds(self):
        """Of all daemons, and etcd."""
        ticks = 0
        for pid in [node.process.pid for node in self.nodes.alive()] + [self.nodes.etcd.pid]:
            fields = mount.read_text(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def held(self):
        return sum(node.image_bytes() for node in self.nodes.alive())

    def loss(self):
        self.commit(tp=4, pp=1, dp=1, replicas=1)
        whole, before = self.held(), self.plans()
        killed = time.perf_counter()
        self.nodes.kill(3)
        watcher = self.nodes.nodes[0]
        until(lambda: "w3" not in watcher.members())
        start, self.cpu = time.perf_counter(), self.cpu_seconds()
        until(lambda: self.held() >= whole)
        self.nodes.wait_settled(self.name)
        self.cpu = self.cpu_seconds() - self.cpu
        took, self.since_kill = time.perf_counter() - start, time.perf_counter() - killed
        plan = self.new_plan(before)
        return took, busiest(plan), plan


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", nargs="*", default=["one", "layout", "loss"])
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", default="1gbit")
    options = parser.parse_args()
    mount.require_program("iperf3")
    ratios, facts = bench.Ratios(), bench.Ratios()
    for _ in range(options.rounds):
        for what in options.what:
            with cluster.Cluster(NODES, "--lease", "3", rate=options.rate,
                                 memory=f"{options.mib * 8 + 1024}M") as nodes:
                rate = link_rate(nodes)
                facts.add("link, MB/s", rate / 1e6)
                facts.add("load of the machine", os.getloadavg()[0])
                runs = Bench(nodes, options.mib)
                took, bound, plan = getattr(runs, what)()
                ratios.add(what, took / (bound / rate))
                facts.add(f"{what}: seconds", took)
                facts.add(f"{what}: CPU seconds, all nodes", runs.cpu)
                if what == "loss":
                    facts.add("loss: seconds since the kill, of a lease of 3", runs.since_kill)
                facts.add(f"{what}: MiB of the busiest link", bound / 2**20)
                facts.add(f"{what}: MiB moved in all", plan["bytes"]["moved"] / 2**20)
    facts.print()
    print("time, as a multiple of what the busiest link needs:")
    ratios.print()


if __name__ == "__main__":
    main()
