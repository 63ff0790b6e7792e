"""/healthz and /readyz of the nodes of a cluster, asked in the network of each: whatever others do, the former tells of
this daemon alone, the latter also of its place among them, and neither waits for anybody."""
import concurrent.futures
import subprocess
import sys
import threading
import time
import unittest

import cluster
from cluster import mount
import models
from cases import LEASE, BigLlama, TestCase, layout_name

# In the node's network; prints the status, then the body.
ASK = """
import sys, time, urllib.error, urllib.request
begun = time.monotonic()
try:
    answer = urllib.request.urlopen("http://127.0.0.1:9090" + sys.argv[1], timeout=20)
except urllib.error.HTTPError as error:
    answer = error
print(answer.status, time.monotonic() - begun)
print(answer.read().decode(), end="")
"""
WITHIN = 2  # seconds, on a machine that does much else
HEALTHY = {"mount": "ok", "requests": "ok"}
READY = {**HEALTHY, "lease": "ok", "agreement": "ok", "drain": "ok", "leaving": "ok"}


class HealthCase(TestCase):
    NODES = 2
    OPTIONS = ("--http", "127.0.0.1:9090")

    def ask(self, node, path):
        """Status and lines, once somebody listens."""
        launcher = self.nodes.launcher(f"w{node}")
        done = subprocess.run([*launcher, sys.executable, "-c", ASK, path], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            self.assertIn("refused", done.stderr)
            return 0, {}
        head, *lines = done.stdout.splitlines()
        status, seconds = head.split()
        self.assertLess(float(seconds), WITHIN, done.stdout)
        return int(status), dict(line.split(": ", 1) for line in lines)

    def expect_ready(self, node):
        self.assertEqual(self.ask(node, "/healthz"), (200, HEALTHY))
        self.assertEqual(self.ask(node, "/readyz"), (200, READY))

    def until_said(self, node, path, status, **said):
        """That, and nothing but that is wrong."""
        got = []

        def is_said():
            got[:] = self.ask(node, path)
            return got[0] == status and all(words in got[1].get(name, "") for name, words in said.items())
        try:
            cluster.until(is_said, "it is said", 30)
        except AssertionError as error:
            raise AssertionError(f"{path} of w{node}: {got}") from error
        self.assertEqual({name for name, line in got[1].items() if line != "ok"}, set(said))


class Health(HealthCase):
    def test_one_that_is_cut_off_from_etcd(self):
        self.expect_ready(0)
        self.nodes.partition(0, ("eth1",))
        self.until_said(0, "/readyz", 503, lease="does not reach the agreement store (etcd)")
        self.assertEqual(self.ask(0, "/healthz"), (200, HEALTHY))
        self.expect_ready(1)
        self.nodes.heal(0, ("eth1",))
        self.until_said(0, "/readyz", 200)

    def test_one_that_is_drained(self):
        self.nodes.nodes[0].ptc("drain", "w1")
        self.until_said(1, "/readyz", 503, drain="this node is drained")
        self.assertEqual(self.ask(1, "/healthz"), (200, HEALTHY))
        self.expect_ready(0)
        self.nodes.nodes[0].ptc("drain", "w1", "--cancel")
        self.until_said(1, "/readyz", 200)

    def test_one_that_waits_for_another(self):
        model = BigLlama(1)
        self.commit(0, model, pp=2, devices=["w0:0", "w1:0"])
        elsewhere = self.job(0).rank_file("base", layout_name(1, 2), 1)
        self.nodes.pause(1)
        held = []
        readers = [threading.Thread(target=lambda: held.append(models.read_safetensors(elsewhere))) for _ in range(40)]
        for reader in readers:
            reader.start()
        end = time.monotonic() + LEASE + 1  # it is a member for a while, and then it is not
        while time.monotonic() < end:
            self.assertEqual(self.ask(0, "/healthz"), (200, HEALTHY))
            status, said = self.ask(0, "/readyz")
            self.assertEqual((status, said), (200, READY))
        self.assertEqual(held, [])
        self.nodes.resume(1)
        for reader in readers:
            reader.join()
        self.assertEqual(held, len(readers) * [{tensor.name: tensor for tensor in model.rank_tensors(1, 2, 0, 1)}])

    def test_one_that_starts(self):
        """It waits until a member that does not answer cannot be one any more."""
        self.nodes.kill(1)
        self.nodes.pause(0)
        mounted = threading.Event()

        def look():
            said = []
            while not mounted.is_set():
                said += [self.ask(1, path) for path in ("/healthz", "/readyz")]
            return said
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # not the start: with a thread ends what it has begun
            looking = pool.submit(look)
            try:
                self.nodes.start(1)
            finally:
                mounted.set()
            said = [answer for answer in looking.result() if answer[1].get("mount") != "ok"]
        self.assertIn((503, {"mount": "not yet: ptcfs starts"}), said)
        self.assertEqual({status for status, _ in said} - {0, 503}, set())  # 0: nobody listens yet
        self.until_said(1, "/readyz", 200)
        self.nodes.resume(0)
        self.until_said(0, "/readyz", 200)


class Distrusted(HealthCase):
    NODES = 1

    def test_one_whose_etcd_is_another(self):
        self.expect_ready(0)
        self.nodes.etcdctl("del", "--prefix", "")
        cluster.until(lambda: self.ask(0, "/readyz")[1]["agreement"] != "ok", "it is noticed", 30)
        self.assertEqual(self.ask(0, "/readyz")[0], 503)
        self.assertEqual(self.ask(0, "/healthz"), (200, HEALTHY))

    def clean(self):
        """It is the last one."""


if __name__ == "__main__":
    mount.main()
