"""tools/deploy: the unit can be read by systemd, and its options are some that ptcfs has (clients.kubernetes: all else)."""
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "clients"))
import mount  # noqa: E402

DEPLOY = os.path.join(HERE, "..", "..", "tools", "deploy")


def options_of(words):
    return [word.split("=")[0] for word in words if word.startswith("--")]


class Deploy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ptcfs = os.path.join(mount.bin_dir(), "ptcfs")
        done = subprocess.run([cls.ptcfs, "--help"], capture_output=True, text=True, check=True)
        cls.known = set(re.findall(r"--[a-z-]+", done.stdout))

    def test_options_for_the_unit(self):
        text = mount.read_text(os.path.join(DEPLOY, "ptcfs.default"))
        (name, value), = (line.split("=", 1) for line in text.splitlines()
                          if line and not line.startswith("#"))
        self.assertEqual(name, "PTCFS_OPTIONS")
        self.assertLessEqual(set(options_of(shlex.split(value.strip('"')))), self.known)

    def test_the_unit_reads_them(self):
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not installed")
        with tempfile.TemporaryDirectory(prefix="ptcfs-deploy-") as top:
            unit = os.path.join(top, "ptcfs@mnt-ptc.service")
            text = mount.read_text(os.path.join(DEPLOY, "ptcfs@.service.in"))
            text = text.replace("@bindir@", os.path.dirname(self.ptcfs))
            text = text.replace("/etc/default/ptcfs\n", os.path.abspath(DEPLOY) + "/ptcfs.default\n")
            with open(unit, "w", encoding="utf-8") as file:
                file.write(text)
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit],
                                  capture_output=True, text=True, check=False)
            if "Failed to" in done.stderr and unit not in done.stderr:
                self.skipTest("systemd-analyze does not work here: " + done.stderr.strip())
            self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    mount.main()
