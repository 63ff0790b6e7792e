"""One directory, in which several processes make, move, remove, look up and list names at once: each finds exactly its own
as it left them, and every name that stays exactly once.

PTC_SEED replays, PTC_ROUNDS makes it longer.
"""
import multiprocessing
import os
import random
import traceback

from sides import mount
import models  # where sides found mount

SEED = int(os.environ.get("PTC_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
ROUNDS = int(os.environ.get("PTC_ROUNDS", "300"))
WORKERS, LASTING = 6, 150


class Worker:
    """Names that begin with `prefix` are its own: `names` says which of them there are, and of which kind."""

    def __init__(self, directory, prefix, files):
        self.directory, self.prefix, self.files = directory, prefix, files
        self.random = random.Random(f"{SEED} {prefix}")
        self.names = {}

    def path(self, name):
        return os.path.join(self.directory, name)

    def any_name(self):
        return f"{self.prefix}{self.random.randrange(20)}"

    def make(self):
        name = self.any_name()
        if name in self.names:
            return
        directory = not self.files or self.random.random() < 0.3
        if directory:
            os.mkdir(self.path(name))
        else:
            models.write_file(self.path(name), name)
        self.names[name] = directory

    def move(self):
        name, to = self.any_name(), self.any_name()
        if not self.files or name not in self.names or to in self.names:
            return
        os.rename(self.path(name), self.path(to))
        self.names[to] = self.names.pop(name)

    def remove(self):
        name = self.any_name()
        if name not in self.names:
            return
        (os.rmdir if self.names.pop(name) else os.unlink)(self.path(name))

    def look_up(self):
        name = self.any_name()
        assert os.path.isdir(self.path(name)) == self.names.get(name, False), name
        assert os.path.exists(self.path(name)) == (name in self.names), name
        lasting = f"lasting-{self.random.randrange(LASTING)}"
        assert os.path.exists(self.path(lasting)), lasting
        assert not os.path.exists(self.path(f"never-{self.random.randrange(1000)}"))

    def list(self):
        for again in (True, True, False):
            found = os.listdir(self.directory)
            assert len(found) == len(set(found)), "a name is listed twice"
            assert sum(name.startswith("lasting-") for name in found) == LASTING
            own = {name for name in found if name.startswith(self.prefix)}
            if own == set(self.names):
                return
            # Where another process began to list before our last change, and ends while we are between two pages, the kernel
            # (6.18, fuse_readdir_cached) gives us the rest of that listing.
            assert again, (own, set(self.names))

    def work(self):
        calls = [self.make] * 4 + [self.move] * 3 + [self.remove] * 2 + [self.look_up] * 4 + [self.list]
        for _ in range(ROUNDS):
            self.random.choice(calls)()
        for name, directory in self.names.items():
            (os.rmdir if directory else os.unlink)(self.path(name))


def run_worker(directory, number, files, errors):
    try:
        Worker(directory, f"own-{number}-", files).work()
    except BaseException:  # pylint: disable=broad-except
        errors.put(traceback.format_exc())


class OneDirectory(mount.TestCase):
    def at_once(self, directory, files=True):
        context = multiprocessing.get_context("fork")
        errors = context.Queue()
        workers = [context.Process(target=run_worker, args=(directory, number, files, errors)) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertTrue(errors.empty(), f"PTC_SEED={SEED}: " + (errors.get() if not errors.empty() else ""))
        self.assertEqual([worker.exitcode for worker in workers], [0] * WORKERS)
        self.assertEqual([name for name in os.listdir(directory) if name.startswith("own-")], [])

    def fill(self, directory):
        for i in range(LASTING):
            models.write_file(os.path.join(directory, f"lasting-{i}"), str(i))

    def test_of_incoming(self):
        directory = self.new_job().incoming("base") + "/rank/0"
        os.makedirs(directory)
        self.fill(directory)
        self.at_once(directory)

    def test_of_a_job(self):
        job = self.new_job()
        self.fill(job.path)
        self.at_once(job.path)

    def test_of_the_mount(self):
        for i in range(LASTING):
            os.mkdir(f"{self.mount.path}/lasting-{i}")
        self.at_once(self.mount.path, files=False)


if __name__ == "__main__":
    mount.main()
