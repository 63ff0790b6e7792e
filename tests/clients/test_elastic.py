"""tools/examples: training runs whose layout changes under way, compared with one that is never interrupted."""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import mount

HERE = os.path.dirname(os.path.abspath(__file__))
torch = mount.require("torch")
for folder in ("python", "examples"):
    sys.path.insert(0, os.path.join(HERE, "../../tools", folder))
sys.path.append(os.path.join(HERE, "../cluster"))
import cluster  # noqa: E402  pylint: disable=wrong-import-position
import elastic  # noqa: E402  pylint: disable=wrong-import-position
import proof  # noqa: E402  pylint: disable=wrong-import-position
import ptc  # noqa: E402  pylint: disable=wrong-import-position
from ptc.ranks import Ranks  # noqa: E402  pylint: disable=wrong-import-position


def stat_of(pid):
    """State and parent of a process; None: there is none."""
    try:
        return mount.read_text(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid):
    found = stat_of(pid)
    return found is not None and found[0] != "Z"


def descendants(pid):
    parents = {int(name): int(found[1]) for name in os.listdir("/proc") if name.isdigit() and (found := stat_of(name))}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


class Elastic(mount.TestCase):
    def tell(self, name):
        samples = self.temporary("samples")
        proof.write_samples(samples)
        self.assertTrue(proof.tell(name, self.mount.path, samples, self.scratch, self.kill_daemon))
        picture = mount.read_text(self.temporary(name + ".svg"))
        self.assertIn("killed", picture)
        kept = os.environ.get("PTC_PICTURES")
        if kept:
            with open(os.path.join(kept, name + ".svg"), "w", encoding="utf-8") as file:
                file.write(picture)

    def kill_daemon(self):
        self.mount.stop(kill=True)
        self.mount.start()

    def test_a_job_that_is_there_is_left_alone(self):
        os.mkdir(os.path.join(self.mount.path, "proof-tensors"))
        self.addCleanup(os.rmdir, os.path.join(self.mount.path, "proof-tensors"))
        for path in (self.mount.path, self.scratch):
            told = subprocess.run([sys.executable, proof.__file__, path, "--only", "tensors", "--out", self.temporary("out")],
                                  stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
                                  env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(ptc.__file__))})
            self.assertEqual(told.returncode, 1)
            self.assertEqual(told.stderr.count("\n"), 1, told.stderr)
            self.assertIn("left alone" if path == self.mount.path else "no mount of ptcfs", told.stderr)
        self.assertEqual(ptc.Job(self.mount.path + "/proof-tensors").status["revision"], 1)

    # ---- the launcher ----

    def job(self, name, **layout):
        """With samples for some minutes: what is not ended goes on for longer than a test looks."""
        samples = self.temporary("samples")
        self.addCleanup(setattr, proof, "SAMPLES", proof.SAMPLES)
        proof.SAMPLES = 40000
        proof.write_samples(samples)
        return proof.new_job(os.path.join(self.mount.path, name), samples, proof.layout_of(**layout), 4, elastic.train.first())

    def launch(self, job):
        """elastic.py as a process, once its ranks have made a few steps; (it, all its descendants)."""
        log = self.temporary(job.name + ".log")
        launcher = subprocess.Popen([sys.executable, elastic.__file__, job.path, log], stdin=subprocess.DEVNULL,
                                    env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(ptc.__file__))})
        self.addCleanup(launcher.wait)
        self.addCleanup(launcher.kill)
        while len(proof.read_log(log)) < 3:
            self.assertIsNone(launcher.poll())
            time.sleep(0.05)
        return launcher, descendants(launcher.pid)

    def await_end_of(self, pids):
        deadline = time.monotonic() + 60
        while any(is_alive(pid) for pid in pids):
            self.assertLess(time.monotonic(), deadline, f"of {pids} some are still there")
            time.sleep(0.05)

    def test_sigterm_before_a_rank_can_save(self):
        """As when the layout changes just after the ranks were started: they end as if they had made no step."""
        job = self.job("early", dp=2)
        job.wait()
        ranks = Ranks(elastic.train.main, [(rank, 2, job.path, job.layout, job.current, self.temporary("meet"), self.temporary("log"))
                                           for rank in range(2)], elastic.train.PRELOAD)
        for process in ranks.processes:
            process.terminate()
        for process in ranks.processes:
            process.join(60)
        self.assertEqual(ranks.codes, [0, 0])
        self.assertEqual((job.checkpoints(), proof.read_log(self.temporary("log"))), (["step00000"], []))

    def test_what_ranks_are_forked_from_has_imported_what_they_need(self):
        """Wherever the launcher was started: else each rank would, for seconds."""
        text = ("import sys; sys.path[:0] = sys.argv[1:]; import elastic, time; from multiprocessing import forkserver\n"
                "from ptc.ranks import start_server; start_server(elastic.train.PRELOAD); server = forkserver._forkserver._forkserver_pid\n"
                "while 'libtorch' not in open(f'/proc/{server}/maps').read(): time.sleep(0.1)\n"
                "print(elastic.os.environ.get('PYTHONPATH'))")
        places = [os.path.dirname(elastic.__file__), os.path.dirname(os.path.dirname(ptc.__file__))]
        told = subprocess.run([sys.executable, "-c", text, *places], cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=120,
                              env={**os.environ, "PYTHONPATH": "/elsewhere"}, text=True, check=True)
        self.assertEqual(told.stdout, "/elsewhere\n")

    def test_the_launcher_is_killed(self):
        """Its ranks do not go on to the end of the data set."""
        launcher, ranks = self.launch(self.job("orphans", dp=2))
        self.assertGreaterEqual(len(ranks), 3)
        launcher.kill()
        self.await_end_of(ranks)

    def test_the_launcher_is_asked_to_end(self):
        job = self.job("asked", dp=2)
        launcher, ranks = self.launch(job)
        launcher.terminate()
        self.assertEqual(launcher.wait(60), 128 + signal.SIGTERM)
        self.await_end_of(ranks)
        last = max(one["step"] for one in proof.read_log(self.temporary("asked.log")))
        self.assertEqual(job.checkpoints()[-1], f"step{last:05}")

    def test_ranks_that_fail_again_and_again(self):
        job = self.job("again")
        self.addCleanup(setattr, elastic, "FAILURES", elastic.FAILURES)
        elastic.FAILURES = 2
        with self.assertRaisesRegex(elastic.Failing, r"with \[1\], and have saved nothing since .*step00000"):
            elastic.run(job, self.temporary("there/is/none"))

    # ---- stories ----

    def test_the_daemon_is_killed(self):
        """While pp2-dp2 runs; what was committed is there again, and the loss is the same to the last bit."""
        self.tell("daemon")

    def test_replicas_and_stages_to_the_last_bit(self):
        """dp2, dp4 (a process killed), pp2-dp2 with half the batch, pp4."""
        self.tell("replicas-and-stages")

    def test_tensors(self):
        """tp2-dp2, dp4, tp4 with half the batch (a process killed), pp2-tp2."""
        self.tell("tensors")

    def test_fsdp(self):
        """FSDP2 on four, two (a process killed), three ranks with half the batch."""
        self.tell("fsdp")


class OnACluster(unittest.TestCase):
    """Three nodes and etcd; each rank on the mount of its node."""

    @classmethod
    def setUpClass(cls):
        try:
            cls.nodes = cluster.Cluster(3, "--lease", "3")
        except SystemExit:
            raise unittest.SkipTest("no cluster here") from None
        cls.nodes.__enter__()
        cls.addClassCleanup(cls.nodes.__exit__)

    def kill(self, name):
        self.nodes.kill(int(name[1:]))
        self.nodes.wait_members()

    def test_what_an_attempt_left_on_another_node(self):
        """Does not become part of a checkpoint: a commit takes what all nodes have in incoming/."""
        job = ptc.Job.create(self.nodes.path(0, "left"), dp=2)
        self.nodes.wait_settled("left")
        os.makedirs(self.nodes.path(1, "left/incoming/a/rank/2"))
        with open(self.nodes.path(1, "left/incoming/a/rank/2/ptc.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        scratch = tempfile.mkdtemp(prefix="ptcfs-scratch-")
        self.addCleanup(shutil.rmtree, scratch, ignore_errors=True)
        text = ("import os, sys; package, meet, rank, path = sys.argv[1:]; sys.path.insert(0, package)\n"
                "import torch, torch.distributed as dist, ptc\n"
                "dist.init_process_group('gloo', init_method='file://' + meet, rank=int(rank), world_size=2)\n"
                "ptc.Job(path).save({'w': torch.ones(2)}, 'a')\n"
                "dist.barrier(); os._exit(0)")
        package = os.path.dirname(os.path.dirname(ptc.__file__))
        ranks = [subprocess.Popen([sys.executable, "-c", text, package, scratch + "/meet", str(rank),
                                   self.nodes.path(rank, "left")], stdin=subprocess.DEVNULL) for rank in range(2)]
        for rank in ranks:
            self.addCleanup(rank.wait)
            self.addCleanup(rank.kill)
        self.assertEqual([rank.wait(120) for rank in ranks], [0, 0])
        self.assertEqual(job.checkpoints(), ["a"])

    def test_a_node_is_killed(self):
        """For good, and with it the rank that has the last stage. What others keep of it is brought into a layout
        without it, and the run goes on from the last checkpoint, to the last bit.
        """
        scratch = tempfile.mkdtemp(prefix="ptcfs-scratch-")
        self.addCleanup(shutil.rmtree, scratch, ignore_errors=True)
        samples = os.path.join(scratch, "samples")
        proof.write_samples(samples)
        mounts = {node.name: node.path for node in self.nodes.nodes}
        self.assertTrue(proof.tell("node", mounts["w0"], samples, scratch, self.kill, mounts))
        self.assertEqual(self.nodes.nodes[0].members(), ["w0", "w1"])


if __name__ == "__main__":
    mount.main()
