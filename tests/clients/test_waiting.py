"""One slow thing stops nothing else: a data set's shards lie on a file system whose server is stopped (mirror_fs)."""
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

import models
import mount

READERS = 60   # more than there are threads that answer
PATIENCE = 20  # seconds
PROMPT = 5     # seconds, on a machine that does other things too


class Mirror:
    """`mirror_fs`: shows a directory, for as long as it is not stopped."""

    def __init__(self):
        self.top = tempfile.mkdtemp(prefix="ptcfs-mirror-")
        self.data, self.path = os.path.join(self.top, "data"), os.path.join(self.top, "mnt")
        os.mkdir(self.data)
        os.mkdir(self.path)
        self.process = subprocess.Popen([os.path.join(mount.bin_dir(), "mirror_fs"), self.data, self.path],
                                        stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + mount.START_SECONDS
        while not mount.is_mounted(self.path):
            if self.process.poll() is not None or time.monotonic() > deadline:
                mount.skip("mirror_fs cannot mount here")
            time.sleep(0.02)

    def end(self):
        self.process.kill()
        self.process.wait()
        subprocess.run(["umount", "-l", self.path], check=False)
        shutil.rmtree(self.top, ignore_errors=True)


class StoppedSource(unittest.TestCase):
    mount_type, options = mount.Mount, ()

    @classmethod
    def setUpClass(cls):
        if os.getuid() != 0:
            raise unittest.SkipTest("only root sees into both mounts")
        cls.source = Mirror()
        cls.addClassCleanup(cls.source.end)
        cls.mount = cls.mount_type(*cls.options, "--patience", str(PATIENCE))
        cls.mount.__enter__()
        cls.addClassCleanup(cls.mount.__exit__)

    def setUp(self):
        self.stopped = False
        name = self.id().rsplit(".", 1)[-1]
        for i in range(200):
            models.write_file(os.path.join(self.source.data, name, f"{i:04}.txt"), f"sample {i}\n" * 100)
        self.job = self.mount.job(name)
        models.write_file(self.job.file("dataset/source.json"), '{"shards": "%s", "format": "files"}' % os.path.join(self.source.path, name))
        models.write_file(self.job.file("dataset/order.json"), '{"batch": 100, "seed": 1}')
        deadline = time.monotonic() + 30
        while mount.read_json(self.job.file("dataset/status.json"))["state"] != "ready":
            self.assertLess(time.monotonic(), deadline, mount.read_text(self.job.file("dataset/status.json")))
            time.sleep(0.05)
        self.files = []
        for where, _, names in os.walk(self.job.file("dataset/head/rank-000/files")):
            self.files += [os.path.join(where, name) for name in names if name.endswith(".txt")]
        self.assertGreaterEqual(len(self.files), READERS + 20)

    def tearDown(self):
        self.carry_on()
        self.assertIsNone(self.mount.process.poll(), mount.read_text(self.mount.log))

    def stop(self):
        self.stopped = True
        mount.halt(self.source.process)

    def carry_on(self):
        if self.stopped:
            self.source.process.send_signal(signal.SIGCONT)
        self.stopped = False

    def check_all_else_goes_on(self, other):
        self.assertIn(self.job.name, mount.within(PROMPT, os.listdir, self.mount.path))
        requests = mount.within(PROMPT, mount.read_json, self.mount.path + "/.ptc/requests")
        self.assertIn("requests", requests)
        mount.within(PROMPT, mount.read_text, self.mount.path + "/.ptc/metrics")
        mount.within(PROMPT, mount.read_json, self.job.file("dataset/status.json"))
        mount.within(PROMPT, mount.read_json, self.job.file("status.json"))
        job = mount.within(PROMPT, self.mount.job, other)
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        mount.within(PROMPT, job.commit, "base")
        mount.within(PROMPT, mount.read_text, job.checkpoint("base", "meta.json"))
        mount.within(PROMPT, mount.digests, job.checkpoint("base", "layouts/tp2-pp1-dp1"))
        mount.within(PROMPT, mount.digests, job.checkpoint("base", "model"))

    def test_readers_wait_and_nobody_else(self):
        self.stop()
        readers = [subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                   for path in self.files[:READERS]]
        begun = time.monotonic()
        time.sleep(1)
        self.check_all_else_goes_on("meanwhile")
        # Of a source eight are waited for by threads of the mount, and the other readers take none.
        self.assertLessEqual(self.mount.threads()["ptcfs-fuse"], 16)
        for reader in readers:
            self.addCleanup(reader.stderr.close)
            self.addCleanup(reader.kill)
        for reader in readers[:5] + readers[-5:]:
            self.assertIsNone(reader.poll())
            reader.kill()
            self.assertEqual(reader.wait(timeout=PROMPT), -signal.SIGKILL)
        for reader in readers[5:-5]:
            said = reader.communicate(timeout=begun + 4 * PATIENCE - time.monotonic())[1]
            self.assertEqual(reader.returncode, 1)
            self.assertIn(os.strerror(errno.ETIMEDOUT), said)
        self.assertGreater(time.monotonic(), begun + PATIENCE - 1)
        self.assertIn("has waited", mount.read_text(self.mount.log))
        self.check_all_else_goes_on("afterwards")
        self.carry_on()
        for path in self.files[:READERS]:
            self.assertTrue(mount.within(PROMPT, mount.read_text, path).startswith("sample "))

    def test_saving_a_source_there_holds_up_nobody(self):
        text = mount.read_text(self.job.file("dataset/source.json"))
        jobs = [self.mount.job(f"saves-{i}") for i in range(READERS + 20)]
        self.stop()
        savers = [threading.Thread(target=models.write_file, args=(job.file("dataset/source.json"), text)) for job in jobs]
        for saver in savers:
            saver.start()
        time.sleep(1)
        mount.within(PROMPT, self.mount.job, "while-they-save")
        for saver in savers:
            saver.join(4 * PROMPT)
            self.assertFalse(saver.is_alive())
        for job in jobs:
            self.assertEqual(mount.within(PROMPT, mount.read_text, job.file("dataset/source.json")), text)

    def test_a_rename_over_it_waits_for_nobody(self):
        text = mount.read_text(self.job.file("dataset/source.json"))
        other = self.mount.job("renames-meanwhile")
        os.mkdir(other.file("a"))
        self.job = self.mount.job("renames-over-it")  # nothing else in it asks for the source
        target = self.job.file("dataset/source.json")
        new = self.job.file("new.json")
        models.write_file(new, text)
        self.stop()
        begun, slowest, refused = time.monotonic(), 0, 0
        while True:
            before = time.monotonic()
            try:
                mount.within(PROMPT, os.rename, new, target)
                break
            except BlockingIOError:
                refused += 1
                self.assertIn("still being looked for", mount.read_json(self.job.file("dataset/status.json"))["error"])
                self.assertIn("still being looked for", self.job.error())
                self.assertFalse(os.path.exists(target))
            finally:
                slowest = max(slowest, time.monotonic() - before)
            os.rename(other.file("a"), other.file("b"))  # the kernel has one lock for all renames between directories
            os.rename(other.file("b"), other.file("a"))
            self.assertLess(time.monotonic(), begun + 3 * PROMPT)
        self.assertGreater(refused, 0)
        self.assertLess(slowest, 1.5)
        self.assertGreater(time.monotonic(), begun + 1.5)  # it went on with the first one's look, and gave it its time
        self.assertEqual(mount.within(PROMPT, mount.read_text, target), text)
        self.assertFalse(os.path.exists(new))
        self.assertEqual(self.job.error(), "")

    def test_umount_ends_the_daemon_all_the_same(self):
        other = mount.Mount("--patience", "600")
        with other:
            job = other.job("waits")
            models.write_file(job.file("dataset/source.json"),
                              mount.read_text(self.job.file("dataset/source.json")))
            models.write_file(job.file("dataset/order.json"), '{"batch": 100, "seed": 1}')
            deadline = time.monotonic() + 30
            while mount.read_json(job.file("dataset/status.json"))["state"] != "ready":
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.05)
            path = next(os.path.join(where, names[0])
                        for where, _, names in os.walk(job.file("dataset/head/rank-000/files")) if names)
            self.stop()
            with subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL) as reader:
                time.sleep(0.5)
                reader.kill()
                reader.wait(timeout=PROMPT)
            subprocess.run(["umount", other.path], check=True)
            other.process.wait(timeout=30)


class SealedDirectory(mount.TestCase):
    """What is being committed is sealed; who would write it waits for a moment, on a thread that answers others, too."""
    OPENERS = 48

    def test_few_wait_for_it(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        wanted, held = (job.incoming("base") + f"/rank/0/{name}" for name in ("wanted", "held"))
        models.write_file(wanted, "x")
        stop, refused, waiting = threading.Event(), [0], []

        def commit_in_vain():
            while not stop.is_set():
                mount.error_of(os.rename, job.incoming("base"), job.checkpoint("base"))

        def open_it():
            while not stop.is_set():
                try:
                    os.close(os.open(wanted, os.O_WRONLY))
                except OSError as error:
                    self.assertEqual(error.errno, errno.EBUSY)
                    refused[0] += 1
                stop.wait(0.2)
        with open(held, "w", encoding="utf-8"):  # so that a commit looks for a while whether it is closed
            threads = [threading.Thread(target=commit_in_vain)] + [threading.Thread(target=open_it) for _ in range(self.OPENERS)]
            for thread in threads:
                thread.start()
            try:
                until = time.monotonic() + 5
                while time.monotonic() < until:
                    mount.within(PROMPT, os.mkdir, f"{self.mount.path}/made")
                    mount.within(PROMPT, os.rmdir, f"{self.mount.path}/made")
                    requests = mount.within(PROMPT, mount.read_json, self.mount.path + "/.ptc/requests")["requests"]
                    time.sleep(0.02)
                    waiting.append(sum(one["operation"] == "open" and one["age_ms"] >= 100 for one in requests))
            finally:
                stop.set()
                for thread in threads:
                    thread.join()
        waiting = sorted(number for number in waiting if number > 0)
        self.assertGreater(refused[0], 0)
        self.assertGreater(len(waiting), 0)
        # Of a job four wait; others are answered at once, as far as the machine has time for that.
        self.assertLessEqual(waiting[len(waiting) // 2], 4, waiting)


if __name__ == "__main__":
    mount.main()
