"""What a reshard or a removal gives back is free at once, whatever names the kernel still remembers."""
import errno
import json
import os
import random
import subprocess
import time

import models
import mount

STATE = 24 << 20
SLACK = 3 << 20


class Space(mount.TestCase):
    mount_options = ("--memory", "96M")
    only_root = "can mount a tmpfs for the store"

    def free(self):
        space = os.statvfs(self.mount.path)
        return space.f_bfree * space.f_frsize

    def commit(self, job, name):
        """24 MiB of a layer that any tensor parallelism cuts."""
        tensor = models.random_tensor(random.Random(1), "model.layers.0.mlp.up_proj.weight", "F32",
                                      (6144, 1024))
        config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 8}
        models.write_file(job.incoming(name) + "/rank/0/config.json", json.dumps(config).encode())
        models.write_safetensors(job.incoming(name) + "/rank/0/model.safetensors", [tensor])
        job.commit(name)

    def assert_used_since(self, before, states, when=""):
        for _ in range(200):  # the last close of a file reaches the daemon a moment later
            if abs(before - self.free() - states * STATE) < SLACK:
                return
            time.sleep(0.02)
        self.fail(f"{before - self.free()} bytes are used, {states} times {STATE} are expected {when}")

    def test_files_as_they_were_written_go_when_a_layout_replaces_them(self):
        before = self.free()
        job = self.new_job()
        self.commit(job, "base")  # and nobody looks the checkpoint up
        for tp in (2, 4, 8, 2):
            job.set_layout(tp=tp)
            self.assert_used_since(before, 1, f"tp{tp}")
        self.mount.ptc("rm", "-y", job.name, "--force")
        self.assert_used_since(before, 0)

    def test_removed_checkpoints_and_jobs_whose_names_were_looked_at(self):
        before = self.free()
        job = self.new_job()
        for name in ("one", "two"):
            self.commit(job, name)
            subprocess.run(["ls", "-lR", job.path], stdout=subprocess.DEVNULL, check=True)
        self.assert_used_since(before, 2)
        rank = os.open(os.path.dirname(job.rank_file("one", "tp1-pp1-dp1", 0)), os.O_PATH)
        self.addCleanup(os.close, rank)
        with open(job.rank_file("one", "tp1-pp1-dp1", 0), "rb") as held:
            self.mount.ptc("rm", "-y", f"{job.name}/one", "--force")
            self.assert_used_since(before, 2, "one is open")
            self.assertEqual(mount.error_of(os.stat, job.checkpoint("one")), "ENOENT")
            self.assertGreater(len(held.read()), STATE)
        self.assert_used_since(before, 1)
        with self.assertRaises(FileNotFoundError):
            os.open("model.safetensors", os.O_RDONLY, dir_fd=rank)
        self.mount.ptc("rm", "-y", job.name, "--force")
        self.assert_used_since(before, 0)

    def test_a_job_that_was_only_committed(self):
        before = self.free()
        job = self.new_job()
        self.commit(job, "base")
        self.mount.ptc("rm", "-y", job.name, "--force")
        self.assert_used_since(before, 0)

    def test_full_to_the_last_byte(self):
        """There is always room to start again, and to remove something."""
        job = self.new_job()
        for name in ("one", "two"):
            self.commit(job, name)
        self.fill(job.incoming("three") + "/rank")
        models.Llama().write_hf(self.temporary("model"))
        refused = self.mount.ptc("import", f"{job.name}/four", self.temporary("model"), check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr, "No space left on device\nThe store is full: ptc rm .* --memory")
        self.assertNotIn("incoming/", refused.stderr.split("full:")[1])  # it may be being written
        for path in (job.incoming("three"), job.incoming("three") + "/rank"):
            os.utime(path, (1e9, 1e9))
        refused = self.mount.ptc("import", f"{job.name}/four", self.temporary("model"), check=False)
        self.assertRegex(refused.stderr, "left in incoming/, if nobody wants it:\n"
                         f"  rm -r {job.incoming('three')}   # .* MiB, not committed")
        self.mount.stop(kill=True)
        self.mount.start()
        self.assertLess(self.free(), 1 << 20)
        self.mount.ptc("rm", "-y", f"{job.name}/one", "--force")
        self.assertGreaterEqual(self.free(), STATE)
        self.fill(job.incoming("three") + "/more")
        self.mount.ptc("rm", "-y", f"{job.name}/two", "--force")
        self.assertGreaterEqual(self.free(), STATE)
        self.mount.ptc("rm", "-y", job.name, "--force")

    def test_a_job_that_an_import_made_in_vain(self):
        models.write_file(self.temporary("large/w.bin"), "x" * (128 << 20))
        refused = self.mount.ptc("import", "in_vain", self.temporary("large"), check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("The store is full", refused.stderr)
        self.assertIn("job in_vain is removed again", refused.stderr)
        self.assertFalse(os.path.exists(self.mount.path + "/in_vain"))

    def fill(self, path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with self.assertRaises(OSError) as full:
                    while True:
                        file.write(bytes(size))
                self.assertEqual(full.exception.errno, errno.ENOSPC)


if __name__ == "__main__":
    mount.main()
