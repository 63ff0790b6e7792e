"""Requests by io_uring (`--io-uring`): the same as ever, whoever waits, is killed or unmounts; refused where the kernel has it not."""
import contextlib
import errno
import os
import signal
import subprocess
import time
import unittest

import models
import mount
import test_waiting

OFFERED = "/sys/module/fuse/parameters/enable_uring"  # asked at each mount, and only of daemons that want it
PROMPT = 10  # seconds, on a machine that does other things too


def setUpModule():
    if os.environ.get("PTC_IO_URING") != "1":
        mount.skip("it changes a parameter of the running kernel (enable_uring): PTC_IO_URING=1 asks for that")
    if os.getuid() != 0:
        raise unittest.SkipTest("only root says whether the kernel offers it")
    if not os.path.exists(OFFERED):
        raise unittest.SkipTest("this kernel knows no FUSE over io_uring")


class Offered:
    """While it is entered, the kernel offers it; or does not."""

    def __init__(self, value="Y"):
        self.value = value

    def __enter__(self):
        self.before = mount.read_text(OFFERED).strip()
        models.write_file(OFFERED, self.value)

    def __exit__(self, *_):
        models.write_file(OFFERED, self.before)


class Rings(mount.Mount):
    def start(self):
        with Offered():
            super().start()
        deadline = time.monotonic() + PROMPT
        while "io_uring)" not in mount.read_text(self.log):
            if time.monotonic() > deadline:
                raise AssertionError("no io_uring:\n" + mount.read_text(self.log))
            time.sleep(0.02)


def run_at_once(count, *command):
    return [subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(count)]


class Refused(unittest.TestCase):
    def test_where_the_kernel_does_not_offer_it(self):
        daemon = mount.Mount("--io-uring", "on")
        self.addCleanup(daemon.__exit__)
        with Offered("N"), self.assertRaisesRegex(RuntimeError, "Linux 6.14.*enable_uring"):
            daemon.start()
        self.assertEqual(daemon.process.returncode, 32)
        daemon.process = None
        self.assertFalse(mount.is_mounted(daemon.path))

    def test_auto_goes_without(self):
        with Offered("N"), mount.Mount("--io-uring", "auto") as daemon:
            self.assertIn("passthrough on)", mount.read_text(daemon.log))


class AllElse(mount.TestCase):
    mount_type = Rings
    mount_options = ("--io-uring", "auto")

    def test_large_and_small(self):
        job = self.new_job()
        written = os.urandom(5 << 20) + b"end"
        models.write_file(job.file("large"), written)
        self.assertEqual(mount.read_bytes(job.file("large")), written)
        names = [f"{i:04}-" + "n" * 240 for i in range(500)]
        os.mkdir(job.file("many"))
        for name in names:
            models.write_file(job.file("many", name), name)
        self.assertEqual(sorted(os.listdir(job.file("many"))), names)
        os.setxattr(job.file("large"), "user.x", b"v" * 3000)
        self.assertEqual(os.getxattr(job.file("large"), "user.x"), b"v" * 3000)
        with self.assertRaisesRegex(OSError, os.strerror(errno.ENOENT)):
            os.stat(job.file("none"))
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2)
        self.assertTrue(mount.digests(job.checkpoint("base", "layouts/tp4-pp1-dp1")))

    def test_many_at_once(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        callers = run_at_once(40, "ls", "-lR", job.path) + run_at_once(20, "cat", self.mount.path + "/.ptc/metrics")
        for caller in callers:
            self.assertEqual(caller.wait(timeout=6 * PROMPT), 0)

    def test_what_is_removed_is_free_at_once(self):
        with Rings("--io-uring", "on", "--memory", "24M") as daemon:
            path = daemon.job("small").file("most-of-it")
            for _ in range(20):
                models.write_file(path, bytes(16 << 20))
                os.unlink(path)

    def busy(self, daemon):
        job = daemon.job("busy")
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        callers = run_at_once(8, "sh", "-c", f"while ls -lR {job.path} && cat {daemon.path}/.ptc/metrics; do :; done")
        for caller in callers:
            self.addCleanup(caller.wait)
            self.addCleanup(caller.kill)
        time.sleep(0.5)
        return callers

    def test_killed_under_load(self):
        with Rings("--io-uring", "on") as daemon:
            callers = self.busy(daemon)
            daemon.process.kill()
            self.assertEqual(daemon.process.wait(timeout=PROMPT), -signal.SIGKILL)
            for caller in callers:
                caller.wait(timeout=PROMPT)
            self.assertEqual(mount.error_of(os.listdir, daemon.path), "ENOTCONN")
            daemon.stop()
            daemon.start()
            self.assertIn("busy", os.listdir(daemon.path))

    def test_unmounted_under_load(self):
        with Rings("--io-uring", "on") as daemon:
            callers = self.busy(daemon)
            subprocess.run(["umount", "-l", daemon.path], check=True)
            for caller in callers:
                caller.wait(timeout=PROMPT)
            self.assertEqual(daemon.process.wait(timeout=3 * PROMPT), 0)

    def test_ended_under_load(self):
        with Rings("--io-uring", "on") as daemon:
            callers = self.busy(daemon)
            daemon.process.send_signal(signal.SIGTERM)
            for caller in callers:
                caller.wait(timeout=PROMPT)
            self.assertEqual(daemon.process.wait(timeout=3 * PROMPT), 0)


class StoppedSource(test_waiting.StoppedSource):
    """More readers wait than there are threads of all processors that have entries of their own, and then go on."""
    mount_type = Rings
    options = ("--io-uring", "on")
    READERS = 16 * 2 + 20

    def affinities(self, name):
        """Of each thread of that name, how many processors it may run on."""
        found = []
        for task in os.listdir(f"/proc/{self.mount.process.pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                if mount.read_text(f"/proc/{self.mount.process.pid}/task/{task}/comm").strip() == name:
                    found.append(len(os.sched_getaffinity(int(task))))
        return found

    @unittest.skipIf(len(os.sched_getaffinity(0)) == 1, "there is one processor")
    def test_threads_that_a_request_begins_run_anywhere(self):
        text = mount.read_text(self.job.file("dataset/source.json"))
        jobs = [self.mount.job(f"begins-{i}") for i in range(8)]
        self.stop()
        for job in jobs:  # one looks at the source, and hangs
            mount.within(2 * PROMPT, models.write_file, job.file("dataset/source.json"), text)
        found = self.affinities("ptcfs-source")
        self.assertGreaterEqual(len(found), len(jobs))
        self.assertNotIn(1, found)

    def test_readers_go_on(self):
        self.stop()
        readers = [subprocess.Popen(["cat", path], stdout=subprocess.PIPE, text=True) for path in self.files[:self.READERS]]
        for reader in readers:
            self.addCleanup(reader.stdout.close)
        time.sleep(1)
        self.check_all_else_goes_on("while-they-wait")
        self.carry_on()
        for reader in readers:
            self.assertTrue(reader.communicate(timeout=2 * PROMPT)[0].startswith("sample "))
            self.assertEqual(reader.returncode, 0)
        self.check_all_else_goes_on("when-they-went-on")


if __name__ == "__main__":
    mount.main()
