"""`ptcfs --keep`, whose daemon is killed again and again, and replaced: nobody notices.

Beside that go, each in a process of its own: readers of a checkpoint under several layouts, through fresh opens, open
files, mappings and directories that are kept (watcher.py); writers who write, append to, rename, link and remove files
in incoming/, and compare; one who makes and removes; one who saves layout.json; one who lists. None gets an
error, none another byte than there is, and nothing is done twice.

PTC_KEPT_KILLS=15      how often
PTC_KEPT_SEED=1        when, and who does what
"""
import contextlib
import errno
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import threading
import time
import traceback
import unittest

import story
from story import mount
from watcher import Watcher

KILLS = int(os.environ.get("PTC_KEPT_KILLS", "15"))
SEED = int(os.environ.get("PTC_KEPT_SEED", "1"))


class Kept(mount.Mount):
    """With a keeper; `process` is that."""

    def __init__(self, *options, **named):
        super().__init__("--keep", "--scrub", "off", *options, **named)

    def daemon(self):
        """Its process, which serves; 0: there is none just now."""
        children = mount.read_text(f"/proc/{self.process.pid}/task/{self.process.pid}/children").split()
        return int(children[0]) if children else 0

    def kill_daemon(self, how=signal.SIGKILL):
        """Returns when another serves."""
        before = self.daemon()
        os.kill(before, how)
        deadline = time.monotonic() + 20
        while self.daemon() in (0, before):
            assert time.monotonic() < deadline, "no other daemon"
            time.sleep(0.001)
        return before

    def upgrade(self, *options):
        return subprocess.run([os.path.join(self.bin, "ptcfs"), "--upgrade", *options, self.path],
                              capture_output=True, text=True, timeout=60, check=False)


class Busy:
    """A forked process that does `work(self, random)` again and again until it is told to stop. What it raises, stop()
    tells."""

    def __init__(self, name, work, seed):
        self.name = name
        asked, self.ask = os.pipe()
        self.report, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.ask)
            os._exit(self.run(work, seed, asked, report))
        os.close(asked)
        os.close(report)

    @staticmethod
    def run(work, seed, asked, report):
        os.set_blocking(asked, False)
        chance, rounds = random.Random(seed), 0
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.read(asked, 1)
                    break
                work(chance, rounds)
                rounds += 1
            os.write(report, str(rounds).encode())
            return 0
        except BaseException:  # whatever it is, the parent tells it
            os.write(report, traceback.format_exc()[-3500:].encode())
            return 1

    def stop(self):
        with contextlib.suppress(BrokenPipeError):  # it has told what is wrong already
            os.write(self.ask, b".")  # others, which were forked later, have this end, too
        os.close(self.ask)
        with os.fdopen(self.report) as report:
            text = report.read()
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, f"{self.name}: status {status}: {text}"
        return int(text)


def appended(top):
    """Small writes, one behind the other, by one descriptor that appends: each comes once, in its place."""
    def work(chance, round_):
        path = f"{top}/log"
        lines = [f"{round_} {i} {chance.random()}\n".encode() for i in range(chance.randrange(1, 40))]
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for line in lines:
                assert os.write(fd, line) == len(line)
        finally:
            os.close(fd)
        assert mount.read_bytes(path) == b"".join(lines), f"{path}: not what was written"
    return work


def written(top):
    """A larger file in pieces in any order, read meanwhile, then renamed, linked, and removed."""
    def work(chance, round_):
        path, moved, linked = f"{top}/big", f"{top}/moved{round_ % 3}", f"{top}/linked"
        pieces = [chance.randbytes(chance.randrange(1, 200000)) for _ in range(8)]
        at = [sum(len(piece) for piece in pieces[:i]) for i in range(len(pieces))]
        order = list(range(len(pieces)))
        chance.shuffle(order)
        with open(path, "w+b", buffering=0) as file:
            for i in order:
                assert os.pwrite(file.fileno(), pieces[i], at[i]) == len(pieces[i])
                assert os.pread(file.fileno(), len(pieces[i]), at[i]) == pieces[i]
            os.rename(path, moved)
            whole = b"".join(pieces)
            assert os.pread(file.fileno(), len(whole), 0) == whole, "an open file that was moved"
            assert os.fstat(file.fileno()).st_nlink == 1
        os.link(moved, linked)
        assert os.stat(moved).st_ino == os.stat(linked).st_ino
        os.unlink(moved)
        assert mount.read_bytes(linked) == whole
        os.unlink(linked)
        assert mount.error_of(os.stat, linked) == "ENOENT"
    return work


def made(top):
    """Directories, links, exclusive files: each of these succeeds, and once."""
    def work(chance, round_):
        here = f"{top}/d{round_}"
        os.mkdir(here)
        directory = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
        try:
            names = [f"f{i}" for i in range(chance.randrange(1, 12))]
            for name in names:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640, dir_fd=directory)
                os.write(fd, name.encode())
                os.close(fd)
            os.symlink("f0", "s", dir_fd=directory)
            os.mkdir("deep", dir_fd=directory)
            assert sorted(os.listdir(here)) == sorted([*names, "s", "deep"])
            assert os.readlink("s", dir_fd=directory) == "f0"
            os.setxattr(f"{here}/f0", "user.a", b"1", os.XATTR_CREATE)
            os.rename("f0", "g0", src_dir_fd=directory, dst_dir_fd=directory)
            assert os.getxattr(f"{here}/g0", "user.a") == b"1"
            os.removexattr(f"{here}/g0", "user.a")
            for name in ["g0", *names[1:], "s"]:
                os.unlink(name, dir_fd=directory)
            os.rmdir("deep", dir_fd=directory)
            assert os.listdir(here) == []
            os.rmdir(here)
        finally:
            os.close(directory)
    return work


def saved(job):
    """layout.json, by a shell and by an editor."""
    def work(chance, round_):
        text = json.dumps({"tp": chance.choice([1, 2]), "pp": 1, "dp": 1}) + " " * (round_ % 50) + "\n"
        path = job.file("layout.json")
        if round_ % 2:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        else:
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(text)
            os.rename(path + ".new", path)
        assert mount.read_text(path) == text
        time.sleep(0.05)
    return work


def where_am_i():
    """When all names expire, a directory has none for the moment until somebody looks it up."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        time.sleep(0.1)
        return os.getcwd()


def looked_at(job):
    """Lists and attributes, by paths and in a directory that one is in."""
    def work(_, round_):
        if round_ == 0:
            os.chdir(job.path)
        assert {"layout.json", "incoming", "checkpoints", "current"} <= set(os.listdir(".")), os.listdir(".")
        json.loads(mount.read_text("status.json"))
        assert where_am_i() == job.path
        assert os.stat(".").st_ino == os.stat(job.path).st_ino
        assert os.listdir("checkpoints") == ["a"], os.listdir("checkpoints")
        with os.scandir("checkpoints/a/model") as entries:
            for entry in entries:
                entry.stat()
    return work


class KilledAgainAndAgain(unittest.TestCase):
    def test_nobody_notices(self):
        chance = random.Random(SEED)
        with Kept() as daemon:
            job = daemon.job("job")
            story.models.write_file(job.file("layout.json"), '{"tp": 2, "pp": 1, "dp": 1}')
            story.MODELS["a"].write_ranks(job.incoming("a"), 2, 1)
            job.commit("a")
            job.wait()
            for name in ("one", "two", "three"):
                os.makedirs(job.incoming(name))
            doing = [Busy("appends", appended(job.incoming("one")), SEED), Busy("writes", written(job.incoming("two")), SEED + 1),
                     Busy("makes", made(job.incoming("three")), SEED + 2), Busy("saves", saved(job), SEED + 3),
                     Busy("looks", looked_at(job), SEED + 4)]
            watcher = Watcher(job, kept=True)
            slowest = 0
            try:
                for _ in range(KILLS):
                    time.sleep(chance.random())
                    if chance.random() < 0.2:
                        done = daemon.upgrade()
                        self.assertEqual(done.returncode, 0, done.stderr)
                    else:
                        daemon.kill_daemon()
                    begun = time.monotonic()
                    os.statvfs(daemon.path)
                    slowest = max(slowest, time.monotonic() - begun)
            finally:
                rounds, wrong = {}, []
                for one in doing:
                    try:
                        rounds[one.name] = one.stop()
                    except AssertionError as error:
                        wrong.append(str(error))
                reads = watcher.stop()
            self.assertEqual(wrong, [], "\n".join(wrong))
            print(f"{KILLS} times; {rounds}, {reads} files read; the longest that a caller waited: {slowest:.3f} s")
            self.assertTrue(all(count > 0 for count in rounds.values()), rounds)
            job.wait()
            for rank in range(2):
                story.check_file(job.rank_file("a", "tp2-pp1-dp1", rank), "a", 2, 1, rank)


class WhatTheKeeperDoes(unittest.TestCase):
    """What does not go on by itself, and ends of all kinds."""

    def setUp(self):
        self.daemon = Kept()
        self.addCleanup(self.daemon.__exit__)
        self.daemon.__enter__()
        self.job = self.daemon.job("job")

    def ended(self, seconds=15):
        status = self.daemon.process.wait(seconds)
        self.assertFalse(mount.is_mounted(self.daemon.path))
        return status

    def test_sigterm_ends_both(self):
        daemon = self.daemon.daemon()
        self.daemon.process.terminate()
        self.assertEqual(self.ended(), 0)
        self.assertFalse(os.path.exists(f"/proc/{daemon}"))

    def test_umount_ends_both(self):
        self.daemon.kill_daemon()
        subprocess.run(["umount", self.daemon.path], check=True, timeout=20)
        self.assertEqual(self.ended(), 0)

    def test_what_cannot_be_started_is_given_up(self):
        os.rename(self.daemon.store, self.daemon.store + ".away")
        os.kill(self.daemon.daemon(), signal.SIGKILL)
        self.assertIn(mount.error_of(mount.within, 30, os.statvfs, self.job.path), {"ECONNABORTED", "ENOTCONN", "ENOENT"})
        self.assertEqual(self.ended(), 2)
        self.assertIn("failed to start 5 times in a row", mount.read_text(self.daemon.log))

    def test_a_second_one_leaves_the_first_alone(self):
        for keep in (["--keep"], []):
            done = subprocess.run([os.path.join(self.daemon.bin, "ptcfs"), *keep, "--store", self.daemon.store, self.daemon.path],
                                  capture_output=True, text=True, timeout=60, check=False)
            self.assertNotEqual(done.returncode, 0)
            self.assertTrue(mount.is_mounted(self.daemon.path))
        self.daemon.kill_daemon()
        self.assertEqual(self.job.status()["state"], "idle")
        self.assertEqual(self.daemon.upgrade().returncode, 0)

    def with_faults(self):
        self.daemon.stop()
        faults = os.path.join(self.daemon.top, "faults")
        story.models.write_file(faults, bytes(32))
        os.environ.update({"LD_PRELOAD": os.path.join(mount.bin_dir(), "faults.so"), "PTC_FAULTS": faults, "PTC_FAULTS_OF_DAEMON": "1"})
        try:
            self.daemon.start()
        finally:
            for name in ("LD_PRELOAD", "PTC_FAULTS", "PTC_FAULTS_OF_DAEMON"):
                del os.environ[name]

    def test_a_request_that_daemons_die_of_is_refused(self):
        self.with_faults()
        link = self.job.file("link")
        self.assertEqual(mount.error_of(os.symlink, "what the daemon dies of", link), "EIO")
        os.symlink("else", link)
        self.assertEqual(mount.read_text(self.daemon.log).count("(Aborted); it is started again"), 2)  # says the keeper first

    def test_what_is_served_beside_it_is_not(self):
        self.daemon.stop()
        self.daemon = self.enterContext(Kept("--quota-job", "100G"))  # so that writes come to it
        self.job = self.daemon.job("job")
        self.with_faults()
        directory, ended, errors = self.job.incoming("x"), threading.Event(), []
        os.makedirs(directory)

        def write(number):
            with open(f"{directory}/{number}", "wb", buffering=0) as file:
                for i in itertools.count():
                    if ended.is_set():
                        return
                    try:
                        os.pwrite(file.fileno(), bytes(1 << 20), (i % 16) << 20)
                    except OSError as error:
                        errors.append(error)
        writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for writer in writers:
            writer.start()
        for _ in range(4):
            self.assertEqual(mount.error_of(os.symlink, "what the daemon dies of", self.job.file("link")), "EIO")
            time.sleep(0.2)
        ended.set()
        for writer in writers:
            writer.join(30)
        self.assertEqual(errors, [])

    def test_memory_that_is_short_takes_the_daemon(self):
        def score(process):
            return int(mount.read_text(f"/proc/{process}/oom_score_adj"))
        try:
            story.models.write_file("/proc/self/oom_score_adj", str(score("self") - 1))
        except PermissionError:
            self.skipTest("no process can be spared here: that needs CAP_SYS_RESOURCE")
        self.assertLess(score(self.daemon.process.pid), score(self.daemon.daemon()))

    def test_an_upgrade_that_fails_changes_nothing(self):
        held = os.open(self.job.file("layout.json"), os.O_RDONLY)
        before = os.read(held, 100)
        elsewhere = os.path.join(self.daemon.top, "elsewhere")
        os.mkdir(elsewhere)
        done = self.daemon.upgrade("--store", elsewhere)
        self.assertEqual(done.returncode, 2)
        self.assertIn("The former one goes on", done.stderr)
        self.assertIn("cannot become", mount.read_text(self.daemon.log))
        self.assertEqual(os.pread(held, 100, 0), before)
        os.close(held)
        done = self.daemon.upgrade("-f", "--store", self.daemon.store, "--patience", "7")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(mount.read_json(self.daemon.path + "/.ptc/daemon.json")["options"]["patience"], 7)

    def test_what_is_in_devices_alone_is_not_upgraded_away(self):
        with Kept("--gpu", "host:64M") as daemon:
            job = daemon.job("in_device")
            story.MODELS["a"].write_hf(job.incoming("a") + "/rank/0")
            job.commit("a")
            job.set_layout(tp=1, memory="device")
            before = daemon.daemon()
            done = daemon.upgrade()
            self.assertEqual(done.returncode, 2, done.stdout)
            self.assertIn("job in_device has", done.stderr)
            self.assertIn("--memory host", done.stderr)
            self.assertEqual(daemon.daemon(), before)
            self.assertTrue(mount.read_bytes(job.rank_file("a", "tp1-pp1-dp1", 0)))
            job.set_layout(tp=1, memory="host")
            done = daemon.upgrade()
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertTrue(mount.read_bytes(job.rank_file("a", "tp1-pp1-dp1", 0)))

    def test_what_was_removed_is_never_another_file(self):
        path = self.job.incoming("x") + "/f"
        os.makedirs(os.path.dirname(path))
        with open(path, "w+b", buffering=0) as file:
            file.write(b"mine" * 1000)
            os.unlink(path)
            story.models.write_file(path, b"else" * 1000)
            self.daemon.kill_daemon()
            try:
                self.assertEqual(os.pread(file.fileno(), 4000, 0), b"mine" * 1000)
            except OSError as error:
                self.assertEqual(error.errno, errno.ESTALE)
        self.assertEqual(mount.read_bytes(path), b"else" * 1000)

    def test_what_is_mapped_goes_on(self):
        path = self.job.incoming("x") + "/f"
        os.makedirs(os.path.dirname(path))
        story.models.write_file(path, bytes(1 << 20))
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as both:
            both[0:3] = b"one"
            self.daemon.kill_daemon()
            both[1 << 19:(1 << 19) + 3] = b"two"
            both.flush()
            self.assertEqual(both[0:3], b"one")
        self.assertEqual(mount.read_bytes(path)[1 << 19:(1 << 19) + 3], b"two")

    def test_a_draft_goes_on(self):
        text = '{"tp": 4, "pp": 1, "dp": 1}\n'
        with open(self.job.file("layout.json"), "w", encoding="utf-8", buffering=1) as file:
            file.write(text[:10])
            file.flush()
            self.daemon.kill_daemon()
            file.write(text[10:])
        self.assertEqual(mount.read_text(self.job.file("layout.json")), text)
        with open(self.job.file("rules.json"), "w", encoding="utf-8") as file:  # that there was none of
            self.daemon.kill_daemon()
            file.write(mount.read_text(story.RULES))
            file.flush()
            self.daemon.kill_daemon()
        self.assertTrue(mount.same_bytes(self.job.file("rules.json"), story.RULES))


class HowItStarts(unittest.TestCase):
    def ptcfs(self, *arguments):
        return subprocess.run([os.path.join(mount.bin_dir(), "ptcfs"), *arguments], capture_output=True, text=True, timeout=30, check=False)

    def test_in_the_background(self):
        with Kept() as daemon:
            daemon.stop()
            here = os.path.dirname(daemon.store)
            done = subprocess.run([os.path.join(mount.bin_dir(), "ptcfs"), "--keep", "--store", "store", "mnt"], cwd=here,
                                  capture_output=True, text=True, timeout=30, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue(os.path.exists(daemon.store + "/jobs"))
            os.mkdir(daemon.path + "/job")
            held = os.open(daemon.path + "/job", os.O_RDONLY | os.O_DIRECTORY)
            done = self.ptcfs("--upgrade", daemon.path)
            self.assertIn("nobody served it for", done.stdout, done.stderr)
            self.assertIn("layout.json", os.listdir(held))
            os.close(held)
            daemon.unmount()
            for _ in range(100):  # it ends in its own time
                said = self.ptcfs("--upgrade", daemon.path).stderr
                if "no ptcfs --keep serves" in said:
                    break
                time.sleep(0.05)
            self.assertIn("no ptcfs --keep serves", said)

    def test_what_is_wrong_is_said_at_once(self):
        with Kept() as daemon:
            twice = self.ptcfs("--keep", "--store", daemon.store, daemon.path)
            self.assertEqual(twice.returncode, 32, twice.stderr)
            self.assertIn("already mounted", twice.stderr)
            daemon.job("job")
        for arguments, status, words in ((("--io-uring", "on", "/mnt"), 1, "without io_uring"),
                                         (("--store", "/proc/none", "/mnt"), 2, "store")):
            done = self.ptcfs("--keep", *arguments)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main()
