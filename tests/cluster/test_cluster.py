"""Nodes in networks of their own: one state of affairs, the least moved, and nothing lost with a node."""
import concurrent.futures
import errno
import json
import os
import shutil
import signal
import time
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import make_llama
import models

LEASE = 3
MIB = 1 << 20


def layout_name(tp, pp, dp=1):
    return f"tp{tp}-pp{pp}-dp{dp}"


def read(path):
    with open(path, "rb") as file:
        return file.read()


def tree(directory):
    """Path below → content of every file."""
    return {os.path.relpath(os.path.join(where, name), directory): read(os.path.join(where, name))
            for where, _, names in os.walk(directory) for name in names}


class TestCase(unittest.TestCase):
    """One cluster for the tests of a class; every test makes a job of its own name."""
    NODES = 3

    @classmethod
    def setUpClass(cls):
        cls.nodes = cluster.Cluster(cls.NODES, "--lease", str(LEASE))
        cls.nodes.__enter__()
        cls.addClassCleanup(cls.nodes.__exit__)

    def setUp(self):
        self.name = self.id().rsplit(".", 1)[-1]
        self.addCleanup(self.clean)

    def clean(self):
        """The next test finds all nodes, and no files of this one."""
        for number, node in enumerate(self.nodes.nodes):
            self.nodes.heal(number)
            self.nodes.shape(number, None)
            if node.paused:
                self.nodes.resume(number)
            if node.process is None:
                self.nodes.start(number)
        self.nodes.wait_members()
        self.nodes.nodes[0].ptc("rm", "--force", self.name, check=False)

    def job(self, node):
        return mount.Job(self.nodes.nodes[node], self.name)

    def commit(self, node, model, **layout):
        """A checkpoint `base` of one rank, and then the layout."""
        job = self.nodes.job(node, self.name)
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        if layout:
            job.set_layout(**layout)
        self.nodes.wait_settled(self.name)

    def alive(self):
        return [number for number, node in enumerate(self.nodes.nodes) if node in self.nodes.alive()]

    def expect_everywhere(self, model, tp, pp, dp=1):
        """Every living node shows every rank's file as it should be, and the same model/."""
        layout, trees = layout_name(tp, pp, dp), []
        for node in self.alive():
            job = self.job(node)
            self.assertEqual(os.readlink(job.file("current")), f"checkpoints/base/layouts/{layout}")
            for rank in range(tp * dp * pp):
                held = models.read_safetensors(job.rank_file("base", layout, rank))
                wanted = model.rank_tensors(tp, pp, rank % tp, rank // (tp * dp))
                self.assertEqual(held, {tensor.name: tensor for tensor in wanted}, (node, rank))
            trees.append(tree(job.checkpoint("base", "model")))
        for other in trees[1:]:
            self.assertEqual(other, trees[0])


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
                       {"tp": 1, "pp": 3}):
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

    def held(self):
        return sum(self.nodes.nodes[node].image_bytes() for node in self.alive())

    def reads_right(self, model):
        try:
            self.expect_everywhere(model, 1, 2)
        except OSError:
            return False
        return True


class BigLlama(models.Llama):
    vocab = 64 * 1024  # 16 MiB


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
        before = self.nodes.bytes_received(1)
        cluster.until(lambda: self.nodes.bytes_received(1) - before > 8 * MIB, "w1 gets its bytes without w2")
        self.nodes.heal(2)
        self.end(model)


class Partition(TestCase):
    def test_a_node_alone_decides_nothing(self):
        model = models.Llama(6)
        self.commit(0, model)
        job = self.job(2)
        models.Llama(7).write_hf(job.incoming("other") + "/rank/0")
        models.write_file(job.incoming("other") + "/layout.json", '{"tp": 1, "pp": 1, "dp": 1}')
        self.nodes.partition(2)
        cluster.until(lambda: "w2" not in self.nodes.nodes[2].members(), "it knows that it is alone")
        for call in ((job.commit, "other"), (job.set_layout,), (os.mkdir, self.nodes.path(2, "new"))):
            self.assertEqual(mount.error_of(*call), "EIO")
        self.assertIn("node w2 is cut off from its cluster", job.status()["last_error"]["what"])
        self.job(0).set_layout(tp=2, devices=["w0:0", "w1:0"])
        self.nodes.heal(2)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)
        self.assertFalse(os.path.exists(self.nodes.path(0, "new")))
        job.commit("other")
        self.nodes.wait_settled(self.name)
        self.assertEqual(self.job(0).status()["checkpoint"], "other")


class Faults(TestCase):
    def test_two_editors_race(self):
        """A total order: every accepted edit is one revision, and all nodes end with the last one."""
        model = models.Llama(10)
        self.commit(0, model)
        before = self.job(0).status()["revision"]

        def edit(node):
            accepted = 0
            for number in range(25):
                text = json.dumps({"tp": 1 + number % 2, "pp": 1, "dp": 1, "keep": 100 * node + number + 2})
                try:
                    with open(self.job(node).file("layout.json"), "w", encoding="utf-8") as file:
                        file.write(text)
                    accepted += 1
                except OSError as error:
                    self.assertIn(errno.errorcode[error.errno], ("EBUSY", "EAGAIN", "ESTALE", "EIO"))
            return accepted

        with concurrent.futures.ThreadPoolExecutor() as threads:
            accepted = sum(threads.map(edit, (0, 1)))
        self.nodes.wait_settled(self.name)
        self.assertGreater(accepted, 0)
        for node in self.alive():
            self.assertEqual(self.job(node).status()["revision"], before + accepted)
            self.assertEqual(read(self.job(node).file("layout.json")), read(self.job(0).file("layout.json")))
        tp = mount.read_json(self.job(0).file("layout.json"))["tp"]
        self.expect_everywhere(model, tp, 1)

    def test_without_etcd_all_is_read_and_nothing_decided(self):
        """Longer than a lease lasts; PTC_ETCD_AWAY=20 for as many seconds."""
        model = models.Llama(11)
        self.commit(0, model, pp=3, replicas=1)
        self.nodes.etcd.send_signal(signal.SIGSTOP)
        self.addCleanup(self.nodes.etcd.send_signal, signal.SIGCONT)
        end = time.monotonic() + float(os.environ.get("PTC_ETCD_AWAY", LEASE + 2))
        while time.monotonic() < end:
            self.expect_everywhere(model, 1, 3)
        for node in self.alive():
            self.assertEqual(mount.error_of(self.job(node).set_layout), "EIO")
            self.assertEqual(mount.error_of(os.mkdir, self.nodes.path(node, "new")), "EIO")
        self.expect_everywhere(model, 1, 3)
        self.nodes.etcd.send_signal(signal.SIGCONT)
        self.nodes.wait_members()
        self.job(1).set_layout(tp=2)
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)

    def test_a_full_store(self):
        """What does not fit on a node is refused before it starts, and nothing committed suffers."""
        model = BigLlama(12)
        self.nodes.kill(2)
        store = self.nodes.nodes[2].store
        cluster.run("mount", "-t", "tmpfs", "-o", f"size={12 * MIB}", "small", store)
        self.addCleanup(self.replace_store)
        self.nodes.start(2)
        self.nodes.wait_members()
        self.commit(0, model)
        with self.assertRaises(OSError) as refused:
            self.job(1).set_layout(devices=["w2:0"])
        self.assertEqual(refused.exception.errno, errno.EINVAL)
        self.assertIn("not enough memory on node w2", self.job(1).status()["last_error"]["what"])
        self.assertEqual(self.nodes.nodes[2].image_bytes(), 0)
        incoming = self.job(2).incoming("big")
        self.assertEqual(mount.error_of(models.write_file, incoming + "/data", bytes(16 * MIB)), "ENOSPC")
        self.expect_everywhere(model, 1, 1)
        shutil.rmtree(incoming)
        models.Llama(13).write_hf(incoming + "/rank/0")
        self.job(2).commit("big")
        self.nodes.wait_settled(self.name)
        self.nodes.nodes[0].ptc("verify", self.name)

    def replace_store(self):
        self.nodes.kill(2)
        cluster.run("umount", self.nodes.nodes[2].store)
        self.nodes.start(2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
