"""Many jobs of little activity share threads; a layout that would take too much is not even begun.

PTC_JOBS=10000 makes as many (500 otherwise).
"""
import os
import subprocess
import time

import models
import mount

JOBS = int(os.environ.get("PTC_JOBS", "500"))


class ManyJobs(mount.TestCase):
    def count(self, what):
        return len(os.listdir(f"/proc/{self.mount.process.pid}/{what}"))

    def test_a_job_costs_no_thread(self):
        before = self.count("task")
        for i in range(JOBS):
            os.mkdir(f"{self.mount.path}/many-{i}")
        subprocess.run(["ls", "-lR", self.mount.path], stdout=subprocess.DEVNULL, check=True)
        for i in range(0, JOBS, 7):  # what they do in the background is done, too
            self.assertEqual(mount.read_json(f"{self.mount.path}/many-{i}/status.json")["state"], "idle")
        self.assertLess(self.count("task"), before + 90)  # what all of them share, at most
        deadline = time.monotonic() + 60
        while self.count("task") > before + 8 and time.monotonic() < deadline:
            time.sleep(0.5)
        self.assertLessEqual(self.count("task"), before + 8)


class Memory(mount.TestCase):
    def used(self):
        """Bytes of the daemon's own memory; not of the store."""
        for line in mount.read_text(f"/proc/{self.mount.process.pid}/status").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0

    def test_what_cannot_be_computed_is_refused_before_it_is(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        for wanted, reason in (({"pp": 64}, "layers"), ({"dp": 1 << 20, "optimizer": "fsdp"}, "at most")):
            self.assertEqual(mount.error_of(lambda wanted=wanted: job.save_layout(**wanted)), "EINVAL")
            self.assertIn(reason, job.error())
        self.assertEqual(mount.error_of(os.stat, job.checkpoint("base", "layouts/tp1-pp64-dp1")), "ENOENT")
        self.assertLess(self.used() - before, 64 << 20)


if __name__ == "__main__":
    mount.main()
