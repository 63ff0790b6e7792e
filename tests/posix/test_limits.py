"""What the daemon keeps of root's powers, and how much a user or a job may have."""
import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import models  # noqa: E402
import mount  # noqa: E402
import users  # noqa: E402
from users import ANN, BOB, ROOT, read_text, run_as  # noqa: E402

if os.access("/dev/shm", os.W_OK):
    mount.tempfile.tempdir = "/dev/shm"  # the store in memory, as it is by default

MIB = 1 << 20
# As in capabilities.h of Linux.
KEPT = {"CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "FSETID": 4, "SETGID": 6, "SETUID": 7,
        "LINUX_IMMUTABLE": 9, "NET_BIND_SERVICE": 10, "SYS_ADMIN": 21, "LEASE": 28}
XATTR = "trusted.ptc.quota"


def capabilities(pid, which):
    for line in read_text(f"/proc/{pid}/status").splitlines():
        if line.startswith(which + ":"):
            return int(line.split()[1], 16)
    raise AssertionError(which)


def write(path, size, mode="wb"):
    with open(path, mode) as file:
        while size > 0:
            size -= file.write(b"x" * min(size, MIB))
            file.flush()


class Capabilities(mount.TestCase):
    only_root = "has something to give up"

    def test_only_what_is_needed(self):
        wanted = sum(1 << number for number in KEPT.values())
        tasks = os.listdir(f"/proc/{self.mount.process.pid}/task")
        self.assertGreater(len(tasks), 3)
        for pid in [self.mount.process.pid, *tasks]:
            for which in ("CapEff", "CapPrm", "CapBnd"):
                self.assertEqual(capabilities(pid, which), wanted & capabilities("self", which), f"{which} of {pid}")
            for which in ("CapInh", "CapAmb"):
                self.assertEqual(capabilities(pid, which), 0)
        self.assertNotIn("is missing", read_text(self.mount.log))

    def test_the_unit_names_the_same(self):
        unit = read_text(os.path.join(os.path.dirname(__file__), "../../tools/deploy/ptcfs@.service.in"))
        named = [word for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")
                 for word in line.split("=")[1].split()]
        self.assertEqual(sorted(named), sorted("CAP_" + name for name in KEPT))


class Fewer(mount.TestCase):
    """What is not there is said, and what needs it is refused with the reason."""
    only_root = "has something to lose"
    mount_options = ("-o", "allow_other")

    class mount_type(mount.Mount):
        launcher = ("setpriv", "--bounding-set", "-setuid,-lease")

    def test_what_is_missing_is_said(self):
        log = read_text(self.mount.log)
        self.assertIn("CAP_SETUID is missing: shards of a data set cannot be read as", log)
        self.assertIn("CAP_LEASE is missing", log)
        self.expect_refusal()

    def expect_refusal(self):
        os.chmod(self.mount.top, 0o755)
        job = self.new_job()
        os.chown(job.path, *ANN)
        os.chown(job.file("dataset"), *ANN)

        def save():
            with open(job.file("dataset/source.json"), "w", encoding="utf-8") as file:
                file.write('{"shards": "/etc/hostname", "format": "files"}')
        self.assertEqual(run_as(ANN, save), "EACCES")
        self.assertIn("may not read as uid 41001", mount.read_json(job.file("dataset/status.json"))["error"])


class FewerGroups(Fewer):
    class mount_type(mount.Mount):
        launcher = ("setpriv", "--bounding-set", "-setgid")

    def test_what_is_missing_is_said(self):
        self.assertIn("CAP_SETGID is missing", read_text(self.mount.log))
        self.expect_refusal()


class Quotas(users.TestCase):
    mount_options = ("-o", "allow_other,quota-user=8M;60", "--quota-job", "12M,100")

    def setUp(self):
        super().setUp()
        os.chmod(self.mount.path, 0o777)

    def job_of(self, user, name):
        path = os.path.join(self.mount.path, name)
        self.assertEqual(run_as(user, os.mkdir, path), "")
        return path

    def expect(self, wanted, user, call, *arguments):
        self.assertEqual(run_as(user, call, *arguments), wanted)

    def remove(self, *paths):
        for path in paths:
            subprocess.run(["rm", "-rf", path], check=True)

    def check_becomes(self, value, expected):
        """Once the kernel has let go of what was removed: it says so (FORGET) after unlink() has returned."""
        deadline = time.monotonic() + 30
        while value() != expected and time.monotonic() < deadline:
            time.sleep(0.001)
        self.assertEqual(value(), expected)

    def test_bytes_of_a_user(self):
        one, two = self.job_of(ANN, "bytes-one"), self.job_of(ANN, "bytes-two")
        self.expect("", ANN, write, one + "/a", 5 * MIB)
        self.expect("EDQUOT", ANN, write, two + "/b", 4 * MIB)
        self.assertLessEqual(os.stat(two + "/b").st_blocks * 512, 3 * MIB)
        self.expect("", BOB, write, self.job_of(BOB, "bytes-three") + "/c", 4 * MIB)
        # What is there may be written again, with nothing left.
        os.truncate(two + "/b", 0)
        self.expect("", ANN, write, two + "/b", 3 * MIB)
        self.expect("", ANN, write, one + "/a", 5 * MIB, "r+b")
        self.expect("EDQUOT", ANN, write, one + "/a", 1, "ab")
        # A name more costs nothing, and one less nothing comes back; the last one brings all of it.
        os.link(one + "/a", one + "/a2")
        os.unlink(one + "/a")
        self.expect("EDQUOT", ANN, write, two + "/d", MIB)
        os.unlink(one + "/a2")
        self.expect("", ANN, write, two + "/d", 5 * MIB)
        # By other ways: holes, fallocate, mmap, another one's file that becomes Ann's.
        os.truncate(two + "/d", 0)

        def allocate(path, size):
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        self.expect("EDQUOT", ANN, allocate, two + "/d", 6 * MIB)
        self.expect("", ANN, allocate, two + "/d", 4 * MIB)
        self.expect("", ANN, os.truncate, two + "/d", 64 * MIB)
        self.expect("EDQUOT", ANN, lambda: write_at(two + "/d", 60 * MIB, 2 * MIB))
        self.expect("", ANN, lambda: write_at(two + "/d", 60 * MIB, MIB // 2))

        def map_and_write():
            with open(two + "/d", "r+b") as file, mmap.mmap(file.fileno(), 8 * MIB) as mapped:
                for at in range(0, 8 * MIB, 4096):
                    mapped[at] = 1
                mapped.flush()
        self.assertIn(run_as(ANN, map_and_write), ("EDQUOT", "EIO"))
        self.assertLessEqual(os.stat(two + "/d").st_blocks * 512, 5 * MIB)
        self.remove(one, two, os.path.join(self.mount.path, "bytes-three"))

    def test_what_was_taken_at_once_can_be_written(self):
        """Though less is left than a write may take; and what was given up again cannot."""
        job = self.job_of(ANN, "at-once")
        size = 8 * MIB - 65536

        def save(change=None):
            fd = os.open(job + "/a", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                os.posix_fallocate(fd, 0, size)
                os.posix_fallocate(fd, 0, size)
                if change is not None:
                    change(fd)
                    write(job + "/b", MIB)
                for at in range(0, size, MIB):
                    os.pwrite(fd, b"x" * min(MIB, size - at), at)
                users.write_text(job + "/c", "x" * 65536)
            finally:
                os.close(fd)
        self.within_seconds("", ANN, save)  # all that she may have: of other tests nothing may be left
        self.assertEqual(sum(os.stat(f"{job}/{name}").st_blocks * 512 for name in "ac"), 8 * MIB)
        punch = ctypes.CDLL(None, use_errno=True).fallocate
        for change in (lambda fd: os.truncate(fd, size - 2 * MIB),
                       lambda fd: (os.truncate(fd, 0), os.truncate(fd, size)),
                       lambda fd: punch(fd, 3, ctypes.c_long(2 * MIB), ctypes.c_long(2 * MIB)),
                       lambda fd: os.truncate(job + "/a", MIB),
                       lambda fd: os.close(os.open(job + "/a", os.O_TRUNC | os.O_WRONLY))):
            self.remove(job + "/b", job + "/c")
            self.expect("EDQUOT", ANN, save, change)
            self.assertLessEqual(sum(os.stat(f"{job}/{name}").st_blocks * 512 for name in "ab"), 8 * MIB)
        self.remove(job)

    def test_space_that_nobody_has_frees_none(self):
        job = self.job_of(ANN, "huge")
        self.expect("", ANN, write, job + "/a", 8 * MIB)

        def allocate(size):
            fd = os.open(job + "/b", os.O_RDWR | os.O_CREAT)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)
        for size in ((1 << 63) - 1, (1 << 63) - 8193, (1 << 62)):
            self.assertIn(run_as(ANN, allocate, size), ("EDQUOT", "ENOSPC", "EFBIG"))
            self.expect("EDQUOT", ANN, write, job + "/c", MIB)
        self.remove(job)

    def test_texts_that_are_moved_away_count(self):
        job = self.job_of(ANN, "away")
        text = '{"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1}' + " " * (400 << 10)

        def move(number):
            for count in range(number):
                users.write_text(job + "/layout.json", text)
                os.rename(job + "/layout.json", f"{job}/moved-{count}")
        self.expect("EDQUOT", ANN, move, 30)
        self.assertLessEqual(sum(os.stat(entry).st_blocks * 512 for entry in os.scandir(job) if entry.name != "layout.json"), 8 * MIB)
        # One that takes the place of another takes its space, too.
        self.remove(*(entry.path for entry in os.scandir(job) if entry.name.startswith("moved")))
        self.expect("", ANN, write, job + "/moved-0", 5 * MIB)
        self.expect("", ANN, move, 1)
        self.within_seconds("", ANN, write, job + "/a", 6 * MIB)
        self.remove(job)
        after = self.job_of(ANN, "after-away")  # nor is a draft counted any more that went with its job
        self.within_seconds("", ANN, write, after + "/a", 8 * MIB)
        self.remove(after)

    def test_copies_of_hard_links_count(self):
        job = self.job_of(ANN, "links")
        self.expect("", ANN, write, job + "/a", 5 * MIB)

        def commit():
            os.makedirs(job + "/incoming/x/rank/0", exist_ok=True)
            os.link(job + "/a", job + "/incoming/x/rank/0/a.bin")
            write(job + "/incoming/x/rank/0/bad.safetensors", 1)
            os.rename(job + "/incoming/x", job + "/checkpoints/x")
        self.expect("EDQUOT", ANN, commit)
        self.assertTrue(os.path.samefile(job + "/a", job + "/incoming/x/rank/0/a.bin"))
        os.truncate(job + "/a", 3 * MIB)
        os.unlink(job + "/incoming/x/rank/0/a.bin")
        self.expect("ECANCELED", ANN, commit)
        self.assertFalse(os.path.samefile(job + "/a", job + "/incoming/x/rank/0/a.bin"))
        self.expect("EDQUOT", ANN, write, job + "/b", 3 * MIB)
        self.remove(job)

    def test_files_of_a_user_and_of_a_job(self):
        one, two = self.job_of(ANN, "files-one"), self.job_of(ROOT, "files-two")

        def make(directory, count):
            for number in range(count):
                kind = (os.mkdir, lambda path: os.symlink("x", path), lambda path: write(path, 0))[number % 3]
                kind(f"{directory}/{number}-{count}")
        self.expect("", ANN, make, one, 50)
        self.expect("EDQUOT", ANN, make, one, 20)
        self.expect("EDQUOT", ROOT, make, two, 101)
        self.assertEqual(len([name for name in os.listdir(two) if name.endswith("-101")]), 99)  # and the job itself
        self.remove(one)
        again = self.job_of(ANN, "files-one")
        self.expect("", ANN, make, again, 55)
        self.assertEqual(os.statvfs(two).f_files, 100)
        self.assertEqual(os.statvfs(two).f_ffree, 0)
        self.remove(again, two)

    def test_jobs_count_as_files_of_who_makes_them(self):
        jobs = [f"{self.mount.path}/{number}-of-ann" for number in range(70)]
        refused = [run_as(ANN, os.mkdir, job) for job in jobs]
        self.assertEqual(refused, [""] * 60 + ["EDQUOT"] * 10)
        self.expect("EDQUOT", ANN, write, jobs[0] + "/a", 0)
        self.expect("", BOB, os.mkdir, jobs[-1])
        self.remove(jobs[0], jobs[-1])
        self.expect("", ANN, write, jobs[1] + "/a", 0)
        self.expect("EDQUOT", ANN, os.mkdir, jobs[0])
        self.remove(*jobs[1:60])

    def test_a_file_without_a_name_counts_until_it_is_closed(self):
        job = self.job_of(ANN, "nameless")
        with open(job + "/a", "wb") as file:
            os.chown(job + "/a", *ANN)
            file.write(b"x" * 6 * MIB)
            file.flush()
            os.unlink(job + "/a")
            self.expect("EDQUOT", ANN, write, job + "/b", 4 * MIB)
            os.truncate(job + "/b", 0)
        end = time.monotonic() + 10
        while run_as(ANN, write, job + "/b", 7 * MIB) and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(os.stat(job + "/b").st_size, 7 * MIB)
        self.remove(job)

    def within_seconds(self, wanted, user, call, *arguments):
        """What was closed, or removed, is told to the daemon a moment later."""
        end = time.monotonic() + 10
        while run_as(user, call, *arguments) != wanted and time.monotonic() < end:
            time.sleep(0.1)
        self.expect(wanted, user, call, *arguments)

    def test_what_is_open_while_its_job_is_removed(self):
        for number, remove in enumerate((self.remove, lambda path: self.mount.ptc("rm", "-y", "--force", os.path.basename(path)))):
            job, other = self.job_of(ANN, f"removed-{number}"), self.job_of(ANN, f"other-{number}")
            self.expect("", ANN, write, job + "/a", 6 * MIB)
            self.expect("", ANN, write, job + "/b", MIB)
            with open(job + "/a", "r+b", buffering=0) as file:
                remove(job)
                self.assertFalse(os.path.exists(job))
                self.assertEqual(os.fstat(file.fileno()).st_size, 6 * MIB)
                self.expect("EDQUOT", ANN, write, other + "/c", 4 * MIB)
                os.truncate(other + "/c", 0)
                again = self.job_of(ANN, f"removed-{number}")  # another one, with an account of its own
                self.expect("EDQUOT", ANN, write, again + "/c", 4 * MIB)
                self.remove(again)
                file.truncate(0)
                self.within_seconds("", ANN, write, other + "/c", 7 * MIB)
                self.expect("EDQUOT", ANN, write, other + "/d", 2 * MIB)  # what came back, came back once
                os.unlink(other + "/d")
            self.expect("EDQUOT", ANN, write, other + "/d", 2 * MIB)
            self.remove(other)

    def test_a_removed_checkpoint_counts_while_it_is_read(self):
        job = mount.Job(self.mount, "read-on")
        os.mkdir(job.path)
        models.Llama(1).write_hf(job.incoming("a") + "/rank/0")
        size = os.path.getsize(job.incoming("a") + "/rank/0/model.safetensors")
        os.setxattr(job.path, XATTR, f"{2 * size}".encode())
        job.commit("a")
        with open(job.rank_file("a", "tp1-pp1-dp1", 0), "rb"):
            subprocess.run(["rm", "-r", job.checkpoint("a")], check=True)
            self.expect("EDQUOT", ROOT, write, job.path + "/more", size + MIB)
            os.unlink(job.path + "/more")
        self.within_seconds("", ROOT, write, job.path + "/more", 2 * size - 64 * 1024)
        self.remove(job.path)

    def test_attributes_of_files_count_and_are_bounded(self):
        job = self.job_of(ANN, "attributes")
        self.expect("", ANN, write, job + "/a", 1)

        def fill(path, count, size):
            for number in range(count):
                os.setxattr(path, f"user.{number}", b"x" * size)
        if run_as(ANN, fill, job + "/a", 1, 10) == "EOPNOTSUPP":
            self.skipTest("the store's file system has no attributes of users")
        self.expect("ENOSPC", ANN, fill, job + "/a", 1000, 1000)
        self.assertLessEqual(sum(len(os.getxattr(job + "/a", name)) for name in os.listxattr(job + "/a")), 128 << 10)
        os.unlink(job + "/a")
        self.expect("", ANN, write, job + "/b", 8 * MIB - (32 << 10))
        self.expect("", ANN, write, job + "/c", 1)
        self.expect("EDQUOT", ANN, fill, job + "/c", 60, 1000)
        self.assertGreater(len(os.listxattr(job + "/c")), 20)
        self.expect("EDQUOT", ANN, write, job + "/d", 16 << 10)
        # The same after a kill; and what goes comes back.
        self.mount.stop(kill=True)
        self.mount.start()
        self.expect("EDQUOT", ANN, write, job + "/d", 16 << 10)
        for name in os.listxattr(job + "/c"):
            os.removexattr(job + "/c", name)
        self.expect("", ANN, write, job + "/d", 16 << 10)
        self.remove(job)

    def test_texts_and_drafts_count(self):
        job = self.job_of(ANN, "texts")
        layout, padding = '{"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1}', " " * (400 << 10)

        def save(text):
            users.write_text(job + "/layout.json", text)
        self.expect("", ANN, write, job + "/a", 8 * MIB - (300 << 10))
        self.expect("EDQUOT", ANN, save, layout + padding)
        self.expect("", ANN, save, layout)  # nobody is kept from that
        os.truncate(job + "/a", 7 * MIB)
        self.expect("", ANN, save, layout + padding)
        self.expect("EDQUOT", ANN, write, job + "/b", 700 << 10)
        self.expect("", ANN, save, layout)
        self.within_seconds("", ANN, write, job + "/b", 900 << 10)
        self.remove(job)

    def test_texts_are_counted_once_after_a_start(self):
        job = self.job_of(ANN, "texts-again")
        layout, padding = '{"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1}', " " * (400 << 10)
        self.expect("", ANN, users.write_text, job + "/layout.json", layout + padding)
        self.expect("", ANN, write, job + "/a", 8 * MIB - (512 << 10))
        for kill in (True, False):
            self.mount.stop(kill=kill)
            self.mount.start()
            self.expect("EDQUOT", ANN, write, job + "/b", 300 << 10)
            os.truncate(job + "/b", 0)
        # What goes comes back once.
        self.expect("", ANN, users.write_text, job + "/layout.json", layout)
        self.within_seconds("", ANN, write, job + "/b", 400 << 10)
        self.expect("EDQUOT", ANN, write, job + "/c", 300 << 10)
        self.remove(job)

    def test_a_job_with_a_limit_of_its_own(self):
        job = self.job_of(ROOT, "limited")
        self.expect("EDQUOT", ROOT, write, job + "/a", 13 * MIB)
        self.expect("EPERM", ANN, os.setxattr, job, XATTR, b"1G")
        self.assertEqual(mount.error_of(os.setxattr, job, XATTR, b"a lot"), "EINVAL")
        os.setxattr(job, XATTR, b"20M")
        self.assertEqual(os.getxattr(job, XATTR), b"20M")
        self.expect("", ROOT, write, job + "/a", 18 * MIB)
        space = os.statvfs(job)
        self.assertEqual(space.f_blocks * space.f_frsize, 20 * MIB)
        self.assertEqual(space.f_bavail * space.f_frsize, 2 * MIB)
        # The same after a kill.
        self.mount.stop(kill=True)
        self.mount.start()
        self.assertEqual(os.getxattr(job, XATTR), b"20M")
        self.expect("EDQUOT", ROOT, write, job + "/b", 3 * MIB)
        os.removexattr(job, XATTR)
        self.assertEqual(mount.error_of(os.getxattr, job, XATTR), "ENODATA")
        self.expect("EDQUOT", ROOT, write, job + "/c", 1)
        self.remove(job + "/a", job + "/b")
        self.expect("", ROOT, write, job + "/c", 11 * MIB)
        self.remove(job)

    def test_why_a_commit_was_refused_counts(self):
        job = mount.Job(self.mount, "refused")
        os.mkdir(job.path)
        os.setxattr(job.path, XATTR, b"12M,10")
        os.makedirs(job.incoming("a") + "/rank/0")
        write(job.incoming("a") + "/rank/0/bad.safetensors", 1)

        def free():
            space = os.statvfs(job.path)
            return space.f_ffree, space.f_bavail * space.f_frsize
        self.assertEqual(free()[0], 5)
        before = free()
        for _ in range(2):
            write(job.incoming("a") + "/rank/0/bad.safetensors", 1)
            self.assertEqual(mount.error_of(os.rename, job.incoming("a"), job.checkpoint("a")), "ECANCELED")
            self.assertTrue(os.path.exists(job.incoming("a.error")))
            self.assertEqual(free(), (before[0] - 1, before[1] - os.stat(job.incoming("a.error")).st_blocks * 512))
        os.unlink(job.incoming("a.error"))
        self.check_becomes(free, before)
        # The name that a commit shows until mv has its answer counts for nobody after it.
        shutil.rmtree(job.incoming("a") + "/rank")
        models.Llama(1).write_hf(job.incoming("a") + "/rank/0")
        os.setxattr(job.path, XATTR, b"1G,100")
        job.commit("a")
        self.check_becomes(lambda: free()[0], 99)  # counted when nobody waits for it
        self.remove(job.path)

    def test_checkpoints_count(self):
        job = mount.Job(self.mount, "checkpoints")
        os.mkdir(job.path)
        model = models.Llama(1)
        model.write_hf(job.incoming("a") + "/rank/0")
        size = os.path.getsize(job.incoming("a") + "/rank/0/model.safetensors")
        os.setxattr(job.path, XATTR, f"{2 * size}".encode())
        job.commit("a")
        free = os.statvfs(job.path)
        self.assertLess(free.f_bavail * free.f_frsize, size + 8192)
        self.assertEqual(mount.error_of(write, job.path + "/more", size + MIB), "EDQUOT")
        os.unlink(job.path + "/more")
        subprocess.run(["rm", "-r", job.checkpoint("a")], check=True)
        end = time.monotonic() + 10
        while mount.error_of(write, job.path + "/more", 2 * size - 64 * 1024) and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(os.path.getsize(job.path + "/more"), 2 * size - 64 * 1024)
        self.remove(job.path)


class LaterQuota(mount.TestCase):
    """What was open before there was a limit."""
    only_root = "sets limits"

    def test_it_is_looked_at(self):
        job = self.new_job()
        with open(job.file("a"), "w+b", buffering=0) as file, open(job.file("gone"), "w+b", buffering=0) as gone:
            file.write(b"x" * MIB)
            gone.write(b"x" * MIB)
            os.unlink(job.file("gone"))
            os.setxattr(job.path, XATTR, b"8M")
            self.assertEqual(mount.error_of(write, job.file("b"), 5 * MIB), "")
            os.unlink(job.file("b"))
            file.write(b"x" * 4 * MIB)  # the kernel does it by itself
            space = os.statvfs(job.path)
            self.assertLessEqual(space.f_bavail * space.f_frsize, 2 * MIB)
            self.assertEqual(mount.error_of(write, job.file("b"), 3 * MIB), "EDQUOT")
            os.truncate(job.file("b"), 0)
            file.truncate(0)
            self.assertEqual(mount.error_of(write, job.file("b"), 6 * MIB), "")
            self.assertEqual(mount.error_of(write, job.file("c"), 2 * MIB), "EDQUOT")
            os.truncate(job.file("c"), 0)
        end = time.monotonic() + 10
        while mount.error_of(write, job.file("c"), 2 * MIB - 4096) and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(os.path.getsize(job.file("c")), 2 * MIB - 4096)


def write_at(path, offset, size):
    fd = os.open(path, os.O_WRONLY)
    try:
        for at in range(offset, offset + size, MIB // 2):
            os.pwrite(fd, b"x" * min(MIB // 2, offset + size - at), at)
    finally:
        os.close(fd)


if __name__ == "__main__":
    mount.main()
