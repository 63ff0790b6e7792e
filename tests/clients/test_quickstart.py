"""tools/quickstart's tour, with what is built already, in paths with spaces."""
import os
import re
import shutil
import subprocess
import tempfile
import unittest
import urllib.request

import models
import mount

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")


class Quickstart(unittest.TestCase):
    def setUp(self):
        if not os.path.exists("/dev/fuse"):
            mount.skip("this machine has no /dev/fuse")
        self.top = tempfile.mkdtemp(prefix="ptcfs test ")
        self.addCleanup(shutil.rmtree, self.top)

    def at(self, *parts):
        path = os.path.join(self.top, *parts)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def program(self, path, text):
        models.write_file(path, "#!/bin/sh\n" + text)
        os.chmod(path, 0o755)

    def quickstart(self, *arguments):
        """Packages and the build are left out: everything that has a path in it is run."""
        shutil.copy(os.path.join(ROOT, "tools/quickstart"), self.at("my clone/tools/quickstart"))
        self.program(self.at("my clone/tools/install-deps"), "exit 0\n")
        self.program(self.at("programs here/cmake"), "exit 0\n")
        for name in ("compare_shards.py", "models.py"):
            shutil.copy(os.path.join(ROOT, "tests/clients", name), self.at("my clone/tests/clients", name))
        shutil.copy(os.path.join(ROOT, "tools/examples/jobs.json"), self.at("my clone/tools/examples/jobs.json"))
        shutil.copytree(os.path.join(ROOT, "tests/bench/data/elasticflow"), self.at("my clone/tests/bench/data/elasticflow"))
        os.symlink(mount.bin_dir(), self.at("my clone/build/bin"))
        models.Bert().write_hf(self.at("my clone/build/models/minilm/"))
        os.mkdir(self.at("a $HOME's tmp"))
        done = subprocess.run(
            [self.at("my clone/tools/quickstart"), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            cwd="/", timeout=200,
            env={**os.environ, "TMPDIR": self.at("a $HOME's tmp"), "PATH": self.at("programs here") + ":" + os.environ["PATH"]})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("identical", done.stdout)
        self.assertIn("checked bit for bit", done.stdout)
        self.assertIn("16 of 16 GPUs in use", done.stdout)
        return done.stdout

    def test_in_paths_with_spaces(self):
        said = self.quickstart()
        self.assertIn("<svg", mount.read_text(self.at("my clone/build/plan.svg")))
        self.assertEqual(os.listdir(self.at("a $HOME's tmp")), [])
        if shutil.which("etcd"):
            self.assertRegex(said, r"\bw1 +w2 +[1-9]")

    def test_it_stays_when_asked(self):
        said = self.quickstart("--stay")
        end = re.search(r"^to end it +(.*)$", said, re.MULTILINE)[1]
        self.addCleanup(subprocess.run, end, shell=True, check=False, capture_output=True)
        page = re.search(r"^its page +(http://\S+)$", said, re.MULTILINE)[1]
        with urllib.request.urlopen(page, timeout=60) as answer:
            self.assertIn("minilm", answer.read().decode())
        self.assertEqual(len(os.listdir(self.at("a $HOME's tmp"))), 1)
        done = subprocess.run(["bash", "-c", end], capture_output=True, text=True, check=False, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(os.listdir(self.at("a $HOME's tmp")), [])


if __name__ == "__main__":
    mount.main()
