"""The same calls in two places: a directory of incoming/, and one of the tmpfs that lies under it.

A Side is a process for each user, in the directory of that side; `Sides.both` makes a call on each and
compares what came of it. Results are texts: a value, or the name of an errno.
"""
import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import mount  # noqa: E402

if os.access("/dev/shm", os.W_OK):
    tempfile.tempdir = "/dev/shm"  # the store, and what it is compared with, in memory

# A user and a group of his own; the second is in the first one's group too.
END = "end\n"
USERS = {"root": (0, 0, []), "ann": (41001, 42001, []), "bob": (41002, 42002, [42001])}


class Calls:
    """What a process can be asked to do. Files are numbered slots, so that both sides agree."""

    def __init__(self):
        self.slots = {}

    def open(self, slot, path, flags, mode=0o644):
        self.close(slot)
        self.slots[slot] = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        return "ok"

    def close(self, slot):
        fd = self.slots.pop(slot, None)
        if fd is not None:
            os.close(fd)
        return "ok"

    def on(self, slot, name, *arguments):
        """os.NAME(fd, …)"""
        if slot not in self.slots:
            return "not open"
        result = getattr(os, name)(self.slots[slot], *arguments)
        return text_of_stat(result) if isinstance(result, os.stat_result) else result

    def call(self, name, *arguments, **more):
        result = getattr(os, name)(*arguments, **more)
        return sorted(result) if isinstance(result, list) else result

    def stat(self, path):
        return text_of_stat(os.lstat(path))

    def list(self, path):
        with os.scandir(path) as entries:
            return sorted((e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries)

    def times(self, path):
        s = os.lstat(path)
        return s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns

    def lock(self, slot, how, kind, start=0, length=0):
        if kind == "flock":
            fcntl.flock(self.slots[slot], how)
        else:
            fcntl.lockf(self.slots[slot], how, length, start)
        return "ok"


def text_of_stat(s):
    sized = stat.S_ISREG(s.st_mode) or stat.S_ISLNK(s.st_mode)
    return (f"mode {s.st_mode:o} nlink {s.st_nlink} uid {s.st_uid} gid {s.st_gid} "
            f"size {s.st_size if sized else '-'}")


class Process:
    """One user on one side."""

    def __init__(self, directory, user):
        ask_read, self.ask = os.pipe()
        self.answer, answer_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.ask)
                os.close(self.answer)
                uid, gid, groups = USERS[user]
                os.setgroups(groups)
                os.setresgid(gid, gid, gid)
                os.setresuid(uid, uid, uid)
                os.chdir(directory)
                os.umask(0o022)
                with os.fdopen(ask_read, "r", encoding="ascii") as questions, \
                     os.fdopen(answer_write, "w", encoding="ascii") as answers:
                    serve(questions, answers)
            finally:
                os._exit(0)
        os.close(ask_read)
        os.close(answer_write)
        self.ask = os.fdopen(self.ask, "w", encoding="ascii")
        self.answer = os.fdopen(self.answer, "r", encoding="ascii")

    def do(self, name, *arguments, **more):
        self.ask.write(ascii((name, arguments, more)) + "\n")
        self.ask.flush()
        line = self.answer.readline()
        if not line:
            raise AssertionError(f"the process ended at {name}{arguments}")
        return eval(line)  # pylint: disable=eval-used  # our own child wrote it with ascii()

    def end(self):
        self.ask.write(END)  # a mere close would not end it: later processes hold the pipe as well
        self.ask.close()
        os.waitpid(self.pid, 0)
        self.answer.close()


def serve(questions, answers):
    calls = Calls()
    for line in iter(questions.readline, END):
        name, arguments, more = eval(line)  # pylint: disable=eval-used
        try:
            result = getattr(calls, name)(*arguments, **more)
        except OSError as error:
            result = errno.errorcode.get(error.errno, str(error.errno))
        except ValueError as error:
            result = str(error)
        answers.write(ascii(result) + "\n")
        answers.flush()


class Sides:
    """`with Sides(mount, "name") as sides`: two empty directories that everybody may write to."""

    def __init__(self, mounted, job):
        os.chmod(mounted.top, 0o755)
        os.chmod(os.path.dirname(job.incoming("x")), 0o777)
        self.directories = [os.path.join(mounted.top, "local-" + job.name), job.incoming("x")]
        for directory in self.directories:
            os.mkdir(directory)
            os.chmod(directory, 0o777)
        self.processes = [{user: Process(d, user) for user in USERS} for d in self.directories]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for side in self.processes:
            for process in side.values():
                process.end()
        # shutil cannot remove paths of more than PATH_MAX.
        subprocess.run(["rm", "-rf", *self.directories], check=True)

    def do(self, user, name, *arguments, **more):
        """(what tmpfs said, what ptcfs said)"""
        return tuple(side[user].do(name, *arguments, **more) for side in self.processes)


class TestCase(mount.TestCase):
    """A daemon that other users may enter."""
    mount_options = ("-o", "allow_other")
    only_root = "can be several users"

    def sides(self):
        return Sides(self.mount, self.new_job())

    def both(self, sides, user, name, *arguments, **more):
        expected, got = sides.do(user, name, *arguments, **more)
        self.assertEqual(got, expected, f"{user}: {name}{arguments}{more or ''}")
        return got
