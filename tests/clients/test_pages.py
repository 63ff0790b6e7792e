"""The pages that have an open file's bytes: who may open a path may have them, and nobody else."""
import ctypes
import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import models
import mount
import ranks
import users

sys.path.insert(0, ranks.PACKAGE)
from ptc import pages  # noqa: E402  pylint: disable=wrong-import-position

NOBODY = (65534, 65534)  # nobody: fusermount3 asks for a name
HEADER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "tools/include")
PROGRAM = """
#include <ptcfs/pages.h>
#include <fcntl.h>
#include <stdio.h>
int main(int count, char **arguments) {
  const int pages = ptcfs_pages(open(arguments[count - 1], O_RDONLY));
  if (pages < 0) return printf("%d", errno), 0;
  char bytes[4096];
  const ssize_t got = read(pages, bytes, sizeof bytes);
  return write(1, bytes, got < 0 ? 0 : (size_t)got) < 0;
}
"""


def ticket_of(file):
    version, _, token, path, _, _ = pages._TICKET.unpack(fcntl.ioctl(file, pages._GET_PAGES, bytes(pages._TICKET.size)))
    assert version == 1
    return token, os.fsdecode(path.split(b"\0", 1)[0])


def changed(token, path):
    """The errno that a ticket is answered with; 0: a descriptor came."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(5)
        link.connect(path)
        link.send(token)
        said, passed, _, _ = link.recvmsg(4, socket.CMSG_SPACE(4))
        for _, _, data in passed:
            os.close(int.from_bytes(data[:4], sys.byteorder))
        return int.from_bytes(said, sys.byteorder)


def opened(path, flags):
    """A descriptor; None: there is none."""
    file = os.open(path, flags)
    try:
        found = pages.ask(file)
        return None if found is None else found.descriptor
    finally:
        os.close(file)


def page_of(path):
    """The number of the memory that a mapping has its first bytes in."""
    with open(path, "rb") as file, open("/proc/self/pagemap", "rb") as pages_of:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
        assert len(memory[:1]) == 1  # it is there now
        pages_of.seek(ctypes.addressof(ctypes.c_char.from_buffer(memory)) // mmap.PAGESIZE * 8)
        return int.from_bytes(pages_of.read(8), sys.byteorder) & ((1 << 55) - 1)


class OfTheDaemon(mount.Mount):
    """It runs as a user who may mount by fusermount3 alone, so the kernel hands no file to it."""
    launcher = ("setpriv", "--reuid", str(NOBODY[0]), "--regid", str(NOBODY[1]), "--clear-groups")

    def __init__(self, *options):
        super().__init__(*options)
        self.store = tempfile.mkdtemp(prefix="ptcfs-test-", dir="/dev/shm")  # only such pages are handed out

    def __exit__(self, *failed):
        super().__exit__(*failed)
        shutil.rmtree(self.store, ignore_errors=True)

    def start(self):
        for path in (self.top, self.path, self.store):
            os.chown(path, *NOBODY)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + mount.START_SECONDS
        while not users.run_as(NOBODY, lambda: "yes" * os.path.exists(self.path + "/.ptc/version")):  # nobody else may look
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("ptcfs is not ready:\n" + mount.read_text(self.log))
            time.sleep(0.02)


class Pages(mount.TestCase):
    mount_type = OfTheDaemon
    only_root = "can run a daemon as another user"

    @classmethod
    def setUpClass(cls):
        if not shutil.which("setpriv") or not shutil.which("fusermount3"):
            raise unittest.SkipTest("setpriv or fusermount3 is not installed")
        device = tempfile.mkdtemp(prefix="ptcfs-device-")
        cls.addClassCleanup(shutil.rmtree, device, ignore_errors=True)
        mount.let_users_mount(device)
        if os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
            raise unittest.SkipTest("users may not open /dev/fuse here")
        super().setUpClass()

    def as_nobody(self, call, *arguments):
        return users.run_as(NOBODY, call, *arguments)

    def committed(self):
        """A file of a checkpoint, as the daemon has it."""
        def make():
            os.mkdir(self.path)
            directory = self.path + "/incoming/base/rank/0"
            models.Llama().write_hf(directory)
            os.rename(self.path + "/incoming/base", self.path + "/checkpoints/base")
        self.assertEqual(self.as_nobody(make), "")
        return self.path + "/checkpoints/base/layouts/tp1-pp1-dp1/rank/0/model.safetensors"

    def setUp(self):
        super().setUp()
        Pages.count = getattr(Pages, "count", 0) + 1
        self.path = f"{self.mount.path}/job{Pages.count}"

    def test_a_checkpoints_file_is_read_in_its_own_pages(self):
        path = self.committed()

        def check():
            found = opened(path, os.O_RDONLY)
            assert found is not None
            assert os.fstat(found).st_dev != os.stat(path).st_dev, "it is one of the store"
            assert os.pread(found, 1 << 24, 0) == mount.read_bytes(path)
            try:
                os.write(found, b"x")
            except OSError as error:
                assert error.errno == errno.EBADF
            else:
                raise AssertionError("it can be written")
            try:
                mmap.mmap(found, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            except PermissionError:
                return
            raise AssertionError("it can be mapped for writing")
        self.assertEqual(self.as_nobody(check), "")

    def test_what_is_written_so_is_committed_when_it_is_closed(self):
        def check():
            os.mkdir(self.path)
            os.makedirs(self.path + "/incoming/base/rank/0")
            path = self.path + "/incoming/base/rank/0/model.safetensors"
            models.write_safetensors(path, [models.random_tensor(random.Random(1), "model.norm.weight", "F32", (64,))])
            content = mount.read_bytes(path)
            found = opened(path, os.O_RDWR)
            os.pwrite(found, bytes(256), len(content) - 256)
            try:
                os.rename(self.path + "/incoming/base", self.path + "/checkpoints/base")
            except OSError as error:
                assert error.errno == errno.EBUSY, error
            else:
                raise AssertionError("committed while somebody can still write")
            memory = mmap.mmap(found, 0)
            os.close(found)
            try:
                os.rename(self.path + "/incoming/base", self.path + "/checkpoints/base")
            except OSError as error:
                assert error.errno == errno.EBUSY, error
            else:
                raise AssertionError("committed while it is mapped for writing")
            memory[-1] = 1
            memory.close()
            os.rename(self.path + "/incoming/base", self.path + "/checkpoints/base")
            new = mount.read_bytes(self.path + "/checkpoints/base/layouts/tp1-pp1-dp1/rank/0/model.safetensors")
            assert new == content[:-256] + bytes(255) + b"\1"
            assert opened(self.path + "/checkpoints/base/meta.json", os.O_RDONLY) is None
        self.assertEqual(self.as_nobody(check), "")

    def test_refused(self):
        path = self.committed()

        def reason(of, flags=os.O_RDONLY):
            file = os.open(of, flags)
            try:
                ticket_of(file)
            except OSError as error:
                return errno.errorcode[error.errno]
            finally:
                os.close(file)
            return "none"
        computed = path.replace("tp1-", "tp2-")
        self.assertEqual(self.as_nobody(reason, self.path + "/layout.json"), "ENOTSUP")
        self.assertEqual(self.as_nobody(reason, computed), "ENOTSUP")
        self.assertEqual(self.as_nobody(reason, self.path), "ENOTTY")

        def write_alone():
            with open(self.path + "/incoming/x", "wb"):
                return reason(self.path + "/incoming/x", os.O_WRONLY)
        self.assertEqual(self.as_nobody(write_alone), "ENOTSUP")

    def test_a_ticket_is_for_one_user_and_once(self):
        path = self.committed()

        def use():
            token, where = ticket_of(os.open(path, os.O_RDONLY))
            with open(shared, "w", encoding="utf-8") as file:
                file.write(token.hex() + where)
            while not os.path.exists(shared + ".tried"):
                time.sleep(0.01)
            return " ".join(str(changed(one, where)) for one in (token, token, bytes(16), b"short"))
        shared = self.mount.top + "/ticket"
        tried = []

        def as_root():  # who did not ask for it
            while not os.path.exists(shared) or not mount.read_text(shared):
                time.sleep(0.01)
            answer = mount.read_text(shared)
            tried.append(changed(bytes.fromhex(answer[:32]), answer[32:]))
            with open(shared + ".tried", "w", encoding="utf-8"):
                pass
        thread = threading.Thread(target=as_root)
        thread.start()
        self.assertEqual(self.as_nobody(use), f"0 {errno.ENOENT} {errno.ENOENT} {errno.EINVAL}")
        thread.join()
        self.assertEqual(tried, [errno.ENOENT])

    def test_a_ticket_ends_with_the_open_file(self):
        path = self.committed()

        def use():
            file = os.open(path, os.O_RDONLY)
            token, where = ticket_of(file)
            os.close(file)
            deadline = time.monotonic() + 20
            while changed(token, where) != errno.ENOENT:  # the close reaches the daemon a moment later
                assert time.monotonic() < deadline
                token, where = ticket_of(file := os.open(path, os.O_RDONLY))
                os.close(file)
                time.sleep(0.05)
        self.assertEqual(self.as_nobody(use), "")

    def test_too_many_tickets(self):
        path = self.committed()

        def take():
            file = os.open(path, os.O_RDONLY)
            for taken in range(100):
                try:
                    ticket_of(file)
                except OSError as error:
                    return f"{errno.errorcode[error.errno]} after {taken}"
            return "no limit"
        self.assertRegex(self.as_nobody(take), "EBUSY after 3[0-9]")
        deadline = time.monotonic() + 30  # they end with the file that they were asked of
        while self.as_nobody(lambda: str(opened(path, os.O_RDONLY) is None)) == "True":
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)

    def test_clients_that_are_killed_leave_nothing(self):
        path = self.committed()
        descriptors = f"/proc/{self.mount.process.pid}/fd"
        self.as_nobody(lambda: str(opened(path, os.O_RDONLY)))
        before = len(os.listdir(descriptors))

        def client(how):
            file = os.open(path, os.O_RDONLY)
            if how == 0:
                ticket_of(file)
            elif how == 1:  # connects, and says nothing
                link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                link.connect(ticket_of(file)[1])
            else:
                mmap.mmap(pages.ask(file).descriptor, 0, prot=mmap.PROT_READ)
            os.kill(os.getpid(), signal.SIGKILL)
        for i in range(1000):
            child = os.fork()
            if child == 0:
                os.setgid(NOBODY[1])
                os.setuid(NOBODY[0])
                try:
                    client(i % 3 if i % 50 else 0)
                finally:
                    os._exit(1)
            os.waitpid(child, 0)
        deadline = time.monotonic() + 30
        while len(os.listdir(descriptors)) > before + 4:
            self.assertLess(time.monotonic(), deadline, os.listdir(descriptors))
            time.sleep(0.1)
        self.assertEqual(self.as_nobody(lambda: str(opened(path, os.O_RDONLY) is None)), "False")

    def test_programs_in_c(self):
        if not shutil.which("cc"):
            self.skipTest("no C compiler here")
        path = self.committed()
        content = self.as_nobody(lambda: mount.read_bytes(path)[:4096].hex())
        for command in (["cc", "-std=c11", "-D_GNU_SOURCE", "-xc"], ["c++", "-std=c++17", "-xc++"]):
            program = self.mount.top + "/program"
            subprocess.run([*command, "-Wall", "-Wextra", "-Werror", "-I", HEADER, "-o", program, "-"], input=PROGRAM, text=True,
                           check=True)
            os.chmod(program, 0o755)
            found = self.as_nobody(lambda: subprocess.run([program, path], capture_output=True, check=True).stdout.hex())
            self.assertEqual(found, content)
            found = self.as_nobody(lambda: subprocess.run([program, "/proc/version"], capture_output=True, check=True).stdout.hex())
            self.assertEqual(bytes.fromhex(found).decode(), str(errno.ENOTTY))


class WithPassthrough(mount.TestCase):
    only_root = "has passthrough"

    def test_a_mapping_is_one_of_the_store(self):
        if not mount.read_json(self.mount.path + "/.ptc/stats")["passthrough"]:
            self.skipTest("there is no passthrough here")
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        path = job.rank_file("base", "tp1-pp1-dp1", 0)
        size = os.stat(path).st_size
        stored = {page_of(os.path.join(top, name)) for top, _, names in os.walk(self.mount.store) for name in names
                  if os.stat(os.path.join(top, name)).st_size == size}
        self.assertTrue(page_of(path))
        self.assertIn(page_of(path), stored)
        with open(path, "rb") as file:
            with self.assertRaises(OSError) as refused:
                ticket_of(file.fileno())
            self.assertIn(refused.exception.errno, (errno.EALREADY, errno.EOPNOTSUPP))
            found = pages.ask(file.fileno())
            # Of a store on a disk there are no pages to be pinned for long.
            self.assertEqual(found, pages.Found(-1, b"", 0) if refused.exception.errno == errno.EALREADY else None)


if __name__ == "__main__":
    mount.enter_own_namespace()
    mount.main()
