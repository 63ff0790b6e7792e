"""Tells the story to a daemon with faults.so in it, with readers beside it, and again after a start."""
import mmap
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import time
import traceback

import story
from story import mount
from watcher import Watcher

SIGNAL, FAIL_ONCE, FAIL_FROM_HERE_ON = 1, 2, 3
WORKERS = int(os.environ.get("PTC_WORKERS", "4"))  # they wait more than they work


class Faults:
    """The file that faults.so maps: points passed, where, what, with which number."""

    def __init__(self, path):
        with open(path, "w+b") as file:
            file.write(bytes(32))
            file.flush()
            self.map = mmap.mmap(file.fileno(), 32)
        self.environment = {"LD_PRELOAD": os.path.join(mount.bin_dir(), "faults.so"),
                            "PTC_FAULTS": path}

    def set(self, at, action, argument):
        struct.pack_into("<3Q", self.map, 8, at, action, argument)

    @property
    def struck(self):
        """Whether the fault that was set has befallen the daemon."""
        passed, at = struct.unpack_from("<2Q", self.map)
        return passed >= at

    @property
    def passed(self):
        return struct.unpack_from("<Q", self.map)[0]


class Telling:
    """One daemon, one story, one fault; `with` ends all of it, and shows the log where it failed."""

    OPTIONS = ()

    def __init__(self, label, teller=story.Story):
        self.label = label
        self.daemon = mount.Mount("--scrub", "off", *self.OPTIONS)  # it writes when it likes
        self.story = teller(self.daemon)
        self.faults = Faults(os.path.join(self.daemon.top, "faults"))
        self.reads = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.daemon.stop(kill=True)
        if kind is not None:
            sys.stderr.write(f"{self.label}, after {self.story.done}\n{mount.read_text(self.daemon.log)}")
        shutil.rmtree(self.daemon.top, ignore_errors=True)

    def start(self):
        """With faults. False: it died at once."""
        os.environ.update(self.faults.environment)
        try:
            self.daemon.start()
            return True
        except RuntimeError:
            return False
        finally:
            for name in self.faults.environment:
                del os.environ[name]

    def ended_now(self):
        return self.daemon.process is None or self.daemon.process.poll() is not None

    def ended(self):
        """A death shows as an error of some call a moment before wait() knows of it."""
        for _ in range(100):
            if self.ended_now():
                return True
            time.sleep(0.01)
        return False

    def tell_through_handle(self):
        """The same by a handle of the mount's root: a path might mean what lies below the mount point."""
        root = os.open(self.daemon.path, os.O_RDONLY | os.O_DIRECTORY)
        if os.fstat(root).st_dev == os.stat(self.daemon.top).st_dev:  # unmounted before anybody came
            os.close(root)
            return None
        jobs = (self.story.job, self.story.other)
        paths = [job.path for job in jobs]
        for job in jobs:
            job.path = f"/proc/self/fd/{root}/{job.name}"
        try:
            return self.tell()
        finally:
            for job, path in zip(jobs, paths):
                job.path = path
            os.close(root)

    def tell(self, kept=False):
        """The story with readers; returns the error that cut it off. `kept`: no reader may notice a death."""
        watcher = Watcher(self.story.job, kept)
        error = None
        try:
            self.story.run()
        except (OSError, mount.Failed) as caught:
            error = caught
        self.reads += watcher.stop(daemon_died=error is not None)
        return error

    def go_on(self):
        """A start without faults: everything must be in order."""
        self.daemon.stop(kill=True)
        self.daemon.start()
        self.story.check()
        self.story.run()
        self.story.check()
        self.story.clear()


def spread(total, wanted):
    """`wanted` points, or all of them, over 1 … total."""
    number = total if wanted == "all" else min(total, int(wanted))
    return sorted({1 + i * (total - 1) // max(1, number - 1) for i in range(number)})


def warm_up():
    """Before the workers are forked: what every reader compares with."""
    for checkpoint in story.MODELS:
        for tp, pp in {(1, 1), *story.LAYOUTS.values()}:
            for rank in range(tp * pp):
                story.expected(checkpoint, tp, pp, rank)


def count_points(teller=story.Story):
    """How many points the whole story has, told without a fault."""
    if teller is story.Story:
        warm_up()
    with Telling("no fault", teller) as telling:
        assert telling.start(), "ptcfs does not start"
        error = telling.tell()
        if error is not None:
            raise error
        points = telling.faults.passed
        assert points > 0, "faults.so is not in the daemon"
        telling.go_on()
        return points


def kill(point, teller=story.Story):
    """SIGKILL there; then a start. How many files were read meanwhile."""
    with Telling(f"PTC_KILL_ONLY={point}", teller) as telling:
        telling.faults.set(point, SIGNAL, signal.SIGKILL)
        if telling.start():
            error = telling.tell()
            if error is not None and not telling.ended():
                raise AssertionError(f"{error!r}, but the daemon lives") from error
        telling.go_on()
        return telling.reads


def attempt(call_and_point):
    call, point = call_and_point
    try:
        return call(point), None
    except Exception:  # the others go on; all are told at the end
        return 0, f"{point}: {traceback.format_exc()}"


def survive(call, chosen):
    """Calls with each point, several at once; ends the program."""
    print(f"{len(chosen)} points", flush=True)
    with multiprocessing.Pool(WORKERS) as pool:
        results = list(pool.imap_unordered(attempt, [(call, point) for point in chosen]))
    failures = [text for _, text in results if text]
    print(f"{len(chosen) - len(failures)} of {len(chosen)} survived, {sum(reads for reads, _ in results)} "
          "files read meanwhile, none of them mixed" if not failures else "\n".join(failures))
    sys.exit(1 if failures else 0)
