"""Many jobs and files take neither threads nor descriptors. PTC_JOBS=10000 makes as many (500 otherwise)."""
import errno
import json
import os
import subprocess
import time
import unittest

import models
import mount
import users

CAN_FORGET = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 18)  # the kernel, names, when it is asked to
JOBS = int(os.environ.get("PTC_JOBS", "500"))


class ManyJobs(mount.TestCase):
    def count(self, what):
        return len(os.listdir(f"/proc/{self.mount.process.pid}/{what}"))

    def settled(self, what):
        """Its count, once that stays the same: what begins with the daemon has begun, or ended again."""
        count, since = self.count(what), time.monotonic()
        while time.monotonic() - since < 2:
            time.sleep(0.1)
            if self.count(what) != count:
                count, since = self.count(what), time.monotonic()
        return count

    def test_a_job_costs_no_thread_and_no_descriptor(self):
        before, descriptors = self.settled("task"), self.settled("fd")
        for i in range(JOBS):
            os.mkdir(f"{self.mount.path}/many-{i}")
        subprocess.run(["ls", "-lR", self.mount.path], stdout=subprocess.DEVNULL, check=True)
        for i in range(0, JOBS, 7):  # what they do in the background is done, too
            self.assertEqual(mount.read_json(f"{self.mount.path}/many-{i}/status.json")["state"], "idle")
        self.assertLess(self.count("task"), before + 110)  # what all of them share, at most
        deadline = time.monotonic() + 60
        while self.count("task") > before + 8 and time.monotonic() < deadline:
            time.sleep(0.5)
        self.assertLessEqual(self.count("task"), before + 8)
        self.assertLessEqual(self.count("fd"), descriptors + 8)


class Idle(unittest.TestCase):
    """A daemon that nobody uses any more."""
    THREADS = 8
    READERS = 40

    def test_it_sleeps(self):
        with mount.Mount() as daemon:
            job = daemon.job("quiet")
            models.Llama().write_hf(job.incoming("base") + "/rank/0")
            job.commit("base")
            job.set_layout(tp=2)
            readers = [subprocess.Popen(f"for i in $(seq 20); do cat {job.checkpoint('base')}/model/*/*/*/*; ls -R {daemon.path}; done",
                                        shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(self.READERS)]
            most = 0
            while any(reader.poll() is None for reader in readers):
                most = max(most, daemon.threads()["ptcfs-fuse"])
            self.assertLessEqual(most, 24 + 1)  # and one that ends just then
            deadline = time.monotonic() + 120
            while sum(daemon.threads().values()) > self.THREADS and time.monotonic() < deadline:
                time.sleep(1)
            self.assertLessEqual(sum(daemon.threads().values()), self.THREADS, daemon.threads())
            self.assertNotIn("ptcfs-copy", daemon.threads())
            self.assertLess(daemon.wake_ups(10), 25, daemon.threads())  # 110 if any thread looks five times a second, and some others every few
            self.assertTrue(mount.digests(job.checkpoint("base", "model")))


class Descriptors(unittest.TestCase):
    """Of a daemon that may have few."""
    LIMIT, FILES, STORED = 600, 3000, 400

    def mounted(self, *launcher, options=()):
        """Ready, as started through `launcher`; and how many descriptors it has then."""
        daemon = mount.Mount(*options)
        daemon.launcher = (*launcher, "prlimit", f"--nofile={self.LIMIT}:{self.LIMIT}")
        daemon.__enter__()
        self.addCleanup(daemon.__exit__)
        return daemon

    def open_descriptors(self, daemon):
        return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))

    def make_files(self, daemon):
        directory = daemon.job("files").incoming("many")
        os.makedirs(directory)
        for i in range(self.FILES):
            models.write_file(f"{directory}/{i}", str(i))
        return directory

    def committed(self, daemon):
        job = daemon.job("other")
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        return job

    def check_others(self, daemon, job):
        """Makes jobs and saves layouts, and reads what is stored, as it is and computed."""
        for i in range(5):
            os.mkdir(f"{daemon.path}/made-{i}")
            os.rmdir(f"{daemon.path}/made-{i}")
        job.set_layout(tp=2)
        self.assertEqual(job.status()["state"], "idle")
        for layout in ("tp2-pp1-dp1", "tp4-pp1-dp1"):
            self.assertTrue(mount.digests(job.checkpoint("base", "layouts", layout)))

    def test_what_is_stored_takes_few(self):
        """Committed at once, far more files than there may be descriptors; then read, and gone."""
        self.LIMIT = 200  # pylint: disable=invalid-name
        daemon = self.mounted()
        job = daemon.job("small")
        rank = job.incoming("base") + "/rank/0"
        arrays = [models.Tensor(f"w{i}", "F32", (4,), bytes([i % 251]) * 16) for i in range(self.STORED)]
        for i, array in enumerate(arrays):
            models.write_file(f"{rank}/arrays/{i}.npy", models.npy_bytes(array))
            models.write_file(f"{rank}/other/{i}", str(i))
        before = self.open_descriptors(daemon)
        job.commit("base")
        most = before + self.LIMIT // 8 + 8
        self.assertLessEqual(self.open_descriptors(daemon), most)
        stored = job.checkpoint("base", "layouts", "tp1-pp1-dp1", "rank", 0)
        for _ in range(2):
            for i, array in enumerate(arrays):
                self.assertEqual(models.read_npy(f"{stored}/arrays/{i}.npy")[1], array.data)
                self.assertEqual(mount.read_text(f"{stored}/other/{i}"), str(i))
        self.assertLessEqual(self.open_descriptors(daemon), most)
        daemon.stop()
        daemon.start()
        self.assertEqual(mount.read_text(f"{stored}/other/7"), "7")
        self.assertLessEqual(self.open_descriptors(daemon), most)
        with open(f"{stored}/other/{self.STORED - 1}", encoding="utf-8") as file:
            job.mount.ptc("rm", "small/base")
            self.assertEqual(file.read(), str(self.STORED - 1))
        self.check_others(daemon, self.committed(daemon))

    def test_what_is_made_takes_few(self):
        """Of a change of layout; all of it is there at its end."""
        class Deep(models.Llama):
            layers = 30
            config = {**models.Llama.config, "num_hidden_layers": 30}
        self.LIMIT = 200  # pylint: disable=invalid-name
        daemon = self.mounted()
        job = daemon.job("deep")
        model = Deep()
        models.write_file(job.incoming("base") + "/rank/0/config.json", json.dumps(model.config))
        for tensor in model.tensors:
            models.write_file(f"{job.incoming('base')}/rank/0/{tensor.name}.npy", models.npy_bytes(tensor))
        self.assertGreater(len(model.tensors), self.LIMIT)
        job.commit("base")
        before = mount.digests(job.checkpoint("base", "model"))
        job.set_layout(tp=2)
        self.assertEqual(mount.digests(job.checkpoint("base", "model")), before)

    def test_what_is_known_takes_none(self):
        daemon = self.mounted()
        before = self.open_descriptors(daemon)
        directory = self.make_files(daemon)
        for i in range(self.LIMIT):
            daemon.job(f"job-{i}")
        subprocess.run(["ls", "-lR", daemon.path], stdout=subprocess.DEVNULL, check=True)
        subprocess.run(f"cat {directory}/* | wc -c", shell=True, check=True, stdout=subprocess.DEVNULL)
        self.assertLessEqual(self.open_descriptors(daemon), before + 8)

    def test_what_is_open_leaves_a_reserve(self):
        daemon = self.mounted()
        other = self.committed(daemon)
        directory = self.make_files(daemon)
        opened = []
        with self.assertRaises(OSError) as failed:
            for i in range(self.FILES):
                opened.append(os.open(f"{directory}/{i}", os.O_RDONLY))
        self.assertEqual(failed.exception.errno, errno.EMFILE)
        self.assertGreater(len(opened), self.LIMIT / 2)
        self.check_others(daemon, other)
        for fd in opened:
            os.close(fd)
        self.assertEqual(mount.read_text(f"{directory}/{self.FILES - 1}"), str(self.FILES - 1))

    def opener(self, user, *paths):
        """Opens these as that user, as many as it may; and holds them. How many these are, and the errno of the next one."""
        holds = ("import os, sys\nheld = []\nerror = 0\nfor path in sys.stdin.read().split('\\n'):\n"
                 "    try: held.append(os.open(path, os.O_RDONLY))\n"
                 "    except OSError as failed:\n        error = failed.errno\n        break\n"
                 "print(len(held), error, flush=True)\nimport time\ntime.sleep(600)")
        process = subprocess.Popen(["prlimit", "--nofile=8192:8192", "python3", "-c", holds], user=user[0], group=user[1], extra_groups=[],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        process.stdin.write("\n".join(paths))
        process.stdin.close()
        count, error = process.stdout.readline().split()
        return process, int(count), int(error)

    def test_one_user_leaves_some_to_others(self):
        if os.getuid() != 0:
            self.skipTest("only root can become other users")
        daemon = self.mounted(options=("-o", "allow_other"))
        os.chmod(daemon.top, 0o755)
        other, directory = self.committed(daemon), self.make_files(daemon)
        paths = [f"{directory}/{i}" for i in range(self.FILES)]
        ann, count, error = self.opener(users.ANN, *paths)
        self.assertEqual(error, errno.EMFILE)
        self.assertGreater(count, self.LIMIT / 4)
        self.assertLess(count, self.LIMIT / 2)
        self.assertEqual(self.opener(users.BOB, *paths[-60:])[1:], (60, 0))
        self.check_others(daemon, other)
        ann.kill()
        ann.wait()
        deadline = time.monotonic() + 10
        while self.opener(users.ANN, *paths[:60])[2] and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(self.opener(users.ANN, *paths[:60])[1:], (60, 0))

    def test_what_is_computed_is_opened_without(self):
        """As long as there are some, what is computed on read is memory with a descriptor of its own; beyond that it is read all the same."""
        if os.getuid() != 0:
            self.skipTest("only root can become other users")
        self.LIMIT = 200  # pylint: disable=invalid-name
        daemon = self.mounted(options=("-o", "allow_other", "--cache", "256M"))
        os.chmod(daemon.top, 0o755)
        other = self.committed(daemon)
        large = daemon.job("large")
        tensors = [models.Tensor(f"w{i:03}.weight", "F32", (270, 256), bytes([i]) * (270 * 1024)) for i in range(self.LIMIT)]
        models.write_safetensors(large.incoming("base") + "/rank/0/model.safetensors", tensors)
        large.commit("base")
        paths = sorted(os.path.join(where, name) for where, _, names in os.walk(large.checkpoint("base", "model")) for name in names)
        self.assertEqual(len(paths), self.LIMIT)
        self.assertEqual(self.opener(users.ANN, *paths)[1:], (self.LIMIT, 0))
        self.assertLess(self.open_descriptors(daemon), self.LIMIT / 2 + 10)
        for path in (paths[0], paths[-1]):
            self.assertEqual(subprocess.run(["wc", "-c", path], user=users.BOB[0], capture_output=True, text=True, check=True).stdout.split()[0],
                             str(os.path.getsize(path)))
        self.check_others(daemon, other)

    def test_removed_and_still_in_use(self):
        """What has no name any more is found by who has it open, or is in it."""
        daemon = self.mounted()
        directory = daemon.job("files").incoming("removed")
        os.makedirs(directory + "/below")
        with open(directory + "/file", "w+", encoding="ascii") as file, open(directory + "/other", "w", encoding="ascii"):
            inside = os.open(directory + "/below", os.O_PATH)
            self.addCleanup(os.close, inside)
            os.unlink(directory + "/file")
            os.rename(directory + "/other", directory + "/file")
            os.rmdir(directory + "/below")
            file.write("still here")
            file.flush()
            self.assertEqual(os.fstat(file.fileno()).st_nlink, 0)
            self.assertEqual(os.fstat(file.fileno()).st_size, 10)
            self.assertEqual(os.stat(inside).st_nlink, 0)
            self.assertEqual(os.listdir(f"/proc/self/fd/{inside}"), [])
            self.assertEqual(mount.error_of(os.mkdir, f"/proc/self/fd/{inside}/more"), "ENOENT")

    def test_without_handles(self):
        """Then what is known takes one each; but not the last."""
        if not CAN_FORGET:
            self.skipTest("this kernel cannot be asked to forget names")
        drop = ("--bounding-set", "-dac_read_search", "--inh-caps", "-dac_read_search")
        if subprocess.run(["setpriv", *drop, "true"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
            self.skipTest("no setpriv here that takes capabilities away")
        daemon = self.mounted("setpriv", *drop)
        other = self.committed(daemon)
        directory = daemon.job("files").incoming("many")
        os.makedirs(directory)
        deadline = time.monotonic() + 60
        for i in range(self.FILES):
            while mount.error_of(models.write_file, f"{directory}/{i}", str(i)) == "EMFILE":
                self.assertLess(time.monotonic(), deadline)  # the kernel forgets names, on Linux 6.18
                time.sleep(0.1)
        self.assertLess(self.open_descriptors(daemon), self.LIMIT)
        self.check_others(daemon, other)


if __name__ == "__main__":
    mount.main()
