"""Mutual TLS between nodes and https to etcd: ends, strangers, and certificates and secrets that are exchanged under load."""
import calendar
import os
import shutil
import signal
import subprocess
import threading
import time
import unittest

from authority import Authority
from cases import TestCase, layout_name, read
import cluster
from cluster import mount
import models
import prometheus


class Certificates(TestCase):
    NODES, TLS = 4, True

    def setUp(self):
        super().setUp()
        self.pids = [node.process.pid for node in self.nodes.nodes]

    def expect_nobody_crashed(self):
        self.assertEqual([node.process.poll() for node in self.nodes.nodes], [None] * self.NODES)
        self.assertEqual([node.process.pid for node in self.nodes.nodes], self.pids)

    def put(self, texts):
        """Each file anew, as a whole: its name among the certificates, or a path, → content."""
        for name, text in texts.items():
            path = self.nodes.authority.file(name)
            with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(text)
            os.rename(path + ".new", path)

    def another_authority(self, name):
        authority = Authority(os.path.join(self.nodes.top, name))
        self.addCleanup(shutil.rmtree, authority.directory)
        files = {}
        for node in self.nodes.nodes:
            for path in authority.issue(node.name):
                files[os.path.basename(path)] = read(path)
        return authority, files

    def test_ends_as_it_should(self):
        self.commit(0, models.Llama(1), tp=1, pp=3, devices=["w0:0", "w1:0", "w2:0"])
        for node, by in ((2, signal.SIGTERM), (1, signal.SIGINT)):
            daemon = self.nodes.nodes[node]
            daemon.process.send_signal(by)
            status = daemon.process.wait(timeout=30)
            daemon.process = None
            self.assertEqual(status, 0)

    def test_when_they_end_is_told(self):
        samples = prometheus.check(mount.read_text(self.nodes.path(0, ".ptc/metrics")))
        options = mount.read_json(self.nodes.path(0, ".ptc/daemon.json"))["options"]
        named = [option for option in ("tls-ca", "tls-cert", "etcd-ca", "etcd-cert") if option in options]
        self.assertLessEqual({"tls-ca", "tls-cert"}, set(named))
        for option in named:
            for date, name in (("-enddate", "not_after"), ("-startdate", "not_before")):
                said = subprocess.run(["openssl", "x509", "-noout", date, "-in", options[option]], capture_output=True, text=True,
                                      check=True).stdout.strip().split("=")[1]
                seconds = calendar.timegm(time.strptime(said, "%b %d %H:%M:%S %Y GMT"))
                self.assertEqual(samples[(f"ptcfs_certificate_{name}_timestamp_seconds", (("option", option),))], seconds)

    def work(self, node, stop, done, refused):
        """Commits, edits, reads and removes for as long as it may, again and again while a node comes and goes."""
        mounted, turn = self.nodes.nodes[node], 0
        job = self.nodes.job(node, f"{self.name}-{node}")
        while not stop.is_set():
            turn += 1
            name, pp, model = f"c{turn}", 1 + turn % 3, models.Llama(turn)
            try:
                model.write_hf(job.incoming(name) + "/rank/0")
                with open(job.incoming(name) + "/layout.json", "w", encoding="ascii") as file:
                    file.write('{"tp": 1, "pp": 1, "dp": 1}')
                job.commit(name)
                job.set_layout(tp=1, pp=pp, devices=[f"w{rank}:0" for rank in range(pp)])
                for rank in range(pp):
                    held = models.read_safetensors(job.rank_file(name, layout_name(1, pp), rank))
                    wanted = {tensor.name: tensor for tensor in model.rank_tensors(1, pp, 0, rank)}
                    if held != wanted:
                        stop.set()
                        raise AssertionError(f"rank {rank} of {name} is wrong")
                mounted.ptc("rm", f"{job.name}/{name}")
                done[node] += 1
            except (OSError, AssertionError, mount.Failed) as error:
                refused.append(f"{mounted.name}: {error}")

    def under_load(self, exchange):
        """All but the last node work; the last one is started anew at each step, so that all connect to it again."""
        last = self.NODES - 1
        stop, done, refused = threading.Event(), [0] * last, []
        workers = [threading.Thread(target=self.work, args=(node, stop, done, refused)) for node in range(last)]

        def step(what, files):
            self.put(files)
            self.nodes.stop(last)
            self.nodes.start(last)
            self.pids[last] = self.nodes.nodes[last].process.pid
            self.nodes.wait_members()
            before = list(done)
            cluster.until(lambda: stop.is_set() or all(map(int.__gt__, done, before)),
                          f"all have worked once more, {what}: {refused[-3:]}")
            self.expect_nobody_crashed()

        for worker in workers:
            worker.start()
        try:
            exchange(step)
        finally:
            wrong = stop.is_set()
            stop.set()
            for worker in workers:
                worker.join()
            for node in range(last):
                self.nodes.nodes[node].ptc("rm", "--force", f"{self.name}-{node}", check=False)
        self.assertFalse(wrong, refused)

    def test_exchanged_under_load(self):
        authority, files = self.another_authority("next")
        old, new = read(self.nodes.authority.ca), read(authority.ca)

        def exchange(step):
            step("the new authority beside the old one", {"ca.pem": old + new})
            step("new certificates", files)
            step("the new authority alone", {"ca.pem": new})
            # Not how it is done: everything at once. Until all have the new ones, some are refused.
            following, files_of_it = self.another_authority("following")
            step("another authority at once", {"ca.pem": read(following.ca), **files_of_it})
        self.under_load(exchange)

    def test_a_secret_is_exchanged_under_load(self):
        old, new = read(self.nodes.secret), b"n" * 40

        def exchange(step):
            step("the new secret below the old one", {self.nodes.secret: old + b"\n" + new})
            step("above it", {self.nodes.secret: new + b"\n" + old})
            step("the new one alone", {self.nodes.secret: new})
        self.under_load(exchange)


if __name__ == "__main__":
    unittest.main()
