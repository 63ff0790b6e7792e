"""Reading what lies on other nodes: no more moves than is read, and a node that dies is not waited for."""
import contextlib
import ctypes
import errno
import importlib.util
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import cluster
from cluster import mount  # (it finds tests/clients)
import models
from cases import MIB, TestCase, layout_name, read
from users import ANN, BOB, ROOT


class LargeLlama(models.Llama):
    vocab = 256 * 1024  # 64 MiB


def pages_taken_back():
    """Pages of files that the kernel has taken for other uses, since the machine was started."""
    with open("/proc/vmstat", encoding="utf-8") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("pgsteal_file "))


def bytes_not_cached(path):
    """What of a file is not in the page cache; nothing of it is read."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.stat(path).st_size
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as content:
        address = ctypes.addressof(ctypes.c_char.from_buffer(content))
        failed = libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states) != 0
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(1 for state in states if not state & 1) * mmap.PAGESIZE


def numpy_bytes(array):
    """Of NumPy or PyTorch, where that is installed: bits of a type that NumPy may not have."""
    return (array.view(-1).view(sys.modules["torch"].uint8).numpy() if hasattr(array, "numpy") else array).tobytes()


class Remote(TestCase):
    """A rank's file of 64 MiB on w0, read on w2."""

    def setUp(self):
        super().setUp()
        self.commit(0, LargeLlama(31), devices=["w0:0"])
        self.nodes.wait_settled(self.name)
        self.here = self.job(0).rank_file("base", layout_name(1, 1), 0)
        self.path = self.job(2).rank_file("base", layout_name(1, 1), 0)
        self.size = os.stat(self.path).st_size
        self.assertGreater(self.size, 64 * MIB)

    def moved(self, action):
        """Bytes that w2 received meanwhile, and what the action returned."""
        before = self.nodes.bytes_received(2)
        result = action()
        return self.nodes.bytes_received(2) - before, result

    def test_eight_bytes(self):
        def look():
            with open(self.path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), 8, self.size // 2)
        moved, found = self.moved(look)
        with open(self.here, "rb") as file:
            self.assertEqual(found, os.pread(file.fileno(), 8, self.size // 2))
        print(f"8 bytes: {moved} moved")
        self.assertLess(moved, 2 * MIB)

    @unittest.skipUnless(importlib.util.find_spec("numpy"), "Python has no NumPy here")
    def test_where_it_lies(self):
        """On the node that has it Python reads the parts there; on another the daemon makes what is read."""
        sys.path.insert(0, os.path.join(os.path.dirname(cluster.__file__), "..", "..", "tools", "python"))
        import ptc  # pylint: disable=import-outside-toplevel
        layouts = [self.job(node).checkpoint("base", "layouts/" + layout_name(2, 1)) for node in (0, 2)]
        said = [json.loads(read(where + "/rank/1/.sources.json")) for where in layouts]
        self.assertEqual([list(one["files"]) for one in said], [["model.safetensors"], []])
        for rank in range(2):
            here, there = (ptc.load(where, rank=rank, numpy=True, copy=True)["model"] for where in layouts)
            self.assertEqual(here.keys(), there.keys())
            for name, value in here.items():
                self.assertEqual(value.tobytes(), there[name].tobytes(), name)
        parts = [json.loads(read(self.job(node).checkpoint("base", ".sources.json"))) for node in (0, 2)]
        self.assertTrue(all(parts[0]["tensors"]))
        self.assertFalse(any(parts[1]["tensors"]))
        wholes = [ptc.Checkpoint(self.job(node).checkpoint("base")) for node in (0, 2)]
        for name in ("model.norm.weight", "lm_head.weight"):
            here, there = (numpy_bytes(whole.read(name)) for whole in wholes)
            self.assertEqual(here, there)

    def test_eight_bytes_of_a_mapping(self):
        def look():
            with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
                return content[self.size // 2:self.size // 2 + 8]
        moved, found = self.moved(look)
        with open(self.here, "rb") as file:
            self.assertEqual(found, os.pread(file.fileno(), 8, self.size // 2))
        print(f"8 bytes of a mapping: {moved} moved")
        self.assertLess(moved, 4 * MIB)

    def test_here_and_there(self):
        places = random.Random(32).sample(range(0, self.size - 4096, 1 << 16), 100)

        def look():
            with open(self.path, "rb", buffering=0) as file:
                return [os.pread(file.fileno(), 4096, place) for place in places]
        moved, found = self.moved(look)
        with open(self.here, "rb") as file:
            self.assertEqual(found, [os.pread(file.fileno(), 4096, place) for place in places])
        print(f"100 times 4 KiB: {moved / MIB:.1f} MiB moved")
        self.assertLess(moved, 8 * MIB)

    def test_a_quarter_in_order(self):
        def look():
            with open(self.path, "rb", buffering=0) as file:
                return b"".join(file.read(MIB) for _ in range(12))
        moved, found = self.moved(look)
        with open(self.here, "rb") as file:
            self.assertEqual(found, file.read(12 * MIB))
        print(f"12 MiB in order: {moved / MIB:.1f} MiB moved")
        self.assertLess(moved, 18 * MIB)

    def test_all_of_it_moves_once(self):
        taken_back = pages_taken_back()
        moved, content = self.moved(lambda: read(self.path))
        self.assertTrue(content == read(self.here))
        print(f"all {self.size / MIB:.1f} MiB: {moved / MIB:.1f} moved")
        self.assertLess(moved, self.size * 1.1 + 2 * MIB)
        missing = bytes_not_cached(self.path)
        moved, content = self.moved(lambda: read(self.path))
        self.assertTrue(content == read(self.here))
        taken_back = pages_taken_back() - taken_back
        print(f"again: {moved / MIB:.1f} moved; {missing / MIB:.1f} of it had left the page cache, of which the kernel "
              f"took {taken_back * mmap.PAGESIZE / MIB:.1f} meanwhile")
        self.assertLess(moved, MIB + min(self.size, taken_back * mmap.PAGESIZE))

    def test_readers_of_both_halves(self):
        expected = read(self.here)

        def look():
            parts = []
            with open(self.path, "rb", buffering=0) as file:
                for at in range(0, self.size // 2 + MIB, MIB):
                    for place in (at, self.size // 2 + at):
                        parts.append(os.pread(file.fileno(), MIB, place) == expected[place:place + MIB])
            return parts
        moved, right = self.moved(look)
        self.assertTrue(all(right))
        print(f"both halves at once: {moved / MIB:.1f} of {self.size / MIB:.1f} MiB moved")
        self.assertLess(moved, self.size * 1.1 + 8 * MIB)


class Lost(TestCase):
    """The lease is long: whoever waits for its end is seen to."""
    LEASE = 40
    BOUND = 5  # seconds
    ROUNDS = 3

    def times_of_reads(self, model, reader):
        """Seconds of each rank's first read, which the kernel has no copy of."""
        times = []
        for rank in range(3):
            path = self.job(reader).rank_file("base", layout_name(1, 3), rank)
            start = time.monotonic()
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                content = file.read()
            times.append(time.monotonic() - start)
            held = models.safetensors_bytes(model.rank_tensors(1, 3, 0, rank))
            self.assertEqual(content[-1000:], held[-1000:])
        return times

    def lose(self, what, take, give_back):
        model = models.Llama(33)
        self.commit(0, model, pp=3, replicas=1, devices=["w0:0", "w1:0", "w2:0"])
        longest = 0
        for turn in range(self.ROUNDS):
            lost = turn % 3
            self.times_of_reads(model, (lost + 1) % 3)
            take(lost)
            times = self.times_of_reads(model, (lost + 1) % 3) + self.times_of_reads(model, (lost + 2) % 3)
            longest = max(longest, *times)
            give_back(lost)
            self.nodes.wait_members()
            self.nodes.wait_settled(self.name)
        print(f"{what}: the longest first read took {longest:.2f} s, {longest / self.LEASE:.3f} of the lease")
        self.assertLess(longest, self.BOUND)

    def test_killed(self):
        self.lose("killed", self.nodes.kill, self.nodes.start)

    def test_stopped(self):
        self.lose("stopped", self.nodes.pause, self.nodes.resume)

    def test_cut_off(self):
        self.lose("cut off", lambda node: self.nodes.partition(node, links=("eth0",)),
                  lambda node: self.nodes.heal(node, links=("eth0",)))


class FewDescriptors(TestCase):
    """w0 may have few of them, and its users take all that they get."""
    LIMIT = 600

    def test_other_nodes_and_what_is_agreed_have_theirs(self):
        node = self.nodes.nodes[0]
        self.nodes.stop(0)
        node.launcher = (*node.launcher, "prlimit", f"--nofile={self.LIMIT}:{self.LIMIT}")
        self.nodes.start(0)
        self.nodes.wait_members()
        self.commit(0, models.Llama(33), devices=["w0:0"])
        many = self.nodes.path(0, self.name, "incoming/many")
        os.makedirs(many)
        for i in range(self.LIMIT):
            models.write_file(f"{many}/{i}", str(i))
        with contextlib.ExitStack() as opened:
            with self.assertRaises(OSError) as refused:
                for i in range(self.LIMIT):
                    opened.callback(os.close, os.open(f"{many}/{i}", os.O_RDONLY))
            self.assertEqual(refused.exception.errno, errno.EMFILE)
            for _ in range(2):  # longer than a lease
                time.sleep(self.LEASE)
                self.assertEqual(self.nodes.nodes[1].members(), ["w0", "w1", "w2"])
            os.mkdir(self.nodes.path(0, "made-meanwhile"))
            self.assertTrue(read(self.job(2).rank_file("base", layout_name(2, 1), 1)))  # out of w0's file
            self.job(1).set_layout(tp=2, devices=["w1:0", "w2:0"])
            self.nodes.wait_settled(self.name)
        os.rmdir(self.nodes.path(0, "made-meanwhile"))


class Stopped(TestCase):
    """A node is stopped, and no other has what lies on it."""
    LEASE = 40
    OPTIONS = ("-o", "allow_other")
    READERS = 60  # more than there are threads that answer
    PROMPT = 5    # seconds, on a machine that does other things too

    def test_a_verify_ends_with_who_asked(self):
        self.commit(0, models.Llama(35), devices=["w0:0"])
        self.nodes.pause(0)
        ask, answers = self.nodes.path(2, ".ptc/ask"), []

        def begin(job):
            """The question, of which eight are answered at once; None when it was one too many."""
            fd = os.open(ask, os.O_RDWR)
            with contextlib.suppress(BlockingIOError):
                os.write(fd, json.dumps({"do": "verify", "job": job, "checkpoint": "base"}).encode())
                return fd
            os.close(fd)
            return None
        askers = [begin(self.name) for _ in range(8)]
        self.assertNotIn(None, askers)
        self.assertIsNone(begin(self.name))
        patient = threading.Thread(target=lambda: answers.append(os.read(askers[0], 1 << 16)))
        patient.start()
        for asker in askers[1:]:
            os.close(asker)
        begun = []

        def many_begun():
            """Of which each is given up, too."""
            if (question := begin(self.name)) is not None:
                begun.append(question)
                os.close(question)
            return len(begun) == 24
        cluster.until(many_begun, "there was room for other questions")
        self.assertEqual(answers, [])  # to the one that somebody waits for
        self.nodes.resume(0)
        patient.join()
        os.close(askers[0])

    def test_who_asks_much_leaves_room_for_others(self):
        self.commit(0, models.Llama(36), devices=["w0:0"])
        self.nodes.pause(0)

        def begin(user):
            """Who opens it asks. None: it was one too many."""
            os.seteuid(user[0])
            try:
                fd = os.open(self.nodes.path(2, ".ptc/ask"), os.O_RDWR)
            finally:
                os.seteuid(0)
            self.addCleanup(os.close, fd)
            with contextlib.suppress(BlockingIOError):
                os.write(fd, json.dumps({"do": "verify", "job": self.name, "checkpoint": "base"}).encode())
                return fd
            return None
        of_ann = [begin(ANN) for _ in range(9)]
        self.assertEqual([number for number, fd in enumerate(of_ann) if fd is None], [8])
        self.assertIsNotNone(begin(BOB))
        self.assertIsNotNone(begin(ROOT))

    def test_an_export_is_interrupted_all_the_same(self):
        self.commit(0, LargeLlama(37), devices=["w0:0"])
        self.nodes.wait_settled(self.name)
        self.nodes.pause(0)
        node, target = self.nodes.nodes[2], tempfile.mkdtemp(prefix="ptc-export-test-")
        self.addCleanup(shutil.rmtree, target)
        export = subprocess.Popen([os.path.join(node.bin, "ptc"), "-C", node.path, "export", self.name, target + "/out", "--layout", "current"],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(export.kill)
        time.sleep(1)
        self.assertIsNone(export.poll())
        export.send_signal(signal.SIGINT)
        said = export.communicate(timeout=self.PROMPT)[1].decode()
        self.assertNotEqual(export.returncode, 0)
        self.assertIn("interrupted", said)
        self.assertEqual(os.listdir(target), [])
        self.nodes.resume(0)
        self.nodes.wait_members()

    def test_it_stops_its_readers_and_nothing_else(self):
        self.commit(0, LargeLlama(34), devices=["w0:0"])
        self.nodes.wait_settled(self.name)
        there = self.job(2).rank_file("base", layout_name(1, 1), 0)
        size = os.stat(there).st_size
        other = mount.Job(self.nodes.nodes[2], "here")
        os.mkdir(other.path)
        self.addCleanup(self.nodes.nodes[1].ptc, "rm", "--force", "here", check=False)
        mount.within(self.PROMPT, models.write_file, other.file("own"), "text")
        self.nodes.pause(0)
        readers = [subprocess.Popen(["dd", f"if={there}", "of=/dev/null", "bs=4096", "count=1", "status=none",
                                     f"skip={at // 4096}"], stderr=subprocess.DEVNULL)
                   for at in range(MIB, size - MIB, (size - 2 * MIB) // self.READERS)]
        for reader in readers:
            self.addCleanup(reader.wait)
            self.addCleanup(reader.kill)
        time.sleep(1)
        self.assertEqual([reader.poll() for reader in readers], [None] * len(readers))
        self.assertIn("here", mount.within(self.PROMPT, os.listdir, self.nodes.path(2)))
        self.assertEqual(mount.within(self.PROMPT, mount.read_text, other.file("own")), "text")
        self.assertGreater(len(str(mount.within(self.PROMPT, mount.read_json, self.nodes.path(2, ".ptc/requests")))), 100)
        mount.within(self.PROMPT, mount.read_json, self.job(2).file("status.json"))
        for reader in readers[:5] + readers[-5:]:
            reader.kill()
            self.assertEqual(reader.wait(timeout=self.PROMPT), -signal.SIGKILL)
        self.nodes.resume(0)
        self.nodes.wait_members()
        self.assertTrue(read(there) == read(self.job(0).rank_file("base", layout_name(1, 1), 0)))


class Patience(TestCase):
    """A node is stopped, and nobody waits for it for ever, though it counts as there."""
    LEASE = 120
    PATIENCE = 5
    OPTIONS = ("--patience", str(PATIENCE))
    READERS = 60

    def test_who_waits_for_a_node_is_told_in_the_end(self):
        self.commit(0, LargeLlama(38), devices=["w0:0"])
        self.nodes.wait_settled(self.name)
        there = self.job(2).rank_file("base", layout_name(1, 1), 0)
        size = os.stat(there).st_size
        self.nodes.pause(0)
        readers = [subprocess.Popen(["dd", f"if={there}", "of=/dev/null", "bs=4096", "count=1", "status=none",
                                     f"skip={at // 4096}"], stderr=subprocess.PIPE, text=True)
                   for at in range(MIB, size - MIB, (size - 2 * MIB) // self.READERS)]
        for reader in readers:
            self.addCleanup(reader.stderr.close)
            self.addCleanup(reader.wait)
            self.addCleanup(reader.kill)
        time.sleep(1)
        # Of a node eight are waited for by threads of the mount, and the other readers take none; beside them are up to
        # 24 that are free or just open a file, as many as so many processes that began at once have needed.
        self.assertLessEqual(self.nodes.nodes[2].threads()["ptcfs-fuse"], 8 + 24)
        for reader in readers:
            said = reader.communicate(timeout=self.LEASE / 2)[1]
            self.assertEqual(reader.returncode, 1)
            self.assertIn(os.strerror(errno.ETIMEDOUT), said)
        self.assertEqual(self.nodes.nodes[2].members(), ["w0", "w1", "w2"])
        log = mount.read_text(self.nodes.nodes[2].log)
        self.assertIn("for node w0: it fails with ETIMEDOUT", log)
        # The kernel asks again for what it could not read ahead, and nobody waits for that a second time.
        for reader in readers:
            self.assertLessEqual(log.count(f"of process {reader.pid} has waited"), 1)
        self.nodes.resume(0)
        self.nodes.wait_members()
        self.assertTrue(read(there) == read(self.job(0).rank_file("base", layout_name(1, 1), 0)))


if __name__ == "__main__":
    unittest.main(verbosity=2)
