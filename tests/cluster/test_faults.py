"""Nodes in networks of their own, and what goes wrong with them: the old state or the new one, never a mix."""
import concurrent.futures
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import time
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import models
from cases import BigLlama, LEASE, MIB, TestCase, read


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
            self.assertEqual(mount.error_of(*call), "EAGAIN")
        cut_off = "node w2 is cut off from its cluster"
        self.assertIn(cut_off, job.status()["last_error"]["what"])
        self.assertIn(cut_off, job.commit_error("other"))
        source = os.path.join(self.nodes.top, "to-import")
        models.Llama(7).write_hf(source)
        ptc = self.nodes.nodes[2].ptc
        for arguments in (("import", self.name, source, "--name", "imported"), ("layout", self.name, "set", "--tp", 2)):
            done = ptc(*arguments, check=False)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn(cut_off, done.stderr)
        for name, text in (("source.json", json.dumps({"shards": source})), ("order.json", '{"batch": 2}')):
            with self.assertRaises(OSError) as refused:
                with open(job.file("dataset", name), "w", encoding="utf-8") as file:
                    file.write(text)
            self.assertEqual(refused.exception.errno, errno.EAGAIN, name)
            self.assertIn(cut_off, job.status()["last_error"]["what"])
        shutil.rmtree(job.incoming("imported"))
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
                    self.assertIn(errno.errorcode[error.errno], ("EBUSY", "EAGAIN", "ESTALE"))
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
        mount.halt(self.nodes.etcd)
        self.addCleanup(self.nodes.etcd.send_signal, signal.SIGCONT)
        end = time.monotonic() + float(os.environ.get("PTC_ETCD_AWAY", LEASE + 2))
        while time.monotonic() < end:
            self.expect_everywhere(model, 1, 3)
        for node in self.alive():
            self.assertEqual(mount.error_of(self.job(node).set_layout), "EAGAIN")
            self.assertEqual(mount.error_of(os.mkdir, self.nodes.path(node, "new")), "EAGAIN")
            for remove, name in ((os.unlink, "hf/config.json"), (os.unlink, "meta.json"), (os.rmdir, "model")):  # as rm -r does
                self.assertEqual(mount.error_of(remove, self.job(node).checkpoint("base", name)), "EAGAIN", name)
        self.expect_everywhere(model, 1, 3)
        self.nodes.etcd.send_signal(signal.SIGCONT)
        self.nodes.wait_members()
        self.job(1).set_layout(tp=2)
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)

    def while_etcd_is_silent(self, locked, change, *arguments):
        """Before it is known that the lease may have ended: what the call fails with. It does not take long, nor does
        an ls of the directory that the kernel has locked for it."""
        def timed(call, *arguments):
            begun = time.monotonic()
            return mount.error_of(call, *arguments), time.monotonic() - begun

        def listed():
            subprocess.run(["ls", "-l", locked], stdout=subprocess.DEVNULL, check=True)

        mount.halt(self.nodes.etcd)
        try:
            with concurrent.futures.ThreadPoolExecutor() as threads:
                changing = threads.submit(timed, change, *arguments)
                time.sleep(0.3)
                listing = threads.submit(timed, listed)
                failed, seconds = changing.result()
                self.assertEqual(listing.result()[0], "")
                self.assertLess(max(seconds, listing.result()[1]), 2.5)
                self.assertGreater(seconds, 1, "it did not wait at all: the lease had ended")
        finally:
            self.nodes.etcd.send_signal(signal.SIGCONT)
        return failed

    def expect_job(self, there):
        for node in self.alive():
            cluster.until(lambda node=node: (self.name in os.listdir(self.nodes.path(node))) == there,
                          f"w{node} {'has' if there else 'has not'} the job", 10)
            self.assertEqual(os.path.isdir(self.job(node).path), there)
            self.assertEqual(os.path.isdir(os.path.join(self.nodes.nodes[node].store, "jobs", self.name)), there)

    def test_a_silent_etcd_holds_up_no_listing(self):
        """mkdir and rmdir of a job wait no longer than a rename; nothing has changed then, and the same again does it."""
        path = self.nodes.path(0, self.name)
        for change, there in ((os.mkdir, False), (os.rmdir, True)):
            self.nodes.wait_members()
            self.assertEqual(self.while_etcd_is_silent(self.nodes.path(0), change, path), "EAGAIN")
            said = f"the same {change.__name__} again goes on with it"
            self.assertIn(said, mount.read_text(self.nodes.nodes[0].log))
            time.sleep(2)  # who has just waited in vain may wait less
            self.expect_job(there)
            cluster.until(lambda change=change: mount.error_of(change, path) == "", "the same again", 10)
            self.expect_job(not there)
            self.assertEqual(mount.error_of(change, path), "ENOENT" if there else "EEXIST")

    def test_a_silent_etcd_holds_up_no_directory_of_a_job(self):
        """What is changed of it with such a lock goes on by itself, and the same again joins it."""
        self.commit(0, models.Llama(16))
        job = self.job(0)
        models.Llama(17).write_hf(job.incoming("kept") + "/rank/0")
        job.commit("kept")
        models.write_file(job.file("rules.json"), json.dumps({"format": "ptc-rules/1", "family": "mine",
                                                              "rules": [{"names": ["**"], "stage": "all"}]}))
        for where, names, files in os.walk(job.checkpoint("base"), topdown=False):
            for name in files:
                os.unlink(os.path.join(where, name))
            for name in names:
                path = os.path.join(where, name)
                (os.unlink if os.path.islink(path) else os.rmdir)(path)
        changes = ((job.path, os.chmod, (job.path, 0o700)), (job.path, os.chmod, (job.file("layout.json"), 0o600)),
                   (job.path, os.unlink, (job.file("rules.json"),)),
                   (job.file("checkpoints"), os.rmdir, (job.checkpoint("base"),)),
                   (job.checkpoint("kept"), os.setxattr, (job.checkpoint("kept"), "user.ptc.pin", b"1")))
        for locked, change, arguments in changes:
            self.nodes.wait_members()
            # Of setxattr the kernel would make "not supported" of EAGAIN.
            wanted = "EBUSY" if change is os.setxattr else "EAGAIN"
            self.assertEqual(self.while_etcd_is_silent(locked, change, *arguments), wanted, arguments)
            cluster.until(lambda call=(change, *arguments): mount.error_of(*call) in ("", "ENOENT"), "the same again", 10)
        for node in self.alive():
            there = self.job(node)
            cluster.until(lambda there=there: os.stat(there.path).st_mode & 0o777 == 0o700 and
                          os.stat(there.file("layout.json")).st_mode & 0o777 == 0o600 and
                          not os.path.exists(there.file("rules.json")) and os.listdir(there.file("checkpoints")) == ["kept"] and
                          os.listxattr(there.checkpoint("kept")) == ["user.ptc.pin"],
                          f"w{node} has it so", 10)

    def test_without_etcd_a_job_is_listed_that_nobody_here_has_looked_at(self):
        """Its data set alone waits for what is agreed on, and holds up nobody."""
        names, readers = [f"{self.name}-{i}" for i in range(6)], []
        for name in names:
            os.mkdir(self.nodes.path(0, name))
        deadline = time.monotonic() + 10
        while not set(names) <= set(os.listdir(self.nodes.path(1))):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        mount.halt(self.nodes.etcd)
        self.addCleanup(self.nodes.etcd.send_signal, signal.SIGCONT)
        jobs = [self.nodes.job(1, name) for name in names]
        for job in jobs:
            self.assertIn("dataset", mount.within(2, os.listdir, job.path))
            subprocess.run(["ls", "-l", job.path], stdout=subprocess.DEVNULL, check=True, timeout=3)
        for job in jobs:  # more than there are threads
            for file in ("head", "order.json", "source.json", "consumed", "plan.json", "status.json", "gen"):
                readers.append(subprocess.Popen(["cat", job.file("dataset", file)], stdout=subprocess.DEVNULL,
                                                stderr=subprocess.DEVNULL))
        self.addCleanup(lambda: [reader.kill() for reader in readers])
        requests = self.nodes.path(1, ".ptc/requests")
        cluster.until(lambda: len(mount.within(2, mount.read_json, requests)["requests"]) > 30, "most of them wait", seconds=10)
        mount.within(2, os.listdir, jobs[0].path)
        readers[0].kill()
        self.assertEqual(readers[0].wait(timeout=2), -signal.SIGKILL)  # not because it gave up
        self.nodes.etcd.send_signal(signal.SIGCONT)
        for reader in readers[1:]:
            self.assertIn(reader.wait(timeout=30), (0, 1))
        self.assertEqual(mount.read_json(jobs[0].file("dataset/status.json"))["state"], "no source.json")

    def test_history_is_compacted_while_a_node_is_away(self):
        """It misses no version: what was committed, edited and removed meanwhile it lists anew."""
        model = models.Llama(14)
        self.commit(0, model)
        self.nodes.partition(2, links=("eth1",))
        self.job(0).set_layout(tp=2, keep=1, devices=["w0:0", "w1:0"])
        newer = models.Llama(15)
        newer.write_hf(self.job(1).incoming("newer") + "/rank/0")
        models.write_file(self.job(1).incoming("newer") + "/layout.json", '{"tp": 1, "pp": 1, "dp": 1}')
        self.job(1).commit("newer")
        self.job(0).set_layout(pp=2, keep=1)
        cluster.until(lambda: os.listdir(self.job(0).file("checkpoints")) == ["newer"], "w0 keeps the newer one alone")
        self.nodes.compact_etcd()
        self.nodes.heal(2, links=("eth1",))
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        cluster.until(lambda: os.listdir(self.job(2).file("checkpoints")) == ["newer"], "w2 lists the newer one alone")
        for rank in range(2):
            held = models.read_safetensors(self.job(2).rank_file("newer", "tp1-pp2-dp1", rank))
            self.assertEqual(held, {tensor.name: tensor for tensor in newer.rank_tensors(1, 2, 0, rank)})

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
        self.nodes.kill(1)
        self.nodes.wait_members()
        drained = self.nodes.nodes[2].ptc("drain", "w0", check=False)
        self.assertEqual(drained.returncode, 1)
        self.assertIn("not enough memory on node w2", drained.stderr)
        self.nodes.start(1)
        self.nodes.wait_members()
        models.Llama(13).write_hf(incoming + "/rank/0")
        self.job(2).commit("big")
        self.nodes.wait_settled(self.name)
        self.nodes.nodes[0].ptc("verify", self.name)

    def replace_store(self):
        self.nodes.kill(2)
        cluster.run("umount", self.nodes.nodes[2].store)
        self.nodes.start(2)


class Network(TestCase):
    """What a network does to nodes that are alive."""

    def test_one_way_cut(self):
        """w1 hears w0 no more, and is heard. It goes on by itself when that is over."""
        model = models.Llama(20)
        self.commit(0, model)
        self.nodes.lose(0, 1)
        for node in (0, 2):
            self.assertEqual(self.nodes.nodes[node].members(), ["w0", "w1", "w2"])
        self.job(2).save_layout(tp=2, devices=["w1:0", "w1:1"])
        time.sleep(LEASE)
        state = os.readlink(self.job(2).file("current"))
        self.assertIn(state.rsplit("/", 1)[-1], ("tp1-pp1-dp1", "tp2-pp1-dp1"))
        self.nodes.lose_nothing()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 2, 1)

    def test_one_percent_is_lost(self):
        model = BigLlama(21)
        self.commit(0, model)
        for source in range(3):
            for target in range(3):
                if source != target:
                    self.nodes.lose(source, target, percent=1)
        self.job(1).set_layout(pp=2, devices=["w1:0", "w2:0"])
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)
        for node in range(3):
            self.assertEqual(self.nodes.nodes[node].members(), ["w0", "w1", "w2"])
        self.nodes.nodes[2].ptc("verify", self.name)

    def test_a_slow_node(self):
        """It counts as alive, and what concerns others does not wait for it."""
        model, small = BigLlama(22), models.Llama(23)
        self.commit(0, model)
        self.nodes.shape(2, "2mbit")
        self.job(0).save_layout(devices=["w2:0"])
        cluster.until(lambda: self.job(0).status()["state"] == "resharding", "it is being moved")
        other = self.nodes.job(0, self.name + "-other")
        self.addCleanup(self.nodes.nodes[0].ptc, "rm", "--force", other.name, check=False)
        small.write_hf(other.incoming("base") + "/rank/0")
        other.commit("base")
        other.save_layout(tp=2, devices=["w0:0", "w1:0"])
        cluster.until(lambda: os.readlink(other.file("current")).endswith("tp2-pp1-dp1"), "another job goes on")
        self.assertEqual(self.job(0).status()["state"], "resharding")
        self.assertEqual(self.nodes.nodes[0].members(), ["w0", "w1", "w2"])
        self.nodes.shape(2, None)
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 1)

    def test_partitions_heal_in_any_order(self):
        """Edits come from who is not cut off; when all is healed there is one history."""
        dice = random.Random(os.environ.get("PTC_SEED", time.time_ns()))
        seed = dice.randrange(1 << 32)
        print("PTC_SEED", seed)
        dice.seed(seed)
        model = models.Llama(24)
        self.commit(0, model, pp=3, replicas=1)
        accepted = 0
        for _ in range(3):
            cuts = dice.sample([(node, (link,)) for node in range(3) for link in ("eth0", "eth1")], 2)
            for cut in cuts:
                self.nodes.partition(*cut)
            for node in range(3):
                try:
                    self.job(node).save_layout(tp=dice.choice((1, 2)), keep=dice.randrange(2, 100))
                    accepted += 1
                except OSError as error:
                    self.assertIn(errno.errorcode[error.errno], ("EBUSY", "EAGAIN", "EINVAL"))
            time.sleep(dice.random() * LEASE)
            for cut in dice.sample(cuts, 2):
                self.nodes.heal(*cut)
                time.sleep(dice.random())
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        texts = {read(self.job(node).file("layout.json")) for node in range(3)}
        self.assertEqual(len(texts), 1)
        print(accepted, "edits were accepted")
        self.expect_everywhere(model, json.loads(texts.pop())["tp"], 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
