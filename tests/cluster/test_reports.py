"""What each node says of the cluster: all nodes, also those that are away, and no byte counted twice."""
import contextlib
import json
import os
import subprocess
import time
import unittest

import cluster
from cluster import mount
import models
import prometheus
from cases import BigLlama, TestCase, layout_name


class Reports(TestCase):
    def nodes_of(self, node):
        return mount.read_json(self.nodes.path(node, ".ptc/nodes.json"))

    def by_name(self, node):
        return {one["name"]: one for one in self.nodes_of(node)["nodes"]}

    def metrics(self, node):
        return prometheus.check(mount.read_text(self.nodes.path(node, ".ptc/metrics")))

    def agreed(self):
        """What nodes.json says of all nodes that is agreed on; once all say the same, and since when one is away."""
        keys = ("state", "since", "materialised_bytes", "drain")

        def said(node):
            return {name: [one.get(key) for key in keys] for name, one in self.by_name(node).items()}
        cluster.until(lambda: len({str(said(node)) for node in self.alive()}) == 1 and
                      None not in [since for _, since, *_ in said(self.alive()[0]).values()],
                      f"all nodes say the same: {[said(node) for node in self.alive()]}", 20)
        return {name: dict(zip(keys, values)) for name, values in said(self.alive()[0]).items()}

    def test_all_nodes_are_known_everywhere(self):
        self.commit(0, BigLlama(1), pp=2, devices=["w0:0", "w2:0"])
        agreed = self.agreed()
        self.assertEqual(sorted(agreed), ["w0", "w1", "w2"])
        for node in range(3):
            self.assertEqual(agreed[f"w{node}"]["materialised_bytes"], self.nodes.nodes[node].image_bytes())
            cluster.until(lambda node=node: all("memory_total_bytes" in one for one in self.by_name(node).values()),
                          f"w{node} has heard of all")
            whole, nodes = self.nodes_of(node)["cluster"], self.by_name(node).values()
            for one in nodes:
                self.assertEqual(one["state"], "up")
                self.assertGreater(one["memory_total_bytes"], one["memory_used_bytes"])
                self.assertIn("received_bytes", one["traffic"])
            memory = {os.stat(one.store).st_dev: self.by_name(node)[one.name]["memory_total_bytes"] for one in self.nodes.nodes}
            self.assertEqual(whole["memory_total_bytes"], sum(memory.values()))  # each file system once
            self.assertEqual(whole["materialised_bytes"], sum(one.image_bytes() for one in self.nodes.nodes))
            metrics = self.metrics(node)
            for one in nodes:
                self.assertEqual(metrics[("ptcfs_cluster_node_memory_limit_bytes", (("node", one["name"]),))],
                                 one["memory_total_bytes"])
        self.assertIn("w2 up", self.nodes.nodes[1].ptc("top", "--once").stdout)

        before = time.time()
        self.nodes.kill(2)
        self.nodes.wait_members()
        agreed = self.agreed()
        self.assertEqual([agreed[name]["state"] for name in ("w0", "w1", "w2")], ["up", "up", "away"])
        self.assertGreater(agreed["w2"]["materialised_bytes"], 0)
        since = agreed["w2"]["since"]
        self.assertGreater(since, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before - 1)))
        self.assertRegex("".join(self.nodes.nodes[0].ptc("top", "--once").stdout.split()), "w2away(for|since).*incheckpoints")
        self.assertRegex(self.nodes.nodes[0].ptc("status").stdout, r"\Anodes: w0 up, w1 up, w2 away (for|since) ")
        self.nodes.stop(1)  # one that was not there to see it knows it, too
        self.nodes.start(1)
        self.nodes.wait_members()
        self.assertEqual(self.by_name(1)["w2"]["since"], since)
        lost = self.job(0).status()["checkpoints"][0]["lost"]
        self.assertGreater(len(lost), 0)
        for node in (0, 1):
            self.assertEqual(self.metrics(node)[("ptcfs_job_lost_tensors", (("job", self.name),))], len(lost))
        metrics = self.metrics(1)
        self.assertEqual([metrics[("ptcfs_cluster_node_up", (("node", f"w{node}"),))] for node in range(3)], [1, 1, 0])
        self.assertGreater(metrics[("ptcfs_cluster_node_since_seconds", (("node", "w2"),))], before - 1)
        self.assertNotIn(("ptcfs_cluster_node_memory_used_bytes", (("node", "w2"),)), metrics)
        self.nodes.start(2)
        self.nodes.wait_members()
        agreed = self.agreed()
        self.assertEqual(agreed["w2"]["state"], "up")
        self.assertGreater(agreed["w2"]["since"], since)
        for node in range(3):
            self.assertEqual(self.metrics(node)[("ptcfs_job_lost_tensors", (("job", self.name),))], 0)

    def test_what_is_counted_of_calls(self):
        """Of another node, and of etcd."""
        self.commit(0, models.Llama(9))

        def of_peer(node, name, peer):
            return self.metrics(node)[(f"ptcfs_peer_{name}_total", (("peer", peer),))]
        calls, failed, seconds = (of_peer(0, name, "w1") for name in ("calls", "failed_calls", "call_seconds"))
        self.assertGreater(calls, failed)
        self.assertTrue(0 < seconds < 600)
        self.nodes.lose(0, 1)
        self.nodes.lose(1, 0)
        cluster.until(lambda: self.nodes_of(0) and of_peer(0, "failed_calls", "w1") > failed, "a call had no answer", 30)
        self.nodes.lose_nothing()
        cluster.until(lambda: self.nodes_of(0) and of_peer(0, "calls", "w1") - calls > of_peer(0, "failed_calls", "w1") - failed,
                      "others have one again", 30)

        def agreement(name):
            return self.metrics(0)[(f"ptcfs_agreement_{name}", ())]
        for _ in range(20):
            self.assertTrue(0 < agreement("lease_remaining_seconds") <= self.LEASE)
            time.sleep(0.1)
        self.assertGreaterEqual(agreement("term"), 1)
        self.assertGreater(agreement("calls_total"), 10)
        self.assertGreater(agreement("call_seconds_total"), 0)

    def events(self, node):
        told = self.nodes.nodes[node].ptc("events", self.name, "--json").stdout
        return [json.loads(line) for line in told.splitlines()]

    def test_what_has_happened(self):
        """Each node tells it, of decisions of others, too; and each under its own name."""
        self.commit(0, BigLlama(3), pp=2, devices=["w0:0", "w2:0"])
        for node in range(3):
            cluster.until(lambda node=node: {"commit", "reshard_ended"} <= {one["event"] for one in self.events(node)},
                          f"w{node} has heard of both", 20)
            self.assertEqual({one["node"] for one in self.events(node)}, {f"w{node}"})
        ended = [[one for one in self.events(node) if one["event"] == "reshard_ended"][-1] for node in range(3)]
        for one in ended:
            self.assertEqual([one[key] for key in ("checkpoint", "to", "bytes_written", "bytes_moved", "seconds")],
                             [ended[0][key] for key in ("checkpoint", "to", "bytes_written", "bytes_moved", "seconds")])
        self.assertGreater(ended[0]["bytes_moved"], 0)
        began = [one["node"] for node in range(3) for one in self.events(node) if one["event"] == "reshard_began"]
        self.assertEqual(len(set(began)), 1)  # who leads it
        self.nodes.kill(2)
        self.nodes.wait_members()
        for node in (0, 1):
            cluster.until(lambda node=node: "lost" in [one["event"] for one in self.events(node)], f"w{node} misses tensors", 20)
            (went,) = [one for one in self.events(node) if one["event"] == "nodes_went"]
            (lost,) = [one for one in self.events(node) if one["event"] == "lost"]
            self.assertEqual(went["nodes"], ["w2"])
            self.assertEqual(lost["tensors_lost"], len(self.job(node).status()["checkpoints"][0]["lost"]))
        self.nodes.start(2)
        self.nodes.wait_members()
        for node in (0, 1):
            cluster.until(lambda node=node: "found_again" in [one["event"] for one in self.events(node)], f"w{node} finds them", 20)
            self.assertIn(("nodes_came", ["w2"]), [(one["event"], one.get("nodes")) for one in self.events(node)])
        self.assertEqual([one["event"] for one in self.events(2) if one["event"] == "daemon_started"], ["daemon_started"])

    def test_one_that_is_drained(self):
        self.commit(0, models.Llama(6))
        for name in ("incoming/half/rank/0/x", "notes.txt", "results/loss"):
            models.write_file(os.path.join(self.nodes.nodes[2].path, self.name, name), "x")
        drain = self.nodes.nodes[1].ptc("drain", "w2", check=False)
        told = drain.stdout
        self.assertEqual(drain.returncode, 4, drain)
        self.assertIn("w2 is drained, but 3 files and directories that are not committed stay there, and go with it:", told)
        self.assertEqual(told.split("\n")[-4:-1],
                         [f"  {name} of job {self.name}" for name in ("incoming/half", "notes.txt", "results")])
        self.assertEqual(self.nodes.nodes[1].ptc("drain", "--json", "w2", check=False).returncode, 4)
        agreed = self.agreed()
        self.assertEqual(agreed["w2"]["drain"], {"bytes_left": 0})
        for arguments in ((), (self.name,)):
            self.assertIn("w2 up (drained)", self.said(0, *arguments))
        for node in range(3):
            self.assertEqual(self.metrics(node)[("ptcfs_cluster_node_draining", (("node", "w2"),))], 1)
        self.nodes.nodes[0].ptc("drain", "w2", "--cancel")
        self.assertIsNone(self.agreed()["w2"]["drain"])

    def said(self, node, *arguments):
        """By `ptc status`, as one line."""
        return " ".join(self.nodes.nodes[node].ptc("status", *arguments, env={"COLUMNS": "1000"}).stdout.split())

    def test_one_that_is_cut_off_from_etcd(self):
        model = models.Llama(7)
        self.commit(0, model)
        for arguments in ((), (self.name,)):
            self.assertNotIn("agreement", self.said(0, *arguments))
        before = time.time()
        counted = {name: self.metrics(0)[(f"ptcfs_agreement_{name}_total", ())] for name in ("failed_calls", "retries", "lease_losses")}
        self.nodes.partition(0, ("eth1",))
        cluster.until(lambda: "agreement" in self.nodes_of(0), "it says that nothing is decided", 20)
        agreement = self.nodes_of(0)["agreement"]
        self.assertEqual((agreement["state"], self.by_name(0)["w0"]["state"]), ("away", "fenced"))
        self.assertGreater(agreement["since"], time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before - 1)))
        self.assertLess(agreement["since"], time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 1)))
        self.assertRegex(self.said(0), r"w0 fenced (for|since) .* agreement: away (for|since) .*nothing is decided")
        self.assertRegex(self.said(0, self.name), r"agreement away (for|since) .*nothing is decided")
        self.assertIn("nothing is decided", " ".join(self.nodes.nodes[0].ptc("top", "--once").stdout.split()))
        self.assertEqual([self.metrics(node)[("ptcfs_agreement_decides", ())] for node in (0, 1)], [0, 1])
        self.assertEqual(self.metrics(0)[("ptcfs_agreement_lease_remaining_seconds", ())], 0)
        for name in ("failed_calls", "retries"):
            cluster.until(lambda name=name: self.metrics(0)[(f"ptcfs_agreement_{name}_total", ())] > counted[name], name, 30)
        cluster.until(lambda: self.metrics(0)[("ptcfs_agreement_lease_losses_total", ())] == counted["lease_losses"] + 1, "once", 20)
        self.assertEqual(mount.error_of(os.mkdir, self.nodes.path(0, "new")), "EAGAIN")
        held = models.read_safetensors(self.job(0).rank_file("base", layout_name(1, 1), 0))
        self.assertEqual(held, {tensor.name: tensor for tensor in model.rank_tensors(1, 1, 0, 0)})
        cluster.until(lambda: "w0 away " in self.said(1), "the others say that it is away")
        self.assertNotIn("agreement", self.said(1))
        self.nodes.heal(0, ("eth1",))
        self.nodes.wait_members()
        cluster.until(lambda: "agreement" not in self.said(0), "it decides again")
        self.assertNotIn("agreement", self.nodes_of(0))
        self.assertEqual(self.metrics(0)[("ptcfs_agreement_decides", ())], 1)

    def test_one_that_is_not_heard_of(self):
        """Of two that reach all others, but not each other, each counts for the other as there."""
        self.commit(0, models.Llama(8))
        self.assertNotIn("not heard", self.said(0))
        self.nodes.lose(0, 1)
        self.nodes.lose(1, 0)
        cluster.until(lambda: "w1 up (not heard of for " in self.said(0), "w0 has not heard of w1 for a while", 30)
        self.assertNotIn("w2 up (not", self.said(0))
        self.assertNotIn("not heard", self.said(2))
        self.nodes.lose_nothing()
        cluster.until(lambda: "not heard" not in self.said(0), "it has answered", 30)

    def test_nothing_is_counted_on_several_nodes(self):
        before = self.traffic()
        self.commit(0, BigLlama(2), pp=3, devices=["w0:0", "w1:0", "w2:0"])
        images = [node.image_bytes() for node in self.nodes.nodes]
        self.assertTrue(all(images), images)
        for node in range(3):
            metrics = self.metrics(node)
            self.assertEqual(metrics[("ptcfs_store_materialised_bytes", ())], images[node])
            self.assertEqual(metrics[("ptcfs_job_checkpoint_bytes", (("job", self.name),))], images[node])
            for other in range(3):
                self.assertEqual(metrics[("ptcfs_cluster_node_materialised_bytes", (("node", f"w{other}"),))], images[other])
        self.assertEqual(self.job(1).status()["checkpoints"][0]["bytes"], sum(images))
        # What one sends another gets.
        after = self.traffic()
        went = {way: after[way] - before[way] for way in after}
        for (sender, receiver, counted), count in went.items():
            other_end = went[sender, receiver, "received" if counted == "sent" else "sent"]
            self.assertAlmostEqual(count, other_end, delta=count / 10 + (1 << 20))
        moved = mount.read_json(self.job(2).file("plan.json"))["bytes"]["moved"]
        self.assertGreater(went[0, 1, "sent"] + went[0, 2, "sent"], moved)

    def traffic(self):
        """By sender, receiver, and which of the two counted it."""
        counted = {}
        for node in range(3):
            metrics = self.metrics(node)
            for other in set(range(3)) - {node}:
                peer = (("peer", f"w{other}"),)
                counted[node, other, "sent"] = metrics.get(("ptcfs_peer_sent_bytes_total", peer), 0)
                counted[other, node, "received"] = metrics.get(("ptcfs_peer_received_bytes_total", peer), 0)
        return counted

    def test_missing_copies(self):
        self.commit(0, models.Llama(3), pp=3, replicas=1)

        def missing(node):
            return self.nodes_of(node)["missing_copies"]["bytes"]
        cluster.until(lambda: not any(missing(node) for node in range(3)), "all copies are there")
        self.nodes.kill(1)
        self.nodes.kill(2)
        self.nodes.wait_members()
        cluster.until(lambda: missing(0) > 0, "the job has followed, too")
        self.assertIn(self.name, [one["job"] for one in self.nodes_of(0)["missing_copies"]["jobs"]])
        self.assertIn("are missing", self.nodes.nodes[0].ptc("top", "--once").stdout)
        self.assertGreater(self.metrics(0)[("ptcfs_job_missing_copy_bytes", (("job", self.name),))], 0)
        for node in (1, 2):
            self.nodes.start(node)
        self.nodes.wait_members()
        cluster.until(lambda: not any(missing(node) for node in range(3)), "they are made anew")

    def test_progress_and_the_last_reshard_are_the_same_everywhere(self):
        self.commit(0, BigLlama(4))
        for node in self.alive():
            self.nodes.shape(node, "20mbit")
        self.job(1).save_layout(tp=2, devices=["w1:0", "w2:0"])
        seen = {}

        def all_say():
            for node in self.alive():
                progress = self.job(node).status()["progress"]
                if progress and progress["bytes_done"]:
                    seen.setdefault(node, progress)
            return len(seen) == 3
        cluster.until(all_say, "all nodes show progress")
        for progress in seen.values():
            for key in ("checkpoint", "from", "to", "bytes_total"):
                self.assertEqual(progress[key], seen[0][key])
        for node in self.alive():
            self.nodes.shape(node, None)
        self.nodes.wait_settled(self.name)

        def last():
            return [self.job(node).status()["last_reshard"] for node in self.alive()]
        cluster.until(lambda: all(one and one == last()[0] for one in last()), f"last_reshard: {last()}")
        before = last()[0]
        self.assertEqual(before["to"], "tp2-pp1-dp1")
        self.nodes.stop(0)
        self.nodes.start(0)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.assertEqual(self.job(0).status()["last_reshard"], before)
        self.assertEqual([self.job(node).status()["progress"] for node in self.alive()], [None] * 3)

    def test_damage_is_counted(self):
        self.commit(0, models.Llama(5), replicas=1)
        holder = next(node for node in self.nodes.nodes if node.image_bytes() > 0)
        images = os.path.join(holder.store, "images")
        path = max((os.path.join(images, name) for name in os.listdir(images)), key=os.path.getsize)
        os.chmod(path, 0o600)
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 4]))
        self.assertNotEqual(self.nodes.nodes[0].ptc("verify", self.name, check=False).returncode, 0)
        self.nodes.nodes[0].ptc("verify", self.name, "--repair")
        key = ("job", self.name)
        metrics = self.metrics(0)
        self.assertEqual(metrics[("ptcfs_job_damage_found_total", (key,))], 2)
        self.assertEqual(metrics[("ptcfs_job_damaged_copies_total", (key, ("outcome", "mended")))], 1)

        def mendings():
            return [self.metrics(node)[("ptcfs_job_mendings", (key,))] for node in range(3)]
        cluster.until(lambda: mendings() == [1, 1, 1], f"all nodes know of it: {mendings()}")
        for node in range(3):
            self.assertEqual(self.metrics(node)[("ptcfs_job_damage_left", (key,))], 0)

    def test_what_arrives_damaged_is_counted(self):
        for name in ("checksum_failures", "retries", "broken_connections"):
            for node, peer in ((0, "w1"), (2, "w0")):
                self.assertIn((f"ptcfs_peer_{name}_total", (("peer", peer),)), self.metrics(node))
        # One that ends in the middle of a fetch; what the numbers are of the rest: tests/store/tcp_faults_test.cc.
        self.commit(0, BigLlama(9), devices=["w1:0"])

        def retries():
            return self.metrics(0).get(("ptcfs_peer_retries_total", (("peer", "w1"),)), 0)
        before = retries()
        self.nodes.shape(1, "20mbit")
        with contextlib.ExitStack() as ends:
            reader = subprocess.Popen(["cat", self.job(0).rank_file("base", layout_name(1, 1), 0)], stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL)
            ends.callback(reader.wait)
            ends.callback(reader.kill)
            time.sleep(1)
            self.nodes.kill(1)
            cluster.until(lambda: retries() > before, "it is counted that it was tried again", 4)


if __name__ == "__main__":
    unittest.main(verbosity=2)
