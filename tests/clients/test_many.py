"""Many jobs of little activity share threads; a layout that would take too much is not even begun; what is computed for one
who looks takes no memory when he has gone.

PTC_JOBS=10000 makes as many (500 otherwise), PTC_RANKS=30000 looks at so many (3000), PTC_NAMES=2000000 lists so many (120000).
"""
import os
import subprocess
import time

import models
import mount

JOBS = int(os.environ.get("PTC_JOBS", "500"))
RANKS = int(os.environ.get("PTC_RANKS", "3000"))
NAMES = int(os.environ.get("PTC_NAMES", "120000"))


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

    def nodes(self):
        for line in mount.read_text(self.mount.path + "/.ptc/metrics").splitlines():
            if line.startswith("ptcfs_nodes "):
                return int(line.split()[1])
        return 0

    def wait_until_it_is_back(self, before):
        deadline = time.monotonic() + 180
        while self.used() > before + (64 << 20) and time.monotonic() < deadline:
            time.sleep(1)
        self.assertLessEqual(self.used() - before, 64 << 20)

    def test_it_comes_back_after_all_ranks_of_a_large_layout(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        ranks = job.checkpoint("base", "layouts", f"tp1-pp1-dp{RANKS}", "rank")
        names = os.listdir(ranks)
        self.assertEqual(len(names), RANKS)
        for name in names:
            self.assertIn("model.safetensors", os.listdir(f"{ranks}/{name}"))
            self.assertTrue(os.listdir(f"{ranks}/{name}/tensors"))
        print(f"{RANKS} ranks: {(self.used() - before) >> 20} MiB at first")
        self.wait_until_it_is_back(before)

    def test_it_comes_back_after_very_many_names(self):
        """Which the kernel still knows: it is asked to forget them."""
        if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 18):
            self.skipTest("this kernel cannot be asked to forget names")
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        ranks = job.checkpoint("base", "layouts", f"tp1-pp1-dp{NAMES}", "rank")
        subprocess.run(["ls", "-lU", ranks], stdout=subprocess.DEVNULL, check=True)
        self.assertGreater(self.nodes(), NAMES)
        print(f"{NAMES} names: {(self.used() - before) >> 20} MiB at first")
        deadline = time.monotonic() + 180
        while self.nodes() > 1000 and time.monotonic() < deadline:
            time.sleep(1)
        self.assertLess(self.nodes(), 1000)
        self.wait_until_it_is_back(before)
        self.assertTrue(os.path.isdir(f"{ranks}/{NAMES - 1}"))

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
