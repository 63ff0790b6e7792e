"""cmake --install: what it puts where, and that each piece works from there."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import mount

BUILD = os.path.dirname(mount.bin_dir())
CHANGELOG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/packages/changelog")
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/python/ptc")


def run(*command, **options):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          check=False, **options)


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not os.path.exists(os.path.join(BUILD, "cmake_install.cmake")):
            mount.skip(f"{BUILD} is no build directory")
        mount.require_program("cmake")
        cls.prefix = tempfile.mkdtemp(prefix="ptcfs-install-")
        cls.addClassCleanup(shutil.rmtree, cls.prefix, ignore_errors=True)
        done = run("cmake", "--install", BUILD, "--prefix", cls.prefix)
        assert done.returncode == 0, done.stderr

    def at(self, *parts):
        return os.path.join(self.prefix, *parts)

    def test_what_is_where(self):
        found = sorted(os.path.relpath(os.path.join(where, name), self.prefix)
                       for where, _, names in os.walk(self.prefix) for name in names)
        self.assertEqual(found, sorted([
            "bin/ptc", "bin/ptcfs", "include/ptcfs/pages.h",
            "lib/systemd/system/ptcfs@.service",
            "share/bash-completion/completions/ptc", "share/bash-completion/completions/ptcfs",
            "share/fish/vendor_completions.d/ptc.fish", "share/fish/vendor_completions.d/ptcfs.fish",
            "share/ptcfs/python/README.md", "share/ptcfs/python/pyproject.toml", *(
                f"share/ptcfs/python/ptc/{name}" for name in os.listdir(PACKAGE) if name != "__pycache__"),
            *(f"share/ptcfs/monitoring/{name}" for name in ("grafana.json", "ptcfs.rules.test.yml", "ptcfs.rules.yml")),
            *(f"share/ptcfs/techniques/{name}" for name in ("accumulation", "ddp", "fsdp", "gpipe", "offload", "tensor", "trial.py")),
            "share/man/man1/ptc.1", "share/man/man5/ptcfs-layout.5", "share/man/man8/ptcfs.8",
            "share/zsh/site-functions/_ptc"]))

    def test_programs_run(self):
        for program in ("ptc", "ptcfs"):
            done = run(self.at("bin", program), "--version")
            self.assertRegex(done.stdout, rf"^{program} \d")

    def test_all_are_of_one_version(self):
        """CMakeLists.txt says it; the packages' changelog and the Python package are checked against that."""
        said = run(self.at("bin/ptcfs"), "--version").stdout.split()[1]
        self.assertEqual(run(self.at("bin/ptc"), "--version").stdout.split()[1], said)
        self.assertIn(f'\n__version__ = "{said}"\n', mount.read_text(os.path.join(PACKAGE, "__init__.py")))
        self.assertRegex(mount.read_text(CHANGELOG), rf"^ptcfs \({re.escape(said)}-[0-9.]+\) ")

    def test_the_python_package(self):
        """pip installs what is there, types too, without anything else."""
        copy = self.at("copy")  # pip builds in the folder
        shutil.copytree(self.at("share/ptcfs/python"), copy)
        self.addCleanup(shutil.rmtree, copy)
        done = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                   "--target", self.at("copy/site"), copy)
        missing = ("No module named", "Cannot import", "invalid command 'bdist_wheel'")
        if done.returncode != 0 and any(said in done.stderr for said in missing):
            self.skipTest("pip, setuptools or wheel is not there: " + done.stderr.strip().splitlines()[-1])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(os.path.exists(self.at("copy/site/ptc/py.typed")))
        code = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import ptc; print(ptc.__file__)"
        done = run(sys.executable, "-c", code, env={**os.environ, "PYTHONPATH": self.at("copy/site")})
        self.assertEqual(done.stdout.strip(), self.at("copy/site/ptc/__init__.py"), done.stderr)

    def test_manual_pages_are_found(self):
        if shutil.which("man") is None:
            self.skipTest("man is not installed")
        for section, page in (("1", "ptc"), ("5", "ptcfs-layout"), ("8", "ptcfs")):
            done = run("man", "-M", self.at("share/man"), section, page)
            self.assertIn("DESCRIPTION", done.stdout, done.stderr)

    def test_the_systemd_unit(self):
        unit = self.at("lib/systemd/system/ptcfs@.service")
        text = mount.read_text(unit)
        self.assertNotIn("@bindir@", text)
        self.assertIn(f"ExecStart={self.prefix}/bin/ptcfs ", text)
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not installed")
        instance = os.path.join(self.prefix, "ptcfs@mnt-ptc.service")
        shutil.copy(unit, instance)
        self.addCleanup(os.unlink, instance)
        done = run("systemd-analyze", "verify", "--man=no", instance)
        if "Failed to" in done.stderr and instance not in done.stderr:
            self.skipTest("systemd-analyze does not work here: " + done.stderr.strip())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        done = run("systemd-analyze", "security", "--offline=yes", "--no-pager", "--json=short", instance)
        if done.returncode == 0 and done.stdout.startswith("["):
            held = {one["json_field"]: one["set"] for one in json.loads(done.stdout)}
            for what in ("NoNewPrivileges", "RestrictNamespaces_mnt", "RestrictRealtime", "LockPersonality", "SystemCallArchitectures",
                         "RestrictAddressFamilies_AF_PACKET"):
                self.assertTrue(held[what], what)
            for what in ("PrivateTmp", "ProtectSystem", "PrivateMounts"):
                self.assertFalse(held.get(what), what + ": others would not see the mount")


if __name__ == "__main__":
    mount.main()
