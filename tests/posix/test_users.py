"""What POSIX promises to one user and another: modes, owners, errnos and times in incoming/ against tmpfs.

PTC_SEED replays the random part, PTC_ROUNDS makes it longer.
"""
import errno
import os
import random
import re
import subprocess
import time

import sides
from sides import mount

R, W, RW = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
C, X, T, A = os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND
D, N = os.O_DIRECTORY, os.O_NOFOLLOW
COMPONENT, PATH = 255, 4096  # NAME_MAX, PATH_MAX

# Each line: who, and a call. Both sides must answer alike, and so must `stat` of the names after it.
SCRIPTS = {
    "owners and modes of what is made": """
        ann mkdir d 0o777            ann open 0 d/f C|RW 0o666     bob open 0 d/g C|RW 0o666
        bob mkdir d/e 0o700          ann chmod d 0o777             bob open 0 d/g C|RW 0o666
        bob mkdir d/e 0o700          root open 1 d/e/x C|RW 0o640  ann open 2 d/e/x R
        ann listdir d/e              bob listdir d/e               ann chmod d/g 0o600
        ann umask 0o077              ann open 3 d/private C|RW 0o666  bob open 3 d/private R
        ann mkfifo d/fifo            ann symlink nowhere d/link    bob readlink d/link
        ann open 4 d/suid C|RW 0o6777
    """,
    "group of a setgid directory": """
        ann mkdir d 0o777            ann chmod d 0o2777            bob open 0 d/f C|RW 0o666
        bob mkdir d/e                root open 1 d/r C|RW 0o666    bob mkfifo d/fifo
        bob symlink x d/link         ann chown d -1 42002          bob chmod d/f 0o2755
        root chmod d/f 0o2755        root chown d/r 41002 42002    bob chmod d/r 0o2711
    """,
    "sticky bit": """
        root mkdir d 0o777           root chmod d 0o1777           ann open 0 d/a C|RW 0o666
        bob open 0 d/b C|RW 0o666    bob unlink d/a                bob rename d/a d/c
        bob rename d/b d/a           ann rename d/b d/a            ann mkdir d/e 0o777
        bob rmdir d/e                bob rename d/e d/mine         ann rename d/a d/c
        root unlink d/b              ann unlink d/c                bob link d/e/x d/y
    """,
    "chmod and chown by others": """
        ann open 0 f C|RW 0o644      bob chmod f 0o666             bob chown f 41002 -1
        ann chown f 41002 -1         ann chown f -1 42001          ann chown f -1 42002
        bob open 0 g C|RW 0o644      bob chown g -1 42001          bob chown g -1 42002
        root chown f 41002 42002     ann chmod f 0o600             bob chmod f 0o4755
        bob chown f 41002 -1         root chown f 41001 42001      root chmod f 0o6755
        root chown f 0 0             root chmod f 0o6644           root chown f 0 0
        ann symlink f l              bob lchown l 41002 -1         root lchown l 41002 42002
        ann chmod nothing 0o644      ann chown nothing 41001 -1    ann chmod f/x 0o644
    """,
    "setuid goes when somebody writes": """
        ann open 0 f C|RW 0o777      ann chmod f 0o6777            bob open 0 f RW
        bob on 0 write b"x"          ann chmod f 0o6777            ann on 0 write b"x"
        ann chmod f 0o6777           bob truncate f 0              ann chmod f 0o6777
        bob on 0 ftruncate 1         ann chmod f 0o6777            root open 1 f RW
        root on 1 write b"x"         ann chmod f 0o6767            bob on 0 write b"x"
        ann chmod f 0o6777           bob open 2 f RW|T
    """,
    "EACCES": """
        ann mkdir d 0o700            ann open 0 d/f C|RW 0o666     bob open 0 d/f R
        bob stat d/f                 bob unlink d/f                bob open 1 d/g C|RW
        bob mkdir d/e                bob rename d/f f              bob link d/f f
        bob symlink x d/l            bob truncate d/f 0            bob chmod d/f 0
        ann chmod d 0o711            bob stat d/f                  bob list d
        bob open 0 d/f RW            bob unlink d/f                ann chmod d 0o744
        bob list d                   bob open 0 d/f R              ann chmod d/f 0o200
        ann chmod d 0o777            ann open 1 d/f R              ann open 1 d/f W
        bob open 1 d/f R             ann chmod d/f 0o004           ann open 1 d/f R
        bob open 1 d/f R             root open 1 d/f RW            bob truncate d/f 0
        bob utime d/f                bob utime d/f (1,2)           ann utime d/f (1,2)
        ann chmod d/f 0o000          bob access d/f 4              root access d/f 4
        root access d/f 1            bob setxattr d/f user.a b"x"  ann getxattr d/f user.a
    """,
    "ENOENT, ENOTDIR, EISDIR, EEXIST, ENOTEMPTY": """
        ann mkdir d                  ann open 0 f C|RW             ann open 1 d/x C|RW
        ann open 2 f/x R             ann open 2 f/x C|RW           ann mkdir f/x
        ann rmdir f                  ann rmdir d                   ann unlink d
        ann unlink f/                ann rename f d                ann rename d f
        ann mkdir f                  ann mkdir d                   ann open 2 d RW
        ann open 2 d C|RW            ann open 2 d C|X|RW           ann open 2 f C|X|RW
        ann open 2 f D|R             ann open 2 none R             ann open 2 none/x C|RW
        ann unlink none              ann rmdir none                ann rename none x
        ann mkdir none/x             ann symlink x f               ann link d x
        ann link none x              ann link f f                  ann link f d/x
        ann mkdir e                  ann rename d e                ann rename e d
        ann rename d d/x             ann rename d d/sub            ann rmdir d/.
        ann rmdir d/..               ann unlink d/.                ann mkdir d/.
        ann rename d/. e             ann truncate d 0              ann truncate none 0
        ann readlink f               ann readlink none             ann listdir f
        ann mkfifo d                 ann open 3 "" R               ann mkdir ""
        ann rename f f               ann link f g                  ann rename f g
        ann truncate f -1            ann on 0 ftruncate -1         ann on 1 lseek -1 0
    """,
    "ELOOP and links": """
        ann symlink a b              ann symlink b a               ann open 0 a R
        ann stat a                   ann mkdir a/x                 ann truncate a 0
        ann chmod a 0o600            ann open 0 a R|N              ann open 1 f C|RW
        ann symlink f l              ann open 0 l R|N              ann open 0 l RW
        ann symlink new m            ann open 0 m C|RW             ann symlink gone n
        ann open 0 n C|X|RW          ann open 0 n R                ann rename l l2
        ann unlink m                 ann link l2 hard              ann symlink "" empty
        ann symlink d/ slash         ann mkdir d                   ann open 0 slash R
        ann rmdir slash              ann symlink / top             ann stat top
    """,
    "files that are gone and still open": """
        ann open 0 f C|RW            ann on 0 write b"abc"         ann link f g
        ann unlink f                 ann on 0 fstat                ann unlink g
        ann on 0 fstat               ann on 0 pread 9 0            ann on 0 pwrite b"z" 1
        ann on 0 ftruncate 2         ann on 0 fstat                ann on 0 fchmod 0o600
        ann on 0 fchown 41001 42001  ann on 0 fstat                ann mkdir d
        ann open 1 d D|R             ann rmdir d                   ann on 1 fstat
        ann on 1 listdir             ann open 2 a C|RW             ann open 3 b C|RW
        ann rename a b               ann on 3 write b"q"           ann on 3 fstat
        ann on 2 fstat               ann on 0 fsync                ann close 0
    """,
    "append, seek and short reads": """
        ann open 0 f C|RW            ann on 0 write b"0123456789"  ann open 1 f W|A
        ann on 1 write b"AA"         ann on 1 pwrite b"BB" 0       ann on 0 pread 20 0
        ann on 0 lseek 0 2           ann on 0 read 5               ann on 0 pread 5 100
        ann on 0 lseek 5 0           ann on 0 read 3               ann on 1 read 3
        ann on 0 ftruncate 30        ann on 0 pread 40 0           ann truncate f 3
        ann on 0 pread 40 0          ann on 0 posix_fallocate 0 50 ann on 0 fstat
        ann open 2 f W|T             ann on 0 pread 9 0            ann on 0 fdatasync
    """,
    "extended attributes": """
        ann open 0 f C|RW            ann setxattr f user.a b"1"    ann setxattr f user.a b"2" 1
        ann setxattr f user.a b"3" 2 ann setxattr f user.b b"" 2   ann setxattr f user.b b""
        ann listxattr f              ann getxattr f user.a         ann getxattr f user.none
        ann removexattr f user.none  ann removexattr f user.a      ann listxattr f
        bob setxattr f user.c b"1"   bob getxattr f user.b         bob removexattr f user.b
        ann setxattr f user. b"1"    ann setxattr f bad b"1"       ann mkdir d
        ann setxattr d user.x b"1"   ann listxattr d               bob setxattr d user.y b"1"
    """,
}


def words_of(line):
    """ "ann open 0 f C|RW 0o644" → "ann", "open", [0, "f", …] """
    user, name, *rest = line.split()
    known = {"R": R, "W": W, "RW": RW, "C": C, "X": X, "T": T, "A": A, "D": D, "N": N}

    def value(word):
        if word and all(part in known for part in word.split("|")):
            return sum(known[part] for part in word.split("|"))
        if word[0] in "-0123456789(\"" or word.startswith("b\""):
            return eval(word)  # pylint: disable=eval-used  # our own script
        return word

    return user, name, [value(word) for word in rest]


def calls_of(script):
    return [words_of(call) for call in re.split(r"\s+(?=(?:root|ann|bob) )", script.strip())]


OWN_CALLS = {"open", "close", "on", "stat", "list", "times", "lock"}


class Users(sides.TestCase):
    def step(self, where, user, name, arguments):
        if name in OWN_CALLS:
            return self.both(where, user, name, *arguments)
        return self.both(where, user, "call", name, *arguments)

    def tree(self, where):
        """Everything there is, as root sees it."""
        def of(directory):
            names = self.both(where, "root", "list", directory)
            for name, is_dir, _ in names:
                path = os.path.join(directory, name)
                self.both(where, "root", "stat", path)
                if is_dir:
                    of(path)
        of(".")

    def test_scripts(self):
        for title, script in SCRIPTS.items():
            with self.subTest(title), self.job_sides(title) as where:
                for user, name, arguments in calls_of(script):
                    self.step(where, user, name, arguments)
                    self.tree(where)

    def job_sides(self, title):
        return sides.Sides(self.mount, self.mount.job("".join(c for c in title if c.isalnum())))

    def test_lengths_of_names_and_paths(self):
        with self.sides() as where:
            for size in (COMPONENT, COMPONENT + 1):
                name = "n" * size
                for call in (("open", 0, name, C | RW), ("stat", name), ("call", "unlink", name),
                             ("call", "mkdir", name), ("call", "rename", name, name[:-1] + "m"),
                             ("call", "rmdir", name[:-1] + "m"), ("call", "symlink", "x", name),
                             ("call", "link", name, "l"), ("call", "truncate", name, 0)):
                    self.both(where, "ann", *call)
                self.tree(where)
            # The target of a link, and a path made of parts that are each short enough.
            for size in (PATH - 2, PATH - 1, PATH):
                self.both(where, "ann", "call", "symlink", "t" * size, f"l{size}")
                self.both(where, "ann", "call", "readlink", f"l{size}")
            deep = "."
            while len(deep) + 201 < PATH - 10:
                deep += "/" + "d" * 200
                self.assertIsNone(self.both(where, "ann", "call", "mkdir", deep))
            for size in (PATH - 2, PATH - 1, PATH):
                name = deep + "/" + "f" * (size - len(deep) - 1)
                self.both(where, "ann", "open", 0, name, C | RW)
                self.both(where, "ann", "stat", name)
            self.tree(where)

    def test_values_of_attributes_have_limits(self):
        with self.sides() as where:
            self.both(where, "ann", "open", 0, "f", C | RW)
            for size in (65536, 65537):
                self.both(where, "ann", "call", "setxattr", "f", "user.big", b"x" * size)
            for size in (COMPONENT, COMPONENT + 1):
                self.both(where, "ann", "call", "setxattr", "f", "user." + "k" * (size - 5), b"v")
            self.both(where, "ann", "call", "getxattr", "f", "user.big")
            self.both(where, "ann", "call", "listxattr", "f")

    def test_a_running_program_is_busy(self):
        with self.sides() as where:
            self.both(where, "ann", "open", 0, "sleep", C | RW, 0o755)
            with open("/bin/sleep", "rb") as program:
                self.both(where, "ann", "on", 0, "write", program.read())
            for directory in where.directories:
                with self.assertRaises(OSError) as busy:
                    subprocess.run([directory + "/sleep", "0"], check=True)
                self.assertEqual(busy.exception.errno, errno.ETXTBSY)
            self.both(where, "ann", "close", 0)
            running = [subprocess.Popen([directory + "/sleep", "60"]) for directory in where.directories]
            try:
                for flags in (R, W, RW | T):
                    self.both(where, "ann", "open", 0, "sleep", flags)
                    self.both(where, "ann", "close", 0)
                self.both(where, "ann", "call", "truncate", "sleep", 0)
                self.both(where, "ann", "call", "unlink", "sleep")
            finally:
                for process in running:
                    process.kill()
                    process.wait()

    def test_which_times_change(self):
        def changes(before, after):
            return [a != b for a, b in zip(before, after)]

        with self.sides() as where:
            self.both(where, "ann", "call", "mkdir", "d")
            self.both(where, "ann", "open", 0, "d/f", C | RW)
            self.both(where, "ann", "call", "symlink", "f", "d/l")
            for call in (("on", 0, "write", b"x"), ("on", 0, "pwrite", b"", 0), ("on", 0, "ftruncate", 0),
                         ("on", 0, "ftruncate", 0), ("call", "truncate", "d/f", 5),
                         ("call", "chmod", "d/f", 0o600), ("call", "chmod", "d/f", 0o600),
                         ("call", "chown", "d/f", -1, -1), ("call", "chown", "d/f", 41001, -1),
                         ("call", "link", "d/f", "d/g"), ("call", "unlink", "d/g"),
                         ("call", "rename", "d/f", "d/f2"), ("call", "rename", "d/f2", "d/f"),
                         ("call", "mkdir", "d/e"), ("call", "rmdir", "d/e"), ("open", 1, "d/new", C | RW),
                         ("open", 1, "d/f", RW | T), ("call", "utime", "d/f"), ("call", "utime", "d/f", (5, 6)),
                         ("call", "setxattr", "d/f", "user.a", b"1"), ("call", "unlink", "d/none"),
                         ("call", "symlink", "x", "d/l2"), ("call", "mkfifo", "d/p"),
                         ("on", 0, "posix_fallocate", 0, 10)):
                before = {name: where.do("ann", "times", name) for name in ("d", "d/f", "d/l")}
                time.sleep(0.02)  # longer than a tick of the kernel's clock
                self.both(where, "ann", *call)
                for name, times in before.items():
                    expected, got = where.do("ann", "times", name)
                    if "rename" in call and "d/f2" in (call[3], call[2]) and name == "d/f":
                        continue
                    self.assertEqual(changes(times[1], got), changes(times[0], expected),
                                     f"atime, mtime, ctime of {name} at {call}")
                    if name == "d/f" and call[:2] == ("call", "utime") and len(call) > 3:
                        self.assertEqual(got[:2], expected[:2])

    def test_locks_between_processes(self):
        import fcntl
        with self.sides() as where:
            self.both(where, "ann", "open", 0, "f", C | RW, 0o666)
            self.both(where, "root", "call", "chmod", "f", 0o666)
            for user in ("bob", "root"):
                self.both(where, user, "open", 0, "f", RW)
            ex, sh, un, now = fcntl.LOCK_EX, fcntl.LOCK_SH, fcntl.LOCK_UN, fcntl.LOCK_NB
            for kind in ("flock", "posix"):
                for user, how, *span in (("ann", ex), ("bob", ex), ("bob", sh), ("ann", sh), ("bob", sh),
                                         ("root", ex), ("ann", un), ("bob", un), ("root", ex),
                                         ("ann", ex), ("root", un)):
                    self.both(where, user, "lock", 0, how | now if how != un else un, kind, *span)
            for user, how, *span in (("ann", ex, 0, 10), ("bob", ex, 10, 10), ("bob", ex, 5, 10),
                                     ("root", sh, 0, 1), ("ann", un, 0, 5), ("root", ex, 0, 5),
                                     ("bob", ex, 4, 2)):
                self.both(where, user, "lock", 0, how | now if how != un else un, "posix", *span)
            for user in ("ann", "bob"):  # a lock goes with its file
                self.both(where, user, "close", 0)
            self.both(where, "root", "lock", 0, ex | now, "posix")
            self.both(where, "root", "lock", 0, ex | now, "flock")

    def test_space_is_the_stores(self):
        job = self.new_job()
        ours, stores = os.statvfs(job.incoming("")), os.statvfs(self.mount.store)
        self.assertEqual((ours.f_frsize, ours.f_blocks, ours.f_files, ours.f_namemax),
                         (stores.f_frsize, stores.f_blocks, stores.f_files, COMPONENT))
        taken = []
        while not taken or taken[-1] < 2000:  # others take and give back space of this disk at the same time
            before = os.statvfs(job.incoming("")).f_bfree
            with open(job.incoming(f"big{len(taken)}"), "wb") as file:
                file.write(bytes(8 << 20))
            taken.append(before - os.statvfs(job.incoming("")).f_bfree)
            self.assertLess(len(taken), 10, taken)

    def test_random_calls_of_three_users(self):
        seed = int(os.environ.get("PTC_SEED") or random.SystemRandom().randrange(1 << 32))
        rounds = int(os.environ.get("PTC_ROUNDS") or 4000)
        print(f"PTC_SEED={seed} PTC_ROUNDS={rounds}", flush=True)
        dice = random.Random(seed)
        names = ["a", "b", "c", "a/x", "a/y", "b/x", "c/x", "a/x/z", "l", "l/x"]
        with self.sides() as where:
            for step in range(rounds):
                with self.subTest(PTC_SEED=seed, step=step):
                    self.random_call(where, dice, lambda: dice.choice(names))
                if self._outcome.result.failures or self._outcome.result.errors:
                    return

    def random_call(self, where, dice, name):
        user = dice.choice(["root", "ann", "ann", "bob", "bob"])
        slot = dice.randrange(3)
        mode = dice.choice([0o755, 0o777, 0o700, 0o644, 0o666, 0o1777, 0o2775, 0o4755, 0, dice.randrange(0o10000)])
        call = dice.choice((
            lambda: ("open", slot, name(), dice.choice([R, W, RW, C | RW, C | X | RW, C | W | T, RW | T, W | A,
                                                        R | D, RW | N, R | N]), mode),
            lambda: ("open", slot, name(), C | RW, 0o666),
            lambda: ("close", slot),
            lambda: ("on", slot, "pwrite", bytes([65 + step_letter(dice)]) * dice.randrange(1, 9000),
                     dice.randrange(9000)),
            lambda: ("on", slot, "pread", 9000, dice.randrange(4000)),
            lambda: ("on", slot, "ftruncate", dice.randrange(9000)),
            lambda: ("on", slot, "fchmod", mode), lambda: ("on", slot, "fstat"),
            lambda: ("on", slot, "fsync"),
            lambda: ("call", "mkdir", name(), mode), lambda: ("call", "mkdir", name(), 0o777),
            lambda: ("call", "rmdir", name()), lambda: ("call", "unlink", name()),
            lambda: ("call", "rename", name(), name()), lambda: ("call", "link", name(), name()),
            lambda: ("call", "symlink", name(), name()), lambda: ("call", "readlink", name()),
            lambda: ("call", "truncate", name(), dice.randrange(9000)),
            lambda: ("call", "chmod", name(), mode), lambda: ("call", "chmod", name(), 0o777),
            lambda: ("call", "chown", name(), *dice.choice(OWNERS)),
            lambda: ("call", "utime", name()), lambda: ("call", "utime", name(), (dice.randrange(9), 5)),
            lambda: ("call", "access", name(), dice.randrange(8)),
            lambda: ("call", "mkfifo", name(), mode),
            lambda: ("call", "setxattr", name(), "user.a", b"v", dice.randrange(3)),
            lambda: ("call", "getxattr", name(), "user.a"), lambda: ("call", "removexattr", name(), "user.a"),
            lambda: ("list", name()), lambda: ("stat", name()),
        ))()
        self.both(where, user, *call)
        if call[0] == "call" and isinstance(call[2], str):
            self.both(where, "root", "stat", call[2])
            self.both(where, "root", "stat", os.path.dirname(call[2]) or ".")


# Not (-1, -1): of a set-user-ID file of somebody else it differs (fs/README.md).
OWNERS = [(uid, gid) for uid in (-1, 0, 41001, 41002) for gid in (-1, 0, 42001, 42002) if (uid, gid) != (-1, -1)]


def step_letter(dice):
    return dice.randrange(26)


if __name__ == "__main__":
    mount.main()
