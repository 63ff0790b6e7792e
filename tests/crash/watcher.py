"""Processes that read a job all the time, while the story is told, and look for a mix.

Every complete read of a rank file under a layout must be exactly the file of that checkpoint and layout:
through fresh opens, `current` resolved anew, descriptors and mappings that are kept, and directories that
are kept. A file may be gone, and a daemon dead; its bytes may never be others.
"""
import errno
import hashlib
import mmap
import os
import re
import signal
import time
import traceback

import models
import story

FINE = {errno.ENOENT, errno.ESTALE}
DEAD = {errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV}
PAUSE_SECONDS = 0.002
HELD = 12  # of each kind


def read_all(fd):
    size, parts, at = os.fstat(fd).st_size, [], 0
    while True:
        part = os.pread(fd, 1 << 20, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    assert at == size, f"{at} bytes of a file of {size}"
    return b"".join(parts)


class Reader:
    def __init__(self, job, kept=False):
        self.job = job
        self.fine = FINE if kept else FINE | DEAD
        self.files, self.directories, self.maps = [], [], []  # held: (what it is, object, digest)
        self.known = {}                                       # what it is → digest
        self.reads = 0

    def checked(self, data, checkpoint, layout, rank):
        """The digest of the file; the first of each is compared by its tensors."""
        what, digest = (checkpoint, layout, rank), hashlib.sha256(data).digest()
        self.reads += 1
        if what not in self.known:
            sizes = [int(size) for size in re.findall(r"\d+", layout)]
            held = models.parse_safetensors(data)
            assert held == story.expected(checkpoint, sizes[0], sizes[1], rank), f"{what}: other tensors"
            self.known[what] = digest
        assert self.known[what] == digest, f"{what}: other bytes than before"
        return digest

    def read(self, path, what, directory=None):
        """One fresh open and read; keeps some of what it opened."""
        fd = os.open(path, os.O_RDONLY, dir_fd=directory)
        try:
            digest = self.checked(read_all(fd), *what)
            if len(self.files) < HELD:
                self.files.append((what, os.dup(fd), digest))
            if len(self.maps) < HELD:
                size = os.fstat(fd).st_size  # mmap() itself hides why it cannot know that
                self.maps.append((what, mmap.mmap(fd, size, prot=mmap.PROT_READ), digest))
        finally:
            os.close(fd)

    def read_current(self):
        """What `current` is when it is opened, it stays."""
        fd = os.open(self.job.file("current"), os.O_RDONLY | os.O_DIRECTORY)
        _, checkpoint, _, layout = os.readlink(f"/proc/self/fd/{fd}").split("/")[-4:]
        try:
            for rank in os.listdir(f"/proc/self/fd/{fd}/rank"):
                self.read(f"rank/{rank}/model.safetensors", (checkpoint, layout, int(rank)), fd)
            if len(self.directories) < HELD:
                self.directories.append(((checkpoint, layout, 0), os.dup(fd)))
        finally:
            os.close(fd)

    def read_held(self):
        for what, fd, digest in self.files:
            assert hashlib.sha256(read_all(fd)).digest() == digest, f"{what}: an open file changed"
        for what, mapping, digest in self.maps:
            assert hashlib.sha256(mapping).digest() == digest, f"{what}: a mapping changed"
        for what, fd in self.directories:
            self.attempt(self.read, "rank/0/model.safetensors", what, fd)
        if self.reads % 2 == 0:  # from time to time other ones
            self.let_go()

    def let_go(self):
        if len(self.files) == HELD:
            os.close(self.files.pop(0)[1])
        if len(self.maps) == HELD:
            self.maps.pop(0)[1].close()
        if len(self.directories) == HELD:
            os.close(self.directories.pop(0)[1])

    def read_computed(self):
        for checkpoint in story.MODELS:
            for layout in ("tp2-pp2-dp1", "tp2-pp1-dp1"):
                self.attempt(self.read, self.job.rank_file(checkpoint, layout, 1), (checkpoint, layout, 1))

    def attempt(self, call, *arguments):
        try:
            call(*arguments)
        except OSError as error:
            if error.errno not in self.fine:
                raise

    def watch(self, stopped):
        while not stopped():
            self.attempt(self.read_current)
            self.attempt(self.read_held)
            self.attempt(self.read_computed)
            time.sleep(PAUSE_SECONDS)


class Watcher:
    """A forked Reader. stop() fails if it saw anything that cannot be."""

    def __init__(self, job, kept=False):
        asked, self.ask = os.pipe()
        self.report, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.ask)
            os._exit(self.read_until(asked, report, Reader(job, kept)))
        os.close(asked)
        os.close(report)

    @staticmethod
    def read_until(asked, report, reader):
        os.set_blocking(asked, False)

        def stopped():
            try:
                os.read(asked, 1)
                return True  # the end of the pipe: the other side has closed it
            except BlockingIOError:
                return False

        try:
            reader.watch(stopped)
            os.write(report, str(reader.reads).encode())
            return 0
        except BaseException:  # whatever it is, the parent tells it
            os.write(report, traceback.format_exc().encode())
            return 1

    def stop(self, daemon_died=False):
        """How many whole files it read. A page of a mapping that only a daemon that died could give is
        SIGBUS; with passthrough there is none."""
        os.close(self.ask)
        with os.fdopen(self.report) as report:
            text = report.read()
        _, status = os.waitpid(self.pid, 0)
        if daemon_died and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGBUS:
            return 0
        assert status == 0, f"a reader: status {status}: {text}"
        return int(text)
