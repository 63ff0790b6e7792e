"""tools/cluster: what a newcomer does with it."""
import os
import signal
import subprocess
import sys
import tempfile
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)

TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/cluster")


class Tool(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cluster.require()
        holder = tempfile.mkdtemp(prefix="ptcfs-tool-")
        cls.addClassCleanup(os.rmdir, holder)
        cls.top = os.path.join(holder, "tool-" + str(os.getpid()))
        cls.addClassCleanup(cluster.take_down, cls.top)

    def run_tool(self, *arguments, code=0):
        done = subprocess.run([sys.executable, "-B", TOOL, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              check=False, timeout=200, env={**os.environ, "PTC_CLUSTER_DIR": self.top})
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        return done.stdout + done.stderr

    def test_its_days(self):
        self.assertIn("none is up", self.run_tool("status", code=1))
        self.assertIn("'banana' is no rate", self.run_tool("up", "2", "--rate", "banana", code=2))
        self.assertFalse(os.path.exists(self.top))
        self.run_tool("up", "2", "--memory", "1G")
        os.mkdir(self.top + "/w0/mnt/llama")
        self.assertIn("w0: killed", self.run_tool("kill", "0"))
        self.assertRegex(self.run_tool("status"), r"w0  dead .*\nw1  pid \d+ .*\netcd  pid")
        self.assertIn("w0 does not run", self.run_tool("kill", "w0", code=1))
        self.assertIn("there is no 7; there are w0, w1 and etcd", self.run_tool("start", "7", code=1))
        self.run_tool("start", "0")
        self.assertTrue(os.path.isdir(self.top + "/w0/mnt/llama"))
        self.assertIn("w0 runs", self.run_tool("start", "w0", code=1))
        self.run_tool("kill", "etcd")
        self.assertIn("etcd  dead", self.run_tool("status"))
        self.run_tool("start", "etcd")
        self.assertIn("w1: stopped", self.run_tool("stop", "w1"))
        # By hand, as its own command line has it, but in the background, with words of another form.
        command = mount.read_json(self.top + "/w1/command")
        command.remove("-f")
        at = command.index("--store")
        command[at:at + 2] = ["--store=" + command[at + 1]]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=60)
        by_hand = int(self.run_tool("status").split("\nw1  pid ")[1].split()[0])
        other = subprocess.Popen(["sleep", "1000"], cwd=self.top)  # is in the directory, and is none of it
        self.addCleanup(other.wait)
        self.addCleanup(other.send_signal, signal.SIGTERM)
        self.run_tool("down")
        self.assertFalse(cluster.lives(by_hand))
        self.assertIsNone(other.poll())
        self.assertFalse(os.path.exists(self.top))
        self.assertIn("none is up", self.run_tool("down", code=1))


if __name__ == "__main__":
    unittest.main(verbosity=2)
