"""A real daemon on temporary directories, for the tests of this folder.

    class Things(mount.TestCase):        # one daemon for the tests of a class
        def test_it(self):
            job = self.mount.job("llama")
            models.Llama().write_hf(job.incoming("base") + "/rank/0")
            job.commit("base")

PTC_BIN_DIR says where `ptcfs` and `ptc` are. Where no daemon can be mounted the script exits with
77, which ctest counts as skipped.
"""
import collections
import contextlib
import errno
import hashlib
import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest

SKIP = 77
START_SECONDS = 20
SETTLE_SECONDS = 60


def skip(reason):
    print("skipped:", reason)
    sys.exit(SKIP)


def require(module):
    """Imports a module, or skips the whole script."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return skip(f"Python has no {module} here (tests/run installs it where it can be had)")


def require_program(name):
    path = shutil.which(name)
    return path or skip(f"{name} is not installed")


def bin_dir():
    path = os.environ.get("PTC_BIN_DIR", "")
    if not os.access(os.path.join(path, "ptcfs"), os.X_OK):
        skip(f"PTC_BIN_DIR ({path or 'not set'}) holds no ptcfs")
    return path


def is_mounted(path):
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return any(line.split()[4].replace("\\040", " ") == path for line in file)


def read_text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def read_json(path):
    return json.loads(read_text(path))


def same_bytes(a, b):
    with open(a, "rb") as left, open(b, "rb") as right:
        while True:
            one, other = left.read(1 << 20), right.read(1 << 20)
            if one != other:
                return False
            if not one:
                return True


def digests(directory):
    """Path below → SHA-256 of the file."""
    found = {}
    for where, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(where, name), "rb") as file:
                found[os.path.relpath(os.path.join(where, name), directory)] = hashlib.sha256(file.read()).hexdigest()
    return found


def halt(process):
    """Stops it, which a thread that runs only notices when its processor looks."""
    process.send_signal(signal.SIGSTOP)

    def stopped(thread):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return read_text(f"/proc/{process.pid}/task/{thread}/stat").rsplit(")", 1)[1].split()[0] in "TZX"
        return True  # it has ended
    while not all(stopped(thread) for thread in os.listdir(f"/proc/{process.pid}/task")):
        time.sleep(0.001)


def within(seconds, call, *arguments):
    """What the call returns; it must not take longer."""
    result = []

    def run():
        try:
            result.append((call(*arguments), None))
        except Exception as error:  # pylint: disable=broad-except
            result.append((None, error))
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result:
        raise AssertionError(f"{call.__name__}{arguments} takes longer than {seconds} s")
    value, error = result[0]
    if error is not None:
        raise error
    return value


class Mount:
    """`ptcfs` in the foreground on a fresh mount point; `with` unmounts it again."""

    launcher = ()  # a command that runs ptcfs

    def __init__(self, *options, top=None):
        self.options = options  # of ptcfs, beside those below
        if not os.path.exists("/dev/fuse"):
            skip("this machine has no /dev/fuse")
        self.bin = bin_dir()
        self.top = top or tempfile.mkdtemp(prefix="ptcfs-test-")
        self.path = os.path.join(self.top, "mnt")
        self.store = os.path.join(self.top, "store")
        self.log = os.path.join(self.top, "log")
        os.mkdir(self.path)
        os.mkdir(self.store)
        self.process = None

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def command(self):
        return [*self.launcher, os.path.join(self.bin, "ptcfs"), "-f", "--store", self.store, *self.options, self.path]

    def start(self):
        with open(self.log, "ab") as log:
            said_before = log.tell()
            self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not (is_mounted(self.path) and os.path.exists(self.path + "/.ptc/version")):
            if self.process.poll() is not None:
                text = self.said_since(said_before)
                if "Operation not permitted" in text or "Permission denied" in text:
                    skip("mounting is not allowed here: " + text.strip().splitlines()[-1])
                raise RuntimeError("ptcfs ended:\n" + text)
            if time.monotonic() > deadline:
                raise RuntimeError("ptcfs is not ready:\n" + self.said_since(said_before))
            time.sleep(0.02)

    def said_since(self, bytes_before):
        return read_bytes(self.log)[bytes_before:].decode("utf-8", "replace")

    def stop(self, kill=False):
        """Ends the daemon: by unmounting, as an administrator would, or at once."""
        if self.process is None:
            return
        if kill:
            self.process.kill()
            self.process.wait()
        self.unmount()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def threads(self):
        """Name → how many the daemon has."""
        found = collections.Counter()
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[read_text(f"/proc/{self.process.pid}/task/{thread}/comm").strip()] += 1
        return found

    def own_bytes(self):
        """Memory of the daemon itself: no images, and not what is kept for those to come."""
        anonymous = next(line for line in read_text(f"/proc/{self.process.pid}/status").splitlines() if line.startswith("RssAnon:"))
        kept = next(line for line in read_text(self.path + "/.ptc/metrics").splitlines()
                    if line.startswith("ptcfs_store_reserve_bytes "))
        return (int(anonymous.split()[1]) << 10) - int(kept.split()[1])

    def wake_ups(self, seconds):
        """How often any of its threads begins to wait meanwhile, but for those that end."""
        def all_of_them():
            found = {}
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    text = read_text(f"/proc/{self.process.pid}/task/{thread}/status")
                    found[thread] = int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0])
            return found
        before = all_of_them()
        time.sleep(seconds)
        return sum(count - before.get(thread, 0) for thread, count in all_of_them().items())

    def unmount(self):
        for _ in range(50):
            if not is_mounted(self.path):
                return
            command = ["umount"] if os.getuid() == 0 else ["fusermount3", "-u"]
            subprocess.run([*command, self.path], stderr=subprocess.DEVNULL, check=False)
            if is_mounted(self.path):
                time.sleep(0.1)
        subprocess.run(["umount", "-l", self.path], check=False)

    def __exit__(self, *_):
        self.stop()
        if sys.exc_info()[0] is not None and os.path.exists(self.log):
            sys.stderr.write(read_text(self.log))
        if is_mounted(self.store):  # with --memory it outlives the daemon
            subprocess.run(["umount", self.store], check=False)
        shutil.rmtree(self.top, ignore_errors=True)

    def ptc(self, *arguments, check=True, env=None):
        """Runs `ptc`; returns its completed process, text captured."""
        done = subprocess.run(
            [os.path.join(self.bin, "ptc"), "-C", self.path, *map(str, arguments)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
            env={**os.environ, **(env or {})})
        if check and done.returncode != 0:
            raise AssertionError(
                f"ptc {arguments} gave {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def job(self, name):
        job = Job(self, name)
        os.mkdir(job.path)
        return job


class Failed(AssertionError):
    """A reshard ended in the state "failed"."""


class Job:
    """A job directory and the steps a user takes in it."""

    def __init__(self, mount, name):
        self.mount, self.name = mount, name
        self.path = os.path.join(mount.path, name)

    def file(self, *parts):
        return os.path.join(self.path, *map(str, parts))

    def incoming(self, name):
        return self.file("incoming", name)

    def commit(self, name, seconds=60):
        """A mv, and the same mv again while what it takes goes on (EAGAIN)."""
        deadline, in_vain = time.monotonic() + seconds, 0
        while True:
            try:
                return os.rename(self.incoming(name), self.file("checkpoints", name))
            except BlockingIOError:
                goes_on = any(commit["checkpoint"] == name for commit in self.status()["commits"])
                in_vain = 0 if goes_on else in_vain + 1  # once: it ended at just that moment
                if time.monotonic() > deadline or in_vain == 3:
                    raise
            except OSError as error:
                error.add_note(self.error())  # why, as status.json says
                raise

    def checkpoint(self, name, *parts):
        return self.file("checkpoints", name, *parts)

    def rank_file(self, checkpoint, layout, rank, name="model.safetensors"):
        return self.checkpoint(checkpoint, "layouts", layout, "rank", rank, name)

    def status(self):
        return read_json(self.file("status.json"))

    def error(self):
        return (self.status().get("last_error") or {}).get("what", "")

    def commit_error(self, name):
        return read_text(self.incoming(name) + ".error")

    def save_layout(self, **fields):
        with open(self.file("layout.json"), "w", encoding="utf-8") as file:
            json.dump({"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1, **fields}, file)

    def set_layout(self, **fields):
        """Saves a layout of these fields and waits until it is in force."""
        self.save_layout(**fields)
        return self.wait()

    def wait(self):
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            status = self.status()
            if status["state"] == "failed":
                raise Failed(f"reshard failed: {status['last_error']}")
            if status["state"] == "idle" and status["in_force_revision"] == status["revision"]:
                return status
            time.sleep(0.02)
        raise AssertionError(f"not settled: {self.status()}")


def error_of(call, *arguments):
    """The errno name of the OSError that a call raises; "" when it raises none."""
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return ""


class TestCase(unittest.TestCase):
    """One daemon for all tests of the class; every test makes a job of its own name."""
    mount_type = Mount
    mount_options = ()
    only_root = ""  # why nobody else can run the tests

    @classmethod
    def setUpClass(cls):
        if cls.only_root and os.getuid() != 0:
            raise unittest.SkipTest("only root " + cls.only_root)
        cls.mount = cls.mount_type(*cls.mount_options)
        cls.mount.__enter__()
        cls.addClassCleanup(cls.mount.__exit__)

    def setUp(self):
        self.scratch = tempfile.mkdtemp(prefix="ptcfs-scratch-")
        self.addCleanup(shutil.rmtree, self.scratch, ignore_errors=True)

    def tearDown(self):
        if self.mount.process.poll() is not None:
            self.fail("the daemon ended:\n" + read_text(self.mount.log))

    def temporary(self, name):
        return os.path.join(self.scratch, name)

    def new_job(self):
        return self.mount.job(self.id().rsplit(".", 1)[-1])

    def assert_same_file(self, a, b):
        self.assertTrue(same_bytes(a, b), f"{a} differs from {b}")


def enter_own_namespace():
    """So that no mount made here is seen, or left, elsewhere. Before anything else."""
    unshare = ["unshare", "-m", "--propagation", "private"]
    if os.getuid() == 0 and "PTC_OWN_NAMESPACE" not in os.environ and shutil.which(unshare[0]) \
            and subprocess.run([*unshare, "true"], check=False).returncode == 0:
        os.environ["PTC_OWN_NAMESPACE"] = "1"
        os.execvp(unshare[0], [*unshare, sys.executable, "-B", *sys.argv])


def let_users_mount(directory):
    """Where /dev/fuse is root's alone, as in a container: one for all, in this namespace, as long as that is."""
    if os.stat("/dev/fuse").st_mode & 0o006 == 0o006 or "PTC_OWN_NAMESPACE" not in os.environ:
        return
    device = os.path.join(directory, "fuse")
    with contextlib.suppress(OSError):
        os.mknod(device, stat.S_IFCHR, os.makedev(10, 229))
        os.chmod(device, 0o666)
        subprocess.run(["mount", "--bind", device, "/dev/fuse"], check=False)


def main():
    result = unittest.main(verbosity=2, exit=False).result
    if result.skipped and not result.testsRun:
        skip(result.skipped[0][1])
    sys.exit(not result.wasSuccessful())
