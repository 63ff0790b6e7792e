"""One slow thing stops nothing else: a data set's shards lie on a file system whose server is stopped (mirror_fs)."""
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
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
                if refused == 1:  # who asks again at once waits less, and may be answered before the next look has ended
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


class SlowGathering(mount.TestCase):
    """What a large file is computed from is gathered by threads that hardly get a processor."""
    only_root = "takes a processor from others"
    ROWS, COLUMNS, LAYERS = 4096, 8192, 12

    def setUp(self):
        super().setUp()
        if len(os.sched_getaffinity(0)) < 2:
            self.skipTest("there is one processor")
        self.job = self.new_job()
        pattern = bytes(range(251)) * 270000  # no two rows are the same
        tensors = [models.Tensor(f"model.layers.{i}.mlp.down_proj.weight", "BF16", (self.ROWS, self.COLUMNS),
                                 pattern[i:i + 2 * self.ROWS * self.COLUMNS]) for i in range(self.LAYERS)]
        models.write_safetensors(self.job.incoming("base") + "/rank/0/model.safetensors", tensors)
        self.job.commit("base")
        self.path = self.job.rank_file("base", "tp2-pp1-dp1", 0)  # 384 MiB
        row = self.COLUMNS  # half of it, in bytes
        self.expected = {tensor.name: b"".join(tensor.data[2 * row * i:2 * row * i + row] for i in range(self.ROWS))
                         for tensor in tensors}

    def tearDown(self):
        self.job.mount.ptc("rm", "--force", self.job.name)
        super().tearDown()

    def hold_up(self):
        """Until what is returned is killed."""
        with open(self.job.rank_file("base", "tp4-pp1-dp1", 0), "rb"):  # from now on these threads are there, for a while
            pass
        processor = min(os.sched_getaffinity(0))
        spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # pylint: disable=consider-using-with
        self.addCleanup(spinner.wait)
        self.addCleanup(spinner.kill)
        os.sched_setaffinity(spinner.pid, {processor})
        tasks = f"/proc/{self.mount.process.pid}/task"
        for thread in os.listdir(tasks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if mount.read_text(f"{tasks}/{thread}/comm").strip() == "ptcfs-copy":
                    os.sched_setaffinity(int(thread), {processor})
        os.sched_setscheduler(spinner.pid, os.SCHED_FIFO, os.sched_param(1))
        return spinner

    def test_the_first_bytes_come_soon_and_all_of_them_are_right(self):
        spinner = self.hold_up()
        with open(self.path, "rb") as file:
            begun = time.monotonic()
            file.read(8)
            self.assertLess(time.monotonic() - begun, PROMPT)
            file.seek(-8, os.SEEK_END)
            tail = file.read()
            self.assertLess(time.monotonic() - begun, PROMPT)
            file.seek(0)
            content = file.read()  # by the daemon, which gathers beside it
        self.assertEqual({name: bytes(tensor.data) == self.expected[name]
                          for name, tensor in models.parse_safetensors(content).items()}, dict.fromkeys(self.expected, True))
        self.assertEqual(tail, content[-8:])
        spinner.kill()
        self.assertTrue(mount.read_bytes(self.path) == content)

    def test_who_is_killed_ends(self):
        self.hold_up()
        with subprocess.Popen(["head", "-c", "8", self.path], stdout=subprocess.DEVNULL) as reader:
            time.sleep(0.3)
            reader.kill()
            begun = time.monotonic()
            reader.wait(timeout=PROMPT)
            self.assertLess(time.monotonic() - begun, 1)

    def test_the_daemon_ends_meanwhile(self):
        spinner = self.hold_up()
        with open(self.path, "rb") as file:
            file.read(8)
        self.mount.unmount()
        time.sleep(2)  # it closes the store, while somebody may be gathering what lies in it
        spinner.kill()
        status = self.mount.process.wait(timeout=4 * PROMPT)
        self.mount.start()
        self.assertEqual(status, 0)

    def test_of_many_each_waits_no_longer(self):
        openers = 150  # more than wait at the same time
        paths = [self.job.rank_file("base", f"tp2-pp1-dp{openers // 2}", rank) for rank in range(openers)]
        for path in paths:
            os.stat(path)
        self.hold_up()
        took, all_opened = [], threading.Event()

        def open_it(path):
            begun = time.monotonic()
            with open(path, "rb"):
                took.append(time.monotonic() - begun)
                if len(took) == openers:
                    all_opened.set()
                all_opened.wait(timeout=4 * PROMPT)
        threads = [threading.Thread(target=open_it, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(took), openers)
        self.assertLess(max(took), 4)

    def test_they_hold_up_nobody_else(self):
        self.hold_up()
        readers = [subprocess.Popen(["head", "-c", "8", self.path], stdout=subprocess.DEVNULL)  # pylint: disable=consider-using-with
                   for _ in range(READERS)]
        begun = time.monotonic()
        os.listdir(self.mount.path)
        mount.read_json(self.job.file("status.json"))
        self.assertLess(time.monotonic() - begun, PROMPT)
        for reader in readers:
            self.assertEqual(reader.wait(timeout=4 * PROMPT), 0)


class LongCommit(mount.TestCase):
    """Hashing takes far longer than any mv waits, and many wait for it."""
    MOVERS = 16

    def test_who_stands_in_their_queue_is_soon_through(self):
        job, other = self.new_job(), self.mount.job("renames-meanwhile")
        for name in ("a", "b"):
            os.makedirs(other.file(name))
        path, size = job.incoming("base") + "/rank/0/model.safetensors", 1 << 42
        models.write_file(path, models.safetensors_header({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
        os.truncate(path, os.path.getsize(path) + size)
        stop, errors = threading.Event(), []

        def ask_again():
            while not stop.is_set():
                errors.append(mount.error_of(os.rename, job.incoming("base"), job.checkpoint("base")))
        movers = [threading.Thread(target=ask_again) for _ in range(self.MOVERS)]
        for mover in movers:
            mover.start()
        try:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                # Those that stand in the queue are before it, and the kernel is fair to none of them.
                mount.within(2 * PROMPT, os.rename, other.file("a"), other.file("b", "a"))
                os.rename(other.file("b", "a"), other.file("a"))
        finally:
            stop.set()
            for mover in movers:
                mover.join()
        self.assertEqual(set(errors), {"EAGAIN"})
        os.unlink(path)  # which ends it


class SealedDirectory(mount.TestCase):
    """What is being committed is sealed; who would write it waits for a moment, on a thread that answers others, too."""
    OPENERS = 48

    def change_while_it_is_committed(self, job, name, change):
        """The errno of a change in the midst of a commit; "" where it came before all was sealed, and may be in it."""
        models.Llama().write_hf(job.incoming(name) + "/rank/0")
        wanted, held = (job.incoming(name) + f"/rank/0/{file}" for file in ("wanted", "held"))
        models.write_file(wanted, "what it was")
        errors, committed = [], []
        with open(held, "w", encoding="utf-8"):  # so that the commit looks whether it is closed, and has sealed the rest
            # Whose mv waited in vain a moment ago waits less, and is told to say it again, which is done here.
            threads = [threading.Thread(target=lambda: committed.append(mount.error_of(job.commit, name)))]
            threads[0].start()
            time.sleep(0.1)
            threads.append(threading.Thread(target=lambda: errors.append(mount.error_of(change, wanted))))
            threads[1].start()
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        self.assertEqual(committed, [""])
        return errors[0]

    def test_who_has_waited_writes_nothing_that_is_committed(self):
        job = self.new_job()
        for kind, change in (("open", lambda path: os.close(os.open(path, os.O_RDWR))),
                             ("open-empty", lambda path: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))),
                             ("truncate", lambda path: os.truncate(path, 1)),
                             ("link", lambda path: os.link(path, job.incoming("linked")))):
            with self.subTest(kind):
                for number in range(20):  # on a busy machine the first may come too early
                    name = f"{kind}{number}"
                    error = self.change_while_it_is_committed(job, name, change)
                    if error != "":
                        break
                    if kind == "link":
                        os.unlink(job.incoming("linked"))
                self.assertIn(error, ("EROFS", "EPERM", "EBUSY"))
                self.assertEqual(mount.read_text(job.rank_file(name, "tp1-pp1-dp1", 0, "wanted")), "what it was")

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
