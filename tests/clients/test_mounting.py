"""ptcfs as a mount program: fstab, several mounts, the background, signals at any moment, users."""
import contextlib
import datetime
import json
import mmap
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

import models
import mount

BIN = mount.bin_dir()
PTCFS = os.path.join(BIN, "ptcfs")
NOBODY = 65534
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class BigLlama(models.Llama):
    """Some 35 MiB, so that commits and reshards can be met half-way."""
    vocab = 1 << 17
    config = {**models.Llama.config, "vocab_size": vocab}

    def add(self, name, *shape, dtype=None):
        size = models.count(shape) * 2
        self.tensors.append(models.Tensor(name, "BF16", shape, os.urandom(size)))


def until(condition, what, seconds=mount.START_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def daemons_on(path):
    """The pids of the ptcfs processes for a mount point."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
            if os.path.basename(words[0]) == "ptcfs" and path in words:
                found.append(int(pid))
    return found


class MountProgram(unittest.TestCase):
    def setUp(self):
        if not os.path.exists("/dev/fuse"):
            self.skipTest("this machine has no /dev/fuse")
        if os.getuid() != 0:
            self.skipTest("only root may mount here")
        self.top = tempfile.mkdtemp(prefix="ptcfs-mounting-")
        os.chmod(self.top, 0o755)
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.addCleanup(self.end_all)
        self.mounts = []

    def end_all(self):
        for path in self.mounts:
            while mount.is_mounted(path):
                subprocess.run(["umount", "-l", path], check=True)
            until(lambda path=path: not daemons_on(path), f"ptcfs on {path} ends")

    def directory(self, name):
        path = os.path.join(self.top, name)
        os.makedirs(path, exist_ok=True)
        if name.startswith("mnt") and path not in self.mounts:
            self.mounts.append(path)
        return path

    def run_program(self, *command, **options):
        """Ends as soon as its parent process has: a daemon must not hold our pipes."""
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              check=False, timeout=60, **options)

    def ptcfs(self, *arguments):
        return self.run_program(PTCFS, *arguments)

    def umount(self, path):
        done = self.run_program("umount", path)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        until(lambda: not daemons_on(path), "umount ends the daemon")


class Fstab(MountProgram):
    """mount(8) lets its helpers search the system's directories: ours must be one of them."""

    def mount_program(self, *arguments):
        return self.run_program("mount", "-T", self.fstab, *arguments)

    def setUp(self):
        super().setUp()
        if "PTC_OWN_NAMESPACE" not in os.environ:
            self.skipTest("this needs a mount namespace of its own (unshare -m)")
        subprocess.run(["mount", "--bind", BIN, "/usr/local/sbin"], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", "/usr/local/sbin"], check=True)
        self.fstab = os.path.join(self.top, "fstab")
        with open(self.fstab, "w", encoding="utf-8") as file:
            for line in (
                    f"none {self.directory('mnt1')} fuse.ptcfs store={self.directory('store1')},"
                    "defaults,nofail,_netdev,x-systemd.automount,x-systemd.requires=a.mount,"
                    "noatime,allow_other 0 0",
                    f"{self.directory('store2')} {self.directory('mnt2')} fuse.ptcfs defaults 0 0",
                    f"none {self.directory('mnt3')} fuse.ptcfs noauto,user,rw,exec,"
                    f"store={self.directory('store3')} 0 0",
                    f"none {self.directory('mnt4')} fuse.ptcfs noauto,ro 0 0",
                    f"none {self.directory('mnt5')} fuse.ptcfs noauto,memory=lots 0 0"):
                print(line, file=file)

    def check_mounted(self, name, store):
        os.mkdir(f"{self.top}/{name}/job")
        self.assertTrue(os.path.exists(f"{self.top}/{name}/job/layout.json"))
        self.assertIn("meta.db", os.listdir(f"{self.top}/{store}"))

    def test_all_of_a_file_twice(self):
        for _ in range(2):
            done = self.mount_program("-a")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertTrue(mount.is_mounted(self.directory("mnt1")))
            self.assertTrue(mount.is_mounted(self.directory("mnt2")))
            for name in ("mnt3", "mnt4", "mnt5"):
                self.assertFalse(mount.is_mounted(self.directory(name)))
        self.check_mounted("mnt1", "store1")
        self.check_mounted("mnt2", "store2")
        options = self.run_program("findmnt", "-no", "OPTIONS,FSTYPE", self.directory("mnt1")).stdout
        for option in ("noatime", "allow_other", "nosuid", "nodev", "fuse.ptcfs"):
            self.assertIn(option, options)
        for name in ("mnt1", "mnt2"):
            self.umount(self.directory(name))

    def test_one_by_its_mount_point(self):
        done = self.mount_program(self.directory("mnt3"))
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.check_mounted("mnt3", "store3")
        self.umount(self.directory("mnt3"))

    def test_what_is_refused(self):
        for name, reason in (("mnt4", "a read-only mount is not offered"), ("mnt5", "lots")):
            done = self.mount_program(self.directory(name))
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("ptcfs: -o ", done.stderr)
            self.assertIn(reason, done.stderr)
            self.assertFalse(mount.is_mounted(self.directory(name)))


class BackgroundLog(MountProgram):
    def test_its_owner_alone_reads_it(self):
        """Whatever the umask; so with what an earlier daemon left."""
        if os.access("/dev/log", os.W_OK):
            self.skipTest("the system has a log")
        store, path = self.directory("store"), self.directory("mnt")
        files = [f"{store}/ptcfs.log", f"{store}/ptcfs.1.log"]
        for before in (False, True):
            if before:
                for file in files:
                    with open(file, "a", encoding="utf-8"):
                        os.chmod(file, 0o644)
            mask = os.umask(0)
            try:
                done = self.ptcfs("--store", store, path)
            finally:
                os.umask(mask)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            until(lambda: "mounted" in mount.read_text(files[0]), "it says so in its log")
            for file in filter(os.path.exists, files):
                self.assertEqual(stat.S_IMODE(os.stat(file).st_mode), 0o600)
            self.umount(path)

    def test_lines_for_programs(self):
        """An object each, with a time that says its zone; in a terminal's text the zone is there, too."""
        if os.access("/dev/log", os.W_OK):
            self.skipTest("the system has a log")
        store, path = self.directory("store"), self.directory("mnt")
        for form in ("json", "text"):
            done = self.ptcfs("--store", store, "--log-format", form, path)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            until(lambda: "mounted" in mount.read_text(f"{store}/ptcfs.log"), "it says so in its log")
            self.umount(path)
            until(lambda: "\n" in mount.read_text(f"{store}/ptcfs.log"), "whole lines")
            lines = mount.read_text(f"{store}/ptcfs.log").splitlines()
            times = [json.loads(line)["time"] for line in lines] if form == "json" else [line.split()[0] for line in lines]
            for said in times:
                self.assertIsNotNone(datetime.datetime.fromisoformat(said).tzinfo, said)
            os.remove(f"{store}/ptcfs.log")

    def test_it_does_not_grow_for_ever(self):
        """Of a full one the next begins; of two that are full one is left."""
        if os.access("/dev/log", os.W_OK):
            self.skipTest("the system has a log")
        store, path = self.directory("store"), self.directory("mnt")
        for name, line in (("ptcfs.log", "the last\n"), ("ptcfs.1.log", "the one before\n")):
            models.write_file(f"{store}/{name}", line * ((16 << 20) // len(line)))
        done = self.ptcfs("--store", store, path)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

        def says_so():
            with contextlib.suppress(FileNotFoundError):  # as for a moment, when the next begins
                return "mounted" in mount.read_text(f"{store}/ptcfs.log")
            return False
        until(says_so, "it says so in its log")
        self.assertLess(os.path.getsize(f"{store}/ptcfs.log"), 1 << 20)
        with open(f"{store}/ptcfs.1.log", encoding="utf-8") as file:
            self.assertEqual(file.readline(), "the last\n")
        logs = sorted(name for name in os.listdir(store) if name.endswith(".log"))
        self.assertEqual(logs, ["ptcfs.1.log", "ptcfs.log"])
        self.umount(path)


class OwnMetadata(MountProgram):
    """meta.db of a node that is alone says what is in its store: whatever becomes of it, nothing goes by that."""

    def test_what_it_does_not_name_stays(self):
        with mount.Mount() as daemon:
            older, newer = daemon.top + "/older", daemon.top + "/newer"

            def own():
                return [name for name in os.listdir(daemon.store) if name.startswith("meta.db")]

            def keep(copies):
                os.mkdir(copies)
                for name in own():
                    shutil.copy(f"{daemon.store}/{name}", copies)

            def put(copies):
                for name in own():
                    os.unlink(f"{daemon.store}/{name}")
                for name in os.listdir(copies):
                    shutil.copy(f"{copies}/{name}", daemon.store)

            def held():
                paths = [os.path.join(where, name) for top in ("images", "jobs")
                         for where, _, names in os.walk(f"{daemon.store}/{top}") for name in names
                         if name != "events.jsonl"]  # which says that the daemon was started
                return {path: os.path.getsize(path) for path in paths}
            job, model, after = daemon.job("llama"), models.Llama(), models.Llama(1)
            model.write_hf(job.incoming("base") + "/rank/0")
            job.commit("base")
            daemon.stop()
            keep(older)
            daemon.start()
            job.set_layout(tp=2)
            after.write_ranks(job.incoming("next"), 2, 1)
            job.commit("next")
            job.wait()
            models.write_file(job.incoming("later") + "/rank/0/notes.txt", "staged")
            daemon.stop()
            keep(newer)
            before = held()
            empty, none = daemon.top + "/empty", daemon.top + "/none"
            models.write_file(empty + "/meta.db", "")
            os.mkdir(none)
            for copies in (older, empty, none):
                put(copies)
                if copies == none:
                    self.assertRaises(RuntimeError, daemon.start)
                    daemon.process = None
                    self.assertIn("has jobs but no meta.db", mount.read_text(daemon.log))
                else:
                    daemon.start()
                    daemon.stop()
                    self.assertIn("is kept, though", mount.read_text(daemon.log))
                now = held()
                self.assertEqual({path: now.get(path) for path in before}, before, copies)
            put(newer)
            daemon.start()
            for name, wanted in (("base", model), ("next", after)):
                found = models.read_safetensors(job.rank_file(name, "tp1-pp1-dp1", 0))
                self.assertEqual(found, {tensor.name: tensor for tensor in wanted.tensors})
                daemon.ptc("verify", f"llama/{name}")
            self.assertEqual(mount.read_text(job.incoming("later") + "/rank/0/notes.txt"), "staged")


class Memory(MountProgram):
    def test_more_than_the_machine_has_is_said(self):
        with mount.Mount("--memory", "64T") as daemon:
            self.assertIn("--memory 64.0 TiB is more than the ", mount.read_text(daemon.log))
        with mount.Mount("--memory", "24M") as daemon:
            self.assertNotIn("is more than", mount.read_text(daemon.log))


class Log(MountProgram):
    ROUNDS = 300

    def test_what_repeats_does_not_fill_it(self):
        with mount.Mount() as daemon:
            begin = time.monotonic()
            for i in range(self.ROUNDS):
                os.mkdir(f"{daemon.path}/{i}")
                os.rmdir(f"{daemon.path}/{i}")
            seconds = time.monotonic() - begin
            lines = [line for line in mount.read_text(daemon.log).splitlines() if line.endswith(" removed")]
            self.assertGreater(len(lines), 10)
            self.assertLessEqual(len(lines), 2 * (51 + 5 * seconds), "two kinds, 50 of each and 5 a second")


class LookedOver(MountProgram):
    def test_a_start_looks_over_what_it_opens(self):
        with mount.Mount() as daemon:
            job = daemon.job("llama")
            models.Llama().write_hf(job.incoming("base") + "/rank/0")
            job.commit("base")
            images = os.path.join(daemon.store, "images")
            image = max((os.path.join(images, name) for name in os.listdir(images)), key=os.path.getsize)
            daemon.stop()
            with open(image, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
            daemon.start()
            until(lambda: (job.status()["checkpoints"][0]["looked_over"] or {}).get("damaged"), "what changed meanwhile is found")
            self.assertIn("no other copy has it right", " ".join(job.status()["warnings"]))

    def test_off_nobody_looks(self):
        for options, looks in (((), True), (("--scrub", "off"), False)):
            with mount.Mount(*options) as daemon:
                thread = "ptcfs-scrub" if looks else "ptcfs-mend"
                until(lambda daemon=daemon, thread=thread: thread in daemon.threads(), f"{thread} is there")
                self.assertEqual("ptcfs-scrub" in daemon.threads(), looks)


class SeveralAndTwice(MountProgram):
    def test_two_mounts_are_two_worlds(self):
        for number in "12":
            done = self.ptcfs("--store", self.directory("store" + number),
                              self.directory("mnt" + number))
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            os.mkdir(f"{self.top}/mnt{number}/job{number}")
        for number in "12":
            names = os.listdir(self.directory("mnt" + number))
            self.assertEqual([name for name in names if name != ".ptc"], ["job" + number])
        self.umount(self.directory("mnt1"))
        self.assertTrue(os.path.exists(self.directory("mnt2") + "/job2/status.json"))

    def test_the_same_store_or_mount_point_again(self):
        store, first, second = (self.directory(name) for name in ("store", "mnt1", "mnt2"))
        self.assertEqual(self.ptcfs("--store", store, first).returncode, 0)
        done = self.ptcfs("--store", store, second)
        self.assertEqual(done.returncode, 2)
        self.assertEqual(done.stderr, f"ptcfs: store {store}: in use by another ptcfs daemon\n")
        self.assertFalse(mount.is_mounted(second))
        done = self.ptcfs("--store", self.directory("other"), first)
        self.assertEqual(done.returncode, 32)
        self.assertIn(f"already mounted on {first}", done.stderr)
        self.assertEqual(len(daemons_on(first)), 1)
        self.assertTrue(os.path.exists(first + "/.ptc/version"))


class Background(MountProgram):
    def test_it_can_be_used_when_the_parent_ends(self):
        path = self.directory("mnt")
        done = self.ptcfs("--store", self.directory("store"), path)
        self.assertTrue(os.path.exists(path + "/.ptc/version"))
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))
        pid, = daemons_on(path)
        self.assertEqual(os.getsid(pid), pid, "a session of its own")
        self.assertEqual(os.readlink(f"/proc/{pid}/cwd"), "/")
        for fd in range(3):
            self.assertEqual(os.readlink(f"/proc/{pid}/fd/{fd}"), "/dev/null")
        self.umount(path)

    def test_relative_paths_mean_those_of_the_caller(self):
        self.directory("mnt")
        done = self.run_program(PTCFS, "--store", "store", "mnt", cwd=self.top)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertTrue(mount.is_mounted(self.directory("mnt")))
        self.assertTrue(os.path.isdir(self.top + "/store/mount/root"))

    def test_relative_paths_of_files_mean_those_of_the_caller(self):
        """All are read before etcd is asked, which is not there."""
        if shutil.which("openssl") is None:
            self.skipTest("openssl is not installed")
        self.directory("mnt")
        done = self.run_program("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj",
                                "/O=a", "-keyout", "a.key", "-out", "a.pem", cwd=self.top)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name, text in (("secret", "s" * 40), ("credentials", "user:password")):
            models.write_file(f"{self.top}/{name}", text)
        for name in ("secret", "credentials", "a.key"):
            os.chmod(f"{self.top}/{name}", 0o600)
        files = {"secret": "secret", "tls-ca": "a.pem", "tls-cert": "a.pem", "tls-key": "a.key", "etcd-credentials": "credentials",
                 "etcd-ca": "a.pem", "etcd-cert": "a.pem", "etcd-key": "a.key"}
        for options in ([word for name, file in files.items() for word in ("--" + name, file)],
                        ["-o", ",".join(f"{name}={file}" for name, file in files.items())]):
            done = self.run_program(PTCFS, "--etcd", "https://127.0.0.1:1", *options, "--store", "store", "mnt", cwd=self.top)
            self.assertEqual(done.returncode, 2)
            self.assertIn("ptcfs: etcd does not answer", done.stderr)
        for name in files:
            with_others = [word for other, file in files.items() for word in ("--" + other, "none" if other == name else file)]
            done = self.run_program(PTCFS, "--etcd", "https://127.0.0.1:1", *with_others, "--store", "store", "mnt", cwd=self.top)
            self.assertEqual(done.returncode, 2)
            self.assertIn(f"{self.top}/none", done.stderr)
            self.assertIn("No such file or directory", done.stderr)

    def test_a_relative_data_root_is_below_the_callers_directory(self):
        path = self.directory("mnt")
        models.write_file(self.directory("data") + "/x.txt", "inside\n")
        done = self.run_program(PTCFS, "--data-root", "nowhere:./data/../data", "--store", "store", "mnt", cwd=self.top)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        os.mkdir(path + "/job")

        source, status = path + "/job/dataset/source.json", path + "/job/dataset/status.json"
        models.write_file(source, json.dumps({"shards": self.top + "/data", "format": "files"}))
        until(lambda: mount.read_json(status)["state"] == "no order.json", "it is looked at")
        with self.assertRaises(PermissionError):
            models.write_file(source, json.dumps({"shards": "/etc", "format": "files"}))
        self.assertIn(f"does not lie below {self.top}/nowhere, {self.top}/data", mount.read_json(status)["error"])

    def test_what_goes_wrong_is_said_and_leaves_nothing(self):
        path = self.directory("mnt")
        models.write_file(self.top + "/file", "x")
        for status, reason, *arguments in (
                (32, "mount point " + self.top + "/nowhere", self.top + "/nowhere"),
                (32, "is not a directory", self.top + "/file"),
                (2, "file", "--store", self.top + "/file", path),
                (2, "it looks like http://", "--etcd", "10.0.0.1", path),
                (1, "1.0 MiB is too small: 16.0 MiB at least", "--memory", "1M", path),
                (1, "unknown option", "-o", "nonsense", path)):
            for foreground in ([], ["-f"]):
                done = self.ptcfs(*foreground, *arguments)
                self.assertEqual(done.returncode, status, done.stderr)
                self.assertIn("ptcfs: ", done.stderr)
                self.assertIn(reason, done.stderr)
                self.assertFalse(mount.is_mounted(path))


    def test_words_with_spaces_can_be_typed_as_they_are_said(self):
        path = self.directory("mnt with spaces")
        self.assertEqual(self.ptcfs("--store", self.directory("store"), path).returncode, 0)
        self.assertIn(f"unmount it first: umount '{path}'", self.ptcfs(path).stderr)
        self.assertIn(f"unmount it first: umount '{path}'", self.ptcfs("--discard", path).stderr)

    def test_no_store_in_a_mount(self):
        path, second = self.directory("mnt"), self.directory("mnt2")
        self.assertEqual(self.ptcfs("--store", self.directory("store"), path).returncode, 0)
        for store in (path, path + "/job", path + "/job/a/b"):
            for more in ((), ("--memory", "64M")):
                done = self.ptcfs("--store", store, *more, second)
                self.assertEqual(done.returncode, 2)
                self.assertIn(f"the store {store} would lie in the ptcfs that is mounted on {path}", done.stderr)
        self.assertEqual(os.listdir(path), [".ptc"])

    def test_a_start_that_fails_leaves_no_store_that_it_made(self):
        path, store = self.directory("mnt"), self.top + "/new/stores/one"
        etcd = ("--listen", "127.0.0.1:0", "--etcd", "http://127.0.0.1:1")
        for more in ((), ("--memory", "64M")):
            done = self.ptcfs(*etcd, *more, "--store", store, path)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertFalse(os.path.exists(self.top + "/new"))
        done = self.ptcfs("-o", "root-mode=1777", "--store", path + "/below", path)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(os.listdir(path), [])
        os.makedirs(store + "/mine")  # what was there stays, with what is in it
        self.assertEqual(self.ptcfs(*etcd, "--store", store, path).returncode, 2)
        self.assertIn("mine", os.listdir(store))

    def test_a_start_that_fails_leaves_no_tmpfs(self):
        """Nor the directory that it is mounted on."""
        path, own = self.directory("mnt"), os.path.basename(self.top).replace("-", "\\x2d")
        done = self.ptcfs("--listen", "127.0.0.1:0", "--etcd", "http://127.0.0.1:1", path)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("etcd does not answer", done.stderr)
        stores = os.listdir("/run/ptcfs") if os.path.exists("/run/ptcfs") else []  # which goes with the last of them
        self.assertEqual([name for name in stores if own in name], [])


class Signals(mount.TestCase):
    """SIGTERM, SIGINT and SIGHUP: the daemon ends with 0, and the next one finds everything."""

    def end_by(self, number):
        process = self.mount.process
        process.send_signal(number)
        self.assertEqual(process.wait(timeout=30), 0, mount.read_text(self.mount.log))
        self.assertFalse(mount.is_mounted(self.mount.path))
        self.mount.process = None

    def make(self, number, model):
        self.job = self.mount.job(f"{self.id().rsplit('.', 1)[-1]}-{number}")
        self.model = model()
        self.model.write_hf(self.job.incoming("base") + "/rank/0")

    def check_all_there(self, layout):
        status = self.job.wait()
        self.assertEqual((status["layout"], status["checkpoint"]), (layout, "base"))
        found = models.read_safetensors(self.job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in self.model.tensors})
        self.mount.ptc("verify", self.job.name + "/base")

    def test_idle(self):
        for number in SIGNALS:
            self.make(number, models.Llama)
            self.job.commit("base")
            self.end_by(number)
            self.mount.start()
            self.check_all_there("tp1-pp1-dp1")

    def test_during_a_commit(self):
        for number in SIGNALS:
            self.make(number, BigLlama)
            committing = threading.Thread(target=mount.error_of, args=(self.job.commit, "base"))
            committing.start()
            taken = f"{self.mount.store}/jobs/{self.job.name}/committing"
            until(lambda taken=taken, committing=committing: os.path.isdir(taken)
                  or not committing.is_alive(), "the commit begins")
            self.end_by(number)
            committing.join()
            self.mount.start()
            if os.listdir(self.job.file("checkpoints")) != ["base"]:
                self.assertEqual(os.listdir(self.job.file("incoming")), ["base"], "all or nothing")
                self.job.commit("base")
            self.check_all_there("tp1-pp1-dp1")

    def test_during_a_reshard(self):
        for number in SIGNALS:
            self.make(number, BigLlama)
            self.job.commit("base")
            models.write_file(self.job.file("layout.json"), '{"tp": 2, "pp": 1, "dp": 1}')
            until(lambda: self.job.status()["state"] == "resharding"
                  or self.job.status()["layout"] == "tp2-pp1-dp1", "the reshard begins")
            self.end_by(number)
            self.mount.start()
            self.check_all_there("tp2-pp1-dp1")

    def test_with_files_open_and_mapped(self):
        for number in SIGNALS:
            self.make(number, models.Llama)
            self.job.commit("base")
            path = self.job.rank_file("base", "tp1-pp1-dp1", 0)
            with open(path, "rb") as expected:
                content = expected.read()
            with open(path, "rb") as file, \
                    mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                self.end_by(number)
                if "passthrough on" in mount.read_text(self.mount.log):
                    self.assertEqual(mapped[:], content, "readers keep their bytes")
                    file.seek(0)
                    self.assertEqual(file.read(), content)
                self.mount.start()  # on the same place, while the old one is still held open
                self.check_all_there("tp1-pp1-dp1")

    def test_umount_by_hand(self):
        process = self.mount.process
        subprocess.run(["umount", self.mount.path], check=True)
        self.assertEqual(process.wait(timeout=30), 0)
        self.mount.process = None
        self.mount.start()

    def test_umount_while_in_use_is_refused_and_harmless(self):
        with open(self.mount.path + "/.ptc/version", "rb"):
            done = subprocess.run(["umount", self.mount.path], capture_output=True, text=True,
                                  check=False)
            self.assertEqual(done.returncode, 32)
            self.assertIn("busy", done.stderr)
        self.assertTrue(os.path.exists(self.mount.path + "/.ptc/version"))


class BeneathTheMount(MountProgram):
    """What is written to the path of a mount while no daemon serves it."""

    def end_by(self, path, number):
        for pid in daemons_on(path):
            os.kill(pid, number)
        until(lambda: not daemons_on(path), "it ends")

    def start(self, path):
        done = self.ptcfs("--store", self.directory("store"), path)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr

    def test_nothing_falls_through_when_a_daemon_ends(self):
        path = self.directory("mnt")
        for number in SIGNALS:
            self.start(path)
            os.makedirs(path + "/job", exist_ok=True)
            before = os.open(path, os.O_PATH)
            self.end_by(path, number)
            self.assertFalse(mount.is_mounted(path))
            self.assertIn(mount.error_of(os.mkdir, path + "/job"), ("EPERM", "EACCES"))
            self.assertNotEqual(mount.error_of(os.mkdir, f"/proc/self/fd/{before}/job"), "")
            os.close(before)
            self.assertEqual(os.listdir(path), [])
        self.start(path)
        self.assertIn("job", os.listdir(path))
        self.umount(path)
        os.mkdir(path + "/own")  # whoever unmounts has the directory again
        os.rmdir(path + "/own")
        os.rmdir(path)

    def test_discard_gives_the_directory_back(self):
        path = self.directory("mnt")
        self.start(path)
        self.end_by(path, signal.SIGTERM)
        self.assertNotEqual(mount.error_of(os.rmdir, path), "")
        self.ptcfs("--store", self.directory("store"), "--discard", path)
        os.rmdir(path)

    def test_a_dead_mount_takes_no_writes(self):
        path = self.directory("mnt")
        self.start(path)
        self.end_by(path, signal.SIGKILL)
        self.assertIn(mount.error_of(os.mkdir, path + "/job"), ("ENOTCONN", "ECONNABORTED"))
        self.start(path)
        os.mkdir(path + "/job")
        self.umount(path)
        self.assertEqual(os.listdir(path), [])

    def test_it_is_mounted_whatever_lies_beneath(self):
        path = self.directory("mnt")
        models.write_file(path + "/llama/incoming/base/rank/0/model.safetensors", "x")
        said = self.start(path)
        self.assertIn("is not empty", said)
        self.assertIn("llama", said)
        self.assertEqual(os.listdir(path), [".ptc"])
        self.umount(path)
        self.assertEqual(os.listdir(path), ["llama"])

    def test_not_over_its_own_store(self):
        path = self.directory("mnt")
        done = self.ptcfs("--store", path + "/store", path)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("below the mount point", done.stderr)


class OtherUsers(MountProgram):
    def as_nobody(self, *arguments):
        for name in ("mnt", "store"):
            os.chown(self.directory(name), NOBODY, NOBODY)
        if not os.access(PTCFS, os.X_OK) or subprocess.run(
                ["test", "-x", PTCFS], user=NOBODY, check=False).returncode != 0:
            self.skipTest(f"other users cannot run {PTCFS}")
        return self.run_program(PTCFS, *arguments, "--store", self.directory("store"),
                                self.directory("mnt"), user=NOBODY, group=NOBODY, extra_groups=[])

    def test_users_make_jobs_and_step_over_those_of_others(self):
        path, ptc = self.directory("mnt"), os.path.join(BIN, "ptc")
        if subprocess.run(["test", "-x", ptc], user=NOBODY, check=False).returncode != 0:
            self.skipTest(f"other users cannot run {ptc}")
        store = ("--store", self.directory("store"), path)
        self.assertEqual(self.ptcfs("-o", "allow_other", "--root-mode", "1777", *store).returncode, 0)
        os.mkdir(path + "/secret", 0o700)
        as_nobody = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        self.assertEqual(self.run_program("mkdir", path + "/own", **as_nobody).returncode, 0)
        for command in ("ls", "status", "top --once"):
            done = self.run_program(ptc, "-C", path, *command.split(), **as_nobody)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("own", done.stdout)
            self.assertNotIn("secret", done.stdout)
            if command != "top --once":
                self.assertIn("1 job of other users is not shown", done.stderr)
        self.umount(path)
        self.assertEqual(self.ptcfs(*store).returncode, 0)  # the mode lasts
        self.assertEqual(os.stat(path).st_mode & 0o7777, 0o1777)

    def test_a_mode_for_all_opens_nothing_of_the_store(self):
        """Also where the store's directory was there, and is for all to enter; and one of before keeps its mode."""
        path, store = self.directory("mnt"), self.directory("open")
        os.chmod(store, 0o755)
        self.assertEqual(self.ptcfs("--store", store, "--root-mode", "1777", path).returncode, 0)
        for name in sorted(os.listdir(store)):
            self.assertEqual(os.stat(f"{store}/{name}").st_mode & 0o077, 0, name)
        self.umount(path)
        os.rename(store + "/mount/root", store + "/root")
        os.rmdir(store + "/mount")
        self.assertEqual(self.ptcfs("--store", store, path).returncode, 0)
        self.assertEqual(os.stat(path).st_mode & 0o7777, 0o1777)
        self.assertEqual(sorted(set(os.listdir(store)) & {"mount", "root"}), ["mount"])
        self.umount(path)

    def test_allow_other_is_not_everybodys_to_give(self):
        with contextlib.suppress(FileNotFoundError):
            if any(line.strip() == "user_allow_other"
                   for line in mount.read_text("/etc/fuse.conf").split("\n")):
                self.skipTest("/etc/fuse.conf has user_allow_other")
        for foreground in ([], ["-f"]):
            done = self.as_nobody(*foreground, "-o", "allow_other")
            self.assertEqual(done.returncode, 32)
            self.assertIn("user_allow_other", done.stderr)
            self.assertIn("/etc/fuse.conf", done.stderr)

    def let_users_mount(self):
        mount.let_users_mount(self.directory("device"))

    def test_a_mount_that_a_user_may_not_enter_is_not_counted(self):
        ptc = os.path.join(BIN, "ptc")
        if subprocess.run(["test", "-x", ptc], user=NOBODY, check=False).returncode != 0:
            self.skipTest(f"other users cannot run {ptc}")
        closed, opened = self.directory("mnt closed"), self.directory("mnt")
        self.assertEqual(self.ptcfs("--store", self.directory("store1"), closed).returncode, 0)
        self.assertEqual(self.ptcfs("-o", "allow_other", "--store", self.directory("store"), opened).returncode, 0)
        os.mkdir(opened + "/shown")
        done = self.run_program(ptc, "ls", user=NOBODY, group=NOBODY, extra_groups=[], cwd="/")
        self.assertNotIn(closed, done.stderr)
        if done.returncode != 0:  # others of this machine are open, too
            self.assertIn(opened, done.stderr)
        else:
            self.assertIn("shown", done.stdout)

    def test_a_device_that_a_user_may_not_open(self):
        if "PTC_OWN_NAMESPACE" not in os.environ:
            self.skipTest("this needs a mount namespace of its own (unshare -m)")
        device = os.path.join(self.directory("device"), "fuse")
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 229))
        subprocess.run(["mount", "--bind", device, "/dev/fuse"], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", "/dev/fuse"], check=False)
        done = self.as_nobody()
        self.assertEqual(done.returncode, 32, done.stderr)
        self.assertIn("/dev/fuse: Permission denied; whoever mounts must be able to open it: root lets all users with "
                      "chmod 666 /dev/fuse", done.stderr)

    def test_a_user_mounts(self):
        if shutil.which("fusermount3") is None:
            self.skipTest("fusermount3 is not installed")
        self.let_users_mount()
        path = self.directory("mnt")  # where nobody else can look once it is mounted
        done = self.as_nobody()
        if done.returncode == 32 and ("ermission denied" in done.stderr
                                      or "not permitted" in done.stderr):
            self.skipTest("users may not mount here: " + done.stderr.strip())
        # It says what it cannot have, and goes on.
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in done.stderr.splitlines():
            self.assertRegex(line, r"^\S+ (info|warning) ")
        self.assertEqual(self.run_program("ls", path).returncode, 2, "not even for root")
        done = self.run_program("mkdir", path + "/job", user=NOBODY, group=NOBODY)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        done = self.run_program("fusermount3", "-u", path, user=NOBODY, group=NOBODY)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    mount.enter_own_namespace()
    mount.main()
