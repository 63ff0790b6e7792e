"""Nodes in networks of their own: one state of affairs, the least moved, and nothing lost with a node."""
import json
import os
import subprocess
import tempfile
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import make_llama
import models
from cases import BigLlama, MIB, TestCase, layout_name, read, tree


class Idle(TestCase):
    """Nobody uses it any more."""
    NODES, LEASE = 4, 5
    THREADS, OWN_BYTES = 16, 64 << 20

    def test_a_node_costs_little(self):
        self.commit(0, BigLlama(1), tp=2, pp=2)
        for node in self.alive():
            mount.digests(self.job(node).checkpoint("base", "layouts", layout_name(2, 2)))
        for node in self.nodes.nodes:
            cluster.until(lambda node=node: sum(node.threads().values()) <= self.THREADS, f"{node.name} has few threads", 120)
            self.assertLess(node.wake_ups(10), 90, node.threads())  # its lease is prolonged, and etcd's watch looked after; 165 if more is polled
            self.assertLessEqual(node.own_bytes(), self.OWN_BYTES, node.name)


class Names(unittest.TestCase):
    def test_another_cluster_stays(self):
        """tools/cluster's name is the beginning of that of each cluster of these tests."""
        cluster.require()
        top = tempfile.mkdtemp(prefix="ptcfs-names-")
        other = top + "-other"
        names = [cluster.namespace(where, name) for where in (top, other) for name in ("w0", "etcd", "switch")]
        self.addCleanup(cluster.take_down, other)
        for name in names:
            cluster.run("ip", "netns", "add", name)
        cluster.take_down(top)
        self.assertEqual([name for name in names if os.path.exists("/run/netns/" + name)], names[3:])


class Agreement(TestCase):
    def test_committed_on_one_node_and_edited_on_another(self):
        model = models.Llama(1)
        self.commit(0, model)
        self.expect_everywhere(model, 1, 1)
        self.job(1).set_layout(tp=2, pp=1, devices=["w1:0", "w2:0"])
        done = self.nodes.nodes[2].ptc("wait", self.name)
        self.assertIn("tp2-pp1-dp1 in force", done.stdout)
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)

    def test_edits_at_once_on_two_nodes_are_both_kept_or_it_is_said(self):
        self.commit(0, models.Llama(1))
        for turn in range(10):
            wanted = {"tp": 1 + turn % 2, "keep": 10 + turn}
            edits = [subprocess.Popen([os.path.join(mount.bin_dir(), "ptc"), "-C", self.nodes.nodes[node].path, "layout", self.name,
                                       "set", f"--{key}", str(value)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                     for node, (key, value) in enumerate(wanted.items())]
            said = [edit.communicate(timeout=60)[1] for edit in edits]
            self.assertEqual([edit.returncode for edit in edits], [0, 0], said)
            self.nodes.wait_settled(self.name)
            layout = mount.read_json(self.job(2).file("layout.json"))
            kept = {key: layout.get(key) for key in wanted}
            if f"somebody else saved layout.json of {self.name} at the same time" not in "".join(said):
                self.assertEqual(kept, wanted, said)
            self.assertTrue(any(kept[key] == value for key, value in wanted.items()), said)

    def test_devices_say_where_the_files_lie(self):
        self.commit(0, models.Llama(2), pp=3, devices=["w2:0", "w0:0", "w1:0"])
        for rank, node in enumerate((2, 0, 1)):
            before = self.nodes.bytes_received(node)
            content = read(self.job(node).rank_file("base", layout_name(1, 3), rank))
            self.assertLess(self.nodes.bytes_received(node) - before, len(content) / 4)

    def test_least_bytes_cross_the_network(self):
        job = self.nodes.job(0, self.name)
        make_llama.write_model(job.incoming("base") + "/rank/0", "68m", seed=1)
        job.commit("base")
        self.nodes.wait_settled(self.name)
        for layout in ({"tp": 2, "pp": 1, "devices": ["w1:0", "w2:0"]},
                       {"tp": 2, "pp": 2, "devices": ["w1:0", "w2:0", "w0:0", "w0:1"]},
                       {"tp": 1, "pp": 2}):
            before = sum(self.nodes.bytes_received(node) for node in self.alive())
            job.set_layout(**layout)
            self.nodes.wait_settled(self.name)
            moved = sum(self.nodes.bytes_received(node) for node in self.alive()) - before
            plan = self.plan(layout_name(layout["tp"], layout["pp"]))
            self.assertEqual(plan["bytes"]["moved"], plan["bytes"]["minimum"])
            print(f"{plan['to']}: {moved / MIB:.1f} MiB moved, "
                  f"{plan['bytes']['minimum'] / MIB:.1f} MiB is the minimum")
            self.assertLess(moved, plan["bytes"]["minimum"] * 1.05 + MIB)
        self.nodes.nodes[1].ptc("verify", self.name)

    def plan(self, layout):
        """plan.json, which all nodes show alike."""
        plans = [mount.read_json(self.job(node).file("plan.json")) for node in self.alive()]
        self.assertEqual(plans[0]["to"], layout)
        self.assertTrue(all(plan == plans[0] for plan in plans))
        return plans[0]


class Losses(TestCase):
    def test_with_copies_a_dead_node_is_not_missed(self):
        model = models.Llama(3)
        self.commit(0, model, pp=2, replicas=1)
        whole = self.held()
        self.nodes.kill(0)
        cluster.until(lambda: self.reads_right(model), "the others read everything")
        cluster.until(lambda: self.held() >= whole, "there are as many copies as before")
        self.nodes.wait_settled(self.name)
        self.nodes.kill(1)
        cluster.until(lambda: self.reads_right(model), "the last one reads everything")
        for node in (0, 1):
            self.nodes.start(node)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)
        cluster.until(lambda: self.held() == whole, "no copy is missing, and none too many is kept")
        self.nodes.nodes[1].ptc("verify", self.name)

    def test_a_drained_node_can_be_killed(self):
        model, older = models.Llama(8), models.Llama(9)
        job = self.nodes.job(1, self.name)
        older.write_hf(job.incoming("older") + "/rank/0")
        job.commit("older")
        self.commit(1, model, pp=3)
        whole = tree(job.checkpoint("older", "model"))
        drain = self.nodes.nodes[2].ptc("drain", "w1")
        self.assertIn("w1 is drained: it can be stopped", drain.stdout)
        self.assertEqual(self.nodes.nodes[1].image_bytes(), 0)
        self.assertIn("w1 up (drained)", self.nodes.nodes[0].ptc("status", self.name).stdout)
        refused = self.nodes.nodes[0].ptc("layout", self.name, "set", "--tp", "1", "--pp", "1", "--devices", "w1:0",
                                          check=False)
        self.assertIn("ptc drain w1 --cancel", refused.stderr)
        self.nodes.kill(1)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 3)
        for node in self.alive():
            self.assertEqual(tree(self.job(node).checkpoint("older", "model")), whole)
            self.nodes.nodes[node].ptc("verify", self.name)
        self.nodes.start(1)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.assertEqual(self.nodes.nodes[1].image_bytes(), 0)  # drained still
        self.nodes.nodes[1].ptc("drain", "w1", "--cancel")
        self.nodes.wait_settled(self.name)
        cluster.until(lambda: self.nodes.nodes[1].image_bytes() > 0, "w1 is in service again")
        self.expect_everywhere(model, 1, 3)
        self.assertIn("there is no node 'w7'",
                      self.nodes.nodes[1].ptc("drain", "w7", check=False).stderr)

    def test_what_is_lost_holds_up_no_drain(self):
        """w0's store was lost, and with it the newest checkpoint, which had no copy. All else is moved, and it is named."""
        older = models.Llama(21)
        job = self.nodes.job(2, self.name)
        older.write_hf(job.incoming("older") + "/rank/0")
        job.commit("older")
        self.commit(0, models.Llama(22), keep=3)
        self.assertGreater(self.nodes.nodes[2].image_bytes(), 0)
        self.lose_store(0, within_its_lease=True)
        cluster.until(lambda: "is replaced by this one" in mount.read_text(self.nodes.nodes[0].log), "the former store is forgotten")
        cluster.until(lambda: "checkpoint base has lost" in mount.read_text(self.job(1).file("status.json")), "w1 knows of the loss")
        drain = self.nodes.nodes[1].ptc("drain", "w2", check=False)
        self.addCleanup(self.nodes.nodes[1].ptc, "drain", "w2", "--cancel", check=False)
        self.assertEqual(drain.returncode, 0, drain)
        self.assertIn("w2 is drained: it can be stopped", drain.stdout)
        self.assertRegex(drain.stderr, rf"job {self.name}: checkpoint base has lost [0-9]+ tensors, .*; no drain moves these: "
                                       rf"start the node that had them, or remove the checkpoint \(ptc rm {self.name}/base\)")
        self.assertEqual(self.nodes.nodes[2].image_bytes(), 0)
        told = json.loads(self.nodes.nodes[1].ptc("drain", "w2", "--json").stdout)
        self.assertEqual([(one["job"], one["checkpoint"]) for one in told["lost"]], [(self.name, "base")])
        for node in (0, 1):
            self.assertEqual(models.read_hf(self.job(node).checkpoint("older", "hf")), {tensor.name: tensor for tensor in older.tensors})
        self.nodes.nodes[1].ptc("rm", "--yes", f"{self.name}/base")
        self.assertEqual(json.loads(self.nodes.nodes[1].ptc("drain", "w2", "--json").stdout)["lost"], [])

    def held(self):
        return sum(self.nodes.nodes[node].image_bytes() for node in self.alive())

    def reads_right(self, model):
        try:
            self.expect_everywhere(model, 1, 2)
        except OSError:
            return False
        return True


class OpenFiles(TestCase):
    OPTIONS = ("--cache", "0")  # what is on other nodes is asked for when it is read

    def test_keep_their_bytes(self):
        model = BigLlama(11)
        self.commit(0, model, replicas=1, devices=["w0:0"])
        holders = [node for node in self.alive() if self.nodes.nodes[node].image_bytes() > 0]
        reader, = set(self.alive()) - set(holders)
        # Each is read at one moment, and little of it before, so that the kernel does not know it.
        paths = [("layouts", layout_name(1, 1), "rank", 0, "model.safetensors"),
                 ("layouts", layout_name(2, 1), "rank", 0, "model.safetensors"),
                 ("layouts", layout_name(2, 1), "rank", 1, "model.safetensors"),
                 ("hf", "model.safetensors")]
        wanted = [read(self.job(0).checkpoint("base", *path)) for path in paths]
        files = [open(self.job(reader).checkpoint("base", *path), "rb", buffering=0) for path in paths]
        for file in files:
            self.addCleanup(file.close)
            os.pread(file.fileno(), 4096, 0)

        def expect(number, what):
            self.assertTrue(files[number].readall() == wanted[number], what)
        self.nodes.kill(0)
        expect(0, "after a holder died")
        self.nodes.start(0)
        self.nodes.wait_members()
        self.job(max(holders)).set_layout(pp=2, devices=["w0:0", "w0:1"])
        self.nodes.wait_settled(self.name)
        expect(1, "after its bytes were moved")
        self.nodes.nodes[0].ptc("rm", f"{self.name}/base")
        self.assertEqual([node.image_bytes() for node in self.nodes.nodes], [0, 0, 0])
        self.assertGreater(self.nodes.nodes[0].unnamed_images(), 0)
        expect(2, "after the checkpoint was removed")
        self.nodes.nodes[0].ptc("rm", "--force", self.name)
        expect(3, "after the job was removed")
        for file in files:
            file.close()
        cluster.until(lambda: sum(node.unnamed_images() for node in self.nodes.nodes) == 0, "nobody reads: the bytes go")


class Interruptions(TestCase):
    """Something happens to a node while w1 leads a change that moves w0's files to w2."""

    def begin(self, model):
        self.commit(0, model)
        for node in self.alive():
            self.nodes.shape(node, "40mbit")
        before = self.nodes.bytes_received(2)
        self.save()
        cluster.until(lambda: self.nodes.bytes_received(2) - before > MIB, "bytes move")
        self.assertEqual(self.job(1).status()["state"], "resharding")

    def save(self):
        models.write_file(self.job(1).file("layout.json"),
                          '{"tp": 2, "pp": 1, "dp": 1, "devices": ["w2:0", "w2:1"]}')

    def end(self, model):
        for node in self.alive():
            self.nodes.shape(node, None)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)
        self.nodes.nodes[0].ptc("verify", self.name)

    def killed(self, node):
        model = BigLlama(4)
        self.begin(model)
        self.nodes.kill(node)
        self.nodes.start(node)
        self.end(model)

    def test_source_killed(self):
        self.killed(0)

    def test_leader_killed(self):
        self.killed(1)

    def test_target_killed(self):
        self.killed(2)

    def test_target_gone(self):
        """It is tried again, and without the node once that counts as gone."""
        model = BigLlama(4)
        self.begin(model)
        self.nodes.kill(2)
        for node in self.alive():
            self.nodes.shape(node, None)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)

    def test_leader_stopped_for_longer_than_its_lease(self):
        model = BigLlama(5)
        self.begin(model)
        self.nodes.pause(1)
        self.nodes.wait_members()
        for node in self.alive():
            self.nodes.shape(node, None)
        self.job(0).set_layout(pp=2, devices=["w0:0", "w2:0"])
        revision = self.job(0).status()["revision"]
        self.nodes.resume(1)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)
        self.assertEqual(self.job(1).status()["revision"], revision)


class Relays(TestCase):
    """w0 holds what the three others need: they pass it on."""
    NODES = 4
    DEVICES = ["w1:0", "w2:0", "w3:0"]

    def test_the_holder_sends_it_once(self):
        job = self.nodes.job(0, self.name)
        make_llama.write_model(job.incoming("base") + "/rank/0", "68m", seed=1)
        job.commit("base")
        self.nodes.wait_settled(self.name)
        sent = [self.nodes.bytes_sent(node) for node in range(4)]
        received = [self.nodes.bytes_received(node) for node in range(4)]
        job.set_layout(dp=3, devices=self.DEVICES)
        self.nodes.wait_settled(self.name)
        state = os.path.getsize(job.rank_file("base", layout_name(1, 1), 0))
        for node in range(4):
            out = self.nodes.bytes_sent(node) - sent[node]
            print(f"w{node}: {out / MIB:.1f} MiB out, "
                  f"{(self.nodes.bytes_received(node) - received[node]) / MIB:.1f} in, the state has {state / MIB:.1f}")
            self.assertLess(out, state * 1.1 + MIB)
            self.assertLess(self.nodes.bytes_received(node) - received[node], state * 1.1 + MIB)
        content = read(job.rank_file("base", layout_name(1, 1), 0))
        for rank in range(3):
            path = self.job(rank + 1).rank_file("base", layout_name(1, 1, 3), rank)
            self.assertEqual(read(path), content)
        self.nodes.nodes[3].ptc("verify", self.name)

    def begin(self, model):
        self.commit(0, model)
        for node in self.alive():
            self.nodes.shape(node, "40mbit")
        before = [self.nodes.bytes_sent(node) for node in (1, 2)]
        self.received = self.nodes.bytes_received(1)
        models.write_file(self.job(0).file("layout.json"), json.dumps(
            {"tp": 1, "pp": 1, "dp": 3, "devices": self.DEVICES}))
        cluster.until(lambda: all(self.nodes.bytes_sent(node) - sent > MIB // 2
                                  for node, sent in zip((1, 2), before)), "bytes are passed on")
        self.assertEqual(self.job(0).status()["state"], "resharding")

    def end(self, model):
        for node in self.alive():
            self.nodes.shape(node, None)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 1, 3)
        self.nodes.nodes[0].ptc("verify", self.name)

    def test_a_receiver_is_killed(self):
        model = BigLlama(8)
        self.begin(model)
        self.nodes.kill(2)
        self.nodes.start(2)
        self.end(model)

    def test_a_receiver_cannot_be_reached_for_a_while(self):
        model = BigLlama(9)
        self.begin(model)
        self.nodes.partition(2, links=("eth0",))
        state = os.path.getsize(self.job(0).rank_file("base", layout_name(1, 1), 0))
        cluster.until(lambda: self.nodes.bytes_received(1) - self.received > state, "w1 gets its bytes without w2")
        self.nodes.heal(2)
        self.end(model)


if __name__ == "__main__":
    unittest.main(verbosity=2)
