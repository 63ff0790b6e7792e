"""Programs that were made to find faults of file systems, each for some seconds in incoming/: fio, stress-ng, and
pjdfstest where its folder is given (PTC_PJDFSTEST=DIR, built there; it is not a package).

Afterwards the mount is in order, and it holds no more files and inodes than before.
"""
import json
import os
import re
import shutil
import subprocess
import time

import sides
from sides import mount

SECONDS = int(os.environ.get("PTC_SECONDS") or 4)

FIO = {  # Every job verifies each block that it wrote by a checksum in it.
    "random write": "rw=randwrite bs=4k size=24m",
    "mixed sizes": "rw=randrw bsrange=1k-128k size=24m",
    "sequential, then read": "rw=write bs=256k size=48m",
    "mapped": "rw=randwrite bs=4k size=16m ioengine=mmap",
    "several at once": "rw=randwrite bs=8k size=8m numjobs=4",
    "direct": "rw=randwrite bs=4k size=16m direct=1",
    "asynchronous": "rw=randwrite bs=16k size=16m ioengine=libaio iodepth=8 direct=1",
    "synced": "rw=randwrite bs=4k size=2m fsync=16",
}

STRESSORS = ("access chmod chown close copy-file dentry dir dirdeep dup fallocate fcntl fiemap file-ioctl filename "
             "flock fpunch fsize fstat getdent handle hdd io iomix lease link locka lockf lockofd mknod metamix "
             "mmap open readahead rename revio seek sendfile splice symlink sync-file touch utime verity xattr").split()


class Tools(sides.mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()
        self.place = self.job.incoming("t")
        os.mkdir(self.place)
        self.before = self.held()

    def held(self):
        """Descriptors and inodes that the daemon has."""
        stats = json.loads(mount.read_text(self.mount.path + "/.ptc/stats"))
        return len(os.listdir(f"/proc/{self.mount.process.pid}/fd")), stats["nodes_in_memory"]

    def check_nothing_leaked(self):
        shutil.rmtree(self.place)
        os.mkdir(self.place)
        deadline = time.monotonic() + 30  # the kernel lets go of inodes when it likes to
        while True:
            now = self.held()
            if all(have <= had + 16 for have, had in zip(now, self.before)):
                return
            if time.monotonic() > deadline:
                self.fail(f"descriptors and inodes before {self.before}, now {now}")
            subprocess.run(["sh", "-c", "echo 2 > /proc/sys/vm/drop_caches"], check=False,
                           stderr=subprocess.DEVNULL)
            time.sleep(0.2)

    def check_in_order(self):
        """A checkpoint goes in, is cut anew and is what it was."""
        import models
        models.Llama().write_hf(self.job.incoming("after") + "/rank/0")
        self.job.commit("after")
        self.job.set_layout(tp=2)
        self.assertIn("after", self.mount.ptc("verify", self.job.name + "/after").stdout)
        requests = json.loads(mount.read_text(self.mount.path + "/.ptc/requests"))["requests"]
        self.assertEqual([one for one in requests if one["age_ms"] > 5000], [])

    def run_in_place(self, command, seconds):
        done = subprocess.run(command, cwd=self.place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False, timeout=seconds)
        return done.returncode, done.stdout

    def test_fio(self):
        program = self.program("fio")
        for title, options in FIO.items():
            with self.subTest(title):
                status, said = self.run_in_place(
                    [program, f"--name={title.replace(' ', '-')}", "--verify=crc32c", "--verify_fatal=1",
                     "--randrepeat=0", "--ioengine=psync", "--group_reporting", "--thread",
                     *("--" + option for option in options.split())], 200)
                self.assertEqual(status, 0, said)
                self.assertNotRegex(said, r"(?i)verify:|bad magic|err=[^ 0]")
                for name in os.listdir(self.place):
                    os.unlink(os.path.join(self.place, name))
        self.check_nothing_leaked()
        self.check_in_order()

    def test_stress_ng(self):
        program = self.program("stress-ng")
        known = subprocess.run([program, "--stressors"], capture_output=True, text=True, check=False).stdout.split()
        chosen = [name for name in STRESSORS if name in known]
        for begin in range(0, len(chosen), 12):
            some = chosen[begin:begin + 12]
            with self.subTest(some):
                status, said = self.run_in_place(
                    [program, "--temp-path", ".", "--timeout", f"{SECONDS}s", "--verify", "--no-rand-seed",
                     "--hdd-bytes", "8m", "--fallocate-bytes", "16m", "--iomix-bytes", "8m", "--readahead-bytes",
                     "8m", "--revio-bytes", "8m", "--mmap-bytes", "8m", "--mmap-file",
                     *(word for name in some for word in (f"--{name}", "1"))], SECONDS + 200)
                # 3: a stressor that this kernel lacks, or that could not get what it needs; it says so.
                self.assertIn(status, (0, 3), said)
                self.assertNotRegex(said, r"(?im)^.*\b(fail|error|fatal):")
        self.check_nothing_leaked()
        self.check_in_order()

    def test_pjdfstest(self):
        folder = os.environ.get("PTC_PJDFSTEST")
        if not folder or not os.access(os.path.join(folder, "pjdfstest"), os.X_OK):
            self.skipTest("PTC_PJDFSTEST names no folder with a built pjdfstest")
        program = self.program("prove")
        os.chmod(self.mount.top, 0o755)
        with mount.Mount("-o", "allow_other") as mounted:
            os.chmod(mounted.top, 0o755)
            self.place = mounted.job("pjdfstest").incoming("t")
            os.makedirs(self.place)
            _, said = self.run_in_place([program, "-r", os.path.join(folder, "tests")], 3000)
        failed = re.findall(r"^\S*/tests/(\S+) +\(Wstat", said, re.M)
        # These also make device files, which nobody may where ptcfs is mounted.
        devices = [test for test in failed if "mknod" in test or self.makes_devices(folder, test)]
        self.assertEqual(sorted(set(failed) - set(devices)), [], said[-4000:])

    @staticmethod
    def makes_devices(folder, test):
        return re.search(r"\b(block|char)\b|mknod", mount.read_text(os.path.join(folder, "tests", test)))

    def program(self, name):
        path = shutil.which(name)
        if path is None:
            self.skipTest(f"{name} is not installed")
        return path


if __name__ == "__main__":
    mount.main()
