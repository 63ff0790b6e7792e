"""`ptcfs --keep`, whose daemon is killed again and again, and replaced: nobody notices.

Beside that go, each in a process of its own: readers of a checkpoint under several layouts, through fresh opens, open
files, mappings and directories that are kept (watcher.py); writers who write, append to, rename, link and remove files
in incoming/, and compare; one who makes and removes; one who saves layout.json; one who lists. None gets an
error, none another byte than there is, and nothing is done twice.

PTC_KEPT_KILLS=15      how often
PTC_KEPT_SEED=1        when, and who does what
"""
import contextlib
import json
import os
import random
import signal
import subprocess
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


if __name__ == "__main__":
    unittest.main()
