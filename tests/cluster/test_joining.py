"""Who is let in: a node that others would not talk to, or that they cannot reach, never shows as up and harms nobody."""
import json
import os
import shutil
import subprocess
import unittest

from authority import Authority
from cases import TestCase, mount
import cluster
import models


class Joining(TestCase):
    """w0 and w1 are there; w2 tries."""
    TLS = True

    def setUp(self):
        super().setUp()
        self.last = self.nodes.nodes[2]
        options = list(self.last.options)
        self.addCleanup(setattr, self.last, "options", options)
        self.nodes.stop(2)
        self.nodes.wait_members()
        self.option = dict(zip(options[::2], options[1::2]))

    def options(self, **changed):
        option = {**self.option, **{"--" + name.replace("_", "-"): value for name, value in changed.items()}}
        return [word for pair in option.items() for word in pair]

    def starts(self, *options):
        return subprocess.Popen(
            [*self.last.launcher, os.path.join(self.last.bin, "ptcfs"), "-f", "--store", self.last.store, *options,
             self.last.path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def refused(self, *said, **changed):
        """Ends with a reason; and meanwhile the others commit as ever."""
        process = self.starts(*self.options(**changed))
        job, turns = self.nodes.job(0, self.name), 0
        while process.poll() is None or turns == 0:
            name, turns = f"c{turns}", turns + 1
            models.Llama(turns).write_hf(job.incoming(name) + "/rank/0")
            job.commit(name)
            for node in self.nodes.nodes[:2]:
                self.assertNotIn("w2", node.members())
        self.nodes.wait_members()
        output = process.communicate()[0]
        self.assertNotIn(process.returncode, (0, -11), output)
        why = "".join(line for line in output.splitlines() if line.startswith("ptcfs: "))
        for words in ("is not let into the cluster", *said):
            self.assertIn(words, why, output)
        self.nodes.nodes[0].ptc("rm", "--force", self.name)

    def write(self, name, text):
        path = os.path.join(self.nodes.top, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
            file.write(text)
        return path

    def test_another_secret(self):
        self.refused("node w0 (10.1.0.1:7070)", "its shared secret is another", "--secret",
                     secret=self.write("other-secret", "x" * 40))

    def test_with_another_secret_nothing_is_agreed_on(self):
        """A store that was alone keeps its jobs, and its metadata, for itself."""
        self.nodes.job(0, self.name)
        self.nodes.wait_settled(self.name)
        store = self.last.store
        os.rename(store, store + "-kept")
        self.addCleanup(os.rename, store + "-kept", store)
        self.addCleanup(shutil.rmtree, store)
        with mount.Mount() as alone:
            os.mkdir(os.path.join(alone.path, "mine"))
            alone.stop()
            shutil.copytree(alone.store, store)

        def agreed():
            keys = json.loads(self.nodes.etcdctl("get", "--prefix", "", "-w", "json"))["kvs"]
            return [key for key in keys if not key.get("lease")]  # what the others are at comes and goes
        before = agreed()
        process = self.starts(*self.options(secret=self.write("other-secret", "x" * 40)), "--join")
        output = process.communicate(timeout=60)[0]
        self.assertGreater(process.returncode, 0, output)
        self.assertIn("its shared secret is another", output)
        self.assertEqual(agreed(), before)
        self.assertTrue(os.path.exists(store + "/meta.db"))
        self.assertTrue(os.path.isdir(store + "/jobs/mine"))

    def test_certificate_of_another_authority(self):
        other = Authority(os.path.join(self.nodes.top, "other"))
        certificate, key = other.issue("w2")
        # It trusts the others, which do not trust it.
        self.refused("node w0 (10.1.0.1:7070)", "unknown ca", tls_cert=certificate, tls_key=key)
        self.refused("node w0 (10.1.0.1:7070)", "certificate verify failed", tls_ca=other.ca)

    def test_certificate_of_another_name(self):
        certificate, key = self.nodes.authority.issue("somebody", "DNS:somebody")
        self.refused("the certificate is not for node w2", tls_cert=certificate, tls_key=key)

    def test_not_reached_by_the_others(self):
        self.refused("node w0 cannot come back: node w2 (10.1.0.3:7071)", "refused", advertise="10.1.0.3:7071")

    def test_does_not_reach_another(self):
        self.nodes.lose(2, 1)
        self.refused("node w1 (10.1.0.2:7070)", "no answer in time")
        self.nodes.lose_nothing()
        self.nodes.start(2)
        self.nodes.wait_members()

    def test_of_two_at_once_one_is_let_in(self):
        """Nobody is there whom they could ask: the later one finds the earlier one."""
        for node in (0, 1):
            self.nodes.stop(node)
        first = self.nodes.nodes[0]
        secret = self.write("other-secret", "x" * 40)
        options = list(first.options)
        for turn in range(5):
            process = self.starts(*self.options(secret=secret))
            refused = ""
            try:
                first.start()
            except RuntimeError as error:
                refused = str(error)
            if refused:
                self.assertIn("its shared secret is another", refused)
                first.process.wait()
                first.process = None
                # It is a member before it is mounted.
                cluster.until(lambda: mount.is_mounted(self.last.path), "w2 is mounted")
                cluster.until(lambda: self.last.members() == ["w2"], "w2 is alone")
                process.terminate()
                process.communicate()
            else:
                output = process.communicate()[0]
                self.assertIn("its shared secret is another", output)
                self.assertEqual(first.members(), ["w0"])
                first.stop()
        self.assertEqual(options, list(first.options))

    def test_cut_off_and_back(self):
        """A lease that ended while the way to one of the others is cut: it joins again when it can reach all."""
        self.nodes.start(2)
        self.nodes.wait_members()
        self.nodes.lose(2, 1)
        self.nodes.partition(2, ["eth1"])
        cluster.until(lambda: self.nodes.nodes[0].members() == ["w0", "w1"], "w2 is gone")
        self.nodes.heal(2, ["eth1"])
        cluster.until(lambda: "has not joined again: " in open(self.last.log, encoding="utf-8").read(), "w2 is refused")
        self.assertEqual(self.nodes.nodes[0].members(), ["w0", "w1"])
        self.nodes.lose_nothing()
        self.nodes.wait_members()


if __name__ == "__main__":
    unittest.main()
